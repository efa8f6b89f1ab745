"""Our backends pass the conformance kit, and the kit finds bugs that are planted in a backend."""

import pytest
import torch

from deltazoo import UpdateSpec, conformance, use_backend
from deltazoo.backends.base import UpdateOutput
from deltazoo.backends.compare import LIMITS, draw_cotangents, exact, run
from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.conformance import SHAPES, Case, checks, draw
from deltazoo.backends.cover import DTYPES
from deltazoo.backends.errors import ConfigError, UnknownNameError, UnsupportedError
from deltazoo.backends.reference import ReferenceBackend

IN_ONE_GRAPH = "one_graph_gives_the_same_numbers"  # the reference is eager: under torch.compile it unrolls over T

test_reference_conforms = conformance.suite("reference", checks("reference", without=[IN_ONE_GRAPH]))
test_compile_conforms_without_its_compiler = conformance.suite(CompileBackend(compiled=False))
test_compile_conforms = conformance.suite(
    "compile", [(conformance.agrees_with_the_reference, Case(UpdateSpec(decay="head", beta="head"), SHAPES["grouped"]))]
)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", conformance.TINY, ids=lambda shape: shape.name)
def test_every_spec_on_every_shape_and_dtype_agrees_with_the_reference(shape, dtype):
    for case in conformance.every_case((shape,), (dtype,)):
        report = conformance.compare(CompileBackend(compiled=False), case)
        assert not report.failures, str(report)


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


class RefusesWithoutWords(Sound):
    def unsupported(self, spec, meta):
        return ["no"]


MUTANTS = [
    (LeaksTheFuture, "agrees_with_the_reference"),
    (LeaksTheFuture, "the_future_does_not_leak"),
    (LeaksGradientsToTheFuture, "the_future_does_not_leak"),
    (LeaksAcrossRows, "agrees_with_the_reference"),
    (LeaksAcrossRows, "sequences_do_not_leak"),
    (LeaksNansAcrossRows, "sequences_do_not_leak"),
    (LeaksAcrossHeads, "heads_do_not_leak"),
    (LeaksNansAcrossHeads, "heads_do_not_leak"),
    (IgnoresTheInitialState, "agrees_with_the_reference"),
    (IgnoresTheInitialState, "segments_equal_the_whole"),
    (ErrsInTheGradientOfBeta, "agrees_with_the_reference"),
    (SwapsHeads, "agrees_with_the_reference"),
    (SwapsHeads, "grouped_heads_equal_repeated_heads"),
    (SwapsHeads, "heads_do_not_leak"),
    (OverflowsAtStrongDecays, "agrees_with_the_reference"),
    (WritesToItsInputs, "inputs_are_left_alone"),
    (WritesToAStepsInputs, "inputs_are_left_alone"),
    (ForgetsSlots, "steps_equal_the_whole"),
    (StepsTwice, "steps_equal_the_whole"),
    (ForgetsTheStateOfNoTokens, "no_token_returns_the_initial_state"),
    (ReturnsItsInput, "no_token_returns_the_initial_state"),
    (WritesWithoutBeta, "without_strength_it_only_decays"),
    (JoinsPacks, "packing_equals_separate_runs"),
    (JoinsPacks, "agrees_with_the_reference"),
    (WantsBothCotangents, "either_output_alone_has_its_gradients"),
    (BreaksTheGraph, IN_ONE_GRAPH),
    (ReadsUnwrittenMemory, "unwritten_memory_is_never_read"),
    (RoundsItsState, "agrees_with_the_reference"),
    (ReturnsItsStateInTheWrongDtype, "agrees_with_the_reference"),
    (RefusesWithoutWords, "refusals_are_sentences"),
]


@pytest.mark.parametrize(("mutant", "name"), MUTANTS, ids=[f"{mutant.__name__}-{name}" for mutant, name in MUTANTS])
def test_a_planted_bug_is_found(mutant, name):
    others = [found.__name__ for found in conformance.PROPERTIES if found.__name__ != name]
    assert any(holds(mutant(), case, "cpu").failures for holds, case in checks("reference", without=others))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_itself_keeps_well_within_the_limits_that_its_storage_sets(dtype):
    """The limits come from the rounding of the stored tensors: the reference's error is that rounding and no more."""
    eps = torch.finfo(dtype).eps
    for axes in ({"decay": "head", "beta": "head"}, {"transition": "dplr", "decay": "channel"}):
        for regime in conformance.REGIMES:
            report = conformance.compare("reference", Case(UpdateSpec(**axes), SHAPES["chunks"], dtype, regime))
            rounded = max(error.relative for error in report.errors)
            assert rounded < max(0.5 * eps, 2e-5 if dtype == torch.float32 else 0), str(report)


