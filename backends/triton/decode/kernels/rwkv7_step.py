"""One token of RWKV-7 between the products with its input and the output map: low-rank maps, update, norm, bonus, gate.

    w = exp(-exp(-1/2) sigmoid(W_w tanh(d_w) + bias_w)),  eta = sigmoid(W_a d_a + bias_a),  g = W_g sigmoid(d_g)
    kappa = unit(k * xi),  k <- k (1 + (eta - 1) alpha),  v <- v + (v_first - v) sigmoid(W_v d_v + bias_v)
    S <- Diag(w) S - (kappa * eta) (kappa^T S) + k v^T
    o = (weight * norm(S^T r) + bias + (r^T (u * k)) v) * g                  layer norm over V

The token shift's state becomes norm_weight * x / sqrt(mean(x^2) + norm_eps), the normed input of the mixer.

B rows, D width, H heads, K key width, V value width
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.overlap import prefetch_line, start_next, wait_for_previous


class RWKV7Traits(NamedTuple):
    """Compile-time properties.

    Args:
        D, H, K, V: sizes. BK, BV: K and V, and BD: the channels of the shift's state of a program, as powers of two.
        WHOLE: D rounded up to a power of two. DECAY, RATE, GATE, VALUE: ranks of the maps; VALUE 0: no interpolation.
        STRIDE, LOW_STRIDE: elements from row to row of r, k, v and of what the low-rank maps read.
        EPS: of the output norm. NORM_EPS: of the input's.
    """

    D: int
    H: int
    K: int
    V: int
    BK: int
    BV: int
    BD: int
    WHOLE: int
    DECAY: int
    RATE: int
    GATE: int
    VALUE: int
    STRIDE: int
    LOW_STRIDE: int
    EPS: float
    NORM_EPS: float
    OVERLAP: bool


@triton.jit
def low_rank(low, weight, row, in_rows, RANK: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return the product of rows of weight [.., RANK] with activation(low) [RANK], in float32."""
    BLOCK: tl.constexpr = 32
    SIZE: tl.constexpr = row.shape[0]
    sums = tl.zeros([SIZE, BLOCK], tl.float32)
    for start in tl.static_range(0, RANK, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(low + i, mask=i < RANK, other=0.0).to(tl.float32)
        if ACTIVATION == "tanh":
            x = 2.0 * tl.sigmoid(2.0 * x) - 1.0
        if ACTIVATION == "sigmoid":
            x = tl.sigmoid(x)
        mask = in_rows[:, None] & (i < RANK)[None, :]
        sums += x[None, :] * tl.load(weight + row[:, None] * RANK + i[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.sum(sums, 1)


@triton.jit
def prefetch_rows(weight, row, SIZE: tl.constexpr):
    """Request rows of SIZE numbers of at least 16 bits, at valid addresses, from memory into the L2 cache."""
    for start in tl.static_range(0, SIZE, 64):
        prefetch_line(weight + row * SIZE + start)


@triton.jit
def load_channels(x, channel, mask):
    """Load channels in float32."""
    return tl.load(x + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rwkv7_step_kernel(
    x, input_weight, previous, r, k, v, first, low_decay, low_rate, low_gate, low_value, decay, rate, gate, value,
    decay_bias, rate_bias, value_bias, xi, alpha, u, norm_weight, norm_bias, states, o, traits: tl.constexpr,
):  # fmt: skip
    """Decode one token of one head.

    Grid: row, head. Reads x [B, D], input_weight [D]; r, k [B, H K] and v [B, H V] with a row stride, first [B, H V];
    low_* [B, rank] with a row stride; decay, rate [H K, rank]; gate, value [H V, rank]; decay_bias, rate_bias, xi,
    alpha, u [H K]; value_bias, norm_weight, norm_bias [H V]. Updates states [B, H, K, V] float32 and previous [B, D] in
    place. Writes o [B, H V].
    """
    H: tl.constexpr = traits.H
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    D: tl.constexpr = traits.D
    if traits.OVERLAP:
        start_next()
    b = tl.cast(tl.program_id(0) // H, tl.int64)
    h = tl.program_id(0) % H
    ks = tl.arange(0, traits.BK)
    vs = tl.arange(0, traits.BV)
    in_k = ks < K
    in_v = vs < V
    key = h * K + ks
    column = h * V + vs
    if traits.OVERLAP:
        near_key = h * K + tl.minimum(ks, K - 1)
        near_column = h * V + tl.minimum(vs, V - 1)
        prefetch_rows(states + b * H * K * V, near_key, V)
        prefetch_rows(decay, near_key, traits.DECAY)
        prefetch_rows(rate, near_key, traits.RATE)
        prefetch_rows(gate, near_column, traits.GATE)
        if traits.VALUE > 0:
            prefetch_rows(value, near_column, traits.VALUE)
        wait_for_previous()
    at = states + (b * H + h) * K * V + ks[:, None] * V + vs[None, :]
    S = tl.load(at, mask=in_k[:, None] & in_v[None, :], other=0.0)
    low = b * traits.LOW_STRIDE
    row = b * traits.STRIDE
    raw = low_rank(low_decay + low, decay, key, in_k, traits.DECAY, "tanh") + load_channels(decay_bias, key, in_k)
    w = tl.exp(-0.6065306597126334 * tl.sigmoid(raw))
    eta = low_rank(low_rate + low, rate, key, in_k, traits.RATE, "none") + load_channels(rate_bias, key, in_k)
    eta = tl.sigmoid(eta)
    g = low_rank(low_gate + low, gate, column, in_v, traits.GATE, "sigmoid")
    q = load_channels(r + row, key, in_k)
    k_h = load_channels(k + row, key, in_k)
    v_h = load_channels(v + row, column, in_v)
    if traits.VALUE > 0:
        share = low_rank(low_value + row, value, column, in_v, traits.VALUE, "none")
        share = tl.sigmoid(share + load_channels(value_bias, column, in_v))
        v_h += (load_channels(first + b * (H * V), column, in_v) - v_h) * share
    kappa = k_h * load_channels(xi, key, in_k)
    kappa /= tl.maximum(tl.sqrt(tl.sum(kappa * kappa, 0)), 1e-12, propagate_nan=tl.PropagateNan.ALL)
    k_h *= 1.0 + (eta - 1.0) * load_channels(alpha, key, in_k)

    read = tl.sum(S * kappa[:, None], 0)
    S = S * w[:, None] - (kappa * eta)[:, None] * read[None, :] + k_h[:, None] * v_h[None, :]
    tl.store(at, S, mask=in_k[:, None] & in_v[None, :])
    out = tl.sum(S * q[:, None], 0)
    mean = tl.sum(out, 0) / V
    centred = tl.where(in_v, out - mean, 0.0)
    out = centred * tl.rsqrt(tl.sum(centred * centred, 0) / V + traits.EPS)
    out = out * load_channels(norm_weight, column, in_v) + load_channels(norm_bias, column, in_v)
    out += tl.sum(q * k_h * load_channels(u, key, in_k), 0) * v_h
    tl.store(o + b * (H * V) + column, (out * g).to(o.dtype.element_ty), mask=in_v)

    d = tl.arange(0, traits.WHOLE)
    every = load_channels(x + b * D, d, d < D)
    factor = tl.rsqrt(tl.sum(every * every, 0) / D + traits.NORM_EPS)
    SPAN: tl.constexpr = (D + H - 1) // H
    own = h * SPAN + tl.arange(0, traits.BD)
    mask = (own < D) & (tl.arange(0, traits.BD) < SPAN)
    normed = load_channels(x + b * D, own, mask) * factor * load_channels(input_weight, own, mask)
    tl.store(previous + b * D + own, normed.to(previous.dtype.element_ty), mask=mask)
