"""RMS norms with a residual sum or a gate against float64: in Triton's interpreter, or on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.ops import rms_norm as module
from deltazoo.backends.ops.rms_norm import add_rms_norm, gated_rms_norm
from deltazoo.backends.triton import limits
from deltazoo.backends.triton.norm import op as launches
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.mixers import GatedDeltaNet
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.parts.norms import RMSNorm, add_and_normalize

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
DTYPES = list(TOLERANCE)[: 2 if INTERPRETED else 3]
GATES = {"silu": F.silu, "sigmoid": torch.sigmoid}
EPS = 1e-3


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(launches, "_TILE", 64)
        monkeypatch.setattr(launches, "_BACKWARD_PROGRAMS", 3)


def draw(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).to(DEVICE, dtype).requires_grad_()


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    error = (actual.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error <= tolerance, float(error)


def in_float64(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]


@needs_triton
@pytest.mark.parametrize("with_branch", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 16), pytest.param((2, 5, 37), marks=pytest.mark.kernel_smoke), (7, 200)])
def test_the_norm_of_a_sum_and_its_gradients(shape, dtype, with_branch):
    for scale in (1e-3, 1.0, 300.0):
        x, branch = (draw(*shape, dtype=dtype, seed=i, scale=scale) for i in range(2))
        weight = draw(shape[-1], dtype=dtype, seed=2)
        d_sum, dy = (draw(*shape, dtype=dtype, seed=i).detach() for i in (3, 4))
        inputs = [x, branch, weight] if with_branch else [x, weight]
        with watch() as log:
            outputs = add_rms_norm(x, branch if with_branch else None, weight, EPS)
            gradients = torch.autograd.grad(outputs, inputs, (d_sum, dy))
        assert log.kernels == {"rms_norm_kernel": 1, "rms_norm_backward_kernel": 1}
        exact = in_float64(*inputs)
        h = exact[0] + exact[1] if with_branch else exact[0] * 1
        # the norm is of the rounded sum
        rounded = h + (outputs[0].double() - h).detach()
        expected = (h, exact_norm(rounded, exact[-1]))
        references = torch.autograd.grad(expected, exact, (d_sum.double(), dy.double()))
        for actual, reference in zip((*outputs, *gradients), (*expected, *references), strict=True):
            assert actual.dtype == dtype
            assert_near(actual.detach(), reference.detach(), TOLERANCE[dtype])


@needs_triton
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 3), (2, 3, 3, 16), pytest.param((5, 2, 37), marks=pytest.mark.kernel_smoke), (3, 3, 200)]
)
def test_a_gated_norm_and_its_gradients(shape, dtype, activation, gaps):
    heads, D = shape[-2:]
    x, weight = draw(*shape, dtype=dtype, seed=0), draw(D, dtype=dtype, seed=1)
    gate = draw(*shape[:-2], heads * D, dtype=dtype, seed=2, scale=3.0)
    if gaps:  # rows of a padded matrix product
        wide = torch.zeros(*shape[:-2], heads * D + 40, dtype=dtype, device=DEVICE)
        wide[..., : heads * D] = gate.detach()
        gate = wide[..., : heads * D].requires_grad_()
    dy = draw(*shape, dtype=dtype, seed=3).detach()
    with watch() as log:
        y = gated_rms_norm(x, gate, weight, EPS, activation)
        gradients = torch.autograd.grad(y, (x, gate, weight), dy)
    assert log.kernels == {"rms_norm_kernel": 1, "rms_norm_backward_kernel": 1}
    exact = in_float64(x, gate, weight)
    expected = exact_norm(exact[0], exact[2]) * GATES[activation](exact[1]).view(shape)
    references = torch.autograd.grad(expected, exact, dy.double())
    for actual, reference in zip((y, *gradients), (expected, *references), strict=True):
        assert actual.dtype == dtype
        assert_near(actual.detach(), reference.detach(), TOLERANCE[dtype])


@needs_triton
def test_the_sum_has_the_wider_dtype_of_its_terms():
    x, weight = draw(3, 16, dtype=torch.float32, seed=0), draw(16, dtype=torch.float32, seed=1)
    branch = draw(3, 16, dtype=torch.float16, seed=2)
    h, y = add_rms_norm(x, branch, weight, EPS)
    gradients = torch.autograd.grad(h.sum() + y.square().sum(), (x, branch, weight))
    assert h.dtype == y.dtype == torch.float32
    assert [g.dtype for g in gradients] == [torch.float32, torch.float16, torch.float32]
    torch.testing.assert_close(h, x + branch)


@needs_triton
def test_second_derivatives_equal_those_of_the_definition():
    shape = (2, 3, 16)
    x, branch = (draw(*shape, dtype=torch.float32, seed=i) for i in range(2))
    weight, gate = draw(16, dtype=torch.float32, seed=2), draw(2, 48, dtype=torch.float32, seed=3)

    def ours(x: Tensor, branch: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
        h, y = add_rms_norm(x, branch, weight, EPS)
        return gated_rms_norm(h * y, gate, weight, EPS, "silu")

    def definition(x: Tensor, branch: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
        h = x + branch
        return exact_norm(h * exact_norm(h, weight), weight) * F.silu(gate).view(shape)

    results = []
    for function, leaves in ((ours, [x, branch, weight, gate]), (definition, in_float64(x, branch, weight, gate))):
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)])
    for actual, expected in zip(*results, strict=True):
        assert_near(actual.detach(), expected.detach(), 2e-5)


@needs_triton
def test_a_row_of_zeros_has_finite_gradients():
    x = torch.zeros(2, 16, device=DEVICE, requires_grad=True)
    weight = torch.ones(16, device=DEVICE, requires_grad=True)
    h, y = add_rms_norm(x, None, weight, EPS)
    (gradient,) = torch.autograd.grad((h, y), x, (torch.zeros_like(x), torch.ones_like(x)))
    torch.testing.assert_close(gradient, torch.full_like(x, EPS**-0.5))


def run_layer(layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layer(leaf).x
    y.square().sum().backward()
    return [y.detach(), leaf.grad, *(parameter.grad.clone() for parameter in layer.parameters())]


@needs_triton
@pytest.mark.parametrize("hooked", ["nothing", "norm", "mlp_norm", "gate"])
def test_a_layer_computes_the_same_with_and_without_the_kernels(hooked, monkeypatch):
    """A hook on a part is called, and that part's norm is then computed in plain torch."""
    torch.manual_seed(0)
    spec = LayerSpec(mixer=GatedDeltaNet(heads=2, key_width=16, value_width=24), mlp=Dense(width=32))
    layer = spec.build(48, Place(0, 1), "reference").to(DEVICE)
    for parameter in layer.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    x = torch.randn(2, 5, 48).to(DEVICE)
    monkeypatch.setattr(limits, "elementwise_refusals", lambda *_: ("this test runs plain torch.",))
    with watch() as log:
        expected = run_layer(layer, x)
    assert "rms_norm_kernel" not in log.kernels
    monkeypatch.setattr(limits, "elementwise_refusals", lambda *_: ())
    calls = []
    outputs = layer.mixers[0].outputs
    parts = {"norm": layer.norm, "mlp_norm": layer.mlp_norm, "gate": outputs["gate"]}
    if hooked != "nothing":
        parts[hooked].register_forward_hook(lambda *_: calls.append(hooked))
    with watch() as log:
        actual = run_layer(layer, x)
    assert (
        log.kernels["rms_norm_kernel"] == log.kernels["rms_norm_backward_kernel"] == (3 if hooked == "nothing" else 2)
    )
    assert calls == [hooked] * (hooked != "nothing")
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


