"""Operator and launch of one token of RWKV-6 or RWKV-7; kernels/rwkv_step.py states the equations.

B rows, D width, H heads, K key width, V value width
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import mark_written, operator
from deltazoo.backends.triton.operands import flatten, ready, schema, unflatten
from deltazoo.backends.triton.problem import device_spec, overlaps
from deltazoo.backends.triton.runtime.early import loads_early
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, limit_warps, power_of_two


class RWKVWeights(NamedTuple):
    """The second maps of low rank [.., rank], their biases, and the weights by channel.

    Args:
        decay, rate: [H K, rank]; gate, value: [H V, rank]. decay_bias, rate_bias, xi, alpha, u: [H K].
        value_bias, norm_weight, norm_bias: [H V]. eps: of the output norm.
        Those with a default are of RWKV-7; value and value_bias: None: the values are not interpolated.
    """

    decay: Tensor
    decay_bias: Tensor
    u: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    eps: float
    rate: Tensor | None = None
    rate_bias: Tensor | None = None
    gate: Tensor | None = None
    value: Tensor | None = None
    value_bias: Tensor | None = None
    xi: Tensor | None = None
    alpha: Tensor | None = None


class RWKVCall(NamedTuple):
    """The operator's arguments: tensors as of `rwkv_step_kernel`, whose names they have, and eps of the input's norm.

    input_weight: None: the input has no norm. g: given for RWKV-6; low_rate, low_gate: for RWKV-7.
    r, k, v, g and low_* are columns of one tensor, and first of another: their rows may be apart.
    """

    x: Tensor
    previous: Tensor
    states: Tensor
    weights: RWKVWeights
    r: Tensor
    k: Tensor
    v: Tensor
    low_decay: Tensor
    g: Tensor | None = None
    low_rate: Tensor | None = None
    low_gate: Tensor | None = None
    low_value: Tensor | None = None
    first: Tensor | None = None
    input_weight: Tensor | None = None
    input_eps: float = 0.0


_ROWS_APART = ("r", "k", "v", "g", "first", "low_value", "low_decay", "low_rate", "low_gate")
# Of a program of the maps of low rank: rows, and channels if such programs fill the SMs or do not. A layer of RWKV-7
# with 64 rows on an H200 takes 46.1 us with 128 channels and 48.4 with 64.
_ROWS, _CHANNELS, _FEWER_CHANNELS = 16, 128, 64
# Up to so many rows the step applies the maps of low rank itself, if the weights of a head fit registers. 24 layers of
# RWKV-7 with one row on an H200: 197 us, and 240 by two kernels. With two rows two kernels take 30 us less.
_JOINT_ROWS, _JOINT_WARPS, _JOINT_BYTES = 1, 8, 80 * 1024
# With more rows it does so if the weights of a head, which each row reads again from the L2 cache, are no more than
# these: half of what the step reads and writes of a state of 64 x 64.
_SMALL_BYTES = 16 * 1024
_STEP_WARPS = 2  # 24 layers with 32 rows on an H200 take 263 us, and 344 with 4: all programs are resident at once
# Most rows whose states a step that applies these maps prefetches. It follows the product of the large weights, which a
# prefetch of many states delays: a layer of RWKV-6 with 64 rows on an H200 takes 50.9 us with it, and 49.9 without.
_PREFETCHED_ROWS = 32
_IN_PLACE = ("previous", "states")


def rwkv_step(call: RWKVCall) -> Tensor:
    """Decode one token per row, updating `previous` and `states` in place. Returns o [B, H V]."""
    o: Tensor = _step_op(*flatten(call))
    return o


def _step(*arguments: Any) -> Tensor:
    call = unflatten(RWKVCall, arguments)
    o = _fake(*arguments)
    given = call._asdict() | call.weights._asdict()
    tensors: dict[str, Any] = {name: x for name, x in given.items() if not isinstance(x, float | tuple)}
    for name, tensor in tensors.items():
        if tensor is not None and name not in _ROWS_APART:
            tensors[name] = tensor.contiguous() if name in _IN_PLACE else ready(tensor)
    with torch.cuda.device_of(call.x):
        _launch(call, tensors, o)
    for name in _IN_PLACE:
        mark_written(getattr(call, name), tensors[name])
    return o


def _launch(call: RWKVCall, tensors: dict[str, Tensor | None], o: Tensor) -> None:
    from deltazoo.backends.triton.decode.kernels.rwkv_step import (
        RWKVTraits,
        rwkv_low_rank_kernel,
        rwkv_step_kernel,
    )
    from deltazoo.backends.triton.runtime.launcher import launcher

    (B, D), (_, H, K, V) = call.x.shape, call.states.shape
    version = 6 if call.weights.rate is None else 7
    ranks = {name: getattr(call.weights, name) for name in ("decay", "rate", "gate", "value")}
    BK, BV = power_of_two(K), power_of_two(V)
    overlap = overlaps(call.x)
    head_bytes = sum(
        weight.element_size() * width * power_of_two(weight.shape[1])
        for weight, width in zip(ranks.values(), (K, K, V, V), strict=True)
        if weight is not None
    )
    tiles = sum(weight is not None for weight in ranks.values()) * cdiv(B, _ROWS)
    fills = tiles * cdiv(max(H * K, H * V), _CHANNELS) >= device_spec(device_of(call.x).index).processors
    channels = _CHANNELS if fills else _FEWER_CHANNELS
    few = B <= _JOINT_ROWS
    joint = head_bytes <= (_JOINT_BYTES if few else _SMALL_BYTES)
    traits = RWKVTraits(
        VERSION=version, D=D, H=H, K=K, V=V, BK=BK, BV=BV, BD=power_of_two(cdiv(D, H)), WHOLE=power_of_two(D),
        **{name.upper(): 0 if weight is None else weight.shape[1] for name, weight in ranks.items()},
        STRIDE=call.r.stride(0), FIRST_STRIDE=0 if call.first is None else call.first.stride(0), CHANNELS=channels,
        EPS=call.weights.eps, NORM=call.input_weight is not None, NORM_EPS=call.input_eps, OVERLAP=overlap,
        JOINT=joint, STATE_LAST=joint and not few, PREFETCH=not joint or B <= _PREFETCHED_ROWS,
    )  # fmt: skip
    early = loads_early(*ranks.values())
    widths = {"decay": H * K, "rate": H * K, "gate": H * V, "value": H * V}
    sizes = {f"y_{name}": 0 if ranks[name] is None else width for name, width in widths.items()}
    tensors |= {"o": o} | dict.fromkeys(sizes)
    if not joint:
        tensors |= {name: o.new_empty(B, size, dtype=torch.float32) for name, size in sizes.items() if size}
        low_rank = launcher(rwkv_low_rank_kernel, tensors, {"traits": traits}, Options(4, overlap=overlap))
        low_rank(tiles * cdiv(max(H * K, H * V), channels), {"B": B, "early": early})
    options = Options(limit_warps(_JOINT_WARPS if joint and few else _STEP_WARPS, BK * BV), overlap=overlap)
    launcher(rwkv_step_kernel, tensors, {"traits": traits}, options)(B * H, {"early": early})


def _fake(*arguments: Any) -> Tensor:
    call = unflatten(RWKVCall, arguments)
    return call.v.new_empty(call.v.shape)


_step_op = operator(
    f"triton_rwkv_step_({schema(RWKVCall, *_IN_PLACE)}) -> Tensor",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
