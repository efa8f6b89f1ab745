"""Causal depthwise convolution with more taps than fit in registers, such as the shift filter of H3.

    y_t = sum_j weight_j x_(t-j),    x_t = 0 before the first token

An NVIDIA GPU runs Triton kernels, other devices and float64 a loop over the taps in plain torch.

B batch, T time, C channels, W taps
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, differentiate_exported, operator
from deltazoo.backends.triton.limits import runs_elementwise_kernels
from deltazoo.backends.triton.operands import all_ready
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of


def wide_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve x with one filter per channel; differentiable once.

    Args: x: [B, T, C]; weight: [W, C] by lag, float32 (float64 for float64 x).
    Returns: y [B, T, C] in the dtype of the weight, in which it is computed.
    """
    y: Tensor = _WideConv.apply(x, weight)
    return y


def _has_kernel(x: Tensor) -> bool:
    device = device_of(x)
    return runs_elementwise_kernels(device.type, device.index, x.dtype)


def _forward(x: Tensor, weight: Tensor) -> Tensor:
    x, weight = all_ready((x, weight))
    y = _forward_fake(x, weight)
    if _has_kernel(x):
        from deltazoo.backends.triton.conv.wide import convolve

        convolve(x, weight, y, reverse=False)
        return y
    y.zero_()
    T = x.shape[1]
    for lag in range(min(T, len(weight))):
        y[:, lag:] += x[:, : T - lag] * weight[lag]
    return y


def _forward_fake(x: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(x.shape)


def _backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dy, x, weight = all_ready((dy, x, weight))
    dx, d_weight = _backward_fake(dy, x, weight)
    if _has_kernel(x):
        from deltazoo.backends.triton.conv.wide import convolve, correlate

        convolve(dy, weight, dx, reverse=True)
        correlate(dy, x, d_weight)
        return dx, d_weight
    total, T = torch.zeros_like(dy), x.shape[1]
    d_weight.zero_()
    for lag in range(min(T, len(weight))):
        total[:, : T - lag] += dy[:, lag:] * weight[lag]
        d_weight[lag] = (dy[:, lag:] * x[:, : T - lag]).sum((0, 1))
    return total.to(x.dtype), d_weight


def _backward_fake(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


_forward_op = operator(
    "wide_conv(Tensor x, Tensor weight) -> Tensor", _forward, compiled_ahead(_forward, _forward_fake)
)
_backward_op = operator(
    "wide_conv_backward(Tensor dy, Tensor x, Tensor weight) -> (Tensor, Tensor)",
    _backward,
    compiled_ahead(_backward, _backward_fake),
)


@cache_forward_signature
class _WideConv(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = _forward_op(x, weight)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gradients: tuple[Tensor, Tensor] = _backward_op(dy, *ctx.saved_tensors)
        return gradients


differentiate_exported("wide_conv", _WideConv.apply)
