"""Operator and launch of Hyena's filter; kernels/implicit_filter.py states the equations.

B rows, S slots, D channels, F hidden channels, I inputs of the network
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.element.step_tensors import finish, step_tensors
from deltazoo.backends.triton.operands import schema
from deltazoo.backends.triton.problem import overlaps
from deltazoo.backends.triton.runtime.early import loads_early
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

MAX_HIDDEN = 128
_DISTANCES, _CHANNELS = 16, 256  # of a program
_COLUMNS = 16  # of a product, per warp
_EARLY = 1024  # distances: about as many programs as an H200 runs at once


class ImplicitFilterCall(NamedTuple):
    """The operator's arguments: tensors as of `implicit_filter_kernel`.

    Args:
        history: [B, S, D], of which the sizes alone are read. length: L. lowest, highest: of the I // 2 frequencies.
        slowest, fastest: r of the first and of the last channel.
    """

    first_weight: Tensor
    first_bias: Tensor
    second_weight: Tensor
    second_bias: Tensor
    third_weight: Tensor
    third_bias: Tensor
    last_weight: Tensor
    frequency: Tensor
    seen: Tensor
    history: Tensor
    length: int
    lowest: float
    highest: float
    slowest: float
    fastest: float


def implicit_filter_(call: ImplicitFilterCall) -> Tensor:
    """Compute the filter of a decode step, as far as a row has tokens, and add 1 to `seen`.

    Returns: [S, D] float32, with arbitrary values at distances larger than `seen` of all rows before the call.
    """
    filter: Tensor = _step_op(*call)
    return filter


def _step(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton.conv.kernels.implicit_filter import ImplicitFilterTraits, implicit_filter_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    call, filter = ImplicitFilterCall(*arguments), _fake(*arguments)
    (B, S, D), (F, inputs) = call.history.shape, call.first_weight.shape
    tensors = step_tensors(call._replace(history=None), (), ("seen",)) | {"filter": filter}  # type: ignore[arg-type]
    overlap = overlaps(call.seen)
    bands, width = inputs // 2, max(16, power_of_two(F))
    warps = max(4, width // 16)
    columns = _COLUMNS * warps
    traits = ImplicitFilterTraits(
        D=D, F=F, FP=width, BANDS=bands, LOWEST=call.lowest,
        SPACING=(call.highest - call.lowest) / max(1, bands - 1), LENGTH=call.length, SLOWEST=call.slowest,
        SLOPE=(call.fastest - call.slowest) / max(1, D - 1), BS=_DISTANCES, BD=columns, TILES=_CHANNELS // columns,
        EARLY=_EARLY, OVERLAP=overlap,
    )  # fmt: skip
    early = loads_early(*(x for x in call[: call._fields.index("seen")] if isinstance(x, Tensor)))
    with torch.cuda.device_of(call.seen):
        run = launcher(implicit_filter_kernel, tensors, {"traits": traits}, Options(warps, overlap=overlap))
        run(cdiv(S, _DISTANCES) * cdiv(D, _CHANNELS), {"B": B, "S": S, "early": early})
    finish(call, tensors, ("seen",))
    return filter


def _fake(*arguments: Any) -> Tensor:
    call = ImplicitFilterCall(*arguments)
    return call.history.new_empty(call.history.shape[1:], dtype=torch.float32)


_step_op = operator(
    f"triton_implicit_filter_({schema(ImplicitFilterCall, 'seen')}) -> Tensor",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
