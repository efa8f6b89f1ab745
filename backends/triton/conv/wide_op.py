"""Operators of the convolution with many taps, by Triton kernels. `backends/ops/wide_conv.py` has the equation.

Triton is imported when a kernel first runs. B batch, T time, C channels, W taps
"""

from torch import Tensor

from deltazoo.backends.ops.wide_conv import backward_fake, differentiable, forward_fake, shifted_sum
from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.torch_ext.modes import transform_is_active
from deltazoo.backends.triton.operands import all_ready
from deltazoo.backends.triton.runtime.precompile import compiled_ahead


def wide_conv(x: Tensor, weight: Tensor) -> Tensor:
    """As `deltazoo.backends.ops.wide_conv.wide_conv`, not in float64."""
    if transform_is_active():
        return shifted_sum(x, weight)
    y: Tensor = _convolve(x, weight)
    return y


def _forward(x: Tensor, weight: Tensor) -> Tensor:
    from deltazoo.backends.triton.conv.wide import convolve

    x, weight = all_ready((x, weight))
    y = forward_fake(x, weight)
    convolve(x, weight, y, reverse=False)
    return y


def _backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    from deltazoo.backends.triton.conv.wide import convolve, correlate

    dy, x, weight = all_ready((dy, x, weight))
    dx, d_weight = backward_fake(dy, x, weight)
    convolve(dy, weight, dx, reverse=True)
    correlate(dy, x, d_weight)
    return dx, d_weight


_forward_op = operator(
    "triton_wide_conv(Tensor x, Tensor weight) -> Tensor", _forward, compiled_ahead(_forward, forward_fake)
)
_backward_op = operator(
    "triton_wide_conv_backward(Tensor dy, Tensor x, Tensor weight) -> (Tensor, Tensor)",
    _backward,
    compiled_ahead(_backward, backward_fake),
)


_convolve = differentiable("triton_wide_conv", _forward_op, _backward_op)
