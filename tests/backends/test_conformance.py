"""Our backends pass the conformance kit, and the kit finds bugs that are planted in a backend."""

import pytest
import torch

from deltazoo import UpdateSpec, conformance, use_backend
from deltazoo.backends.base import UpdateOutput
from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.conformance import SHAPES, Case, checks, draw
from deltazoo.backends.conformance.compare import LIMITS, draw_cotangents, reference_results, run
from deltazoo.backends.conformance.pairwise import DTYPES
from deltazoo.backends.errors import UnknownNameError, UnsupportedError
from deltazoo.backends.reference import ReferenceBackend

IN_ONE_GRAPH = "compiles_to_one_graph"  # the reference is eager: under torch.compile it unrolls over T

test_reference_conforms = conformance.suite("reference", checks("reference", without=[IN_ONE_GRAPH]))
test_compile_conforms_without_its_compiler = conformance.suite(CompileBackend(compiled=False))
test_compile_conforms = conformance.suite(
    "compile", [(conformance.matches_the_reference, Case(UpdateSpec(decay="head", beta="head"), SHAPES["grouped"]))]
)


GROUPS = sorted({(spec.decay, spec.transition) for spec in conformance.every_spec()})


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", conformance.TINY, ids=lambda shape: shape.name)
@pytest.mark.parametrize(("decay", "transition"), GROUPS)
def test_every_spec_on_every_shape_and_dtype_agrees_with_the_reference(decay, transition, shape, dtype):
    """The product, 149,040 cases; its parts are chosen by -k (see the Makefile)."""
    for case in conformance.every_case((shape,), (dtype,)):
        if (case.spec.decay, case.spec.transition) == (decay, transition):
            report = conformance.compare(CompileBackend(compiled=False), case)
            assert not report.failures, str(report)


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
    want = reference_results(case.spec, inputs, cotangents)
    widened = inputs._replace(**{name: x.double() for name, x in inputs._asdict().items() if x is not None})
    got = run("reference", case.spec, widened, tuple(x.double() for x in cotangents))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_the_checks_of_a_backend_cover_what_it_takes():
    class Narrow(ReferenceBackend):
        def unsupported(self, spec, meta):
            takes = spec.transition == "delta" and spec.householders == 2 and meta.dtype == torch.float32 and meta.K > 4
            return [] if takes else ["narrow takes two delta steps a token in float32 only"]

    pairs = checks(Narrow())
    cases = [case for holds, case in pairs if holds is conformance.matches_the_reference]
    assert {case.dtype for case in cases} == {torch.float32}
    assert {case.spec.decay for case in cases} == {"none", "fixed", "head", "channel", "rate"}
    assert {case.shape.name for case in cases} == {shape.name for shape in conformance.TINY if shape.K > 4}
    assert not any(compare.refused for compare in (conformance.compare(Narrow(), case) for case in cases[:5]))


def test_a_backend_that_takes_nothing_is_an_error_and_no_empty_suite():
    class Never(ReferenceBackend):
        def unsupported(self, spec, meta):
            return ["never takes nothing, by principle"]

    with pytest.raises(UnsupportedError, match="takes no spec on any of the shapes and dtypes to check"):
        conformance.suite(Never())


def test_an_unknown_property_is_an_error_that_names_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'heads_do_not_leak'"):
        checks("reference", without=["head_do_not_leak"])


def test_the_kit_is_not_governed_by_use_backend():
    class Wrong(ReferenceBackend):
        def forward(self, spec, inputs):
            o, state = super().forward(spec, inputs)
            return UpdateOutput(2 * o, state)

    case = Case(UpdateSpec(beta="head"), SHAPES["plain"])
    assert conformance.compare(Wrong(), case).failures
    with use_backend(Wrong()):
        assert not conformance.compare("reference", case).failures
