"""Operator and launch of one token of attention to memory slots; kernels/softmax_slots_step.py states the equations.

B rows, H heads, M slots, K key width, V value width
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.element.step_tensors import finish, step_tensors
from deltazoo.backends.triton.operands import schema
from deltazoo.backends.triton.problem import overlaps
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import limit_warps, power_of_two

# States of a program's keys, and of a tile of its values. A step of 64 rows of ABC with 16 heads of 64 slots on an H200
# takes 55.9 us; 62.0 and 61.5 with two and four times as large tiles.
_KEYS, _VALUES, _MAX_TILES = 16384, 4096, 16
_STATES_PER_WARP, _WARPS = 3072, 8
_OF_TOKEN = ("qkv", "raw", "gate")  # columns of one tensor: their rows may be apart
_IN_PLACE = ("z", "keys", "values")


class SoftmaxSlotsCall(NamedTuple):
    """The operator's arguments: tensors as of `softmax_slots_step_kernel`; z may have any shape of so many elements.

    Args: theta: of the rotary embedding. norm: "rms" or "layer". activation: of the gate.
    """

    heads: int
    qkv: Tensor
    raw: Tensor
    gate: Tensor
    position: Tensor
    z: Tensor
    keys: Tensor
    values: Tensor
    norm_weight: Tensor
    norm: str
    norm_eps: float
    activation: str
    theta: float
    scale: float


def takes_softmax_slots(M: int, K: int, V: int) -> bool:
    """Whether the kernel, which is unrolled, takes M slots of keys and values of these widths."""
    BM = power_of_two(M)
    return BM * power_of_two(K) <= _KEYS and _MAX_TILES * _tile(BM, V) >= V


def softmax_slots_step_(call: SoftmaxSlotsCall) -> Tensor:
    """Decode one token per row; `z`, `keys` and `values` change in place. Returns: o [B, H V]."""
    o: Tensor = _step_op(*call)
    return o


def _tile(BM: int, V: int) -> int:
    return min(power_of_two(V), max(16, _VALUES // BM))


def _step(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton.decode.kernels.softmax_slots_step import SlotsTraits, softmax_slots_step_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    call, o = SoftmaxSlotsCall(*arguments), _fake(*arguments)
    B, H, M, V = call.values.shape
    K, BM = call.keys.numel() // (B * H * M), power_of_two(M)
    tensors = step_tensors(call, _OF_TOKEN, _IN_PLACE) | {"o": o}
    overlap = overlaps(call.qkv)
    traits = SlotsTraits(
        QKV_STRIDE=tensors["qkv"].stride(0), RAW_STRIDE=tensors["raw"].stride(0),
        GATE_STRIDE=tensors["gate"].stride(0), H=H, M=M, K=K, V=V, BM=BM, BK=power_of_two(K), BV=_tile(BM, V),
        LOG_THETA=math.log(call.theta), NORM=call.norm, NORM_PER_HEAD=call.norm_weight.numel() != V, NORM_BIAS=False,
        NORM_EPS=call.norm_eps, GATE=call.activation, GATE_BEFORE_NORM=False, OVERLAP=overlap,
    )  # fmt: skip
    smaller = BM * min(traits.BK, traits.BV)
    warps = BM * (traits.BK + traits.BV) // _STATES_PER_WARP
    options = Options(limit_warps(min(_WARPS, power_of_two(warps)), smaller), overlap=overlap)
    with torch.cuda.device_of(call.qkv):
        launcher(softmax_slots_step_kernel, tensors, {"traits": traits}, options)(B * H, {"scale": call.scale})
    finish(call, tensors, _IN_PLACE)
    return o


def _fake(*arguments: Any) -> Tensor:
    call = SoftmaxSlotsCall(*arguments)
    B, H, _, V = call.values.shape
    return call.qkv.new_empty(B, H * V)


_step_op = operator(
    f"triton_softmax_slots_step_({schema(SoftmaxSlotsCall, *_IN_PLACE)}) -> Tensor",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