def test_the_kernels_refuse_what_they_do_not_compute(monkeypatch):
    x, weight = torch.ones(2, 8), torch.nn.Parameter(torch.ones(8))
    assert module.refusals(x, weight)  # a CPU
    monkeypatch.setattr(limits, "elementwise_refusals", lambda *_: ())
    assert not module.refusals(x, weight)
    assert module.refusals(x, torch.nn.Parameter(torch.ones(2, 8)))
    assert module.refusals(x, weight.detach())  # a subclass or a result of parameters has its own rules
    assert module.refusals(x[:0], weight)
    assert torch.func.vmap(lambda row: torch.tensor(bool(module.refusals(row, weight))))(x).all()
    monkeypatch.setattr(launches, "MAX_WIDTH", 7)
    assert module.refusals(x, weight)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_offset_is_added_to_the_weights_in_float32(dtype, monkeypatch):
    monkeypatch.setattr(limits, "elementwise_refusals", lambda *_: ())
    norm = RMSNorm(24, EPS, offset=1.0).to(DEVICE, dtype)
    torch.nn.init.normal_(norm.weight, std=0.1)
    x, branch = draw(7, 24, dtype=dtype, seed=0), draw(7, 24, dtype=dtype, seed=1)
    leaves = (x, branch, norm.weight)
    with watch() as log:
        h, y = add_and_normalize(norm, x, branch)
        gradients = torch.autograd.grad(h.sum() + (y * y).sum(), leaves)
    assert log.kernels["rms_norm_kernel"] == log.kernels["rms_norm_backward_kernel"] == 1
    exact = in_float64(*leaves)
    expected = exact_norm(exact[0] + exact[1], 1 + exact[2])
    assert_near(y, expected, TOLERANCE[dtype])
    wanted = torch.autograd.grad((exact[0] + exact[1]).sum() + expected.square().sum(), exact)
    assert gradients[2].dtype == dtype
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert_near(ours, theirs, 3 * TOLERANCE[dtype])
