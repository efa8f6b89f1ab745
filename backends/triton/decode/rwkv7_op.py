"""Operator and launch of one token of RWKV-7; kernels/rwkv7_step.py states the equations.

B rows, D width, H heads, K key width, V value width
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import mark_written, operator
from deltazoo.backends.triton.operands import ready
from deltazoo.backends.triton.problem import architecture, device_spec
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, limit_warps, power_of_two


class RWKV7Call(NamedTuple):
    """The operator's arguments: tensors as of `rwkv7_step_kernel`, whose names they have, then the epsilons.

    r, k, v and low_* are columns of one tensor: their rows may be apart.
    """

    x: Tensor
    input_weight: Tensor
    previous: Tensor
    r: Tensor
    k: Tensor
    v: Tensor
    first: Tensor | None
    low_decay: Tensor
    low_rate: Tensor
    low_gate: Tensor
    low_value: Tensor | None
    decay: Tensor
    rate: Tensor
    gate: Tensor
    value: Tensor | None
    decay_bias: Tensor
    rate_bias: Tensor
    value_bias: Tensor | None
    xi: Tensor
    alpha: Tensor
    u: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    states: Tensor
    eps: float
    input_eps: float


_ROWS_APART = ("r", "k", "v", "low_value", "low_decay", "low_rate", "low_gate")
_ROWS, _CHANNELS = 16, 64  # of a program of the maps of low rank
_IN_PLACE = ("previous", "states")


def _step(*arguments: Any) -> Tensor:
    call = RWKV7Call(*arguments)
    o = _fake(*arguments)
    tensors = {name: value for name, value in call._asdict().items() if not isinstance(value, float)}
    for name, tensor in tensors.items():
        if tensor is not None and name not in _ROWS_APART:
            tensors[name] = tensor.contiguous() if name in _IN_PLACE else ready(tensor)
    with torch.cuda.device_of(call.x):
        _launch(call, tensors, o)
    for name in _IN_PLACE:
        mark_written(getattr(call, name), tensors[name])
    return o


def _launch(call: RWKV7Call, tensors: dict[str, Tensor | None], o: Tensor) -> None:
    from deltazoo.backends.triton.decode.kernels.rwkv7_step import (
        RWKV7Traits,
        rwkv7_low_rank_kernel,
        rwkv7_step_kernel,
    )
    from deltazoo.backends.triton.runtime.launcher import launcher

    (B, D), (_, H, K, V) = call.x.shape, call.states.shape
    ranks = {name: getattr(call, name) for name in ("decay", "rate", "gate", "value")}
    BK, BV = power_of_two(K), power_of_two(V)
    overlap = architecture(device_spec(device_of(call.x).index)) == "sm90"
    traits = RWKV7Traits(
        D=D, H=H, K=K, V=V, BK=BK, BV=BV, BD=power_of_two(cdiv(D, H)), WHOLE=power_of_two(D),
        **{name.upper(): 0 if weight is None else weight.shape[1] for name, weight in ranks.items()},
        STRIDE=call.r.stride(0), CHANNELS=_CHANNELS, EPS=call.eps, NORM_EPS=call.input_eps,
        OVERLAP=overlap,
    )  # fmt: skip
    sizes = {"y_decay": H * K, "y_rate": H * K, "y_gate": H * V, "y_value": H * V if call.value is not None else 0}
    tensors |= {"o": o} | {
        name: o.new_empty(B, size, dtype=torch.float32) if size else None for name, size in sizes.items()
    }
    maps = 3 if call.value is None else 4
    low_rank = launcher(rwkv7_low_rank_kernel, tensors, {"traits": traits}, Options(4, overlap=overlap))
    low_rank(maps * cdiv(B, _ROWS) * cdiv(max(H * K, H * V), _CHANNELS), {"B": B})
    options = Options(limit_warps(4, BK * BV), overlap=overlap)
    launcher(rwkv7_step_kernel, tensors, {"traits": traits}, options)(B * H, {})


def _fake(*arguments: Any) -> Tensor:
    call = RWKV7Call(*arguments)
    return call.v.new_empty(call.v.shape)


_TENSORS = ", ".join(
    f"Tensor({'a' if name == 'previous' else 'b'}!) {name}" if name in _IN_PLACE
    else f"Tensor{'?' if RWKV7Call.__annotations__[name] == (Tensor | None) else ''} {name}"
    for name in RWKV7Call._fields[:-2]
)  # fmt: skip
rwkv7_step = operator(
    f"triton_rwkv7_step_({_TENSORS}, float eps, float input_eps) -> Tensor",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
