"""TTT-Linear in the dual form; the equations are in backends/ops/fast_weights/ttt_linear_chunks.py.

A program processes one sequence and head. It keeps W (and in the backward its gradient) in registers, and processes the
mini-batches in order, or backward in reverse order.

N sequences, H heads, M tokens per mini-batch, E head width; rows: of tokens, B T
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.fast_weights.kernels.tiles import (
    chunk_rows,
    count_chunks,
    load_matrix,
    load_span,
    load_tokens,
    load_vector,
    product,
    store_matrix,
    store_tokens,
    store_vector,
)

EPS = tl.constexpr(1e-6)


class TTTTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        H, E, M: sizes. BLOCK_E, BLOCK_M: tiles, the powers of two from E and M on, at least 16.
        HAS_STATE: sequences that are not fresh start from a state.
        PRECISION: of the products, tl.dot's `input_precision`. STEP_PRECISION: of the steps of W that the backward
            undoes: that of the forward.
    """

    H: int
    E: int
    M: int
    BLOCK_E: int
    BLOCK_M: int
    HAS_STATE: bool
    PRECISION: str
    STEP_PRECISION: str


@triton.jit
def normalize(z, traits: tl.constexpr):
    """Return the layer norm of the rows of z, whose columns from E on are zero, and 1 / std."""
    e = tl.arange(0, traits.BLOCK_E)[None, :]
    centred = z - tl.sum(z, 1)[:, None] / traits.E
    centred = tl.where(e < traits.E, centred, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 1) / traits.E + EPS)[:, None]
    return centred * inverse, inverse


@triton.jit
def normalize_backward(d, normed, inverse, traits: tl.constexpr):
    """Return the gradient of z from that of its norm, whose columns from E on are zero."""
    e = tl.arange(0, traits.BLOCK_E)[None, :]
    mean = tl.sum(d, 1)[:, None] / traits.E
    projection = tl.sum(d * normed, 1)[:, None] / traits.E
    return tl.where(e < traits.E, (d - mean - normed * projection) * inverse, 0.0)


@triton.jit
def load_start(first, state, fresh, index, h, E: tl.constexpr, BLOCK_E: tl.constexpr, HAS_STATE: tl.constexpr):
    """Load a matrix of the model before the first token: that of the head in `first` if fresh, else of the state."""
    values = load_matrix(first, h, E, E, BLOCK_E, BLOCK_E)
    if HAS_STATE:
        if not fresh:
            values = load_matrix(state, index, E, E, BLOCK_E, BLOCK_E)
    return values


@triton.jit
def load_start_vector(first, state, fresh, index, h, E: tl.constexpr, BLOCK_E: tl.constexpr, HAS_STATE: tl.constexpr):
    """`load_start` for a vector."""
    values = load_vector(first, h, E, BLOCK_E)
    if HAS_STATE:
        if not fresh:
            values = load_vector(state, index, E, BLOCK_E)
    return values


@triton.jit
def load_steps(G, g, fresh, index, traits: tl.constexpr):
    """Load the sums of the steps of the current mini-batch before the first token: zero if fresh."""
    E: tl.constexpr = traits.E
    BLOCK_E: tl.constexpr = traits.BLOCK_E
    steps = tl.zeros([BLOCK_E, BLOCK_E], tl.float32)
    steps_b = tl.zeros([BLOCK_E], tl.float32)
    if traits.HAS_STATE:
        if not fresh:
            steps = load_matrix(G, index, E, E, BLOCK_E, BLOCK_E)
            steps_b = load_vector(g, index, E, BLOCK_E)
    return steps, steps_b


