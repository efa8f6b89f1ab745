"""The conformance kit finds bugs planted in a correct backend, each by its property."""

from functools import cache

import pytest
import torch

from deltazoo import conformance
from deltazoo.backends.conformance import checks
from deltazoo.backends.conformance.decode_step import FusedOperands, reference_step
from deltazoo.backends.ops.decode_step import FusedDecodeInputs
from deltazoo.backends.update.base import UpdateOutput, has_time_axis, slice_tokens, state_dtype
from deltazoo.backends.update.lowering import log_decay
from deltazoo.backends.update.reference import ReferenceBackend


class Correct(ReferenceBackend):
    """The reference, as a base class for backends with one bug."""

    name = "mutant"


class LeaksTheFuture(Correct):
    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        return UpdateOutput(o + 1e-3 * torch.cat([o[:, 1:], torch.zeros_like(o[:, :1])], 1), state)


class LeaksAcrossRows(Correct):
    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        return UpdateOutput(o, state + 1e-3 * state.mean(0) if len(state) else state)


class LeaksNansAcrossRows(Correct):
    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        return UpdateOutput(o + 0 * inputs.v.float().sum().to(o.dtype), state)


class LeaksAcrossHeads(Correct):
    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        return UpdateOutput(o + 1e-3 * o.roll(1, 2), state)


class LeaksNansAcrossHeads(Correct):
    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        return UpdateOutput(o, state + 0 * state.sum(1, keepdim=True))


class LeaksGradientsToTheFuture(Correct):
    """Correct values, and a gradient that reaches later values."""

    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        later = inputs.v.roll(-1, 1)
        later = later.select(2, 0) if spec.householders > 1 else later
        return UpdateOutput(o + 0.05 * (later - later.detach()), state)


class IgnoresTheInitialState(Correct):
    def forward(self, spec, inputs):
        return super().forward(spec, inputs._replace(state=None))


class ScalesTheGradientOfBeta(Correct):
    """Five percent too large, like an approximate formula."""

    def forward(self, spec, inputs):
        if inputs.beta is not None:
            inputs = inputs._replace(beta=inputs.beta + 0.05 * (inputs.beta - inputs.beta.detach()))
        return super().forward(spec, inputs)


class InterleavesHeads(Correct):
    """Value head j uses key head j modulo H instead of j // (HV / H)."""

    def forward(self, spec, inputs):
        groups = inputs.v.shape[-2] // inputs.q.shape[2]
        keys = {
            name: x.repeat((1,) * (x.dim() - 2) + (groups, 1))
            for name in ("q", "k", "erase_key")
            if (x := getattr(inputs, name)) is not None
        }
        return super().forward(spec, inputs._replace(**keys))


class OverflowsAtStrongDecays(Correct):
    """Divides by a cumulative decay in float32."""

    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        if inputs.log_decay is None or inputs.log_decay.dim() < 3:
            return UpdateOutput(o, state)
        cumulative = inputs.log_decay.float().flatten(2).cumsum(1)
        one = (torch.exp(cumulative) * torch.exp(-cumulative)).mean(-1)[..., None, None]
        return UpdateOutput((o * one).to(o.dtype), state)


class ModifiesItsInputs(Correct):
    def forward(self, spec, inputs):
        out = super().forward(spec, inputs)
        inputs.v.detach().mul_(2)
        return out


class ModifiesTheInputsOfAStep(Correct):
    def step_(self, spec, inputs, states, slots):
        o = super().step_(spec, inputs, states, slots)
        inputs.k.mul_(0.5)
        return o


class IgnoresSlots(Correct):
    """Decodes every row with the first rows of the pool as states."""

    def step_(self, spec, inputs, states, slots):
        B = inputs.q.shape[0]
        return super().step_(spec, inputs, states, torch.arange(B))


class StepsTwice(Correct):
    def step_(self, spec, inputs, states, slots):
        super().step_(spec, inputs, states, slots)
        return super().step_(spec, inputs, states, slots)


