"""One token of TTT-Linear, from the products of the input up to the output map, with the state updated in place.

    q, k = R_i conv(qk),    eta = scale sigmoid(raw),    p_i = max(1 / (i + 1) + place_rate_i, 0)
    W, G, b, g, o           the step of backends/ops/fast_weights/ttt_linear_chunks.py
    y = norm(o) gelu(gate),    norm: a layer norm of all heads

i is the place of the token in its mini-batch of M tokens, from 0, and R_i the rotary embedding of this position.

B rows, H heads, E head width, D = H E
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.decode.kernels.step_parts import activate
from deltazoo.backends.triton.device.overlap import start_next, wait_for_previous
from deltazoo.backends.triton.device.taps import load_past, load_tap_weights, push_token, weigh_taps
from deltazoo.backends.triton.element.kernels.complex_step import cos_and_sin
from deltazoo.backends.triton.fast_weights.kernels.step import step_model
from deltazoo.backends.triton.fast_weights.kernels.tiles import load_matrix, load_vector, store_matrix, store_vector

TURN: tl.constexpr = tl.constexpr(2 * math.pi)


class TokenTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        H, E, M: sizes. BLOCK: E as a power of two. TAPS: of the convolution. LOG_THETA: of the rotary embedding.
        STRIDE: elements from row to row of qk, v, raw and gate. EPS: of the norm. OVERLAP: see device/overlap.py.
    """

    H: int
    E: int
    M: int
    BLOCK: int
    TAPS: int
    LOG_THETA: float
    STRIDE: int
    EPS: float
    OVERLAP: bool