def test_the_limits_are_those_of_the_design():
    assert LIMITS[torch.float32] == (1e-4, 1e-4, 1e-4)
    assert LIMITS[torch.bfloat16] == LIMITS[torch.float16] == (5e-3, 1e-2, 2e-2)
    case = Case(UpdateSpec(), SHAPES["plain"], torch.bfloat16)
    assert [conformance.limit(case, name) for name in ("o", "state", "d_k", "d_state", "d_beta")] == [
        5e-3,
        5e-3,
        1e-2,
        1e-2,
        2e-2,
    ]
    assert conformance.limit(case._replace(regime="decays"), "d_rate") == pytest.approx(6e-2)


@pytest.mark.parametrize("regime", conformance.REGIMES)
def test_inputs_are_drawn_in_float64_and_rounded(regime):
    spec = UpdateSpec(decay="channel", beta="head", negative_eigenvalues="both")
    exactly, rounded = (draw(Case(spec, SHAPES["pack"], dtype, regime)) for dtype in (torch.float64, torch.bfloat16))
    for name, x, y in zip(exactly._fields, exactly, rounded, strict=True):
        if x is not None:
            assert torch.equal(x.to(y.dtype), y), name


def test_the_adversarial_inputs_are_what_they_claim():
    spec = UpdateSpec(decay="channel", beta="head", negative_eigenvalues="both")
    parallel = draw(Case(spec, SHAPES["chunks"], torch.float64, "parallel"))
    cosines = torch.einsum("bshk,bthk->bhst", parallel.k, parallel.k)
    assert cosines.min() > 0.97
    assert float(parallel.beta.median()) * 2 == 1.99
    assert not parallel.log_decay.any()
    decays = draw(Case(spec, SHAPES["chunks"], torch.float64, "decays")).log_decay
    assert decays[:, 75].exp().max() == 0
    for low, high in ((0, 0), (-23, -20), (-63, -60)):
        assert ((decays >= low) & (decays <= high)).double().mean() > 0.05


@pytest.mark.parametrize("regime", conformance.REGIMES)
def test_every_recurrence_that_is_drawn_is_stable(regime):
    """In the regime "parallel" an additive state grows with T, never faster."""
    for case in conformance.pairwise_cases((SHAPES["chunks"]._replace(T=300),), (torch.float64,)):
        case = case._replace(regime=regime)
        out = ReferenceBackend().forward(case.spec, draw(case))
        assert out.o.abs().max() < 3e3, str(case)
        assert out.state.abs().max() < 3e3, str(case)


def test_a_strided_case_has_nan_between_its_numbers():
    inputs = draw(Case(UpdateSpec(beta="head"), SHAPES["plain"], layout="strided"))
    assert not any(x.is_contiguous() for x in inputs if x is not None)
    assert torch.as_strided(inputs.q, (8,), (1,), 0).isnan().sum() == 4


def test_the_error_of_a_tensor_that_vanishes_is_measured_against_ordinary_inputs():
    want, usual = torch.zeros(4, dtype=torch.float64), torch.full((4,), 2.0, dtype=torch.float64)
    assert conformance.relative_error(torch.full((4,), 1e-9), want, usual) == pytest.approx(1e-9 / 2e-6)
    assert conformance.relative_error(want, want, want) == 0
    assert conformance.relative_error(want + 1, want, want) == float("inf")
    assert conformance.relative_error(want * float("nan"), want, want) != 0


def test_the_float64_reference_sees_the_rounded_numbers():
    case = Case(UpdateSpec(decay="head", beta="head"), SHAPES["plain"], torch.bfloat16)
    inputs = draw(case)
    cotangents = draw_cotangents(case, inputs)
    want = exact(case.spec, inputs, cotangents)
    widened = inputs._replace(**{name: x.double() for name, x in inputs._asdict().items() if x is not None})
    got = run("reference", case.spec, widened, tuple(x.double() for x in cotangents))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_the_checks_of_a_backend_cover_what_it_takes():
    class Narrow(Sound):
        def unsupported(self, spec, meta):
            takes = spec.transition == "delta" and spec.householders == 2 and meta.dtype == torch.float32 and meta.K > 4
            return [] if takes else ["narrow takes two delta steps a token in float32 only"]

    pairs = checks(Narrow())
    cases = [case for holds, case in pairs if holds is conformance.agrees_with_the_reference]
    assert {case.dtype for case in cases} == {torch.float32}
    assert {case.spec.decay for case in cases} == {"none", "fixed", "head", "channel", "rate"}
    assert {case.shape.name for case in cases} == {shape.name for shape in conformance.TINY if shape.K > 4}
    assert not any(compare.refused for compare in (conformance.compare(Narrow(), case) for case in cases[:5]))


