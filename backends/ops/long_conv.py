"""Causal convolution with a kernel as long as the sequence, by FFT; triton/conv/long_step_op.py computes one token.

The operator picks the length of the transforms from the actual sizes, so that a graph with a dynamic T has no condition
on it, and transforms windows of channels one after the other: beside operands and results the memory is constant. The
gradients need the operands alone.

B batch, T time, D channels, S taps
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import plain_gradients
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, differentiate_exported, operator
from deltazoo.backends.torch_ext.modes import transform_is_active
from deltazoo.backends.triton.limits import kernel_refusals

SCRATCH = 64 * 2**20  # bytes of the padded operand of a window of channels
_FACTORS = (1, 3, 5, 9, 15)  # times a power of two: lengths for which cuFFT and MKL are fast


def long_conv(x: Tensor, kernel: Tensor) -> Tensor:
    """Compute y_t = sum_(s <= t) kernel_(t - s) x_s for every channel.

    Args: x: [B, T, D]; kernel: [S, D] with S >= T, float32 or float64.
    Returns: [B, T, D] in the dtype of the kernel.
    """
    if transform_is_active():
        return _plain(x, kernel)
    y: Tensor = _LongConv.apply(x, kernel)
    return y


def step_refusals(x: Tensor, history: Tensor) -> list[str]:
    """Return why no kernel computes one token of a convolution, one sentence each; [] if `long_conv_step_` does."""
    if torch.is_grad_enabled():
        return ["it has no gradients."]
    if x.dtype != history.dtype:
        return [f"it needs a history in {x.dtype}, the dtype of x, got {history.dtype}."]
    return kernel_refusals(x)


def transform_length(T: int) -> int:
    """Return a fast length of transforms for a linear convolution of T tokens with T taps, at least 2 T - 1."""
    needed = max(2, 2 * T - 1)
    return min(factor << max(1, (-(-needed // factor) - 1).bit_length()) for factor in _FACTORS)


def _plain(x: Tensor, kernel: Tensor) -> Tensor:
    """Compute the same in operations of torch that every transform supports."""
    T = x.shape[1]
    if x.numel() == 0:  # MKL refuses an empty transform
        return x.to(kernel.dtype)
    size = transform_length(T)
    spectrum = torch.fft.rfft(x.to(kernel.dtype).mT, size) * torch.fft.rfft(kernel[:T].mT, size)
    return torch.fft.irfft(spectrum, size)[..., :T].mT


def _windows(x: Tensor, kernel: Tensor) -> Iterator[tuple[slice, int]]:
    """Divide the channels into windows, with the length of their transforms."""
    B, T, D = x.shape
    size = transform_length(T)
    width = max(1, SCRATCH // (B * size * kernel.element_size())) if x.numel() else 1
    for start in range(0, D if x.numel() else 0, width):
        yield slice(start, start + width), size


def _spectrum(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Transform x [..., T, D] along time: [..., D, size / 2 + 1]."""
    *batch, T, D = x.shape
    padded = x.new_zeros(*batch, D, size, dtype=dtype)
    padded[..., :T].copy_(x.mT)
    return torch.fft.rfft(padded)


def _forward(x: Tensor, kernel: Tensor) -> Tensor:
    T = x.shape[1]
    y = _forward_fake(x, kernel)
    for channels, size in _windows(x, kernel):
        spectrum = _spectrum(x[..., channels], size, kernel.dtype)
        spectrum *= _spectrum(kernel[:T, channels], size, kernel.dtype)
        y[..., channels] = torch.fft.irfft(spectrum, size)[..., :T].mT
    return y


def _forward_fake(x: Tensor, kernel: Tensor) -> Tensor:
    return kernel.new_empty(x.shape)


def _backward(dy: Tensor, x: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Correlate dy with the kernel and with x."""
    T = x.shape[1]
    dx, d_kernel = x.new_empty(x.shape), kernel.new_zeros(kernel.shape)
    for channels, size in _windows(x, kernel):
        d_spectrum = _spectrum(dy[..., channels], size, kernel.dtype)
        of_kernel = (_spectrum(x[..., channels], size, kernel.dtype).conj() * d_spectrum).sum(0)
        d_kernel[:T, channels] = torch.fft.irfft(of_kernel, size)[..., :T].mT
        d_spectrum *= _spectrum(kernel[:T, channels], size, kernel.dtype).conj()
        dx[..., channels] = torch.fft.irfft(d_spectrum, size)[..., :T].mT
    return dx, d_kernel


def _backward_fake(dy: Tensor, x: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), kernel.new_empty(kernel.shape)


_forward_op = operator("long_conv(Tensor x, Tensor kernel) -> Tensor", _forward, _forward_fake)
_backward_op = operator(
    "long_conv_backward(Tensor dy, Tensor x, Tensor kernel) -> (Tensor, Tensor)", _backward, _backward_fake
)


@cache_forward_signature
class _LongConv(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, kernel: Tensor) -> Tensor:
        y: Tensor = _forward_op(x, kernel)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: differentiable again
            return tuple(plain_gradients(_plain, (x, kernel), dy))
        gradients: tuple[Tensor, Tensor] = _backward_op(dy, x, kernel)
        return gradients


differentiate_exported("long_conv", _LongConv.apply)
