"""Operator and launches of one token of multi-head latent attention, from the products of the input to the output map.

B rows, S slots, H heads, K key width, V value width, C latent width, R rotary width
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import mark_written, operator
from deltazoo.backends.torch_ext.devices import tf32_allowed
from deltazoo.backends.triton.attention.latent_op import attend_parts
from deltazoo.backends.triton.operands import ready
from deltazoo.backends.triton.problem import overlaps
from deltazoo.backends.triton.runtime.early import loads_early
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

MAX_HEAD = 256  # K and V
_MAX_PARTS = 64  # with 16, one row of a long text would occupy 16 SMs
_COLUMN_BYTES = 128  # of c of a tile of queries
_QUERY_ROWS = 64
_PAIRS_AT_ONCE = 1024  # of channels of queries
_OUTPUT_ROWS, _OUTPUT_PARTS, _OUTPUT_WARPS = 16, 32, 8  # rows, rows x parts at a time
_OUTPUT_BLOCK, _WEIGHT_BYTES = 128, 65536  # bytes of W_v: of a row in a product; of a program


class LatentTokenCall(NamedTuple):
    """The operator's arguments.

    Args:
        q: [B, H (K + R)], latent: [B, C + R], before norm and rotation, and gate: [B, H], [B, H V] or None, before its
            sigmoid; their rows may be apart.
        norm_weight, eps: of the norm of c. weight: [H (K + V), C], the map of c to k and v.
        position: [B] int64; None: the number of tokens before, `seen`.
        cache: [B, S, 1, C + R] and seen [B] int64, which change in place.
        heads: H. pairs: of channels of r that rotate, all or none. theta: base of their frequencies. scaled: fields of
            `ScaledFrequencies`, or []. scale: factor on the scores.
    """

    q: Tensor
    latent: Tensor
    gate: Tensor | None
    norm_weight: Tensor
    weight: Tensor
    position: Tensor | None
    cache: Tensor
    seen: Tensor
    heads: int
    pairs: int
    theta: float
    scaled: list[float]
    eps: float
    scale: float


def attend_latent_token_(call: LatentTokenCall) -> Tensor:
    """Decode one token per row; `cache` and `seen` change in place. Returns: o [B, H V]."""
    o: Tensor = _attend_op(*call)
    return o


def _attend(*arguments: Any) -> Tensor:
    call, o = LatentTokenCall(*arguments), _fake(*arguments)
    cache, seen = call.cache.contiguous(), call.seen.contiguous()
    prepared = call._replace(
        q=_with_rows(call.q), latent=_with_rows(call.latent), gate=None if call.gate is None else _with_rows(call.gate),
        norm_weight=ready(call.norm_weight), weight=ready(call.weight),
        position=None if call.position is None else ready(call.position), cache=cache, seen=seen,
    )  # fmt: skip
    with torch.cuda.device_of(call.q):
        query = _queries(prepared)
        partial, lse, _ = attend_parts(query, cache, seen, call.weight.shape[1], call.scale, _MAX_PARTS)
        _output(prepared, partial, lse, o)
    for given, written in ((call.cache, cache), (call.seen, seen)):
        mark_written(given, written)
    return o


def _queries(call: LatentTokenCall) -> Tensor:
    """Store the token, and compute its queries [B, H, C + R]."""
    from deltazoo.backends.triton.attention.kernels.latent_token import LatentTokenTraits, latent_token_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    (B, S, _, E), H = call.cache.shape, call.heads
    K, V, C, R = _sizes(call)
    BK, BC, BR = max(16, power_of_two(K)), max(16, power_of_two(C)), power_of_two(max(2, R))
    rows, columns = max(16, min(_QUERY_ROWS, power_of_two(B))), min(BC, _COLUMN_BYTES // call.q.dtype.itemsize)
    overlap = overlaps(call.q)
    factor, constant, per_pair, per_frequency, amplitude = call.scaled or [1.0, 0.0, 0.0, 0.0, 1.0]
    traits = LatentTokenTraits(
        H=H, K=K, V=V, C=C, R=R, BK=BK, BC=BC, BR=BR, ROWS=rows, COLUMNS=columns,
        HEADS=min(power_of_two(H), max(1, _PAIRS_AT_ONCE // BR)), Q_STRIDE=call.q.stride(0),
        LATENT_STRIDE=call.latent.stride(0), PAIRS=call.pairs, LOG_THETA=math.log(call.theta),
        SCALED=bool(call.scaled), FACTOR=factor, CONSTANT=constant, PER_PAIR=per_pair, PER_FREQUENCY=per_frequency,
        AMPLITUDE=amplitude, POSITIONS=call.position is not None, EPS=call.eps,
        PREC="tf32" if tf32_allowed() else "tf32x3", OVERLAP=overlap,
    )  # fmt: skip
    query = call.q.new_empty(B, H, E)
    tensors = {**call._asdict(), "query": query}
    run = launcher(latent_token_kernel, tensors, {"traits": traits}, Options(4, overlap=overlap))
    programs = B + cdiv(B, rows) * H * cdiv(C, columns)
    run(programs, {"B": B, "S": S, "early": loads_early(call.weight, call.norm_weight)})
    return query


def _output(call: LatentTokenCall, partial: Tensor, lse: Tensor, o: Tensor) -> None:
    """Combine the parts, apply W_v and the gate, and write o."""
    from deltazoo.backends.triton.attention.kernels.latent_token import LatentOutputTraits, latent_output_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    (B, H, parts, C), (K, V, _, _) = partial.shape, _sizes(call)
    BC, size = max(16, power_of_two(C)), call.weight.element_size()
    rows = min(_OUTPUT_ROWS, power_of_two(B), max(1, _OUTPUT_PARTS // parts))
    columns = min(64, max(16, _WEIGHT_BYTES // (BC * size)), max(16, power_of_two(V)))
    overlap = overlaps(call.q)
    traits = LatentOutputTraits(
        H=H, K=K, V=V, C=C, BLOCK=min(BC, _OUTPUT_BLOCK // size), PARTS=parts, ROWS=rows,
        AT_ONCE=min(parts, _OUTPUT_PARTS // rows), COLUMNS=columns,
        GATE=0 if call.gate is None else call.gate.shape[1] // H,
        GATE_STRIDE=0 if call.gate is None else call.gate.stride(0), OVERLAP=overlap,
    )  # fmt: skip
    tensors = {"partial": partial, "lse": lse, "weight": call.weight, "gate": call.gate, "o": o}
    run = launcher(latent_output_kernel, tensors, {"traits": traits}, Options(_OUTPUT_WARPS, overlap=overlap))
    run(cdiv(B, rows) * H * cdiv(V, columns), {"B": B, "early": loads_early(call.weight)})


def _sizes(call: LatentTokenCall) -> tuple[int, int, int, int]:
    """Return K, V, C and R."""
    C = call.weight.shape[1]
    R = call.cache.shape[3] - C
    K = call.q.shape[1] // call.heads - R
    return K, call.weight.shape[0] // call.heads - K, C, R


def _with_rows(x: Tensor) -> Tensor:
    """Return x [B, C] with contiguous rows, which may be apart."""
    return x if x.stride(1) == 1 else x.contiguous()


def _fake(*arguments: Any) -> Tensor:
    call = LatentTokenCall(*arguments)
    return call.q.new_empty(call.q.shape[0], call.heads * _sizes(call)[1])


_attend_op = operator(
    "triton_attend_latent_token_(Tensor q, Tensor latent, Tensor? gate, Tensor norm_weight, Tensor weight,"
    " Tensor? position, Tensor(a!) cache, Tensor(b!) seen, int heads, int pairs, float theta, float[] scaled,"
    " float eps, float scale) -> Tensor",
    _attend,
    compiled_ahead(_attend, _fake),
    any_layout=True,
)