def test_a_backend_that_takes_nothing_is_an_error_and_no_empty_suite():
    with pytest.raises(UnsupportedError, match="'mutant' takes no spec on any of the shapes and dtypes to check"):
        conformance.suite(RefusesWithoutWords())


CHECK = """
spec: {decay: head, beta: head}
shapes: [plain, {B: 2, T: 9, H: 2, HV: 4, K: 3, V: 5}, {H: 1, K: 4, lengths: [5, 0, 2]}]
dtypes: [float32, bfloat16]
regimes: [ordinary, decays]
"""


def test_a_check_file_compares_backends_on_ones_own_shapes(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(CHECK)
    check = conformance.read_check(path)
    assert [case.shape[1:] for case in check.cases()[::4]] == [
        (2, 7, 2, 2, 4, 4, ()),
        (2, 9, 2, 4, 3, 5, ()),
        (1, 7, 1, 1, 4, 4, (5, 0, 2)),
    ]
    reports = list(conformance.run_checks(check.cases(), ["reference", OverflowsAtStrongDecays()]))
    assert len(reports) == 24
    assert not any(report.failures for report in reports if report.backend == "reference")
    assert {report.case.regime for report in reports if report.failures} == {"decays"}
    (tmp_path / "mine.json").write_text(check.model_dump_json())
    assert conformance.read_check(tmp_path / "mine.json").cases() == check.cases()


def test_a_backend_that_raises_has_failed_and_the_others_go_on():
    class Raises(Sound):
        def forward(self, spec, inputs):
            raise RuntimeError("out of luck")

    case = Case(UpdateSpec(), SHAPES["plain"])
    first, second = conformance.run_checks([case], [Raises(), "reference"])
    assert first.failures == ["it raised RuntimeError: out of luck"]
    assert not second.failures
    assert second.errors


WRONG_FILES = [
    (CHECK.replace("decay:", "decy:"), "spec.decy: unknown field 'decy'; did you mean 'decay'?"),
    (CHECK.replace("dtypes", "dtyps"), "dtyps: unknown field 'dtyps'; did you mean 'dtypes'?"),
    (CHECK.replace("plain", "plian"), "shapes.0: unknown shape 'plian'; did you mean 'plain'?"),
    (CHECK.replace("HV: 4", "VH: 4"), "shapes.1.VH: unknown field 'VH'; did you mean 'V'?"),
    (CHECK.replace("HV: 4", "HV: 3"), "shapes.1: HV must be a multiple of H, got HV=3, H=2"),
    (CHECK.replace("T: 9, ", ""), "a shape has T, or the lengths of packed sequences, got T=None, lengths=()"),
    (CHECK.replace("K: 4, lengths", "K: 4, B: 2, lengths"), "packed sequences (lengths) need B = 1, got B=2"),
    (CHECK.replace("bfloat16", "bf16"), "dtypes.1: Input should be 'float64', 'float32', 'bfloat16' or 'float16'"),
    (CHECK.replace("head", "haed", 1), "spec.decay: Input should be 'none', 'fixed', 'head', 'channel' or 'rate'"),
    ("spec: {transition: additive, reparam: efla}\nshapes: [plain]", "reparam='efla' steps the delta rule"),
    ("spec: {", "cannot be read"),
    ("[]", "is not a check"),
]


@pytest.mark.parametrize(("text", "words"), WRONG_FILES, ids=[words for _, words in WRONG_FILES])
def test_a_wrong_check_file_is_refused_in_words(tmp_path, text, words):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        conformance.read_check(path)
    assert words in str(caught.value)


def test_an_unknown_property_is_an_error_that_names_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'heads_do_not_leak'"):
        checks("reference", without=["head_do_not_leak"])


def test_the_kit_is_not_governed_by_use_backend():
    case = Case(UpdateSpec(beta="head"), SHAPES["plain"])
    with use_backend(LeaksTheFuture()):
        assert not conformance.compare("reference", case).failures
