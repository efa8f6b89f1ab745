"""Operator and launch of one token of RG-LRU; kernels/rg_lru_step.py states the equations.

B rows, C channels, W channels of a block
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.element.step_tensors import finish, rows_equally_apart, step_tensors
from deltazoo.backends.triton.operands import schema
from deltazoo.backends.triton.problem import overlaps
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

_ROWS, _CHANNELS, _WARPS = 16, 32, 4  # of a program
_INPUTS = {torch.float32: 16}  # of one of its products; in 16 bits 128
_MOST_PRODUCTS = 16


class RGLRUCall(NamedTuple):
    """The operator's arguments: tensors as of `rg_lru_step_kernel`; states [B, C, 1, 1]."""

    u: Tensor
    gate: Tensor
    weight: Tensor
    bias: Tensor
    L: Tensor
    states: Tensor


def takes_block(width: int, dtype: torch.dtype) -> bool:
    """Whether the kernel takes blocks of this width. It is unrolled, and takes long to compile for wide ones."""
    return width <= _MOST_PRODUCTS * _INPUTS.get(dtype, 128)


def rg_lru_step_(call: RGLRUCall) -> Tensor:
    """Decode one token per row; `states` change in place. Returns: o [B, C]."""
    o: Tensor = _step_op(*call)
    return o


def _step(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton.element.kernels.rg_lru_step import RGLRUTraits, rg_lru_step_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    call, o = RGLRUCall(*arguments), _fake(*arguments)
    (B, C), W = call.u.shape, call.weight.shape[-1]
    tensors = step_tensors(call, ("u", "gate"), ("states",)) | {"o": o}
    rows_equally_apart(tensors, ("u", "gate"))
    overlap = overlaps(call.u)
    most = (_CHANNELS, _INPUTS.get(call.u.dtype, 128))
    channels, inputs = (max(16, min(size, power_of_two(W))) for size in most)
    traits = RGLRUTraits(C, W, _ROWS, channels, inputs, tensors["u"].stride(0), overlap)
    with torch.cuda.device_of(call.u):
        run = launcher(rg_lru_step_kernel, tensors, {"traits": traits}, Options(_WARPS, overlap=overlap))
        run(cdiv(B, _ROWS) * (C // W) * cdiv(W, channels), {"B": B})
    finish(call, tensors, ("states",))
    return o


def _fake(*arguments: Any) -> Tensor:
    u: Tensor = arguments[0]
    return u.new_empty(u.shape)


_step_op = operator(
    f"triton_rg_lru_step_({schema(RGLRUCall, 'states')}) -> Tensor",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
