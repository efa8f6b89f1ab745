"""Operator and launch of one token of a long convolution. Triton is imported when the kernel first runs.

B rows, D channels, S slots
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import mark_written, operator
from deltazoo.backends.triton.operands import ready
from deltazoo.backends.triton.problem import architecture, device_spec
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

_ELEMENTS = 4096  # of a tile of the history
_MOST_ROWS, _FEWEST, _MOST = 4, 16, 128  # rows; channels
_STAGES = 4


def _step(x: Tensor, history: Tensor, position: Tensor, filter: Tensor, bias: Tensor) -> Tensor:
    from deltazoo.backends.triton.conv.kernels.long_step import LongStepTraits, long_conv_step_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    (B, S, D), y, pool = history.shape, _fake(x), history.contiguous()
    device = device_spec(device_of(x).index)
    rows = min(_MOST_ROWS, 1 << (B.bit_length() - 1))
    columns = min(_MOST, power_of_two(D))
    while columns > _FEWEST and cdiv(B, rows) * cdiv(D, columns) < device.processors:
        columns //= 2
    overlap = architecture(device) == "sm90"
    traits = LongStepTraits(D, rows, max(1, _ELEMENTS // (rows * columns)), columns, _STAGES, overlap)
    tensors = {
        "x": ready(x), "history": pool, "position": ready(position), "filter": ready(filter), "bias": ready(bias),
        "y": y,
    }  # fmt: skip
    with torch.cuda.device_of(x):
        run = launcher(long_conv_step_kernel, tensors, {"traits": traits}, Options(4, overlap=overlap))
        run(cdiv(B, rows) * cdiv(D, columns), {"B": B, "S": S})
    mark_written(history, pool)
    return y


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


long_conv_step = operator(
    "triton_long_conv_step_(Tensor x, Tensor(a!) history, Tensor position, Tensor filter, Tensor bias) -> Tensor",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
