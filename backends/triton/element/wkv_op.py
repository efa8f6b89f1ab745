"""Operator and launch of one token of RWKV-4; kernels/wkv_step.py states the equations.

B rows, C channels, D width
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
from deltazoo.backends.triton.tiles import cdiv, limit_warps, power_of_two

_CHANNELS, _WARPS = 512, 4  # of a program
_OF_TOKEN = ("k", "v", "r")  # columns of one tensor: their rows may be apart
_IN_PLACE = ("largest", "previous", "states")


class WKVCall(NamedTuple):
    """The operator's arguments: tensors as of `wkv_step_kernel`; previous [B, 1, D], states [B, C, 1, 2]."""

    k: Tensor
    v: Tensor
    r: Tensor
    w: Tensor
    u: Tensor
    x: Tensor
    largest: Tensor
    previous: Tensor
    states: Tensor


def wkv_step_(call: WKVCall) -> Tensor:
    """Decode one token per row; `largest`, `previous` and `states` change in place. Returns: o [B, C]."""
    o: Tensor = _step_op(*call)
    return o


def _step(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton.element.kernels.wkv_step import WKVTraits, wkv_step_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    call, o = WKVCall(*arguments), _fake(*arguments)
    (B, C), D = call.k.shape, call.x.shape[1]
    tensors = step_tensors(call, _OF_TOKEN, _IN_PLACE) | {"o": o}
    rows_equally_apart(tensors, _OF_TOKEN)
    block = min(_CHANNELS, power_of_two(C))
    blocks = cdiv(C, block)
    overlap = overlaps(call.k)
    traits = WKVTraits(C, D, block, power_of_two(cdiv(D, blocks)), tensors["k"].stride(0), overlap)
    with torch.cuda.device_of(call.k):
        options = Options(limit_warps(_WARPS, block), overlap=overlap)
        launcher(wkv_step_kernel, tensors, {"traits": traits}, options)(B * blocks, {})
    finish(call, tensors, _IN_PLACE)
    return o


def _fake(*arguments: Any) -> Tensor:
    k: Tensor = arguments[0]
    return k.new_empty(k.shape)


_step_op = operator(
    f"triton_wkv_step_({schema(WKVCall, *_IN_PLACE)}) -> Tensor",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
