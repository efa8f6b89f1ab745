"""One token of Rodimus's update, from its gates up to the norm before the output map.

    v = sigmoid(W_2 low + b) u,    S <- Diag(exp(log_decay)) S + k v^T
    o = (scale S^T q + D c) activation(gate)

K key width, V value width (of one head), R rank of the value's gate
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.decode.kernels.step_parts import activate
from deltazoo.backends.triton.device.overlap import prefetch_line, start_next, wait_for_previous


class TemperedTraits(NamedTuple):
    """Compile-time properties.

    Args:
        Q, LOW, GATE_STRIDE: elements from row to row of q, low and gate. K, V, R: sizes.
        BK, BR: K and R as powers of 2. BV: columns of a program. GATE: activation. OVERLAP: see device/overlap.py.
    """

    Q: int
    LOW: int
    GATE_STRIDE: int
    K: int
    V: int
    R: int
    BK: int
    BR: int
    BV: int
    GATE: str
    OVERLAP: bool


@triton.jit
def tempered_step_kernel(
    q, low, gate, k, log_decay, streams, weight, bias, skip, states, o, scale, traits: tl.constexpr
):
    """Decode BV columns of a row.

    Grid: row, tile of columns. Reads q [B, K], low [B, R] and gate [B, V], each with a row stride, k and log_decay
    [B, K] float32, streams [B, 2, V] (c and u), weight [V, R] (W_2), bias and skip [V]. Updates states [B, K, V]
    float32 in place. Writes o [B, V].
    """
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    R: tl.constexpr = traits.R
    BV: tl.constexpr = traits.BV
    GATE: tl.constexpr = traits.GATE  # Triton 3.6 cannot pass a str field of a constexpr tuple to a function
    TILES: tl.constexpr = (V + BV - 1) // BV
    row = (tl.program_id(0) // TILES).to(tl.int64)
    first = tl.program_id(0) % TILES * BV
    i = tl.arange(0, traits.BK)
    vs = first + tl.arange(0, BV)
    states += row * (K * V)
    if traits.OVERLAP:
        start_next()
        line = tl.minimum(first + tl.arange(0, max(1, BV // 32)) * 32, V - 1)  # 32 numbers fill a cache line
        prefetch_line(states + tl.minimum(i, K - 1)[:, None] * V + line[None, :])
        wait_for_previous()
    in_k = i < K
    in_v = vs < V
    in_state = in_k[:, None] & in_v[None, :]
    at = states + i[:, None] * V + vs[None, :]
    S = tl.load(at, mask=in_state, other=0.0)
    query = tl.load(q + row * traits.Q + i, mask=in_k, other=0.0).to(tl.float32)
    key = tl.load(k + row * K + i, mask=in_k, other=0.0)
    decay = tl.exp(tl.load(log_decay + row * K + i, mask=in_k, other=0.0))
    j = tl.arange(0, traits.BR)
    in_r = j < R
    rank = tl.load(low + row * traits.LOW + j, mask=in_r, other=0.0).to(tl.float32)
    up = tl.load(weight + vs[None, :] * R + j[:, None], mask=in_r[:, None] & in_v[None, :], other=0.0).to(tl.float32)
    raw = tl.sum(up * rank[:, None], 0) + tl.load(bias + vs, mask=in_v, other=0.0).to(tl.float32)
    value = tl.sigmoid(raw) * tl.load(streams + (2 * row + 1) * V + vs, mask=in_v, other=0.0).to(tl.float32)
    S = decay[:, None] * S + key[:, None] * value[None, :]
    tl.store(at, S, mask=in_state)
    out = scale * tl.sum(S * query[:, None], 0)
    convolved = tl.load(streams + 2 * row * V + vs, mask=in_v, other=0.0).to(tl.float32)
    out += tl.load(skip + vs, mask=in_v, other=0.0).to(tl.float32) * convolved
    g = tl.load(gate + row * traits.GATE_STRIDE + vs, mask=in_v, other=0.0).to(tl.float32)
    tl.store(o + row * V + vs, (out * activate(g, GATE)).to(o.dtype.element_ty), mask=in_v)
