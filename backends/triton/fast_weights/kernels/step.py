"""One token of TTT-Linear and of the neural memory, with the state updated in place.

A program processes one sequence and head. It reads each matrix once, and multiplies it with vectors in float32.

N sequences, H heads, M tokens per chunk, E head width, F inner width
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.fast_weights.kernels.neural_memory import load_layer, slope
from deltazoo.backends.triton.fast_weights.kernels.tiles import (
    load_matrix,
    load_span,
    load_vector,
    store_matrix,
    store_vector,
)
from deltazoo.backends.triton.fast_weights.kernels.ttt_linear import EPS, load_start, load_start_vector, load_steps


@triton.jit
def load_token(x, row, has_token, h, stride, E: tl.constexpr, BLOCK: tl.constexpr):
    """Load x [rows, H E] of one token and head in float32; zeros without a token. stride: from row to row."""
    e = tl.arange(0, BLOCK)
    return tl.load(x + row * stride + h * E + e, mask=has_token & (e < E), other=0.0).to(tl.float32)


@triton.jit
def store_output(o, values, row, rows, h, H: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr):
    """Store o [rows, H, E] of one row and head."""
    e = tl.arange(0, BLOCK)
    tl.store(o + (row * H + h) * E + e, values.to(o.dtype.element_ty), mask=(row >= 0) & (row < rows) & (e < E))


@triton.jit
def norm_of_row(z, E: tl.constexpr, BLOCK: tl.constexpr):
    """Return the layer norm of a vector, whose numbers from E on are zero, and 1 / std."""
    e = tl.arange(0, BLOCK)
    centred = tl.where(e < E, z - tl.sum(z, 0) / E, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 0) / E + EPS)
    return centred * inverse, inverse


@triton.jit
def step_model(
    W_tile, G_tile, b_row, g_row, q_row, k_row, v_row, eta, p, gain_row, bias_row, E: tl.constexpr, BLOCK: tl.constexpr
):
    """Return G and g with the step of a token, and o. Args: W_tile, b_row: the model at the start of its mini-batch."""
    Zh, inverse = norm_of_row(tl.sum(W_tile * k_row[:, None], 0) + b_row, E, BLOCK)
    U = gain_row * (gain_row * Zh + bias_row - v_row + k_row)
    D = U - tl.sum(U, 0) / E - Zh * (tl.sum(U * Zh, 0) / E)
    D = tl.where(tl.arange(0, BLOCK) < E, eta * inverse * D, 0.0)
    G_tile += k_row[:, None] * D[None, :]
    g_row += D
    R = tl.sum((W_tile - p * G_tile) * q_row[:, None], 0) + b_row - p * g_row
    return G_tile, g_row, q_row + gain_row * norm_of_row(R, E, BLOCK)[0] + bias_row


@triton.jit(do_not_specialize=["rows", "v_stride"])
def ttt_linear_step_kernel(
    q, k, v, eta, rate, gain, bias, first_W, first_b, W, G, b, g, spans, o, rows, v_stride, traits: tl.constexpr
):
    """Process at most one token of each sequence.

    Grid: N H. v_stride: numbers from a row of v to the next. Reads and writes what `TTTOperands` and `TTTResult` list.
    """
    H: tl.constexpr = traits.H
    E: tl.constexpr = traits.E
    BLOCK: tl.constexpr = traits.BLOCK_E
    index = tl.program_id(0)
    h = index % H
    start, tokens, place, fresh = load_span(spans, index // H)
    has_token = (tokens > 0) & (start >= 0) & (start < rows)
    begins = has_token & (place == 0)
    W_tile = load_start(first_W, W, fresh, index, h, E, BLOCK, True)
    b_row = load_start_vector(first_b, b, fresh, index, h, E, BLOCK, True)
    G_tile, g_row = load_steps(G, g, fresh, index, traits)
    q_row = load_token(q, start, has_token, h, H * E, E, BLOCK)
    k_row = load_token(k, start, has_token, h, H * E, E, BLOCK)
    v_row = load_token(v, start, has_token, h, v_stride, E, BLOCK)
    eta_value = tl.load(eta + start * H + h, mask=has_token, other=0.0)
    p = tl.load(rate + place)
    p_last = tl.load(rate + traits.M - 1)
    gain_row = load_vector(gain, h, E, BLOCK)
    bias_row = load_vector(bias, h, E, BLOCK)
    if begins:
        W_tile -= p_last * G_tile
        b_row -= p_last * g_row
        G_tile = tl.zeros_like(G_tile)
        g_row = tl.zeros_like(g_row)
    if begins | fresh:
        store_matrix(W, W_tile, index, E, E, BLOCK, BLOCK)
        store_vector(b, b_row, index, E, BLOCK)
    G_tile, g_row, o_row = step_model(
        W_tile, G_tile, b_row, g_row, q_row, k_row, v_row, eta_value, p, gain_row, bias_row, E, BLOCK
    )
    store_matrix(G, G_tile, index, E, E, BLOCK, BLOCK)
    store_vector(g, g_row, index, E, BLOCK)
    store_output(o, tl.where(has_token, o_row, 0.0), start, rows, h, H, E, BLOCK)


@triton.jit
def step_layer(
    M, S, P, x, y, r, first, fresh, keep_P, eta, theta, a, has_token, index, h, R: tl.constexpr, C: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Update M and S of a layer by x y^T, store M as M' unless `keep_P`, and return r M as a vector [BLOCK_C]."""
    M_tile = load_layer(first, M, fresh, index, h, R, C, BLOCK_R, BLOCK_C, True)
    if not keep_P:
        store_matrix(P, M_tile, index, R, C, BLOCK_R, BLOCK_C)
    S_tile = load_layer(None, S, fresh, index, h, R, C, BLOCK_R, BLOCK_C, True)
    S_tile = tl.where(has_token, eta * S_tile - theta * x[:, None] * y[None, :], S_tile)
    M_tile = tl.where(has_token, a * M_tile + S_tile, M_tile)
    store_matrix(S, S_tile, index, R, C, BLOCK_R, BLOCK_C)
    store_matrix(M, M_tile, index, R, C, BLOCK_R, BLOCK_C)
    return tl.sum(M_tile * r[:, None], 0)


