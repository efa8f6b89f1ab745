"""The long convolution against the sum over taps in float64."""

import pytest
import torch
from triton_cases import DEVICE, needs_triton

from deltazoo.backends.ops import long_conv as module
from deltazoo.backends.ops.long_conv import long_conv, transform_length
from deltazoo.backends.triton.conv import long_step_op
from deltazoo.backends.triton.conv.long_step_op import LongStepCall, long_conv_step_


def direct(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    T = x.shape[1]
    lag = torch.arange(T)[:, None] - torch.arange(T)
    matrix = torch.where((lag >= 0)[..., None], kernel[lag.clamp(min=0)], 0.0)
    return torch.einsum("tsd,bsd->btd", matrix, x)


@pytest.mark.parametrize("T", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("scratch", [module.SCRATCH, 20000])
def test_output_and_gradients_equal_the_sum_over_taps(T, scratch, monkeypatch):
    monkeypatch.setattr(module, "SCRATCH", scratch)
    torch.manual_seed(0)
    x = torch.randn(2, T, 9, dtype=torch.float64, requires_grad=True)
    kernel = torch.randn(T + 3, 9, dtype=torch.float64, requires_grad=True)
    y, expected = long_conv(x, kernel), direct(x, kernel)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    actual, reference = (torch.autograd.grad(z, (x, kernel), dy, allow_unused=True) for z in (y, expected))
    for a, b in zip(actual, reference, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_transposed_operands_are_laid_out_as_the_fake_ones():
    dy, x, kernel = torch.randn(2, 9, 5).mT, torch.randn(2, 9, 5).mT, torch.randn(9, 5).T
    torch.library.opcheck(torch.ops.deltazoo.long_conv_backward.default, (dy, x, kernel), test_utils="test_faketensor")


@pytest.mark.parametrize("T", [1, 2, 3, 1000, 4096, 4097, 65537])
def test_transforms_are_long_enough_and_less_than_a_third_longer(T):
    assert 2 * T - 1 <= transform_length(T) < max(3, 4 / 3 * 2 * T)


def test_a_graph_with_a_dynamic_length_is_compiled_once():
    torch._dynamo.reset()
    compiled = torch.compile(long_conv, fullgraph=True, dynamic=True, backend="aot_eager")
    kernel = torch.randn(60, 3, requires_grad=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T in (17, 40, 33):
            x = torch.randn(2, T, 3, requires_grad=True)
            torch.testing.assert_close(compiled(x, kernel), direct(x, kernel), rtol=1e-4, atol=1e-4)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize(
    "positions", [(0, 0, 0), (37, 37, 37), pytest.param((5, 0, 39), marks=pytest.mark.kernel_smoke), (39,)]
)
def test_a_token_joins_its_history_and_reads_all_of_it(positions, around, dtype, monkeypatch):
    monkeypatch.setattr(long_step_op, "_ELEMENTS", 256)
    B, S, D = len(positions), 40, 20
    generator = torch.Generator().manual_seed(0)
    streams, history, kernel, bias = (
        torch.randn(shape, generator=generator).to(DEVICE) for shape in ((B, 3 * D), (B, S, D), (S, D), (D,))
    )
    x, factor, gate = streams.to(dtype).chunk(3, 1)  # their rows are apart
    history, seen = history.to(dtype), torch.tensor(positions, device=DEVICE) + 1
    for b, p in enumerate(positions):  # slots that hold no tokens are not read
        history[b, p:] = torch.nan
    before = history.clone()
    call = LongStepCall(x, factor if around else None, gate if around else None, history, seen, kernel, bias)
    y = long_conv_step_(call)
    u = factor * x if around else x
    for b, p in enumerate(positions):
        assert torch.equal(history[b, p], u[b])
        assert torch.equal(history[b, :p], before[b, :p])
        expected = (kernel[: p + 1].flip(0).double() * history[b, : p + 1].double()).sum(0)
        expected += bias.double() * u[b].double()
        expected *= gate[b].double() if around else 1
        torch.testing.assert_close(y[b].double(), expected, rtol=0, atol=2e-5 if dtype == torch.float32 else 2e-2)


@needs_triton
def test_the_operator_of_a_token_passes_opcheck():
    x, history, kernel = (torch.randn(shape).to(DEVICE) for shape in ((2, 8), (2, 5, 8), (5, 8)))
    call = LongStepCall(x, x, None, history, torch.tensor([1, 4], device=DEVICE), kernel, kernel[0])
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.deltazoo.triton_long_conv_step_.default, tuple(call), test_utils=tests)
