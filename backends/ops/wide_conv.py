"""Causal depthwise convolution with more taps than a graph should unroll, such as the shift filter of H3.

    y_t = sum_j weight_j x_(t-j),    x_t = 0 before the first token

An operator with a loop over the taps in plain torch. B batch, T time, C channels, W taps
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, differentiate_exported, operator
from deltazoo.backends.torch_ext.modes import transform_is_active

Operator = Callable[..., Any]


def wide_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve x with one filter per channel; differentiable once.

    Args: x: [B, T, C]; weight: [W, C] by lag, float32 (float64 for float64 x).
    Returns: y [B, T, C] in the dtype of the weight, in which it is computed.
    """
    if transform_is_active():
        return shifted_sum(x, weight)
    y: Tensor = _convolve(x, weight)
    return y


def shifted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the same in operations of torch that every transform supports."""
    T = x.shape[1]
    y = x.new_zeros((), dtype=weight.dtype)
    for lag, weight_C in enumerate(weight[: max(1, T)]):
        y = y + F.pad(x, (0, 0, lag, 0))[:, :T] * weight_C
    return y


def _forward(x: Tensor, weight: Tensor) -> Tensor:
    y, T = torch.zeros_like(forward_fake(x, weight)), x.shape[1]
    for lag in range(min(T, len(weight))):
        y[:, lag:] += x[:, : T - lag] * weight[lag]
    return y


def forward_fake(x: Tensor, weight: Tensor) -> Tensor:
    """Allocate y."""
    return weight.new_empty(x.shape)


def _backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dx, d_weight, T = torch.zeros_like(dy), weight.new_zeros(weight.shape), x.shape[1]
    for lag in range(min(T, len(weight))):
        dx[:, : T - lag] += dy[:, lag:] * weight[lag]
        d_weight[lag] = (dy[:, lag:] * x[:, : T - lag]).sum((0, 1))
    return dx.to(x.dtype).contiguous(), d_weight


def backward_fake(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the gradients of x and of the weight."""
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


_forward_op = operator("wide_conv(Tensor x, Tensor weight) -> Tensor", _forward, forward_fake)
_backward_op = operator(
    "wide_conv_backward(Tensor dy, Tensor x, Tensor weight) -> (Tensor, Tensor)", _backward, backward_fake
)


def differentiable(name: str, forward_op: Operator, backward_op: Operator) -> Operator:
    """Return the operator `name` of (x, weight) with its gradients; differentiable once.

    Args: backward_op: (dy, x, weight) -> (dx, d_weight).
    """

    @cache_forward_signature
    class WideConv(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, weight: Tensor) -> Tensor:
            y: Tensor = forward_op(x, weight)
            return y

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        @differentiable_once
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            gradients: tuple[Tensor, Tensor] = backward_op(dy, *ctx.saved_tensors)
            return gradients

    differentiate_exported(name, WideConv.apply)
    return WideConv.apply


_convolve = differentiable("wide_conv", _forward_op, _backward_op)
