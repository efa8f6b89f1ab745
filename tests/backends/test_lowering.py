"""Lowering to canonical strengths and decays: accurate values and gradients for keys of any length."""

import mpmath
import pytest
import torch
from scipy.linalg import expm

from deltazoo.backends.conformance.cases import Case, draw
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.backends.update.lowering import exact_factor, log_decay, strengths
from deltazoo.backends.update.spec import UpdateSpec

SHAPE = Shape("small", B=2, T=5, H=2, HV=4, K=3, V=2)
POINTS = [
    *(0.0, 1e-300, 1e-30, 1e-12, 1e-8, 1e-6, 1e-4, 1e-3, 0.01, 0.1, 0.2499999, 0.25, 0.2500001, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 88.0, 104.0, 700.0, 750.0, 1e3, 1e4, 1e5, 1e6),
]


def exact_factor_and_slope(x: float) -> tuple[float, float]:
    """(1 - exp(-x)) / x and its derivative, in 700 digits so that cancellation does not matter."""
    with mpmath.workdps(700):
        z = mpmath.mpf(x)
        if z == 0:
            return 1.0, -0.5
        return float(-mpmath.expm1(-z) / z), float((mpmath.exp(-z) * (1 + z) - 1) / z**2)


@pytest.mark.parametrize(
    ("dtype", "value_rtol", "slope_rtol"), [(torch.float64, 4e-16, 2e-14), (torch.float32, 3e-7, 5e-6)], ids=str
)
def test_exact_factor_and_its_gradient_are_accurate_from_0_to_1e6(dtype, value_rtol, slope_rtol):
    x = torch.tensor(POINTS, dtype=dtype).requires_grad_()
    y = exact_factor(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    expected = torch.tensor([exact_factor_and_slope(float(point)) for point in x.detach()], dtype=torch.float64)
    torch.testing.assert_close(y.detach().double(), expected[:, 0], rtol=value_rtol, atol=0)
    torch.testing.assert_close(slope.double(), expected[:, 1], rtol=slope_rtol, atol=0)


def test_exact_factor_passes_gradcheck_at_0_and_where_the_series_ends():
    x = torch.tensor([0.0, 1e-9, 0.25, 0.25 + 1e-9, 3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(exact_factor, (x,))
    assert torch.autograd.gradgradcheck(exact_factor, (x,))


@pytest.mark.parametrize("beta", ["none", "head", "channel"])
@pytest.mark.parametrize("length", [0.0, 1e-9, 1e-3, 1.0, 30.0])
def test_efla_solves_the_differential_equation_exactly(beta, length):
    """I - k (erase * k)^T equals exp(-k (b * k)^T), and k write is the integral of the source term."""
    spec = UpdateSpec(beta=beta, reparam="efla")
    for k, b, w, erase, write in _steps(spec, length):
        transition = torch.eye(3, dtype=torch.float64) - torch.outer(k, erase * k)
        joint = torch.zeros(4, 4, dtype=torch.float64)
        joint[:3, :3], joint[:3, 3] = -torch.outer(k, b * k), k * w
        expected = torch.from_numpy(expm(joint.numpy()))
        torch.testing.assert_close(transition, expected[:3, :3], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(k * write, expected[:3, 3], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beta", ["none", "head", "channel"])
@pytest.mark.parametrize("length", [0.0, 1e-9, 1e-3, 1.0, 30.0])
def test_longhorn_solves_the_implicit_step_exactly(beta, length):
    """S' = S + k (w v - S'^T (b * k))^T, solved for S'."""
    spec = UpdateSpec(beta=beta, reparam="longhorn")
    for k, b, w, erase, write in _steps(spec, length):
        transition = torch.eye(3, dtype=torch.float64) - torch.outer(k, erase * k)
        expected = torch.linalg.inv(torch.eye(3, dtype=torch.float64) + torch.outer(k, b * k))
        torch.testing.assert_close(transition, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(k * write, expected @ k * w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reparam", ["efla", "longhorn"])
@pytest.mark.parametrize("beta", ["none", "head", "channel"])
def test_strengths_pass_gradcheck_for_zero_and_tiny_keys(reparam, beta):
    spec = UpdateSpec(beta=beta, reparam=reparam)
    inputs = draw(Case(spec, SHAPE, torch.float64))
    inputs.k[:, 1] = 0
    inputs.k[:, 2] *= 1e-8
    names = [name for name in ("k", "beta", "erase", "write") if getattr(inputs, name) is not None]

    def lowered(*operands):
        return strengths(spec, inputs._replace(**dict(zip(names, operands, strict=True))))

    assert torch.autograd.gradcheck(lowered, [getattr(inputs, name).requires_grad_() for name in names])


@pytest.mark.parametrize("reparam", ["efla", "longhorn"])
def test_zero_key_gives_beta_as_the_strength(reparam):
    spec = UpdateSpec(beta="head", reparam=reparam)
    inputs = draw(Case(spec, SHAPE, torch.float32))
    k, beta = torch.zeros_like(inputs.k).requires_grad_(), inputs.beta.clone().requires_grad_()
    erase, write = strengths(spec, inputs._replace(k=k, beta=beta))
    assert torch.equal(erase, beta)
    assert torch.equal(write, beta)
    d_k, d_beta = torch.autograd.grad(erase.sum(), (k, beta))
    assert torch.equal(d_k, torch.zeros_like(k))
    assert torch.equal(d_beta, torch.ones_like(beta))


@pytest.mark.parametrize("reparam", ["efla", "longhorn"])
def test_huge_beta_erases_the_key_completely_and_not_beyond(reparam):
    spec = UpdateSpec(beta="head", reparam=reparam)
    inputs = draw(Case(spec, SHAPE, torch.float32))
    beta = torch.full_like(inputs.beta, 1e12).requires_grad_()
    erase, _ = strengths(spec, inputs._replace(beta=beta))
    squares = inputs.k.square().sum(-1).repeat_interleave(2, dim=-1)
    torch.testing.assert_close(erase * squares, torch.ones_like(erase), rtol=1e-6, atol=0)
    assert bool(((1 - erase.double() * squares.double()) > -3e-7).all())
    (slope,) = torch.autograd.grad(erase.sum(), beta)
    assert bool(torch.isfinite(slope).all())


@pytest.mark.parametrize("length", [0.3, 0.7, 2.0, 4.0, 6.0])
def test_gradient_of_efla_by_beta_is_accurate_for_long_keys(length):
    spec = UpdateSpec(beta="head", reparam="efla")
    inputs = draw(Case(spec, SHAPE, torch.float32))
    k, beta = length * torch.nn.functional.normalize(inputs.k, dim=-1), inputs.beta.clone().requires_grad_()
    erase, _ = strengths(spec, inputs._replace(k=k, beta=beta))
    (slope,) = torch.autograd.grad(erase.sum(), beta)
    time = beta.detach().double() * k.double().square().sum(-1).repeat_interleave(2, dim=-1)
    torch.testing.assert_close(slope.double(), torch.exp(-time), rtol=2e-5, atol=1e-37)


DOUBLED = {"off": (1, 1), "both": (2, 2), "erase": (2, 1)}


@pytest.mark.parametrize("form", DOUBLED)
@pytest.mark.parametrize("beta", ["none", "head", "separate", "channel"])
def test_negative_eigenvalues_double_both_strengths_or_the_erase_only(form, beta):
    spec = UpdateSpec(beta=beta, negative_eigenvalues=form)
    inputs = draw(Case(spec, SHAPE, torch.float32))
    one = torch.ones(2, 5, 4)
    undoubled = (inputs.beta,) * 2 if beta == "head" else (one, one) if beta == "none" else (inputs.erase, inputs.write)
    for lowered, strength, factor in zip(strengths(spec, inputs), undoubled, DOUBLED[form], strict=True):
        assert torch.equal(one if lowered is None else lowered, factor * strength)


@pytest.mark.parametrize("transition", ["additive", "dplr"])
def test_beta_is_only_the_write_strength_without_the_delta_rule(transition):
    inputs = draw(Case(spec := UpdateSpec(transition=transition, beta="head"), SHAPE))
    erase, write = strengths(spec, inputs)
    assert erase is None
    assert torch.equal(write, inputs.beta)
    inputs = draw(Case(spec := UpdateSpec(transition=transition, beta="channel"), SHAPE))
    erase, write = strengths(spec, inputs)
    assert erase is None
    assert torch.equal(write, inputs.write)


def test_strengths_of_bfloat16_inputs_are_float32():
    spec = UpdateSpec(beta="head", reparam="efla")
    inputs = draw(Case(spec, SHAPE, torch.bfloat16))
    wide = UpdateInputs(*(x if x is None else x.float() for x in inputs))
    for strength, expected in zip(strengths(spec, inputs), strengths(spec, wide), strict=True):
        assert strength.dtype == torch.float32
        assert torch.equal(strength, expected)


@pytest.mark.parametrize("seed", [0, 1])
def test_fixed_decay_is_an_expanded_view(seed):
    inputs = draw(Case(spec := UpdateSpec(decay="fixed"), SHAPE, seed=seed))
    expanded = log_decay(spec, inputs)
    assert expanded.data_ptr() == inputs.log_decay.data_ptr()
    assert expanded.stride()[:2] == (0, 0)
    assert all(torch.equal(expanded[b, t], inputs.log_decay) for b in range(2) for t in range(5))


def test_rate_decay_is_step_times_rate():
    inputs = draw(Case(spec := UpdateSpec(decay="rate"), SHAPE))
    assert torch.equal(log_decay(spec, inputs), torch.einsum("bth,hk->bthk", inputs.step, inputs.rate))


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_head_and_channel_decays_are_returned_unchanged(decay):
    inputs = draw(Case(spec := UpdateSpec(decay=decay), SHAPE))
    assert log_decay(spec, inputs) is inputs.log_decay
    assert log_decay(UpdateSpec(), inputs) is None


def _steps(spec, length):
    """Every step of drawn inputs with keys of one length: k [K], b [K], w, and the lowered erase and write."""
    inputs = draw(Case(spec, SHAPE._replace(V=1), torch.float64))
    inputs = inputs._replace(k=length * torch.nn.functional.normalize(inputs.k, dim=-1))
    erase, write = strengths(spec, inputs)
    for b in range(2):
        for t in range(5):
            for j in range(4):
                k = inputs.k[b, t, j // 2]
                if spec.beta == "channel":
                    yield k, inputs.erase[b, t, j], inputs.write[b, t, j, 0], erase[b, t, j], write[b, t, j, 0]
                else:
                    beta = inputs.beta[b, t, j] if spec.beta == "head" else torch.ones((), dtype=torch.float64)
                    yield k, beta * torch.ones_like(k), beta, erase[b, t, j], write[b, t, j]
