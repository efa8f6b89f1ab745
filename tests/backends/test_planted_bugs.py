"""The conformance kit finds bugs that are planted in a sound backend, each by the property that names it."""

import pytest
import torch

from deltazoo import conformance
from deltazoo.backends.base import UpdateOutput
from deltazoo.backends.conformance import checks
from deltazoo.backends.conformance.decode_step import FusedOperands, reference_step
from deltazoo.backends.decode_step import FusedDecodeInputs
from deltazoo.backends.reference import ReferenceBackend


class Sound(ReferenceBackend):
    """The reference, to plant bugs in."""

    name = "mutant"


class LeaksTheFuture(Sound):
    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        return UpdateOutput(o + 1e-3 * torch.cat([o[:, 1:], torch.zeros_like(o[:, :1])], 1), state)


class LeaksAcrossRows(Sound):
    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        return UpdateOutput(o, state + 1e-3 * state.mean(0) if len(state) else state)


class LeaksNansAcrossRows(Sound):
    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        return UpdateOutput(o + 0 * inputs.v.float().sum().to(o.dtype), state)


class LeaksAcrossHeads(Sound):
    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        return UpdateOutput(o + 1e-3 * o.roll(1, 2), state)


class LeaksNansAcrossHeads(Sound):
    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        return UpdateOutput(o, state + 0 * state.sum(1, keepdim=True))


class LeaksGradientsToTheFuture(Sound):
    """Right numbers, and a gradient that reaches later values."""

    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        ghost = inputs.v.roll(-1, 1)
        ghost = ghost.select(2, 0) if spec.householders > 1 else ghost
        return UpdateOutput(o + 0.05 * (ghost - ghost.detach()), state)


class IgnoresTheInitialState(Sound):
    def forward(self, spec, inputs):
        return super().forward(spec, inputs._replace(state=None))


class ErrsInTheGradientOfBeta(Sound):
    """Five percent, as an approximate formula would."""

    def forward(self, spec, inputs):
        if inputs.beta is not None:
            inputs = inputs._replace(beta=inputs.beta + 0.05 * (inputs.beta - inputs.beta.detach()))
        return super().forward(spec, inputs)


class SwapsHeads(Sound):
    """Value head j uses key head j modulo H."""

    def forward(self, spec, inputs):
        groups = inputs.v.shape[-2] // inputs.q.shape[2]
        keys = {
            name: x.repeat((1,) * (x.dim() - 2) + (groups, 1))
            for name in ("q", "k", "erase_key")
            if (x := getattr(inputs, name)) is not None
        }
        return super().forward(spec, inputs._replace(**keys))


class OverflowsAtStrongDecays(Sound):
    """Cumulative decays divided out again, in float32."""

    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        if inputs.log_decay is None or inputs.log_decay.dim() < 3:
            return UpdateOutput(o, state)
        total = inputs.log_decay.float().flatten(2).cumsum(1)
        one = (torch.exp(total) * torch.exp(-total)).mean(-1)[..., None, None]
        return UpdateOutput((o * one).to(o.dtype), state)


class WritesToItsInputs(Sound):
    def forward(self, spec, inputs):
        out = super().forward(spec, inputs)
        inputs.v.detach().mul_(2)
        return out


class WritesToAStepsInputs(Sound):
    def step_(self, spec, inputs, states, slots):
        o = super().step_(spec, inputs, states, slots)
        inputs.k.mul_(0.5)
        return o


class ForgetsSlots(Sound):
    """Decodes every row from and to the first rows of the pool."""

    def step_(self, spec, inputs, states, slots):
        B = inputs.q.shape[0]
        return super().step_(spec, inputs, states, torch.arange(B))


class StepsTwice(Sound):
    def step_(self, spec, inputs, states, slots):
        super().step_(spec, inputs, states, slots)
        return super().step_(spec, inputs, states, slots)


class ForgetsTheStateOfNoTokens(Sound):
    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        return UpdateOutput(o, state if inputs.q.shape[1] else torch.zeros_like(state))


class ReturnsItsInput(Sound):
    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        return UpdateOutput(o, state if inputs.q.shape[1] or inputs.state is None else inputs.state)


