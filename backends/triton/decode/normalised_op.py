"""Operator and launch of one token of linear attention, Based, ReBased, gated RFA or mLSTM.

kernels/normalised_step.py has the equations.

B rows, H key heads, HV value heads, K channels of q and k, R random directions, V value width
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.element.step_tensors import finish, step_tensors
from deltazoo.backends.triton.operands import schema
from deltazoo.backends.triton.problem import overlaps
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, limit_warps, power_of_two

MAX_ROWS, MAX_WIDTH = 512, 512  # rows and columns of a head's state, the normaliser apart
# One program reads the state of a head: with few heads and large states most multiprocessors would be idle.
MANY_HEADS, SMALL_STATE = 128, 32768
_STATES, _STATES_PER_WARP, _WARPS = 16384, 2048, 8  # of a program at a time
_STATES_WITHOUT_GATES = 8192  # linear attention would spill registers: a layer of 64 rows on an H200 takes 97 us for 66
PAIRS = ("taylor", "quadratic")  # features that are products of pairs of channels
# With them; and the most columns of a tile. Layers of Based and ReBased with 64 rows take 71.3 and 64.0 us on an H200;
# 70.0 and 65.0 with 4096 numbers of a tile, and 80.7 and 72.7 with 2 warps.
_STATES_OF_PAIRS, _STATES_OF_PAIRS_PER_WARP, _COLUMNS_OF_PAIRS = 2048, 512, 128
_WEIGHTS = 8192  # of a program's product with random directions
# Of a thread with random features and one tile, so that two programs fit an SM; the compiler would take 179. With
# several tiles they would spill.
_REGISTERS = 128
_OF_TOKEN = ("qkv", "raw", "gate")  # columns of one tensor: their rows may be apart
_IN_PLACE = ("largest", "states")


class NormalisedCall(NamedTuple):
    """The operator's arguments: tensors as of `normalised_step_kernel`.

    Args:
        heads: H. gates, divisor, feature: as in `NormalisedTraits`. floor: of the divisor "floor".
        key_weight, key_bias, key_eps: of a layer norm of q and k before the features "taylor" or "quadratic".
        eps: of the division. bias, largest: with the gates "exponential".
        directions, sigma: of the random features; None: q and k are not mapped.
        norm: of each head's output, "rms" or "layer", with weights [V] or [HV V]; "": none.
        activation: of the output gate; "": none.
    """

    heads: int
    gates: str
    divisor: str
    qkv: Tensor
    states: Tensor
    scale: float
    eps: float
    floor: float = 0.0
    raw: Tensor | None = None
    bias: Tensor | None = None
    largest: Tensor | None = None
    directions: Tensor | None = None
    sigma: Tensor | None = None
    norm: str = ""
    norm_weight: Tensor | None = None
    norm_eps: float = 0.0
    activation: str = ""
    gate: Tensor | None = None
    feature: str = ""
    key_weight: Tensor | None = None
    key_bias: Tensor | None = None
    key_eps: float = 0.0


def takes_state(heads: int, rows: int, V: int) -> bool:
    """Whether the kernel, which is unrolled, serves states of so many rows and of V columns beside the normaliser.

    Args: heads: of all rows of the batch.
    """
    return rows <= MAX_ROWS and V <= MAX_WIDTH and (heads >= MANY_HEADS or rows * V <= SMALL_STATE)


def normalised_step_(call: NormalisedCall) -> Tensor:
    """Decode one token per row; `largest` and `states` change in place. Returns: o [B, HV V]."""
    o: Tensor = _step_op(*call)
    return o


def _step(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton.decode.kernels.normalised_step import NormalisedTraits, normalised_step_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    call, o = NormalisedCall(*arguments), _fake(*arguments)
    B, HV, rows, columns = call.states.shape
    H, V = call.heads, columns - 1
    K, R = (call.qkv.shape[1] - HV * V) // (2 * H), 0 if call.directions is None else call.directions.shape[2]
    tensors = step_tensors(call, _OF_TOKEN, _IN_PLACE) | {"o": o}
    halves = 2 if R else 1
    BR = power_of_two(cdiv(rows, halves))
    BV = min(power_of_two(V), max(16, (_STATES if call.gates else _STATES_WITHOUT_GATES) // (halves * BR)))
    tile_rows, numbers_per_warp, inputs = BR, _STATES_PER_WARP, min(power_of_two(K), max(1, _WEIGHTS // BR))
    if call.feature in PAIRS:
        inputs = power_of_two(K)
        BV = min(power_of_two(V), _COLUMNS_OF_PAIRS)
        tile_rows, numbers_per_warp = min(BR, _STATES_OF_PAIRS // BV), _STATES_OF_PAIRS_PER_WARP
    overlap = overlaps(call.qkv)
    qkv_stride, raw_stride, gate_stride = (
        0 if tensors[name] is None else tensors[name].stride(0) for name in _OF_TOKEN
    )
    traits = NormalisedTraits(
        QKV_STRIDE=qkv_stride, RAW_STRIDE=raw_stride, GATE_STRIDE=gate_stride, H=H, HV=HV, K=K, R=R, V=V,
        HALVES=halves, ROWS=rows // halves, BR=BR, BV=BV, TILE_ROWS=tile_rows, INPUTS=inputs, GATES=call.gates,
        FEATURE=call.feature, KEY_NORM=call.key_weight is not None, KEY_EPS=call.key_eps, DIVISOR=call.divisor,
        FLOOR=call.floor, EPS=call.eps, NORM=call.norm,
        NORM_PER_HEAD=call.norm_weight is not None and call.norm_weight.numel() != V, NORM_BIAS=False,
        NORM_EPS=call.norm_eps, GATE=call.activation, GATE_BEFORE_NORM=False, OVERLAP=overlap,
    )  # fmt: skip
    numbers = halves * tile_rows * BV
    warps = limit_warps(max(1, min(_WARPS, numbers // numbers_per_warp)), numbers)
    with torch.cuda.device_of(call.qkv):
        options = Options(warps, registers=_REGISTERS if R and V <= BV else None, overlap=overlap)
        launcher(normalised_step_kernel, tensors, {"traits": traits}, options)(B * HV, {"scale": call.scale})
    finish(call, tensors, [name for name in _IN_PLACE if tensors[name] is not None])
    return o


def _fake(*arguments: Any) -> Tensor:
    call = NormalisedCall(*arguments)
    B, HV, _, columns = call.states.shape
    return call.qkv.new_empty(B, HV * (columns - 1))


_step_op = operator(
    f"triton_normalised_step_({schema(NormalisedCall, *_IN_PLACE)}) -> Tensor",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
