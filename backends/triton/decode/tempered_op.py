"""Operator and launch of one token of Rodimus's update; kernels/tempered_step.py states the equations.

B rows, K key width, V value width, R rank of the value's gate
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

# Of a program. A layer of width 2048 (K = 64, V = 4096) with 64 rows takes 77.5 us on an H200; 75.8 and 77.6 with half
# the states, and 84.7 with 8 warps.
_STATES, _WARPS = 4096, 4
_COLUMNS = 128
MAX_KEYS, MAX_RANK = 256, 128
_MAPPED = ("q", "k", "g", "tau", "low")  # columns of one tensor: their rows may be apart


class TemperedCall(NamedTuple):
    """The operator's arguments: tensors as of `tempered_step_kernel`; states [B, 1, K, V]."""

    q: Tensor
    k: Tensor
    g: Tensor
    tau: Tensor
    low: Tensor
    gate: Tensor
    g_bias: Tensor
    tau_bias: Tensor
    streams: Tensor
    weight: Tensor
    bias: Tensor
    skip: Tensor
    states: Tensor
    activation: str
    scale: float


def tempered_step_(call: TemperedCall) -> Tensor:
    """Decode one token per row; `states` change in place. Returns: o [B, V]."""
    o: Tensor = _step_op(*call)
    return o


def _step(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton.decode.kernels.tempered_step import TemperedTraits, tempered_step_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    call, o = TemperedCall(*arguments), _fake(*arguments)
    B, _, K, V = call.states.shape
    R, BK = call.weight.shape[1], power_of_two(K)
    tensors = step_tensors(call, (*_MAPPED, "gate"), ("states",)) | {"o": o}
    rows_equally_apart(tensors, _MAPPED)
    overlap = overlaps(call.q)
    BV = min(_COLUMNS, power_of_two(V), max(16, _STATES // BK))
    traits = TemperedTraits(
        MAPPED=tensors["q"].stride(0), GATE_STRIDE=tensors["gate"].stride(0), K=K, V=V, R=R, BK=BK, BR=power_of_two(R),
        BV=BV, GATE=call.activation, OVERLAP=overlap,
    )  # fmt: skip
    with torch.cuda.device_of(call.q):
        options = Options(limit_warps(_WARPS, BK * BV), overlap=overlap)
        run = launcher(tempered_step_kernel, tensors, {"traits": traits}, options)
        run(B * cdiv(V, BV), {"scale": call.scale})
    finish(call, tensors, ("states",))
    return o


def _fake(*arguments: Any) -> Tensor:
    call = TemperedCall(*arguments)
    return call.q.new_empty(call.states.shape[0], call.states.shape[3])


_step_op = operator(
    f"triton_tempered_step_({schema(TemperedCall, 'states')}) -> Tensor",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
