"""One token of Rodimus's update, from the products of its gates up to the norm before the output map.

    g = softplus(g + b_g),    tau = sigmoid(tau + b_tau),    v = sigmoid(W_2 low + b) u
    S <- Diag(exp(-g tau)) S + (g^tau k / |k|) v^T,    o = (scale S^T q + D c) activation(gate)

K key width, V value width (of one head), R rank of the value's gate
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.decode.kernels.step_parts import activate, softplus
from deltazoo.backends.triton.device.overlap import prefetch_line, start_next, wait_for_previous


class TemperedTraits(NamedTuple):
    """Compile-time properties.

    Args:
        MAPPED, GATE_STRIDE: elements from row to row of q, k, g, tau and low, and of gate. K, V, R: sizes.
        BK, BR: K and R as powers of 2. BV: columns of a program. GATE: activation. OVERLAP: see device/overlap.py.
    """

    MAPPED: int
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
def strengths_of(k, g, tau):
    """Return g^tau k / |k| and exp(-g tau) for vectors k, raw g and raw tau in float32. k: zero beyond K."""
    g, tau = softplus(g), tl.sigmoid(tau)
    power = tl.where(tau > 0.0, tl.exp(tau * tl.log(g)), 1.0)  # 0^0 = 1
    return k / tl.maximum(tl.sqrt(tl.sum(k * k, 0)), 1e-12) * power, tl.exp(-g * tau)


@triton.jit
def tempered_step_kernel(
    q, k, g, tau, low, gate, g_bias, tau_bias, streams, weight, bias, skip, states, o, scale, traits: tl.constexpr
):
    """Decode BV columns of a row.

    Grid: row, tile of columns. Reads q, k, g, tau [B, K] and low [B, R] with one row stride, gate [B, V] with another,
    g_bias and tau_bias [K], streams [B, 2, V] (c and u), weight [V, R] (W_2), bias and skip [V]. Updates states
    [B, K, V] float32 in place. Writes o [B, V].
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
    tl.debug_barrier()  # here and below, else ptxas issues loads after others have ended
    of_row = row * traits.MAPPED + i
    query = tl.load(q + of_row, mask=in_k, other=0.0).to(tl.float32)
    key = tl.load(k + of_row, mask=in_k, other=0.0).to(tl.float32)
    raw_g = tl.load(g + of_row, mask=in_k, other=0.0).to(tl.float32)
    raw_g += tl.load(g_bias + i, mask=in_k, other=0.0).to(tl.float32)
    raw_tau = tl.load(tau + of_row, mask=in_k, other=0.0).to(tl.float32)
    raw_tau += tl.load(tau_bias + i, mask=in_k, other=0.0).to(tl.float32)
    j = tl.arange(0, traits.BR)
    in_r = j < R
    rank = tl.load(low + row * traits.MAPPED + j, mask=in_r, other=0.0).to(tl.float32)
    # summed over columns: over rows, Triton would keep the states in the layout of these weights, and move them to it
    up = tl.load(weight + vs[:, None] * R + j[None, :], mask=in_v[:, None] & in_r[None, :], other=0.0).to(tl.float32)
    raw = tl.load(bias + vs, mask=in_v, other=0.0).to(tl.float32)
    convolved = tl.load(streams + 2 * row * V + vs, mask=in_v, other=0.0).to(tl.float32)
    before = tl.load(streams + (2 * row + 1) * V + vs, mask=in_v, other=0.0).to(tl.float32)
    raw_gate = tl.load(gate + row * traits.GATE_STRIDE + vs, mask=in_v, other=0.0).to(tl.float32)
    bypass = tl.load(skip + vs, mask=in_v, other=0.0).to(tl.float32) * convolved
    tl.debug_barrier()
    key, decay = strengths_of(key, raw_g, raw_tau)
    value = tl.sigmoid(raw + tl.sum(up * rank[None, :], 1)) * before
    S = decay[:, None] * S + key[:, None] * value[None, :]
    tl.store(at, S, mask=in_state)
    out = (scale * tl.sum(S * query[:, None], 0) + bypass) * activate(raw_gate, GATE)
    tl.store(o + row * V + vs, out.to(o.dtype.element_ty), mask=in_v)