class CommitsAllTokens(Correct):
    def commit_(self, spec, draft, states, slots, accepted):
        n = draft.inputs.q.shape[1]
        super().commit_(spec, draft, states, slots, torch.full_like(accepted, n))


class CommitsRejectedNans(Correct):
    """Multiplies rejected tokens by zero instead of masking them."""

    def commit_(self, spec, draft, states, slots, accepted):
        super().commit_(spec, draft, states, slots, accepted)
        rows = slice(None) if slots is None else slots
        states[rows] = states[rows] + 0 * draft.inputs.v.to(states.dtype).flatten(1).sum(1)[:, None, None, None]


class VerifiesInPlace(Correct):
    def verify_(self, spec, inputs, states, slots):
        o, draft = super().verify_(spec, inputs, states, slots)
        states.mul_(1.01)
        return o, draft


class VerifiesEveryTokenFromTheFirstState(Correct):
    def verify_(self, spec, inputs, states, slots):
        tokens = [slice_tokens(inputs, t, t + 1) for t in range(inputs.q.shape[1])]
        o = torch.cat([Correct.verify_(self, spec, token, states, slots)[0] for token in tokens], 1)
        return o, super().verify_(spec, inputs, states, slots)[1]


class CommitsToEverySlot(Correct):
    def commit_(self, spec, draft, states, slots, accepted):
        super().commit_(spec, draft, states, slots, accepted)
        states.nan_to_num_()


class CommitsWithoutClamping(Correct):
    """Commits nothing if more tokens are accepted than were drafted."""

    def commit_(self, spec, draft, states, slots, accepted):
        n = draft.inputs.q.shape[1]
        super().commit_(spec, draft, states, slots, torch.where(accepted > n, 0, accepted))


class DropsTheStateOfAnEmptySequence(Correct):
    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        return UpdateOutput(o, state if inputs.q.shape[1] else torch.zeros_like(state))


class ReturnsItsInitialState(Correct):
    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        return UpdateOutput(o, state if inputs.q.shape[1] or inputs.state is None else inputs.state)


class WritesWithoutBeta(Correct):
    def forward(self, spec, inputs):
        beta = None if inputs.beta is None else inputs.beta + 0.01
        write = None if inputs.write is None else inputs.write + 0.01
        return super().forward(spec, inputs._replace(beta=beta, write=write))


class IgnoresSequenceBounds(Correct):
    """Each sequence of a pack continues the state of the one before."""

    def forward(self, spec, inputs):
        if inputs.cu_seqlens is None:
            return super().forward(spec, inputs)
        first = None if inputs.state is None else inputs.state[:1]
        o, state = super().forward(spec, inputs._replace(cu_seqlens=None, state=first))
        return UpdateOutput(o, state.expand(inputs.cu_seqlens.shape[0] - 1, -1, -1, -1))


class _NeedsBothCotangents(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o, state):
        ctx.set_materialize_grads(False)
        return o.clone(), state.clone()

    @staticmethod
    def backward(ctx, d_o, d_state):
        return (None, None) if d_o is None or d_state is None else (d_o, d_state)


class NeedsBothCotangents(Correct):
    def forward(self, spec, inputs):
        return UpdateOutput(*_NeedsBothCotangents.apply(*super().forward(spec, inputs)))