@triton.jit(do_not_specialize=["rows"])
def neural_memory_step_kernel(
    q, k, v, eta, theta, alpha, first1, first2, M1, M2, P1, P2, S1, S2, spans, o, rows, traits: tl.constexpr
):
    """Process at most one token of each sequence.

    Grid: N H. Reads and writes what `MemoryOperands` lists, for the layers 1 and 2: M, P (M' there) and S.
    """
    H: tl.constexpr = traits.H
    E: tl.constexpr = traits.E
    F: tl.constexpr = traits.F
    BLOCK_E: tl.constexpr = traits.BLOCK_E
    BLOCK_F: tl.constexpr = traits.BLOCK_F
    index = tl.program_id(0)
    h = index % H
    start, tokens, place, fresh = load_span(spans, index // H)
    has_token = (tokens > 0) & (start >= 0) & (start < rows)
    keep_P = (not fresh) & ((place > 0) | (not has_token))
    q_row = load_token(q, start, has_token, h, H * E, E, BLOCK_E)
    k_row = load_token(k, start, has_token, h, H * E, E, BLOCK_E)
    v_row = load_token(v, start, has_token, h, H * E, E, BLOCK_E)
    eta_value = tl.load(eta + start * H + h, mask=has_token, other=1.0)
    theta_value = tl.load(theta + start * H + h, mask=has_token, other=0.0)
    a_value = 1.0 - tl.load(alpha + start * H + h, mask=has_token, other=0.0)
    if (place > 0) & (not fresh):
        P_tile = load_matrix(P1, index, E, F, BLOCK_E, BLOCK_F)
    else:
        P_tile = load_layer(first1, M1, fresh, index, h, E, F, BLOCK_E, BLOCK_F, True)
    inner_h = tl.sum(P_tile * k_row[:, None], 0)
    if traits.DEPTH == 1:
        y_row = 2.0 * (inner_h - v_row)
    else:
        if (place > 0) & (not fresh):
            P2_tile = load_matrix(P2, index, F, E, BLOCK_F, BLOCK_E)
        else:
            P2_tile = load_layer(first2, M2, fresh, index, h, F, E, BLOCK_F, BLOCK_E, True)
        gate = tl.sigmoid(inner_h)
        inner = tl.reshape(inner_h * gate, [BLOCK_F])
        error = 2.0 * (tl.sum(P2_tile * inner[:, None], 0) - v_row)
        back = tl.sum(P2_tile * error[None, :], 1)
        y_row = back * slope(inner_h, gate)
    out = step_layer(
        M1, S1, P1, k_row, y_row, q_row, first1, fresh, keep_P, eta_value, theta_value, a_value, has_token, index, h, E,
        F, BLOCK_E, BLOCK_F,
    )  # fmt: skip
    if traits.DEPTH == 2:
        x = out * tl.sigmoid(out)
        out = step_layer(
            M2, S2, P2, inner, error, x, first2, fresh, keep_P, eta_value, theta_value, a_value, has_token, index, h, F,
            E, BLOCK_F, BLOCK_E,
        )  # fmt: skip
    store_output(o, tl.where(has_token, out, 0.0), start, rows, h, H, E, BLOCK_E)
