"""The reference and the compile backend pass the conformance kit; tests of its inputs, limits and errors."""

import math

import pytest
import torch

from deltazoo import UpdateSpec, conformance, use_backend
from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.conformance import SHAPES, Case, checks, draw
from deltazoo.backends.conformance.cache import TensorCache
from deltazoo.backends.conformance.compare import LIMITS, draw_cotangents, reference_results, run
from deltazoo.backends.conformance.pairwise import DTYPES
from deltazoo.backends.io.errors import UnknownNameError, UnsupportedError
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.update.base import UpdateOutput
from deltazoo.backends.update.reference import ReferenceBackend

# Comparisons of the reference with itself cannot fail. It is eager code: torch.compile would unroll it over T.
NOT_FOR_REFERENCE = (
    "matches_the_reference",
    "gradients_of_each_output_alone",
    "uninitialized_memory_is_never_read",
    "compiles_to_one_graph",
)
test_reference_conforms = conformance.suite(
    "reference", checks("reference", dtypes=(torch.float64, torch.bfloat16), without=NOT_FOR_REFERENCE)
)

EAGER = CompileBackend(compiled=False)
GRAPHS = [(check, case) for check, case in checks(EAGER) if check.__name__ == "compiles_to_one_graph"]
test_compile_conforms = conformance.suite(EAGER, checks(EAGER, without=["compiles_to_one_graph"]))
test_compile_conforms_for_one_token_in_one_graph = conformance.suite(
    EAGER, [(check, case) for check, case in GRAPHS if case.shape.T == 1]
)
# test_compile.py compiles graphs of the same specs for all lengths, so that these run in the full product only.
test_compile_conforms_in_one_graph = pytest.mark.slow(conformance.suite(EAGER, GRAPHS))

GROUPS = sorted({(spec.decay, spec.transition) for spec in conformance.every_spec()})


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", conformance.TINY, ids=lambda shape: shape.name)
@pytest.mark.parametrize(("decay", "transition"), GROUPS)
def test_every_spec_on_every_shape_and_dtype_agrees_with_the_reference(decay, transition, shape, dtype):
    """The full product, 149,040 cases; select a part with -k (see the Makefile)."""
    for case in conformance.every_case((shape,), (dtype,)):
        if (case.spec.decay, case.spec.transition) == (decay, transition):
            report = conformance.compare(CompileBackend(compiled=False), case)
            assert not report.failures, str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_of_the_reference_is_the_rounding_of_its_stored_tensors(dtype):
    """The limits allow for the rounding of stored tensors. The reference's own error is this rounding only."""
    eps = torch.finfo(dtype).eps
    for axes in ({"decay": "head", "beta": "head"}, {"transition": "dplr", "decay": "channel"}):
        for regime in conformance.REGIMES:
            report = conformance.compare("reference", Case(UpdateSpec(**axes), SHAPES["chunks"], dtype, regime))
            largest = max(error.relative for error in report.errors)
            assert largest < max(0.5 * eps, 2e-5 if dtype == torch.float32 else 0), str(report)


def test_limits_of_outputs_keys_and_gates():
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
    exact, rounded = (draw(Case(spec, SHAPES["pack"], dtype, regime)) for dtype in (torch.float64, torch.bfloat16))
    for name, x, y in zip(exact._fields, exact, rounded, strict=True):
        if x is not None:
            assert torch.equal(x.to(y.dtype), y), name


def test_adversarial_inputs_have_parallel_keys_or_extreme_decays():
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
def test_drawn_inputs_give_stable_recurrences(regime):
    """An additive state grows linearly with T in the regime "parallel"; no state grows exponentially."""
    for case in conformance.pairwise_cases((SHAPES["chunks"]._replace(T=300),), (torch.float64,)):
        case = case._replace(regime=regime)
        out = ReferenceBackend().forward(case.spec, draw(case))
        assert out.o.abs().max() < 3e3, str(case)
        assert out.state.abs().max() < 3e3, str(case)


def test_strided_operands_have_nan_in_the_gaps():
    inputs = draw(Case(UpdateSpec(beta="head"), SHAPES["plain"], layout="strided"))
    assert not any(x.is_contiguous() for x in inputs if x is not None)
    assert torch.as_strided(inputs.q, (8,), (1,), 0).isnan().sum() == 4