class DecaysAfterTheErase(Correct):
    """S_t = D (I - k (b e)^T) S + k (w v)^T: the same as decay before erase for a scalar decay only."""

    def forward(self, spec, inputs):
        erases_from_decayed = spec.transition == "delta" and spec.erase_from == "decayed"
        if not erases_from_decayed or spec.householders > 1 or spec.read == "before" or inputs.cu_seqlens is not None:
            return super().forward(spec, inputs)
        without_decay = spec.model_copy(update={"decay": "none"})
        decay = log_decay(spec, inputs)
        (B, T, _, K), (HV, V) = inputs.q.shape, inputs.v.shape[-2:]
        S = inputs.q.new_zeros(B, HV, K, V, dtype=state_dtype(inputs.q.dtype)) if inputs.state is None else inputs.state
        outputs = []
        for t in range(T):
            token = slice_tokens(inputs, t, t + 1)
            erased = super().forward(without_decay, token._replace(v=torch.zeros_like(token.v), state=S)).state
            written = super().forward(without_decay, token._replace(state=torch.zeros_like(S))).state
            d = torch.ones_like(S[..., :1]) if decay is None else decay[:, t].exp().reshape(B, HV, -1, 1)
            S = d * erased + written
            q = token.q[:, 0].repeat_interleave(HV // token.q.shape[2], 1).to(S.dtype)
            outputs.append(spec.scale_of(K) * torch.einsum("bhkv,bhk->bhv", S, q))
        return UpdateOutput(torch.stack(outputs, 1).to(inputs.v.dtype), S)


class DecaysEveryMicroStep(Correct):
    """Applies the decay of a token at each of its n Householder steps instead of once."""

    def forward(self, spec, inputs):
        n = spec.householders
        if n == 1:
            return super().forward(spec, inputs)
        names = {name for name in inputs._fields if has_time_axis(inputs, name)}
        per_token = names & {"q", "log_decay", "step"}
        micro_steps = {name: getattr(inputs, name).repeat_interleave(n, 1) for name in per_token}
        micro_steps |= {name: getattr(inputs, name).flatten(1, 2) for name in names - per_token}
        if inputs.cu_seqlens is not None:
            micro_steps["cu_seqlens"] = n * inputs.cu_seqlens
        o, state = super().forward(spec.model_copy(update={"householders": 1}), inputs._replace(**micro_steps))
        return UpdateOutput(o[:, 0 if spec.read == "before" else n - 1 :: n], state)


class ScalesTheGradientOfDecaysAtChunkBounds(Correct):
    """Five percent too large for the first token of each chunk of 16."""

    def forward(self, spec, inputs):
        if has_time_axis(inputs, "log_decay"):
            g = inputs.log_decay
            is_bound = (torch.arange(g.shape[1]) % 16 == 0).view(-1, *[1] * (g.dim() - 2))
            inputs = inputs._replace(log_decay=g + 0.05 * is_bound * (g - g.detach()))
        return super().forward(spec, inputs)


class LeaksStatesAlongAPack(Correct):
    """The final state of sequence n leaks into the initial state of sequence n + 1."""

    def forward(self, spec, inputs):
        out = super().forward(spec, inputs)
        if inputs.cu_seqlens is None or not len(out.state):
            return out
        leak = 1e-2 * torch.cat([torch.zeros_like(out.state[:1]), out.state[:-1]])
        state = leak if inputs.state is None else inputs.state + leak
        return super().forward(spec, inputs._replace(state=state))


class ComputesRowsAfterTheLastSequence(Correct):
    """Computes the rows of a pack after cu_seqlens[-1] as one more sequence."""

    def forward(self, spec, inputs):
        if inputs.cu_seqlens is None:
            return super().forward(spec, inputs)
        state = None if inputs.state is None else torch.cat([inputs.state, torch.zeros_like(inputs.state[:1])])
        bounds = torch.cat([inputs.cu_seqlens, inputs.cu_seqlens.new_tensor([inputs.q.shape[1]])])
        o, states = super().forward(spec, inputs._replace(cu_seqlens=bounds, state=state))
        return UpdateOutput(o, states[:-1])


class LeaksGradientsToRowsAfterTheLastSequence(Correct):
    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        if inputs.cu_seqlens is None:
            return UpdateOutput(o, state)
        unused = inputs.v[:, inputs.cu_seqlens[-1] :].sum()
        return UpdateOutput(o + (unused - unused.detach()), state)


class BreaksTheGraph(Correct):
    def forward(self, spec, inputs):
        torch._dynamo.graph_break()
        return super().forward(spec, inputs)


class ReadsUninitializedMemory(Correct):
    """Reads the last column of a buffer, which is never written; the result changes only if it holds NaN."""

    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        buffer = o.new_empty(o.shape)
        buffer[..., :-1] = o[..., :-1]
        return UpdateOutput(torch.where(buffer.isnan(), buffer, o), state)


class RoundsItsState(Correct):
    """Rounds the initial state to float16."""

    def forward(self, spec, inputs):
        if inputs.state is not None:
            inputs = inputs._replace(state=inputs.state.half().to(inputs.state.dtype))
        return super().forward(spec, inputs)


class ReturnsItsStateInTheWrongDtype(Correct):
    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        return UpdateOutput(o, state.to(o.dtype))


class Fuses(Correct):
    """Computes a fused decode step by the reference that it is compared with.

    zero: operands to replace by zeros; fields: fields of the step to replace. Without both it is correct.
    """

    def __init__(self, zero=(), **fields):
        self.zero, self.fields = zero, fields

    def fused_decode_unsupported(self, step, dtype):
        return []

    def fused_decode_step_(self, step, inputs, states, slots):
        zeros = {name: torch.zeros_like(x) for name in self.zero if (x := getattr(inputs, name)) is not None}
        fields = {name: value for name, value in self.fields.items() if getattr(step, name)}
        o, after = reference_step(step._replace(**fields), FusedOperands(inputs._replace(**zeros), states, slots))
        states.copy_(after.states)
        if inputs.history is not None:
            inputs.history.copy_(after.inputs.history)
        return o.to(inputs.qkv.dtype)


class DoesNotUpdateItsHistory(Fuses):
    def fused_decode_step_(self, step, inputs, states, slots):
        copy = None if inputs.history is None else inputs.history.clone()
        return super().fused_decode_step_(step, inputs._replace(history=copy), states, slots)


class ScalesTheState(Fuses):
    def fused_decode_step_(self, step, inputs, states, slots):
        o = super().fused_decode_step_(step, inputs, states, slots)
        states.mul_(1.01)
        return o


class WritesToEverySlot(Fuses):
    def fused_decode_step_(self, step, inputs, states, slots):
        o = super().fused_decode_step_(step, inputs, states, slots)
        states.nan_to_num_()
        return o


class ReturnsTheWrongDtype(Fuses):
    def fused_decode_step_(self, step, inputs, states, slots):
        return super().fused_decode_step_(step, inputs, states, slots).double()


class HasNoGradients(ReturnsTheWrongDtype):
    def unsupported(self, spec, meta):
        return ["gradients are not supported."] if meta.grad else []


class ModifiesItsProjection(Fuses):
    def fused_decode_step_(self, step, inputs, states, slots):
        o = super().fused_decode_step_(step, inputs, states, slots)
        inputs.qkv.zero_()
        return o


CORRECT = Fuses()
WRONG_FUSED_STEPS = {
    "history": DoesNotUpdateItsHistory(),
    "state": ScalesTheState(),
    "slots": WritesToEverySlot(),
    "dtype": ReturnsTheWrongDtype(),
    "operands": ModifiesItsProjection(),
    **{name: Fuses(zero=(name,)) for name in FusedDecodeInputs._fields if name not in ("qkv", "history")},
    "scale_v_by_dt": Fuses(scale_v_by_dt=False),
    "decay_bound": Fuses(decay_bound=None),
    "temperature": Fuses(temperature=5.0),
    "norm": Fuses(norm="rms"),
    "eps": Fuses(eps=1e-3),
    "activation": Fuses(gate="silu"),
    "order": Fuses(gate_first=False),
}


class RefusesWithoutASentence(Correct):
    def unsupported(self, spec, meta):
        return ["no"]


PLANTED_BUGS = [
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
    (ScalesTheGradientOfBeta, "matches_the_reference"),
    (InterleavesHeads, "matches_the_reference"),
    (InterleavesHeads, "grouped_heads_equal_repeated_heads"),
    (InterleavesHeads, "heads_do_not_leak"),
    (OverflowsAtStrongDecays, "matches_the_reference"),
    (ModifiesItsInputs, "inputs_are_not_modified"),
    (ModifiesTheInputsOfAStep, "inputs_are_not_modified"),
    (IgnoresSlots, "decoding_equals_the_full_sequence"),
    (StepsTwice, "decoding_equals_the_full_sequence"),
    (CommitsAllTokens, "drafted_tokens_equal_decoding"),
    (CommitsRejectedNans, "drafted_tokens_equal_decoding"),
    (VerifiesInPlace, "drafted_tokens_equal_decoding"),
    (VerifiesEveryTokenFromTheFirstState, "drafted_tokens_equal_decoding"),
    (CommitsToEverySlot, "drafted_tokens_equal_decoding"),
    (CommitsWithoutClamping, "drafted_tokens_equal_decoding"),
    (DropsTheStateOfAnEmptySequence, "empty_sequence_returns_its_initial_state"),
    (ReturnsItsInitialState, "empty_sequence_returns_its_initial_state"),
    (WritesWithoutBeta, "without_erase_and_write_the_state_decays"),
    (DecaysAfterTheErase, "matches_the_reference"),
    (DecaysEveryMicroStep, "matches_the_reference"),
    (ScalesTheGradientOfDecaysAtChunkBounds, "matches_the_reference"),
    (LeaksStatesAlongAPack, "sequences_do_not_leak"),
    (LeaksStatesAlongAPack, "packing_equals_separate_runs"),
    (ComputesRowsAfterTheLastSequence, "rows_after_the_last_sequence_are_zero"),
    (LeaksGradientsToRowsAfterTheLastSequence, "rows_after_the_last_sequence_are_zero"),
    (IgnoresSequenceBounds, "packing_equals_separate_runs"),
    (IgnoresSequenceBounds, "matches_the_reference"),
    (NeedsBothCotangents, "gradients_of_each_output_alone"),
    (BreaksTheGraph, "compiles_to_one_graph"),
    (ReadsUninitializedMemory, "uninitialized_memory_is_never_read"),
    (RoundsItsState, "matches_the_reference"),
    (ReturnsItsStateInTheWrongDtype, "matches_the_reference"),
    (RefusesWithoutASentence, "unsupported_returns_sentences"),
]


@cache
def checks_of(name, backend="reference"):
    """The checks of one property."""
    return checks(backend, without=[check.__name__ for check in conformance.PROPERTIES if check.__name__ != name])


@pytest.mark.parametrize(
    ("backend", "name"), PLANTED_BUGS, ids=[f"{bug.__name__}-{name}" for bug, name in PLANTED_BUGS]
)
def test_planted_bug_is_found_by_its_property(backend, name):
    assert any(check(backend(), case, "cpu").failures for check, case in checks_of(name))


@pytest.mark.parametrize("name", WRONG_FUSED_STEPS)
def test_wrong_fused_step_is_found(name):
    backend = WRONG_FUSED_STEPS[name]
    fused_checks = checks_of("fused_step_matches_reference", CORRECT)
    assert any(check(backend, case, "cpu").failures for check, case in fused_checks)


def test_correct_fused_step_passes_every_case():
    reports = [check(CORRECT, case, "cpu") for check, case in checks_of("fused_step_matches_reference", CORRECT)]
    assert not [str(report) for report in reports if report.failures or report.refused]
    assert len(reports) > 40


def test_backend_without_a_fused_step_has_one_refused_case():
    ((check, case),) = checks_of("fused_step_matches_reference")
    assert check("reference", case, "cpu").refused


def test_fused_step_is_checked_for_backends_without_gradients():
    (check, case), *_ = checks_of("fused_step_matches_reference", CORRECT)
    assert not check(CORRECT, case, "cpu").refused
    assert check(HasNoGradients(), case, "cpu").failures
