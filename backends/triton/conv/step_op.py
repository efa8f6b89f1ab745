"""Operator and launch of the short convolution of one token per row. Triton is imported when the kernel first runs.

B batch, C channels, W taps
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.ops.short_conv import EPS, ConvInputs, ConvPart
from deltazoo.backends.torch_ext.custom_op import mark_written, operator
from deltazoo.backends.triton.limits import kernel_refusals
from deltazoo.backends.triton.operands import ready
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.tiles import cdiv, power_of_two

_ELEMENTS = 4096  # inputs of a program
_FEWEST, _MOST = 32, 256  # channels of a program without a norm


def computes_step(inputs: ConvInputs, parts: Sequence[ConvPart]) -> bool:
    """Whether the kernel computes a step: without packing, with a history like x, and norms of equal heads."""
    history, is_packed = inputs.history, inputs.cu_seqlens is not None or inputs.ends is not None
    if is_packed or history is None or history.dtype != inputs.x.dtype or history.shape[1] == 0:
        return False
    return len({part.unit for part in parts} - {0}) <= 1 and not kernel_refusals(inputs.x)


def conv_step_(inputs: ConvInputs, parts: Sequence[ConvPart]) -> tuple[Tensor, ...]:
    """Convolve x [B, 1, C] without gradients, and append it to `inputs.history` in place.

    Returns: a contiguous tensor [B, 1, channels] for each part.
    """
    assert inputs.history is not None
    channels, silu, unit = ([part[i] for part in parts] for i in range(3))
    y = _step_op(inputs.x, inputs.weight, inputs.bias, inputs.history, channels, silu, unit)
    B = inputs.x.shape[0]
    return tuple(piece.view(B, 1, n) for piece, n in zip(y.split([B * n for n in channels]), channels, strict=True))


def _step(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, channels: list[int], silu: list[bool],
    unit: list[int],
) -> Tensor:  # fmt: skip
    from deltazoo.backends.triton.conv.kernels.step import ConvStepTraits, conv_step_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    x = x if x.stride(2) == 1 else x.contiguous()
    (B, _, C), W, pool = x.shape, weight.shape[1], history.contiguous()
    columns = min(_MOST, max(_FEWEST, _ELEMENTS // power_of_two(W)), power_of_two(C))
    step = max(unit) or columns
    tiles = [cdiv(n, step) for n in channels]
    traits = ConvStepTraits(
        C=C, W=W, X_STRIDE=x.stride(0), PARTS=len(channels), CHANNELS=(*channels,), SILU=(*map(int, silu),),
        UNIT=(*unit,), FIRST=(0, *itertools.accumulate(channels)), TILES=(0, *itertools.accumulate(tiles)), STEP=step,
        BC=power_of_two(step), BW=power_of_two(W), EPS=EPS, BIAS=bias is not None,
    )  # fmt: skip
    y = _fake(x)
    tensors = {
        "x": x, "weight": ready(weight), "bias": None if bias is None else ready(bias), "history": pool, "y": y,
    }  # fmt: skip
    with torch.cuda.device_of(x):
        launcher(conv_step_kernel, tensors, {"traits": traits})(B * sum(tiles), {"rows": B})
    mark_written(history, pool)
    return y


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.numel())


_step_op = operator(
    "triton_conv_step_(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) history, int[] channels, bool[] silu,"
    " int[] unit) -> Tensor",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