class WritesWithoutBeta(Sound):
    def forward(self, spec, inputs):
        beta = None if inputs.beta is None else inputs.beta + 0.01
        write = None if inputs.write is None else inputs.write + 0.01
        return super().forward(spec, inputs._replace(beta=beta, write=write))


class JoinsPacks(Sound):
    """One sequence of a pack goes on where the one before stopped."""

    def forward(self, spec, inputs):
        if inputs.cu_seqlens is None:
            return super().forward(spec, inputs)
        first = None if inputs.state is None else inputs.state[:1]
        o, state = super().forward(spec, inputs._replace(cu_seqlens=None, state=first))
        return UpdateOutput(o, state.expand(inputs.cu_seqlens.shape[0] - 1, -1, -1, -1))


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o, state):
        ctx.set_materialize_grads(False)
        return o.clone(), state.clone()

    @staticmethod
    def backward(ctx, d_o, d_state):
        return (None, None) if d_o is None or d_state is None else (d_o, d_state)


class WantsBothCotangents(Sound):
    def forward(self, spec, inputs):
        return UpdateOutput(*_Gate.apply(*super().forward(spec, inputs)))


class BreaksTheGraph(Sound):
    def forward(self, spec, inputs):
        torch._dynamo.graph_break()
        return super().forward(spec, inputs)


class ReadsUnwrittenMemory(Sound):
    """A buffer whose last column nobody writes; what it holds is weighed with almost nothing."""

    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        buffer = o.new_empty(o.shape)
        buffer[..., :-1] = o[..., :-1]
        return UpdateOutput(torch.where(buffer.isnan(), buffer, o), state)


class RoundsItsState(Sound):
    """An initial state that has been kept in float16."""

    def forward(self, spec, inputs):
        if inputs.state is not None:
            inputs = inputs._replace(state=inputs.state.half().to(inputs.state.dtype))
        return super().forward(spec, inputs)


class ReturnsItsStateInTheWrongDtype(Sound):
    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        return UpdateOutput(o, state.to(o.dtype))


class Fuses(Sound):
    """A decode step of a mixer in one, by the lines that it is compared with, of a step and operands that are changed:
    fields of the step, and operands that are zero."""

    def __init__(self, zero=(), **fields):
        self.zero, self.fields = zero, fields

    def fused_decode_unsupported(self, step, dtype):
        return []

    def fused_decode_step_(self, step, inputs, states, slots):
        zeros = {name: torch.zeros_like(x) for name in self.zero if (x := getattr(inputs, name)) is not None}
        fields = {name: change for name, change in self.fields.items() if getattr(step, name)}
        o, after = reference_step(step._replace(**fields), FusedOperands(inputs._replace(**zeros), states, slots))
        states.copy_(after.states)
        if inputs.history is not None:
            inputs.history.copy_(after.inputs.history)
        return o.to(inputs.qkv.dtype)


class LeavesItsHistory(Fuses):
    def fused_decode_step_(self, step, inputs, states, slots):
        kept = None if inputs.history is None else inputs.history.clone()
        return super().fused_decode_step_(step, inputs._replace(history=kept), states, slots)


class ErrsInTheState(Fuses):
    def fused_decode_step_(self, step, inputs, states, slots):
        o = super().fused_decode_step_(step, inputs, states, slots)
        states.mul_(1.01)
        return o


class FusesIntoEverySlot(Fuses):
    def fused_decode_step_(self, step, inputs, states, slots):
        o = super().fused_decode_step_(step, inputs, states, slots)
        states.nan_to_num_()
        return o


class FusesInTheWrongDtype(Fuses):
    def fused_decode_step_(self, step, inputs, states, slots):
        return super().fused_decode_step_(step, inputs, states, slots).double()


class FusesWithoutGradients(FusesInTheWrongDtype):
    def unsupported(self, spec, meta):
        return ["it has no gradients, and grad was asked for."] if meta.grad else []


class WritesToItsProjection(Fuses):
    def fused_decode_step_(self, step, inputs, states, slots):
        o = super().fused_decode_step_(step, inputs, states, slots)
        inputs.qkv.zero_()
        return o


