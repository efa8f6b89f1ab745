"""The gated activation and its linear map against float64: in Triton's interpreter, or on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from assembly import disassemble
from compiling import Compiler
from torch import Tensor
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.ops.glu_linear import glu_linear
from deltazoo.backends.triton import limits
from deltazoo.backends.triton.glu import op as launches
from deltazoo.backends.triton.limits import kernel_refusals
from deltazoo.blocks.model import mlp as module
from deltazoo.blocks.model.mlp import Dense

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
DTYPES = list(TOLERANCE)[: 2 if INTERPRETED else 3]
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(launches, "COLUMNS", 16)


def draw(*shape: int, dtype: torch.dtype, factor: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (factor * torch.randn(*shape, generator=generator)).to(DEVICE, dtype)


def definition(hidden: Tensor, activation: str) -> Tensor:
    gate, up = hidden.double().chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (actual.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error <= tolerance, float(error)


@needs_triton
@pytest.mark.parametrize("activation", [pytest.param("silu", marks=pytest.mark.kernel_smoke), "gelu", "relu2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (4, 16), (9, 37)])
def test_the_kernels_compute_the_activation_and_its_gradient(rows, width, dtype, activation):
    for factor in (1.0, 8.0):
        hidden = draw(rows, 2 * width, dtype=dtype, factor=factor)
        d_h = draw(rows, width, dtype=dtype, seed=1)
        exact = hidden.double().requires_grad_()
        expected = definition(exact, activation)
        (d_expected,) = torch.autograd.grad(expected, exact, d_h.double())
        assert_near(launches.glu(hidden, activation), expected.detach(), TOLERANCE[dtype])
        d_hidden, h = launches.glu_backward(hidden, d_h, activation)
        assert_near(h, expected.detach(), TOLERANCE[dtype])
        assert_near(d_hidden, d_expected, TOLERANCE[dtype])


@needs_triton
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_gates_do_not_overflow_and_nan_propagates(activation):
    hidden = torch.tensor([[3e4, -3e4, torch.nan, 0.0, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    d_h = torch.ones(1, 4, device=DEVICE)
    d_hidden, h = launches.glu_backward(hidden, d_h, activation)
    slope = 1 if activation != "relu2" else 6e4
    torch.testing.assert_close(d_hidden[0, [0, 1]].cpu(), torch.tensor([2.0 * slope, 0.0]))
    assert h[0].isnan().tolist() == [False, False, True, False]
    assert d_hidden[0].isnan().tolist() == [False, False, True, False, False, False, True, False]


@needs_triton
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_linear_map_and_its_gradients_equal_their_definition(activation):
    hidden = draw(2, 5, 24, dtype=torch.float32).requires_grad_()
    weight = draw(7, 12, dtype=torch.float32, seed=1).requires_grad_()
    dy = draw(2, 5, 7, dtype=torch.float32, seed=2)
    with watch() as log:
        y = glu_linear(hidden, weight, activation)
        actual = [y, *torch.autograd.grad(y, (hidden, weight), dy)]
    assert log.kernels == {"glu_kernel": 1, "glu_backward_kernel": 1}
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = definition(exact[0], activation) @ exact[1].T
    for ours, theirs in zip(actual, [expected, *torch.autograd.grad(expected, exact, dy.double())], strict=True):
        assert ours.shape == theirs.shape
        assert_near(ours.detach(), theirs.detach(), 1e-5)


@needs_triton
def test_only_the_projection_and_the_weight_are_saved():
    hidden, weight = draw(3, 8, dtype=torch.float32).requires_grad_(), draw(2, 4, dtype=torch.float32).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        glu_linear(hidden, weight, "silu").sum().backward()
    assert sorted(saved) == [(2, 4), (3, 8)]


@needs_triton
@pytest.mark.parametrize("frozen", ["hidden", "weight", "none"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_derivatives_equal_those_of_the_definition(activation, frozen):
    tensors = {"hidden": draw(3, 8, dtype=torch.float32), "weight": draw(2, 4, dtype=torch.float32, seed=1)}
    results = []
    for dtype, function in (
        (torch.float32, lambda x: glu_linear(x["hidden"], x["weight"], activation)),
        (torch.float64, lambda x: definition(x["hidden"], activation) @ x["weight"].T),
    ):
        x = {name: tensor.to(dtype).requires_grad_(name != frozen) for name, tensor in tensors.items()}
        leaves = [tensor for tensor in x.values() if tensor.requires_grad]
        first = torch.autograd.grad(function(x).square().sum(), leaves, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)])
    for actual, expected in zip(*results, strict=True):
        assert_near(actual.detach(), expected.detach(), 1e-5)


@needs_triton
def test_second_derivatives_of_a_projection_that_depends_on_the_output_map():
    weight = draw(4, 4, dtype=torch.float32).requires_grad_()
    exact = weight.detach().double().requires_grad_()
    results = []
    for leaf, function in (
        (weight, lambda w: glu_linear(torch.cat([w, 2 * w], 1), w, "silu")),
        (exact, lambda w: definition(torch.cat([w, 2 * w], 1), "silu") @ w.T),
    ):
        (first,) = torch.autograd.grad(function(leaf).square().sum(), leaf, create_graph=True)
        results.append([first, *torch.autograd.grad(first.square().sum(), leaf)])
    for actual, expected in zip(*results, strict=True):
        assert_near(actual.detach(), expected.detach(), 1e-5)


@needs_triton
def test_a_frozen_weight_gets_no_gradient():
    hidden, weight = draw(3, 8, dtype=torch.float32).requires_grad_(), draw(2, 4, dtype=torch.float32)
    glu_linear(hidden, weight, "silu").sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


@needs_triton
def test_an_mlp_can_be_vectorised(monkeypatch):
    monkeypatch.setattr(limits, "elementwise_refusals", lambda *_: ())
    mlp = Dense(width=12).build(6).to(DEVICE)
    x = draw(2, 3, 6, dtype=torch.float32)
    torch.testing.assert_close(torch.func.vmap(lambda x: mlp(x[None], None).y[0])(x), mlp(x, None).y)


@needs_triton
@pytest.mark.parametrize("config", [Dense(width=12), Dense(width=12, activation="gelu")])
def test_an_mlp_leaves_its_activation_to_inductor_only_without_gradients(monkeypatch, config):
    monkeypatch.setattr(module, "kernel_refusals", lambda hidden: [])
    torch.manual_seed(0)
    mlp = config.build(6).to(DEVICE)
    x = draw(2, 3, 6, dtype=torch.float32).requires_grad_()
    with watch() as log:
        y = mlp(x, None).y
        gradients = torch.autograd.grad(y.sum(), [x, *mlp.parameters()])
    assert set(log.kernels) == {"glu_kernel", "glu_backward_kernel"}
    with watch() as log, torch.no_grad():
        torch.testing.assert_close(mlp(x, None).y, y)
    assert set(log.kernels) == {"glu_kernel"}
    with watch() as log, torch.no_grad():
        torch.testing.assert_close(torch.compile(mlp, fullgraph=True, backend="aot_eager")(x, None).y, y)
    assert not log.kernels
    monkeypatch.setattr(module, "kernel_refusals", lambda hidden: ["planted"])
    expected = torch.autograd.grad(mlp(x, None).y.sum(), [x, *mlp.parameters()])
    torch.testing.assert_close(gradients, expected)


@needs_triton
def test_a_compiled_mlp_is_one_graph_with_the_same_gradients(monkeypatch):
    monkeypatch.setattr(module, "kernel_refusals", lambda hidden: [])
    torch.manual_seed(0)
    mlp = Dense(width=12).build(6).to(DEVICE)
    x = draw(2, 3, 6, dtype=torch.float32).requires_grad_()
    expected = torch.autograd.grad(mlp(x, None).y.square().sum(), [x, *mlp.parameters()])
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    with watch() as log, torch.device(DEVICE):  # an active torch function mode
        actual = torch.autograd.grad(compiled(x, None).y.square().sum(), [x, *mlp.parameters()])
    assert set(log.kernels) == {"glu_kernel", "glu_backward_kernel"}
    torch.testing.assert_close(actual, expected)


@needs_triton
def test_an_mlp_with_a_hook_or_a_bias_keeps_its_output_map(monkeypatch):
    monkeypatch.setattr(module, "kernel_refusals", lambda hidden: [])
    x = draw(2, 3, 6, dtype=torch.float32)
    called = []
    hooked = Dense(width=12).build(6).to(DEVICE)
    hooked.out.register_forward_hook(lambda *_: called.append(1))
    with watch() as log:
        hooked(x, None)
        Dense(width=12, bias=True).build(6).to(DEVICE)(x, None)
    assert called == [1]
    assert not log.kernels


@needs_triton
def test_operators_pass_opcheck():
    hidden = draw(3, 10, dtype=torch.float32)
    names = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.deltazoo.triton_glu.default, (hidden, "silu"), test_utils=names)
    arguments = (hidden, draw(3, 5, dtype=torch.float32), "silu")
    torch.library.opcheck(torch.ops.deltazoo.triton_glu_backward.default, arguments, test_utils=names)


def test_the_kernels_need_a_gpu_and_at_most_32_bits():
    assert kernel_refusals(torch.zeros(2, 4))
    if not INTERPRETED and torch.cuda.is_available():
        assert not kernel_refusals(torch.zeros(2, 4, device="cuda"))
        assert kernel_refusals(torch.zeros(2, 4, device="cuda", dtype=torch.float64))


@pytest.mark.kernels
@pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler, not its interpreter")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_compiled_kernels_have_no_spills_and_wide_accesses(monkeypatch, activation):
    monkeypatch.setattr(launches, "COLUMNS", 512)
    compiler = Compiler(all=True)
    monkeypatch.setattr("deltazoo.backends.triton.runtime.launcher.launcher", compiler)
    hidden, d_h = torch.empty(8, 11008, dtype=torch.bfloat16), torch.empty(8, 5504, dtype=torch.bfloat16)
    launches.glu(hidden, activation)
    launches.glu_backward(hidden, d_h, activation)
    assert len(compiler.compiled) == 2
    for _, compiled in compiler.compiled:
        assert "ld.global.v4" in compiled.asm["ptx"]
        assert "st.global.v4" in compiled.asm["ptx"]
        assert "STL" not in disassemble(compiled.asm["cubin"])
