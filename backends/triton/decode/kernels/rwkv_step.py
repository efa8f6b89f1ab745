"""One token of RWKV-6 or RWKV-7 between the products with its input and the output map: low-rank maps, then one kernel.

RWKV-7:
    w = exp(-exp(-1/2) sigmoid(W_w tanh(d_w) + bias_w)),  eta = sigmoid(W_a d_a + bias_a),  g = W_g sigmoid(d_g)
    kappa = unit(k * xi),  k <- k (1 + (eta - 1) alpha),  v <- v + (v_first - v) sigmoid(W_v d_v + bias_v)
    S <- Diag(w) S - (kappa * eta) (kappa^T S) + k v^T
    o = (weight * norm(S^T r) + bias + (r^T (u * k)) v) * g                  layer norm over V

RWKV-6:
    w = exp(-exp(W_w tanh(d_w) + bias_w))
    o = (weight * norm(S^T r + (r^T (u * k)) v) + bias) * silu(g)
    S <- Diag(w) S + k v^T

The token shift's state becomes the input of the mixer: x, or with NORM input_weight * x / sqrt(mean(x^2) + NORM_EPS).

B rows, D width, H heads, K key width, V value width
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.overlap import prefetch_line, start_next, wait_for_previous
from deltazoo.backends.triton.element.kernels.channels import load_channels, load_raw


class RWKVTraits(NamedTuple):
    """Compile-time properties.

    Args:
        VERSION: 6 or 7, of RWKV. D, H, K, V: sizes.
        BK, BV: K and V, and BD: the channels of the shift's state of a program, as powers of two.
        WHOLE: D rounded up to a power of two.
        DECAY, RATE, GATE, VALUE: ranks of the maps; 0: there is none. RWKV-6 has DECAY alone.
        STRIDE: elements from row to row of r, k, v, g and of what the low-rank maps read. FIRST_STRIDE: of first.
        CHANNELS: outputs of a program of rwkv_low_rank_kernel.
        EPS: of the output norm. NORM, NORM_EPS: whether the input has a norm, and its epsilon.
        JOINT: rwkv_step_kernel applies the low-rank maps itself. STATE_LAST: it loads the state after that, when the
            registers of their weights are free. PREFETCH: it prefetches the state before it waits.
    """

    VERSION: int
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
    FIRST_STRIDE: int
    CHANNELS: int
    EPS: float
    NORM: bool
    NORM_EPS: float
    JOINT: bool
    STATE_LAST: bool
    PREFETCH: bool
    OVERLAP: bool


@triton.jit
def prefetch_rows(states, row, SIZE: tl.constexpr):
    """Prefetch rows of SIZE float32 numbers, at valid addresses, into the L2 cache."""
    for start in tl.static_range(0, SIZE, 32):
        prefetch_line(states + row * SIZE + start)


@triton.jit
def low_rank_tile(low, weight, y, b, B, row, SIZE: tl.constexpr, RANK: tl.constexpr, ACTIVATION: tl.constexpr,
    traits: tl.constexpr,
):  # fmt: skip
    """Store the products of rows of weight [SIZE, RANK] with activation(low [B, RANK]) to y [B, SIZE] float32."""
    BLOCK: tl.constexpr = 32
    in_row = (row < SIZE)[None, :]
    weights = ()  # every load is issued before the first product
    for start in tl.static_range(0, RANK, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at = weight + row[None, :] * RANK + i[:, None]
        weights = weights + (tl.load(at, mask=in_row & (i < RANK)[:, None], other=0.0),)
    if traits.OVERLAP:
        wait_for_previous()
    inputs = ()
    for start in tl.static_range(0, RANK, BLOCK):
        i = start + tl.arange(0, BLOCK)
        in_low = (b < B)[:, None] & (i < RANK)[None, :]
        x = tl.load(low + b[:, None] * traits.STRIDE + i[None, :], mask=in_low, other=0.0).to(tl.float32)
        if ACTIVATION == "tanh":
            x = 2.0 * tl.sigmoid(2.0 * x) - 1.0
        if ACTIVATION == "sigmoid":
            x = tl.where(in_low, tl.sigmoid(x), 0.0)
        inputs = inputs + (x,)
    sums = tl.zeros([b.shape[0], row.shape[0]], tl.float32)
    for i in tl.static_range(len(weights)):
        sums = tl.dot(inputs[i].to(weights[i].dtype), weights[i], sums, input_precision="ieee")
    tl.store(y + b[:, None] * SIZE + row[None, :], sums, mask=(b < B)[:, None] & in_row)


@triton.jit(do_not_specialize=["B", "early"])
def rwkv_low_rank_kernel(
    low_decay, low_rate, low_gate, low_value, decay, rate, gate, value, y_decay, y_rate, y_gate, y_value, B, early,
    traits: tl.constexpr,
):  # fmt: skip
    """Apply the second maps of low rank, each of whose weights is read once for ROWS rows.

    Grid: rows / ROWS, CHANNELS outputs, maps. Reads low_* [B, rank] with a row stride, and the weights of
    rwkv_step_kernel of the same names. Writes y_decay, y_rate [B, H K] and y_gate, y_value [B, H V], float32.
    early: 1 if the weights may be loaded before the preceding kernel has ended; 0 if it may have written them.
    """
    ROWS: tl.constexpr = 16
    CHANNELS: tl.constexpr = traits.CHANNELS
    KEYS: tl.constexpr = traits.H * traits.K
    VALUES: tl.constexpr = traits.H * traits.V
    MAPS: tl.constexpr = 1 if traits.VERSION == 6 else 4 if traits.VALUE > 0 else 3
    if traits.OVERLAP:
        start_next()
        if early == 0:
            wait_for_previous()
    map = tl.program_id(0) % MAPS
    rest = tl.program_id(0) // MAPS
    blocks = tl.cdiv(B, ROWS)
    b = (rest % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = rest // blocks * CHANNELS + tl.arange(0, CHANNELS)
    if map == 0:
        low_rank_tile(low_decay, decay, y_decay, b, B, row, KEYS, traits.DECAY, "tanh", traits)
    elif map == 1:
        if traits.VERSION == 7:
            low_rank_tile(low_rate, rate, y_rate, b, B, row, KEYS, traits.RATE, "none", traits)
    elif map == 2:
        if traits.VERSION == 7:
            low_rank_tile(low_gate, gate, y_gate, b, B, row, VALUES, traits.GATE, "sigmoid", traits)
    else:
        if traits.VALUE > 0:
            low_rank_tile(low_value, value, y_value, b, B, row, VALUES, traits.VALUE, "none", traits)


@triton.jit
def load_ranks(weight, channel, mask, RANK: tl.constexpr):
    """Load the weights of channels of a map of low rank, [.., RANK rounded up]."""
    i = tl.arange(0, triton.next_power_of_2(RANK))
    return tl.load(weight + channel[:, None] * RANK + i[None, :], mask=mask[:, None] & (i < RANK)[None, :], other=0.0)


@triton.jit
def load_low(low, RANK: tl.constexpr):
    """Load what a map of low rank reads; zeros beyond RANK."""
    i = tl.arange(0, triton.next_power_of_2(RANK))
    return tl.load(low + i, mask=i < RANK, other=0.0)


@triton.jit
def rank_product(weights, low):
    """Return the channels of a map of low rank in float32, with low rounded as the weights."""
    return tl.sum(weights.to(tl.float32) * low.to(weights.dtype).to(tl.float32)[None, :], 1)


@triton.jit(do_not_specialize=["early"])
def rwkv_step_kernel(
    x, input_weight, previous, r, k, v, g, first, y_decay, y_rate, y_gate, y_value,
    low_decay, low_rate, low_gate, low_value, decay, rate, gate, value,
    decay_bias, rate_bias, value_bias, xi, alpha, u, norm_weight, norm_bias, states, o, early, traits: tl.constexpr,
):  # fmt: skip
    """Decode one token of one head.

    Grid: row, head. Reads x [B, D], with NORM input_weight [D]; r, k [B, H K] and v, g, first [B, H V] with row
    strides; y_decay, y_rate [B, H K] and y_gate, y_value [B, H V], the products of low rank; decay_bias, rate_bias, xi,
    alpha, u [H K]; value_bias, norm_weight, norm_bias [H V]. Of these, g is read by RWKV-6 alone, and y_rate, y_gate,
    y_value, rate_bias, value_bias, xi, alpha and first by RWKV-7 alone. Updates states [B, H, K, V] float32 and
    previous [B, D] in place. Writes o [B, H V].

    With JOINT it reads low_* [B, rank] with a row stride, and the weights of the maps of low rank of those names,
    [H K, rank] and [H V, rank], in place of y_*. early: as of rwkv_low_rank_kernel.
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
        if traits.JOINT:
            if early == 0:
                wait_for_previous()
        if traits.PREFETCH:
            prefetch_rows(states + b * H * K * V, h * K + tl.minimum(ks, K - 1), V)
    if traits.JOINT:
        w_decay = load_ranks(decay, key, in_k, traits.DECAY)
        if traits.VERSION == 7:
            w_rate = load_ranks(rate, key, in_k, traits.RATE)
            w_gate = load_ranks(gate, column, in_v, traits.GATE)
        if traits.VALUE > 0:
            w_value = load_ranks(value, column, in_v, traits.VALUE)
    if traits.OVERLAP:
        wait_for_previous()
    # Every load is issued before the first use of one, which waits for the memory. A conversion to float32 is a use:
    # the compiler distributes the numbers over the threads before it.
    at = states + (b * H + h) * K * V + ks[:, None] * V + vs[None, :]
    in_state = in_k[:, None] & in_v[None, :]
    if not traits.STATE_LAST:
        S = tl.load(at, mask=in_state, other=0.0)
    row = b * traits.STRIDE
    if traits.JOINT:
        y_d = load_low(low_decay + row, traits.DECAY)
        if traits.VERSION == 7:
            y_r = load_low(low_rate + row, traits.RATE)
            y_g = load_low(low_gate + row, traits.GATE)
    else:
        y_d = load_raw(y_decay + b * (H * K), key, in_k)
        if traits.VERSION == 7:
            y_r = load_raw(y_rate + b * (H * K), key, in_k)
            y_g = load_raw(y_gate + b * (H * V), column, in_v)
    bias_d = load_raw(decay_bias, key, in_k)
    if traits.VERSION == 7:
        bias_r = load_raw(rate_bias, key, in_k)
    q = load_raw(r + row, key, in_k)
    k_h = load_raw(k + row, key, in_k)
    v_h = load_raw(v + row, column, in_v)
    if traits.VERSION == 6:
        y_g = load_raw(g + row, column, in_v)
    if traits.VALUE > 0:
        y_v = load_low(low_value + row, traits.VALUE) if traits.JOINT else load_raw(y_value + b * (H * V), column, in_v)
        bias_v = load_raw(value_bias, column, in_v)
        v_first = load_raw(first + b * traits.FIRST_STRIDE, column, in_v)
    y_d, y_g, bias_d = y_d.to(tl.float32), y_g.to(tl.float32), bias_d.to(tl.float32)
    q, k_h, v_h = q.to(tl.float32), k_h.to(tl.float32), v_h.to(tl.float32)
    if traits.VALUE > 0:
        bias_v, v_first = bias_v.to(tl.float32), v_first.to(tl.float32)
    if traits.NORM:
        d = tl.arange(0, traits.WHOLE)
        every = load_channels(x + b * D, d, d < D)
        factor = tl.rsqrt(tl.sum(every * every, 0) / D + traits.NORM_EPS)
    if traits.JOINT:
        y_d = rank_product(w_decay, 2.0 * tl.sigmoid(2.0 * y_d) - 1.0)
        if traits.VERSION == 7:
            y_r = rank_product(w_rate, y_r)
            y_g = rank_product(w_gate, tl.sigmoid(y_g))
    if traits.STATE_LAST:
        S = tl.load(at, mask=in_state, other=0.0)
    y_d += bias_d
    if traits.VERSION == 6:
        w = tl.exp(-tl.exp(y_d))
        y_g *= tl.sigmoid(y_g)
        bonus = tl.sum(q * k_h * load_channels(u, key, in_k), 0) * v_h
        out = tl.sum(S * q[:, None], 0) + bonus
        S = S * w[:, None] + k_h[:, None] * v_h[None, :]
        tl.store(at, S, mask=in_state)
    else:
        w = tl.exp(-0.6065306597126334 * tl.sigmoid(y_d))
        eta = tl.sigmoid(y_r + bias_r)
        if traits.VALUE > 0:
            if traits.JOINT:
                y_v = rank_product(w_value, y_v)
            v_h += (v_first - v_h) * tl.sigmoid(y_v + bias_v)
        kappa = k_h * load_channels(xi, key, in_k)
        kappa /= tl.maximum(tl.sqrt(tl.sum(kappa * kappa, 0)), 1e-12, propagate_nan=tl.PropagateNan.ALL)
        k_h *= 1.0 + (eta - 1.0) * load_channels(alpha, key, in_k)

        read = tl.sum(S * kappa[:, None], 0)
        S = S * w[:, None] - (kappa * eta)[:, None] * read[None, :] + k_h[:, None] * v_h[None, :]
        tl.store(at, S, mask=in_state)
        out = tl.sum(S * q[:, None], 0)
    mean = tl.sum(out, 0) / V
    centred = tl.where(in_v, out - mean, 0.0)
    out = centred * tl.rsqrt(tl.sum(centred * centred, 0) / V + traits.EPS)
    out *= load_channels(norm_weight, column, in_v)
    out += load_channels(norm_bias, column, in_v)
    if traits.VERSION == 7:
        out += tl.sum(q * k_h * load_channels(u, key, in_k), 0) * v_h
    tl.store(o + b * (H * V) + column, (out * y_g).to(o.dtype.element_ty), mask=in_v)

    SPAN: tl.constexpr = (D + H - 1) // H
    own = h * SPAN + tl.arange(0, traits.BD)
    mask = (own < D) & (tl.arange(0, traits.BD) < SPAN)
    normed = load_channels(x + b * D, own, mask)
    if traits.NORM:
        normed *= factor * load_channels(input_weight, own, mask)
    tl.store(previous + b * D + own, normed.to(previous.dtype.element_ty), mask=mask)