@triton.jit(do_not_specialize=["rows"])
def ttt_linear_kernel(
    q, k, v, eta, rate, gain, bias, first_W, first_b, W, G, b, g, spans, o, new_W, new_G, new_b, new_g, D, rows,
    traits: tl.constexpr,
):  # fmt: skip
    """Compute the outputs and the new state.

    Grid: N H. Reads and writes what `TTTOperands` and `TTTResult` list; the state may be updated in place. D: None if
    it is not saved.
    """
    H: tl.constexpr = traits.H
    E: tl.constexpr = traits.E
    M: tl.constexpr = traits.M
    BLOCK_E: tl.constexpr = traits.BLOCK_E
    BLOCK_M: tl.constexpr = traits.BLOCK_M
    PRECISION: tl.constexpr = traits.PRECISION
    index = tl.program_id(0)
    h = index % H
    start, tokens, place, fresh = load_span(spans, index // H)
    W_tile = load_start(first_W, W, fresh, index, h, E, BLOCK_E, traits.HAS_STATE)
    b_row = load_start_vector(first_b, b, fresh, index, h, E, BLOCK_E, traits.HAS_STATE)
    G_tile, g_row = load_steps(G, g, fresh, index, traits)
    m = tl.arange(0, BLOCK_M)
    p = tl.load(rate + m, mask=m < M, other=0.0)[:, None]
    p_last = tl.load(rate + M - 1)
    gain_row = load_vector(gain, h, E, BLOCK_E)[None, :]
    bias_row = load_vector(bias, h, E, BLOCK_E)[None, :]
    causal = m[:, None] >= m[None, :]
    row, present = chunk_rows(start, tokens, place, 0, rows, M, BLOCK_M)
    next_q = load_tokens(q, row, present, h, H, E, BLOCK_E)
    next_k = load_tokens(k, row, present, h, H, E, BLOCK_E)
    next_v = load_tokens(v, row, present, h, H, E, BLOCK_E)
    next_eta = tl.load(eta + row * H + h, mask=present, other=0.0)
    count = count_chunks(tokens, place, M)
    for i in range(0, count):
        q_tile = next_q.to(tl.float32)
        k_tile = next_k.to(tl.float32)
        v_tile = next_v.to(tl.float32)
        eta_column = next_eta[:, None]
        row, present = chunk_rows(start, tokens, place, i + 1, rows, M, BLOCK_M)
        next_q = load_tokens(q, row, present, h, H, E, BLOCK_E)
        next_k = load_tokens(k, row, present, h, H, E, BLOCK_E)
        next_v = load_tokens(v, row, present, h, H, E, BLOCK_E)
        next_eta = tl.load(eta + row * H + h, mask=present, other=0.0)
        begins = (i > 0) | (place == 0)
        W_tile = tl.where(begins, W_tile - p_last * G_tile, W_tile)
        G_tile = tl.where(begins, 0.0, G_tile)
        b_row = tl.where(begins, b_row - p_last * g_row, b_row)
        g_row = tl.where(begins, 0.0, g_row)
        Zh, inverse = normalize(product(k_tile, W_tile, PRECISION) + b_row[None, :], traits)
        U = gain_row * (gain_row * Zh + bias_row - v_tile + k_tile)
        D_tile = eta_column * normalize_backward(U, Zh, inverse, traits)
        k_columns = tl.trans(k_tile)
        A = tl.where(causal, product(q_tile, k_columns, PRECISION) + 1.0, 0.0)
        step = product(A, D_tile, PRECISION)
        if traits.HAS_STATE:
            if (i == 0) & (place > 0):
                step += product(q_tile, G_tile, PRECISION) + g_row[None, :]
        R = product(q_tile, W_tile, PRECISION) + b_row[None, :] - p * step
        o_tile = q_tile + gain_row * normalize(R, traits)[0] + bias_row
        row, present = chunk_rows(start, tokens, place, i, rows, M, BLOCK_M)
        store_tokens(o, o_tile, row, present, h, H, E, BLOCK_E)
        if D is not None:
            store_tokens(D, D_tile, row, present, h, H, E, BLOCK_E)
        G_tile += product(k_columns, D_tile, PRECISION)
        g_row += tl.sum(D_tile, 0)
    store_matrix(new_W, W_tile, index, E, E, BLOCK_E, BLOCK_E)
    store_matrix(new_G, G_tile, index, E, E, BLOCK_E, BLOCK_E)
    store_vector(new_b, b_row, index, E, BLOCK_E)
    store_vector(new_g, g_row, index, E, BLOCK_E)


@triton.jit(do_not_specialize=["rows"])
def ttt_linear_backward_kernel(
    q, k, v, eta, D, d_o, rate, gain, bias, first_W, first_b, W, G, b, g, spans, new_W, new_b, d_new_W, d_new_G,
    d_new_b, d_new_g, d_q, d_k, d_v, d_eta, d_rate, d_gain, d_bias, d_W, d_G, d_b, d_g, rows, traits: tl.constexpr,
):  # fmt: skip
    """Compute the gradients.

    Grid: N H. Reads the operands, the results of the forward and their gradients. Writes what `TTTGradients` lists;
    d_rate [N, H, M], d_gain and d_bias [N, H, E] of each program.
    """
    H: tl.constexpr = traits.H
    E: tl.constexpr = traits.E
    M: tl.constexpr = traits.M
    BLOCK_E: tl.constexpr = traits.BLOCK_E
    BLOCK_M: tl.constexpr = traits.BLOCK_M
    PRECISION: tl.constexpr = traits.PRECISION
    STEP_PRECISION: tl.constexpr = traits.STEP_PRECISION
    index = tl.program_id(0)
    h = index % H
    start, tokens, place, fresh = load_span(spans, index // H)
    m = tl.arange(0, BLOCK_M)
    p = tl.load(rate + m, mask=m < M, other=0.0)[:, None]
    p_last = tl.load(rate + M - 1)
    gain_row = load_vector(gain, h, E, BLOCK_E)[None, :]
    bias_row = load_vector(bias, h, E, BLOCK_E)[None, :]
    causal = m[:, None] >= m[None, :]
    W_tile = load_matrix(new_W, index, E, E, BLOCK_E, BLOCK_E)
    b_row = load_vector(new_b, index, E, BLOCK_E)
    dW = load_matrix(d_new_W, index, E, E, BLOCK_E, BLOCK_E)
    dG = load_matrix(d_new_G, index, E, E, BLOCK_E, BLOCK_E)
    db = load_vector(d_new_b, index, E, BLOCK_E)
    dg = load_vector(d_new_g, index, E, BLOCK_E)
    d_p = tl.zeros([BLOCK_M], tl.float32)
    d_p_last = 0.0
    gain_sum = tl.zeros([BLOCK_E], tl.float32)
    bias_sum = tl.zeros([BLOCK_E], tl.float32)
    count = count_chunks(tokens, place, M)
    row, present = chunk_rows(start, tokens, place, count - 1, rows, M, BLOCK_M)
    next_q = load_tokens(q, row, present, h, H, E, BLOCK_E)
    next_k = load_tokens(k, row, present, h, H, E, BLOCK_E)
    next_v = load_tokens(v, row, present, h, H, E, BLOCK_E)
    next_do = load_tokens(d_o, row, present, h, H, E, BLOCK_E)
    next_D = load_tokens(D, row, present, h, H, E, BLOCK_E)
    next_eta = tl.load(eta + row * H + h, mask=present, other=0.0)
    for j in range(0, count):
        i = count - 1 - j
        q_tile = next_q.to(tl.float32)
        k_tile = next_k.to(tl.float32)
        v_tile = next_v.to(tl.float32)
        do = next_do.to(tl.float32)
        D_tile = next_D
        eta_column = next_eta[:, None]
        row, present = chunk_rows(start, tokens, place, i - 1, rows, M, BLOCK_M)
        next_q = load_tokens(q, row, present, h, H, E, BLOCK_E)
        next_k = load_tokens(k, row, present, h, H, E, BLOCK_E)
        next_v = load_tokens(v, row, present, h, H, E, BLOCK_E)
        next_do = load_tokens(d_o, row, present, h, H, E, BLOCK_E)
        next_D = load_tokens(D, row, present, h, H, E, BLOCK_E)
        next_eta = tl.load(eta + row * H + h, mask=present, other=0.0)
        continued = (i == 0) & (place > 0)
        if j > 0:  # undo W <- W - p_M G, and G <- 0, of the next mini-batch
            steps = product(tl.trans(k_tile), D_tile, STEP_PRECISION)
            steps_b = tl.sum(D_tile, 0)
            if traits.HAS_STATE:
                if continued:
                    G_in, g_in = load_steps(G, g, fresh, index, traits)
                    steps += G_in
                    steps_b += g_in
            W_tile += p_last * steps
            b_row += p_last * steps_b
            d_p_last -= tl.sum(steps * dW) + tl.sum(steps_b * db)
            dG = -p_last * dW
            dg = -p_last * db
        if i == 0:  # exact; the first steps may be larger than W
            W_tile = load_start(first_W, W, fresh, index, h, E, BLOCK_E, traits.HAS_STATE)
            b_row = load_start_vector(first_b, b, fresh, index, h, E, BLOCK_E, traits.HAS_STATE)
            if traits.HAS_STATE:
                if place == 0:
                    G_in, g_in = load_steps(G, g, fresh, index, traits)
                    W_tile -= p_last * G_in
                    b_row -= p_last * g_in
        A = tl.where(causal, product(q_tile, tl.trans(k_tile), PRECISION) + 1.0, 0.0)
        step = product(A, D_tile, PRECISION)
        if traits.HAS_STATE:
            if continued:
                G_in, g_in = load_steps(G, g, fresh, index, traits)
                step += product(q_tile, G_in, PRECISION) + g_in[None, :]
        R = product(q_tile, W_tile, PRECISION) + b_row[None, :] - p * step
        Rh, inverse = normalize(R, traits)
        dR = normalize_backward(gain_row * do, Rh, inverse, traits)
        d_p -= tl.sum(dR * step, 1)
        d_step = -p * dR
        dA = tl.where(causal, product(d_step, tl.trans(D_tile), PRECISION), 0.0)
        dD = product(tl.trans(A), d_step, PRECISION) + product(k_tile, dG, PRECISION) + dg[None, :]
        Zh, inverse = normalize(product(k_tile, W_tile, PRECISION) + b_row[None, :], traits)
        target = gain_row * Zh + bias_row - v_tile + k_tile
        U = gain_row * target
        gradient = normalize_backward(U, Zh, inverse, traits)
        row, present = chunk_rows(start, tokens, place, i, rows, M, BLOCK_M)
        tl.store(d_eta + row * H + h, tl.sum(dD * gradient, 1), mask=present)
        d = eta_column * dD
        dU = normalize_backward(d, Zh, inverse, traits)
        d_target = gain_row * dU
        U_Zh = tl.sum(U * Zh, 1)[:, None] / E
        d_Zh = tl.sum(d * Zh, 1)[:, None] / E
        d_normed = gain_row * d_target - (d * U_Zh + U * d_Zh) * inverse
        d_std = tl.sum(d * gradient, 1)[:, None] / E
        dZ = normalize_backward(d_normed, Zh, inverse, traits) - Zh * d_std * inverse
        W_columns = tl.trans(W_tile)
        dq = do + product(dR, W_columns, PRECISION) + product(dA, k_tile, PRECISION)
        dk = d_target + product(dZ, W_columns, PRECISION) + product(tl.trans(dA), q_tile, PRECISION)
        dk += product(D_tile, tl.trans(dG), PRECISION)
        if traits.HAS_STATE:
            if continued:
                G_in, g_in = load_steps(G, g, fresh, index, traits)
                dq += product(d_step, tl.trans(G_in), PRECISION)
        store_tokens(d_q, dq, row, present, h, H, E, BLOCK_E)
        store_tokens(d_k, dk, row, present, h, H, E, BLOCK_E)
        store_tokens(d_v, -d_target, row, present, h, H, E, BLOCK_E)
        gain_sum += tl.sum(do * Rh + dU * (target + gain_row * Zh), 0)
        bias_sum += tl.sum(do + d_target, 0)
        if i == 0:
            dG += product(tl.trans(q_tile), d_step, PRECISION)
            dg += tl.sum(d_step, 0)
        dW += product(tl.trans(q_tile), dR, PRECISION) + product(tl.trans(k_tile), dZ, PRECISION)
        db += tl.sum(dR + dZ, 0)
    if (count > 0) & (place == 0):  # undo the step of the mini-batch before this call
        G_in, g_in = load_steps(G, g, fresh, index, traits)
        d_p_last -= tl.sum(G_in * dW) + tl.sum(g_in * db)
        dG = -p_last * dW
        dg = -p_last * db
    d_p += tl.where(m == M - 1, d_p_last, 0.0)
    store_vector(d_rate, d_p, index, M, BLOCK_M)
    store_vector(d_gain, gain_sum, index, E, BLOCK_E)
    store_vector(d_bias, bias_sum, index, E, BLOCK_E)
    store_matrix(d_W, dW, index, E, E, BLOCK_E, BLOCK_E)
    store_matrix(d_G, dG, index, E, E, BLOCK_E, BLOCK_E)
    store_vector(d_b, db, index, E, BLOCK_E)
    store_vector(d_g, dg, index, E, BLOCK_E)