@triton.jit
def rotate_heads(qk, history, taps, tap_bias, h, place, traits: tl.constexpr):
    """Return q and k of a head after the convolution and the rotation, and append their token to the history.

    A tile [q or k, a channel or the other one of its pair, E]: loads of single vectors would be repeated in every
    layout that a product with q or k needs.
    """
    E: tl.constexpr = traits.E
    C: tl.constexpr = 2 * traits.H * E
    HALF: tl.constexpr = E // 2
    is_k = tl.arange(0, 2)[:, None, None]
    is_other = tl.arange(0, 2)[None, :, None]
    e = tl.arange(0, traits.BLOCK)[None, None, :]
    other = tl.where(e < HALF, e + HALF, tl.where(e < 2 * HALF, e - HALF, e))
    channel = h * E + tl.where(is_other > 0, other, e)
    at = is_k * (C // 2) + channel
    mask = (is_k >= 0) & (is_other >= 0) & (e < E)
    inputs = load_past(history, at, mask, C, traits.TAPS) + (tl.load(qk + is_k * 0 + channel, mask=mask, other=0.0),)
    y = weigh_taps(inputs, load_tap_weights(taps, tap_bias, at, mask, traits.TAPS, True), traits.TAPS, True)
    pair = tl.where(e < HALF, e, e - HALF)
    turn = place * tl.exp(pair * (-traits.LOG_THETA / max(1, HALF))) / TURN
    cos, sin = cos_and_sin(turn - tl.floor(turn))
    cos = tl.where(e < 2 * HALF, cos, 1.0)
    sin = tl.where(e < HALF, -sin, tl.where(e < 2 * HALF, sin, 0.0))
    tl.debug_barrier()  # several threads have loaded an input, and one of them stores it elsewhere
    push_token(inputs, history, at, mask & (is_other == 0), C, traits.TAPS)
    y *= tl.where(is_other > 0, sin, cos)
    q_row = tl.sum(tl.sum(tl.where(is_k > 0, 0.0, y), 1), 0)
    k_row = tl.sum(tl.sum(tl.where(is_k > 0, y, 0.0), 1), 0)
    return q_row, k_row


@triton.jit
def rate_at(place_rate, i):
    """Return p of a place of the mini-batch."""
    p = 1.0 / (i + 1) + tl.load(place_rate + i).to(tl.float32)
    return tl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def ttt_token_kernel(
    qk, v, raw, taps, tap_bias, history, seen, place_rate, gain, bias, first_W, first_b, W, G, b, g, o, scale,
    traits: tl.constexpr,
):  # fmt: skip
    """Decode the token of one head.

    Grid: B H. Reads qk, v [B, D] and raw [B, H] with a row stride, taps [2 D, TAPS], tap_bias [2 D], seen [B] int64,
    place_rate [M], gain, bias, first_b [H, E] and first_W [H, E, E]. Updates history [B, TAPS - 1, 2 D] and, float32,
    W, G [B, H, E, E] and b, g [B, H, E] in place. Writes o [B, D].
    """
    H: tl.constexpr = traits.H
    E: tl.constexpr = traits.E
    M: tl.constexpr = traits.M
    BLOCK: tl.constexpr = traits.BLOCK
    index = tl.program_id(0)
    row = (index // H).to(tl.int64)
    h = index % H
    if traits.OVERLAP:
        start_next()
        wait_for_previous()
    W_tile = load_matrix(W, index, E, E, BLOCK, BLOCK)
    G_tile = load_matrix(G, index, E, E, BLOCK, BLOCK)
    tl.debug_barrier()  # else ptxas issues these loads after that of `seen` has ended
    before = tl.load(seen + row)
    b_row = load_vector(b, index, E, BLOCK)
    g_row = load_vector(g, index, E, BLOCK)
    place = (before % M).to(tl.int32)
    p = rate_at(place_rate, place)
    p_last = rate_at(place_rate, M - 1)
    eta = scale * tl.sigmoid(tl.load(raw + row * traits.STRIDE + h).to(tl.float32))
    gain_row = load_vector(gain, h, E, BLOCK)
    bias_row = load_vector(bias, h, E, BLOCK)
    v_row = load_vector(v + row * traits.STRIDE, h, E, BLOCK)

    qk += row * traits.STRIDE
    history += row * ((traits.TAPS - 1) * 2 * H * E)
    q_row, k_row = rotate_heads(qk, history, taps, tap_bias, h, place, traits)

    if place == 0:
        if before == 0:
            # through memory: Triton would keep all matrices in the layout of these weights
            n = tl.arange(0, BLOCK * BLOCK)
            first = tl.load(first_W + h * (E * E) + n, mask=n < E * E, other=0.0)
            tl.store(W + index.to(tl.int64) * (E * E) + n, first.to(tl.float32), mask=n < E * E)
            tl.debug_barrier()
            W_tile = load_matrix(W, index, E, E, BLOCK, BLOCK)
            b_row = load_vector(first_b, h, E, BLOCK)
        else:
            W_tile -= p_last * G_tile
            b_row -= p_last * g_row
        G_tile = tl.zeros_like(G_tile)
        g_row = tl.zeros_like(g_row)
        store_matrix(W, W_tile, index, E, E, BLOCK, BLOCK)
        store_vector(b, b_row, index, E, BLOCK)
    G_tile, g_row, o_row = step_model(
        W_tile, G_tile, b_row, g_row, q_row, k_row, v_row, eta, p, gain_row, bias_row, E, BLOCK
    )
    store_matrix(G, G_tile, index, E, E, BLOCK, BLOCK)
    store_vector(g, g_row, index, E, BLOCK)
    e = tl.arange(0, BLOCK)
    tl.store(o + row * (H * E) + h * E + e, o_row.to(o.dtype.element_ty), mask=e < E)


@triton.jit
def ttt_output_kernel(o, gate, norm_weight, norm_bias, seen, y, traits: tl.constexpr, BLOCK: tl.constexpr):
    """Normalise a row, apply the gate and count the token.

    Grid: B. Reads o [B, D], gate [B, D] with a row stride, norm_weight and norm_bias [D]. Updates seen [B]. Writes y
    [B, D].
    """
    D: tl.constexpr = traits.H * traits.E
    if traits.OVERLAP:
        start_next()
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    in_d = d < D
    x = tl.load(o + row * D + d, mask=in_d, other=0.0).to(tl.float32)
    g = tl.load(gate + row * traits.STRIDE + d, mask=in_d, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + d, mask=in_d, other=0.0).to(tl.float32)
    bias = tl.load(norm_bias + d, mask=in_d, other=0.0).to(tl.float32)
    before = tl.load(seen + row)
    centred = tl.where(in_d, x - tl.sum(x, 0) / D, 0.0)
    x = centred * tl.rsqrt(tl.sum(centred * centred, 0) / D + traits.EPS) * weight + bias
    tl.store(y + row * D + d, (x * activate(g, "gelu")).to(y.dtype.element_ty), mask=in_d)
    tl.debug_barrier()  # several threads have loaded the number
    tl.store(seen + row, before + 1)
