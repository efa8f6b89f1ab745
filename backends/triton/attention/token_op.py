"""Operator and launch of the attention of one token per sequence, from the product with its weights to the output map.

B batch, S slots, H query heads, G key-value heads, E head width, C = (H + 2 G) E channels of q, k and v
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import mark_written, operator
from deltazoo.backends.torch_ext.devices import tf32_allowed
from deltazoo.backends.triton.attention.launch import parts_of
from deltazoo.backends.triton.operands import ready
from deltazoo.backends.triton.problem import architecture, device_spec
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import limit_warps, power_of_two

# Without tensor cores a part starts earlier and takes longer per key. A captured step on an H200, us, without and with
# them: 939 and 974 with nine caches of 768 slots x 18 heads x 128 (7 MB); 1,438 and 1,379 with 24 of 8,448 x 32 x 64
# (69 MB); 2,571 and 2,300 with 32 rows of the first model.
MOST_BYTES_BY_ROWS = 12 * 2**20


class TokenCall(NamedTuple):
    """The operator's arguments.

    Args:
        qkv: [B, C]; its rows may be apart, and those of gate [B, H E]. q_weight, k_weight: [E], of the norms.
        k, v: the cache [B, S, G, E], or with a table its pages [P, S', G, E], and position: the tokens before, [B]
            int64; all change in place.
        table: [B, M] int32, the pages of each row; 0: none.
        pairs: of channels that rotate. theta: base of their frequencies. scaled: fields of `ScaledFrequencies`, or [].
        eps: of the norms. scale: factor on the scores.
    """

    qkv: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    gate: Tensor | None
    k: Tensor
    v: Tensor
    position: Tensor
    table: Tensor | None
    pairs: int
    theta: float
    scaled: list[float]
    eps: float
    scale: float


def _attend(*arguments: object) -> Tensor:
    call = TokenCall(*arguments)  # type: ignore[arg-type]
    o, (k, v) = _fake(*arguments), (call.k.contiguous(), call.v.contiguous())
    call = call._replace(qkv=_with_rows(call.qkv), gate=None if call.gate is None else _with_rows(call.gate))
    with torch.cuda.device_of(call.qkv):
        _launch(call._replace(k=k, v=v), o)
    for given, written in ((call.k, k), (call.v, v), (call.position, call.position)):
        mark_written(given, written)
    return o


def _with_rows(x: Tensor) -> Tensor:
    """Return x [B, C] with contiguous rows, which may be apart."""
    return x if x.stride(1) == 1 else x.contiguous()


def _launch(call: TokenCall, o: Tensor) -> None:
    from deltazoo.backends.triton.attention.kernels.token import (
        TokenTraits,
        combine_token_kernel,
        token_attention_kernel,
    )
    from deltazoo.backends.triton.runtime.launcher import launcher

    B, (S, G, E) = o.shape[0], call.k.shape[1:]
    H, page = o.shape[1] // E, 0
    if call.table is not None:
        S, page = call.table.shape[1] * S, S
    device, width = device_spec(device_of(call.qkv).index), max(16, power_of_two(E))
    by_rows = H == G and 2 * B * S * G * E * call.k.element_size() <= MOST_BYTES_BY_ROWS
    tile, parts = parts_of(B * G, S, width * call.k.dtype.itemsize, device.processors, page, by_rows)
    overlap, warps = architecture(device) == "sm90", 4
    factor, constant, per_pair, per_frequency, amplitude = call.scaled or [1.0, 0.0, 0.0, 0.0, 1.0]
    traits = TokenTraits(
        H=H, G=G, E=E, V=E, BE=width, BV=width, ROWS=1 if by_rows else max(16, power_of_two(H // G)), BN=tile,
        PARTS=parts, SCALE=call.scale, PREC="tf32" if tf32_allowed() else "tf32x3", OVERLAP=overlap,
        QKV_STRIDE=call.qkv.stride(0), GATE_STRIDE=0 if call.gate is None else call.gate.stride(0),
        PAIRS=call.pairs, LOG_THETA=math.log(call.theta), SCALED=bool(call.scaled), FACTOR=factor,
        CONSTANT=constant, PER_PAIR=per_pair, PER_FREQUENCY=per_frequency, AMPLITUDE=amplitude,
        NORM=call.q_weight is not None, EPS=call.eps, GATE=call.gate is not None, PAGE=page,
        # no fewer numbers than threads: the compiler computes a smaller rotation again in every thread that uses it
        HEADS=max(power_of_two(H // G), 32 * warps // width),
    )  # fmt: skip
    partial, lse = (o.new_empty(B, H, parts, *shape, dtype=torch.float32) for shape in ((E,), ()))
    tensors = {
        "qkv": call.qkv, "k": call.k, "v": call.v, "gate": call.gate, "position": call.position, "o": o,
        "table": call.table,
        "q_weight": None if call.q_weight is None else ready(call.q_weight),
        "k_weight": None if call.k_weight is None else ready(call.k_weight), "partial": partial, "lse": lse,
    }  # fmt: skip
    attend = launcher(token_attention_kernel, tensors, {"traits": traits}, Options(warps, 3, overlap=overlap))
    attend(B * G * parts, {"S": S})
    options = Options(limit_warps(4, width * parts // 4), overlap=overlap)
    launcher(combine_token_kernel, tensors, {"traits": traits}, options)(B * H, {})


def _fake(*arguments: object) -> Tensor:
    call = TokenCall(*arguments)  # type: ignore[arg-type]
    G, E = call.k.shape[2:]
    return call.qkv.new_empty(call.qkv.shape[0], call.qkv.shape[1] - 2 * G * E)


attend_token = operator(
    "triton_attend_token_(Tensor qkv, Tensor? q_weight, Tensor? k_weight, Tensor? gate, Tensor(a!) k, Tensor(b!) v,"
    " Tensor(c!) position, Tensor? table, int pairs, float theta, float[] scaled, float eps, float scale) -> Tensor",
    _attend,
    compiled_ahead(_attend, _fake),
    any_layout=True,
)