def test_error_of_a_vanishing_tensor_is_relative_to_ordinary_inputs():
    zero, ordinary = torch.zeros(4, dtype=torch.float64), torch.full((4,), 2.0, dtype=torch.float64)
    assert conformance.relative_error(torch.full((4,), 1e-9), zero, ordinary) == pytest.approx(1e-9 / 2e-6)
    assert conformance.relative_error(zero, zero, zero) == 0
    assert conformance.relative_error(zero + 1, zero, zero) == float("inf")
    assert math.isnan(conformance.relative_error(zero * float("nan"), zero, zero))


def test_floor_of_the_error_applies_to_adversarial_cases():
    """A gradient that vanishes at a strong decay may be off by rounding, but not by more."""
    spec = UpdateSpec(decay="head")
    case = Case(spec, Shape("decay to zero", B=1, T=2, H=1, HV=1, K=4, V=4), regime="decays")

    def with_error(size):
        class Inexact(ReferenceBackend):
            def forward(self, spec, inputs):
                o, state = super().forward(spec, inputs)
                return UpdateOutput(o, state + size * (inputs.state - inputs.state.detach()))

        return conformance.compare(Inexact(), case, outputs="state").failures

    assert not draw(case).log_decay[0, 1].exp()  # the decay of the second token is 0, so d_state is 0
    assert not with_error(1e-12)
    assert with_error(1e-6)


def test_float64_reference_computes_with_the_rounded_operands():
    case = Case(UpdateSpec(decay="head", beta="head"), SHAPES["plain"], torch.bfloat16)
    inputs = draw(case)
    cotangents = draw_cotangents(case, inputs)
    expected = reference_results(case.spec, inputs, cotangents)
    widened = inputs._replace(**{name: x.double() for name, x in inputs._asdict().items() if x is not None})
    results = run("reference", case.spec, widened, tuple(x.double() for x in cotangents))
    assert all(torch.equal(results[name], expected[name]) for name in expected)


def test_reference_of_a_case_is_computed_once_for_all_backends(monkeypatch):
    dtypes = []
    forward = ReferenceBackend.forward
    monkeypatch.setattr(
        ReferenceBackend, "forward", lambda self, spec, x: dtypes.append(x.q.dtype) or forward(self, spec, x)
    )
    case = Case(UpdateSpec(decay="head", beta="head"), Shape("once", B=1, T=3, H=1, HV=1, K=2, V=2))
    for backend in ("reference", CompileBackend(compiled=False), "reference"):
        assert not conformance.compare(backend, case).failures
    assert dtypes.count(torch.float64) == 1
    assert not conformance.compare("reference", case._replace(seed=1)).failures
    assert dtypes.count(torch.float64) == 2


def test_cache_drops_the_least_recently_used_tensors():
    cache = TensorCache(max_bytes=2 * 8 * 8)  # two tensors
    calls = []

    def get(key):
        return cache.get(key, lambda: calls.append(key) or {"x": torch.full((8,), key, dtype=torch.float64)})["x"]

    assert [int(get(key)[0]) for key in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert calls == [1, 2, 3, 2]


def test_checks_cover_only_supported_specs_shapes_and_dtypes():
    class Narrow(ReferenceBackend):
        def unsupported(self, spec, meta):
            is_delta = spec.transition == "delta" and spec.householders == 2
            supported = is_delta and meta.dtype == torch.float32 and meta.K > 4
            return [] if supported else ["narrow supports two delta steps per token in float32 only"]

    cases = [case for check, case in checks(Narrow()) if check is conformance.matches_the_reference]
    assert {case.dtype for case in cases} == {torch.float32}
    assert {case.spec.decay for case in cases} == {"none", "fixed", "head", "channel", "rate"}
    assert {case.shape.name for case in cases} == {shape.name for shape in conformance.TINY if shape.K > 4}
    assert not any(conformance.compare(Narrow(), case).refused for case in cases[:5])


def test_suite_of_a_backend_that_supports_nothing_raises():
    class Never(ReferenceBackend):
        def unsupported(self, spec, meta):
            return ["never supports no spec at all"]

    with pytest.raises(UnsupportedError, match="supports no spec on any of the shapes and dtypes to check"):
        conformance.suite(Never())


def test_unknown_property_raises_with_the_nearest_name():
    with pytest.raises(UnknownNameError, match="did you mean 'heads_do_not_leak'"):
        checks("reference", without=["head_do_not_leak"])


def test_use_backend_does_not_change_the_compared_backend():
    class Wrong(ReferenceBackend):
        def forward(self, spec, inputs):
            o, state = super().forward(spec, inputs)
            return UpdateOutput(2 * o, state)

    case = Case(UpdateSpec(beta="head"), SHAPES["plain"])
    assert conformance.compare(Wrong(), case).failures
    with use_backend(Wrong()):
        assert not conformance.compare("reference", case).failures
