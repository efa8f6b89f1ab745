"""The convolution with many taps against the sum over taps: in plain torch, in the interpreter, or on a GPU."""

import pytest
import torch
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.ops.short_conv import ConvInputs, ConvPart, short_conv
from deltazoo.backends.ops.wide_conv import wide_conv
from deltazoo.backends.triton.conv import wide, wide_op


def direct(x, weight):
    T = x.shape[1]
    taps = [torch.nn.functional.pad(x, (0, 0, lag, 0))[:, :T] * w for lag, w in enumerate(weight)]
    return torch.stack(taps).sum(0)


def results(function, x, weight, dy):
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("T", [1, 5, 40])
def test_plain_torch_equals_the_sum_over_taps(T):
    torch.manual_seed(0)
    x, weight, dy = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, T, 3), (20, 3), (2, T, 3)))
    for a, b in zip(results(wide_conv, x, weight, dy), results(direct, x, weight, dy), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_transposed_operands_are_laid_out_as_the_fake_ones():
    dy, x, weight = torch.randn(2, 3, 30).mT, torch.randn(2, 3, 30).mT, torch.randn(3, 20).T
    torch.library.opcheck(torch.ops.deltazoo.wide_conv_backward.default, (dy, x, weight), test_utils="test_faketensor")


def test_vmap_equals_a_batch():
    x, weight = torch.randn(4, 30, 3, dtype=torch.float64), torch.randn(20, 3, dtype=torch.float64)
    actual = torch.func.vmap(lambda row: wide_conv(row[None], weight)[0])(x)
    torch.testing.assert_close(actual, wide_conv(x, weight))


@pytest.mark.parametrize("history", [False, True])
def test_a_wide_short_convolution_equals_one_of_each_sequence(history):
    torch.manual_seed(0)
    bounds, W, C = [0, 25, 25, 26, 60], 20, 3
    x, weight, bias, before = (
        torch.randn(*shape, dtype=torch.float64) for shape in ((1, 62, C), (C, W), (C,), (4, W - 1, C))
    )
    inputs = ConvInputs(x, weight, bias, before if history else None, torch.tensor(bounds, dtype=torch.int32))
    (y,) = short_conv(inputs, [ConvPart(C)])
    for n in range(4):
        piece = x[:, bounds[n] : bounds[n + 1]]
        padded = torch.cat([before[n : n + 1] if history else before.new_zeros(1, W - 1, C), piece], 1)
        expected = direct(padded, weight.T.flip(0))[:, W - 1 :] + bias
        torch.testing.assert_close(y[:, bounds[n] : bounds[n + 1]], expected)
    assert not y[:, 60:].any()


def test_one_token_after_a_history_equals_the_last_of_a_sequence():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 20, 3, dtype=torch.float64), torch.randn(3, 20, dtype=torch.float64)
    (y,) = short_conv(ConvInputs(x[:, 19:], weight, None, x[:, :19]), [ConvPart(3)])
    torch.testing.assert_close(y, direct(x, weight.T.flip(0))[:, 19:])


@needs_triton
@pytest.mark.parametrize(
    ("shape", "W", "dtype"),
    [
        pytest.param((2, 21, 10), 18, torch.float32, marks=pytest.mark.kernel_smoke),
        ((1, 70, 20), 64, torch.bfloat16),
    ],
)
def test_kernels_equal_plain_torch(shape, W, dtype, monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(wide, "TIME", 16)
        monkeypatch.setattr(wide, "SUM_TIME", 16)
    torch.manual_seed(0)
    x, dy = (torch.randn(*shape, device=DEVICE) for _ in range(2))
    x, weight = x.to(dtype), torch.randn(W, shape[2], device=DEVICE)
    with watch() as log:
        actual = results(wide_op.wide_conv, x, weight, dy)
    assert log.kernels == {"wide_conv_kernel": 2, "wide_correlation_kernel": 1}
    expected = results(direct, x.double(), weight.double(), dy.double())
    for a, b, limit in zip(actual, expected, (1e-6, 4e-3 if dtype == torch.bfloat16 else 1e-6, 1e-6), strict=True):
        assert float((a - b).norm() / b.norm()) < limit
