"""One token of attention to memory slots (ABC), from the products of the input up to the output map.

    q, k = R_p q, R_p k                              the rotary embedding of position p
    s = min(max(raw, -32), 32), z' = log(exp(z) + exp(s)), a = exp(z - z'), w = exp(s - z')      per slot
    X <- Diag(a) X + w k^T,    U <- Diag(a) U + w v^T,    o = norm(U^T softmax(scale X q)) activation(gate)

H heads, M slots, K key width, V value width
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.decode.kernels.step_parts import load_head, norm_and_gate
from deltazoo.backends.triton.device.overlap import prefetch_state, start_next, wait_for_previous
from deltazoo.backends.triton.element.kernels.complex_step import cos_and_sin

TURN: tl.constexpr = tl.constexpr(2 * math.pi)
BOUND: tl.constexpr = tl.constexpr(32.0)


class SlotsTraits(NamedTuple):
    """Compile-time properties.

    Args:
        QKV_STRIDE, RAW_STRIDE, GATE_STRIDE: elements from row to row of qkv, raw and gate.
        H, M, K, V: sizes. BM, BK: M and K as powers of 2. BV: columns of U that are processed at a time, likewise.
        LOG_THETA: of the rotary embedding. NORM to GATE_BEFORE_NORM: as in `StepTraits`.
        OVERLAP: see device/overlap.py.
    """

    QKV_STRIDE: int
    RAW_STRIDE: int
    GATE_STRIDE: int
    H: int
    M: int
    K: int
    V: int
    BM: int
    BK: int
    BV: int
    LOG_THETA: float
    NORM: str
    NORM_PER_HEAD: bool
    NORM_BIAS: bool
    NORM_EPS: float
    GATE: str
    GATE_BEFORE_NORM: bool
    OVERLAP: bool


@triton.jit
def rotated(x, i, mask, cos, sin, K: tl.constexpr):
    """Return the channels i of a head, rotated in the pairs i and i + K // 2. sin: with the sign of the channel."""
    HALF: tl.constexpr = K // 2
    partner = tl.where(i < HALF, i + HALF, tl.where(i < 2 * HALF, i - HALF, i))
    own = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
    return own * cos + tl.load(x + partner, mask=mask, other=0.0).to(tl.float32) * sin


@triton.jit
def softmax_slots_step_kernel(
    qkv, raw, position, norm_weight, gate, z, keys, values, o, scale, traits: tl.constexpr,
):  # fmt: skip
    """Decode the token of one head.

    Grid: row, head. Reads qkv [B, H (2 K + V)], raw [B, H M] and gate [B, H V], each with a row stride, position [B]
    int64 and norm_weight [V] or [H V]. Updates keys [B, H, M, K] (X), values [B, H, M, V] (U) and z [B, H, M], float32,
    in place. Writes o [B, H V].
    """
    H: tl.constexpr = traits.H
    M: tl.constexpr = traits.M
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    BV: tl.constexpr = traits.BV
    GATE: tl.constexpr = traits.GATE  # Triton 3.6 cannot pass a str field of a constexpr tuple to a function
    HALF: tl.constexpr = K // 2
    TILES: tl.constexpr = (V + BV - 1) // BV
    head = tl.program_id(0)
    row = tl.cast(head // H, tl.int64)
    h = head % H
    keys += head.to(tl.int64) * (M * K)
    values += head.to(tl.int64) * (M * V)
    if traits.OVERLAP:
        start_next()
        prefetch_state(keys, M * K, 16384, 128)
        prefetch_state(values, M * V, 16384, 128)
        wait_for_previous()
    m = tl.arange(0, traits.BM)
    in_m = m < M
    i = tl.arange(0, traits.BK)
    in_k = i < K
    c = tl.arange(0, BV)
    in_keys = in_m[:, None] & in_k[None, :]
    at_keys = keys + m[:, None] * K + i[None, :]
    at_values = values + m[:, None] * V + c[None, :]
    X = tl.load(at_keys, mask=in_keys, other=0.0)

    qkv += row * traits.QKV_STRIDE
    score = tl.load(raw + row * traits.RAW_STRIDE + h * M + m, mask=in_m, other=0.0).to(tl.float32)
    score = tl.minimum(score, BOUND, propagate_nan=tl.PropagateNan.ALL)
    score = tl.maximum(score, -BOUND, propagate_nan=tl.PropagateNan.ALL)
    before = tl.load(z + head * M + m, mask=in_m, other=0.0)
    after = tl.maximum(before, score) + tl.log(1.0 + tl.exp(-tl.abs(before - score)))  # NaN of the sum propagates
    decay = tl.exp(before - after)
    write = tl.exp(score - after)

    pair = tl.where(i < HALF, i, i - HALF)
    turn = tl.load(position + row).to(tl.float64) * tl.exp(pair.to(tl.float64) * (-traits.LOG_THETA / max(1, HALF)))
    turn /= TURN
    cos, sin = cos_and_sin((turn - tl.floor(turn)).to(tl.float32))
    cos = tl.where(i < 2 * HALF, cos, 1.0)
    sin = tl.where(i < HALF, -sin, tl.where(i < 2 * HALF, sin, 0.0))
    q = rotated(qkv + h * K, i, in_k, cos, sin, K)
    k = rotated(qkv + (H + h) * K, i, in_k, cos, sin, K)

    # not earlier: beside the rotation the values would take registers of a third program per SM
    ahead = tl.load(at_values, mask=in_m[:, None] & (c < V)[None, :], other=0.0)
    X = decay[:, None] * X + write[:, None] * k[None, :]
    tl.store(at_keys, X, mask=in_keys)
    logit = tl.where(in_m, scale * tl.sum(X * q[None, :], 1), -float("inf"))
    share = tl.exp(logit - tl.max(logit, 0))
    share /= tl.sum(share, 0)
    gates = ()
    if GATE != "":
        gates = load_head(gate + row * traits.GATE_STRIDE + h * V, V, BV, TILES)
    outs = ()
    for tile in tl.static_range(TILES):
        vs = tile * BV + c
        v = tl.load(qkv + 2 * H * K + h * V + vs, mask=vs < V, other=0.0).to(tl.float32)
        U = ahead
        if tile + 1 < TILES:
            mask = in_m[:, None] & (vs + BV < V)[None, :]
            ahead = tl.load(at_values + (tile + 1) * BV, mask=mask, other=0.0)
        U = decay[:, None] * U + write[:, None] * v[None, :]
        tl.store(at_values + tile * BV, U, mask=in_m[:, None] & (vs < V)[None, :])
        outs = outs + (tl.sum(U * share[:, None], 0),)
    outs = norm_and_gate(outs, gates, norm_weight, norm_weight, h, BV, GATE, traits)
    for tile in tl.static_range(TILES):
        vs = tile * BV + c
        tl.store(o + (row * H + h) * V + vs, outs[tile].to(o.dtype.element_ty), mask=vs < V)
    tl.debug_barrier()  # several threads may have loaded the same number, and one of them stores it
    tl.store(z + head * M + m, after, mask=in_m)