WRONG_STEPS = {
    "history": LeavesItsHistory(),
    "state": ErrsInTheState(),
    "slots": FusesIntoEverySlot(),
    "dtype": FusesInTheWrongDtype(),
    "operands": WritesToItsProjection(),
    **{name: Fuses(zero=(name,)) for name in FusedDecodeInputs._fields if name not in ("qkv", "history")},
    "top": Fuses(top=1.0),
    "writes": Fuses(writes=False),
    "bound": Fuses(bound=None),
    "norm": Fuses(norm="rms"),
    "eps": Fuses(eps=1e-3),
    "activation": Fuses(gate="silu"),
    "order": Fuses(gate_first=False),
}


class RefusesWithoutWords(Sound):
    def unsupported(self, spec, meta):
        return ["no"]


MUTANTS = [
    (LeaksTheFuture, "matches_the_reference"),
    (LeaksTheFuture, "later_tokens_do_not_leak"),
    (LeaksGradientsToTheFuture, "later_tokens_do_not_leak"),
    (LeaksAcrossRows, "matches_the_reference"),
    (LeaksAcrossRows, "sequences_do_not_leak"),
    (LeaksNansAcrossRows, "sequences_do_not_leak"),
    (LeaksAcrossHeads, "heads_do_not_leak"),
    (LeaksNansAcrossHeads, "heads_do_not_leak"),
    (IgnoresTheInitialState, "matches_the_reference"),
    (IgnoresTheInitialState, "pieces_equal_the_full_sequence"),
    (ErrsInTheGradientOfBeta, "matches_the_reference"),
    (SwapsHeads, "matches_the_reference"),
    (SwapsHeads, "grouped_heads_equal_repeated_heads"),
    (SwapsHeads, "heads_do_not_leak"),
    (OverflowsAtStrongDecays, "matches_the_reference"),
    (WritesToItsInputs, "inputs_are_not_modified"),
    (WritesToAStepsInputs, "inputs_are_not_modified"),
    (ForgetsSlots, "decoding_equals_the_full_sequence"),
    (StepsTwice, "decoding_equals_the_full_sequence"),
    (ForgetsTheStateOfNoTokens, "empty_sequence_returns_its_initial_state"),
    (ReturnsItsInput, "empty_sequence_returns_its_initial_state"),
    (WritesWithoutBeta, "without_erase_and_write_the_state_decays"),
    (JoinsPacks, "packing_equals_separate_runs"),
    (JoinsPacks, "matches_the_reference"),
    (WantsBothCotangents, "gradients_of_each_output_alone"),
    (BreaksTheGraph, "compiles_to_one_graph"),
    (ReadsUnwrittenMemory, "uninitialized_memory_is_never_read"),
    (RoundsItsState, "matches_the_reference"),
    (ReturnsItsStateInTheWrongDtype, "matches_the_reference"),
    (RefusesWithoutWords, "unsupported_returns_sentences"),
]


@pytest.mark.parametrize(("mutant", "name"), MUTANTS, ids=[f"{mutant.__name__}-{name}" for mutant, name in MUTANTS])
def test_a_planted_bug_is_found(mutant, name):
    others = [found.__name__ for found in conformance.PROPERTIES if found.__name__ != name]
    assert any(holds(mutant(), case, "cpu").failures for holds, case in checks("reference", without=others))


def fused_checks(backend):
    """Of the whole kit, as a plug-in's tests have it."""
    return [(holds, case) for holds, case in checks(backend) if holds.__name__ == "fused_step_matches_reference"]


@pytest.mark.parametrize("wrong", WRONG_STEPS)
def test_what_is_wrong_with_a_step_in_one_is_found(wrong):
    backend = WRONG_STEPS[wrong]
    assert any(holds(backend, case, "cpu").failures for holds, case in fused_checks(backend))


def test_a_sound_step_in_one_is_sound():
    reports = [holds(Fuses(), case, "cpu") for holds, case in fused_checks(Fuses())]
    assert not [str(report) for report in reports if report.failures or report.refused]
    assert len(reports) > 40
    (holds, case), *others = fused_checks("reference")
    assert not others
    assert holds("reference", case, "cpu").refused == [
        "it takes no decode step in one: the mixer takes it part by part."
    ]


def test_a_step_in_one_is_checked_where_there_are_no_gradients():
    (holds, case), *_ = fused_checks(Fuses())
    assert not holds(Fuses(), case, "cpu").refused
    assert holds(FusesWithoutGradients(), case, "cpu").failures
