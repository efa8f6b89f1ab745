"""Operator and launch of one token of a long convolution. Triton is imported when the kernel first runs.

B rows, D channels, S slots
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.element.step_tensors import finish, step_tensors
from deltazoo.backends.triton.operands import schema
from deltazoo.backends.triton.problem import architecture, device_spec
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

# A layer of Hyena with 64 rows on an H200 takes 65.9 us with this launch, and 74.4 with half the tile and a stage more.
_ELEMENTS = 8192  # of a tile of the history
_MOST_ROWS, _FEWEST, _MOST = 4, 16, 128  # rows; channels
_STAGES = 3


class LongStepCall(NamedTuple):
    """The operator's arguments: tensors as of `long_conv_step_kernel`. factor, gate: None: there is none."""

    x: Tensor
    factor: Tensor | None
    gate: Tensor | None
    history: Tensor
    seen: Tensor
    filter: Tensor
    bias: Tensor


def long_conv_step_(call: LongStepCall) -> Tensor:
    """Append u = factor x to the history, and compute y = gate (sum_(s <= p) filter_(p - s) history_s + bias u).

    u is rounded to the dtype of x. p: the tokens before, seen - 1. Returns: y [B, D] in the dtype of x.
    """
    y: Tensor = _step_op(*call)
    return y


def _step(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton.conv.kernels.long_step import LongStepTraits, long_conv_step_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    call, y = LongStepCall(*arguments), _fake(*arguments)
    B, S, D = call.history.shape
    device = device_spec(device_of(call.x).index)
    rows = min(_MOST_ROWS, 1 << (B.bit_length() - 1))
    columns = min(_MOST, power_of_two(D))
    while columns > _FEWEST and cdiv(B, rows) * cdiv(D, columns) < device.processors:
        columns //= 2
    overlap = architecture(device) == "sm90"
    tensors = step_tensors(call, ("x", "factor", "gate"), ("history",)) | {"y": y}
    X, FACTOR, GATE = (-1 if tensors[name] is None else tensors[name].stride(0) for name in ("x", "factor", "gate"))
    slots = max(1, _ELEMENTS // (rows * columns))
    traits = LongStepTraits(D, X, FACTOR, GATE, rows, slots, columns, _STAGES, overlap)
    with torch.cuda.device_of(call.x):
        run = launcher(long_conv_step_kernel, tensors, {"traits": traits}, Options(4, overlap=overlap))
        run(cdiv(B, rows) * cdiv(D, columns), {"B": B, "S": S})
    finish(call, tensors, ("history",))
    return y


def _fake(*arguments: Any) -> Tensor:
    x: Tensor = arguments[0]
    return x.new_empty(x.shape)


_step_op = operator(
    f"triton_long_conv_step_({schema(LongStepCall, 'history')}) -> Tensor",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
