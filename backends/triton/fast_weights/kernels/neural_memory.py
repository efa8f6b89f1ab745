"""The neural memory of Titans in chunks: the forward kernel.

A program processes one sequence and head. It keeps M and S of each layer in registers, and processes the chunks in
order. The equations are in backends/ops/fast_weights/neural_memory_chunks.py.

N sequences, H heads, M tokens per chunk, E head width, F inner width; rows: of tokens, B T
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.fast_weights.kernels.gates import load_coefficients
from deltazoo.backends.triton.fast_weights.kernels.tiles import (
    chunk_rows,
    count_chunks,
    load_matrix,
    load_span,
    load_tokens,
    product,
    rounded,
    store_matrix,
    store_tokens,
)


@triton.jit
def load_layer(first, state, fresh, index, h, R: tl.constexpr, C: tl.constexpr, BLOCK_R: tl.constexpr,
               BLOCK_C: tl.constexpr, HAS_STATE: tl.constexpr):  # fmt: skip
    """Load a layer before the first token: that of the head in `first`, or of the state; zeros if `first` is None."""
    if first is None:
        values = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    else:
        values = load_matrix(first, h, R, C, BLOCK_R, BLOCK_C)
    if HAS_STATE:
        if not fresh:
            values = load_matrix(state, index, R, C, BLOCK_R, BLOCK_C)
    return values


@triton.jit
def read(r, scores, weights, Y, M, S, A0, B, PRECISION: tl.constexpr):
    """Return r_t M_t for the tokens of a chunk. weights: C_ts theta_s; scores: r x^T."""
    out = A0[:, None] * product(r, M, PRECISION)
    out += B[:, None] * product(r, S, PRECISION)
    return out - product(rounded(weights * scores), Y, PRECISION)


@triton.jit
def advance(X, Y, M, S, e, c, eta_end, a_end, b_end, PRECISION: tl.constexpr):
    """Return M and S after the chunk. e, c: E_Ms theta_s and C_Ms theta_s."""
    X_columns = tl.trans(X)
    new_M = a_end * M + b_end * S - product(X_columns, rounded(c[:, None] * Y), PRECISION)
    return new_M, eta_end * S - product(X_columns, rounded(e[:, None] * Y), PRECISION)


@triton.jit
def slope(h, gate):
    """Return the derivative of silu, from gate = sigmoid(h)."""
    return gate * (1.0 + h * (1.0 - gate))


@triton.jit
def gradients_of_pair(k, v, P1, P2, PRECISION: tl.constexpr):
    """Return (X2, Y2, Y1) of two layers at the memory P1, P2."""
    h = product(k, P1, PRECISION)
    gate = tl.sigmoid(h)
    inner = rounded(h * gate)
    error = rounded(2.0 * (product(inner, P2, PRECISION) - v))
    return inner, error, rounded(product(error, tl.trans(P2), PRECISION) * slope(h, gate))


@triton.jit
def checkpoint_index(start, n, i, h, j, slots, traits: tl.constexpr):
    """Return the number of matrix j of a checkpoint, which is stored for every SEGMENT-th chunk i."""
    slot = start // (traits.M * traits.SEGMENT) + 2 * n + i // traits.SEGMENT
    slot = tl.minimum(tl.maximum(slot, 0), slots - 1)
    return (slot * traits.H + h) * (2 * traits.DEPTH) + j


@triton.jit(do_not_specialize=["rows", "slots", "chunk_slots"])
def neural_memory_kernel(
    q, k, v, first1, first2, M1, M2, P1, P2, S1, S2, spans, o, new_M1, new_M2, new_P1, new_P2,
    new_S1, new_S2, coefficients, checkpoints, rows, slots, chunk_slots, traits: tl.constexpr,
):  # fmt: skip
    """Compute the outputs and the new state.

    Grid: N H. Reads and writes what `MemoryOperands` lists; M, P (M' there) and S of the layers 1 and 2, None for a
    missing one. The state may be updated in place. coefficients: [chunk_slots, H, M + 5, M] of gates.py. checkpoints:
    [slots, H, 2 DEPTH, E F], or None.
    """
    H: tl.constexpr = traits.H
    E: tl.constexpr = traits.E
    F: tl.constexpr = traits.F
    M: tl.constexpr = traits.M
    BLOCK_E: tl.constexpr = traits.BLOCK_E
    BLOCK_F: tl.constexpr = traits.BLOCK_F
    BLOCK_M: tl.constexpr = traits.BLOCK_M
    HAS_STATE: tl.constexpr = traits.HAS_STATE
    PRECISION: tl.constexpr = traits.PRECISION
    index = tl.program_id(0)
    n = index // H
    h = index % H
    start, tokens, place, fresh = load_span(spans, n)
    count = count_chunks(tokens, place, M)
    M1_tile = load_layer(first1, M1, fresh, index, h, E, F, BLOCK_E, BLOCK_F, HAS_STATE)
    S1_tile = load_layer(None, S1, fresh, index, h, E, F, BLOCK_E, BLOCK_F, HAS_STATE)
    if traits.DEPTH == 2:
        M2_tile = load_layer(first2, M2, fresh, index, h, F, E, BLOCK_F, BLOCK_E, HAS_STATE)
        S2_tile = load_layer(None, S2, fresh, index, h, F, E, BLOCK_F, BLOCK_E, HAS_STATE)
    if (count == 0) | (count == 1) & (place > 0):  # M' stays
        P_tile = load_layer(first1, P1, fresh, index, h, E, F, BLOCK_E, BLOCK_F, HAS_STATE)
        store_matrix(new_P1, P_tile, index, E, F, BLOCK_E, BLOCK_F)
        if traits.DEPTH == 2:
            P_tile = load_layer(first2, P2, fresh, index, h, F, E, BLOCK_F, BLOCK_E, HAS_STATE)
            store_matrix(new_P2, P_tile, index, F, E, BLOCK_F, BLOCK_E)
    row, present = chunk_rows(start, tokens, place, 0, rows, M, BLOCK_M)
    next_q = load_tokens(q, row, present, h, H, E, BLOCK_E)
    next_k = load_tokens(k, row, present, h, H, E, BLOCK_E)
    next_v = load_tokens(v, row, present, h, H, E, BLOCK_E)
    for i in range(0, count):
        row, present = chunk_rows(start, tokens, place, i, rows, M, BLOCK_M)
        q_tile = next_q.to(tl.float32)
        k_tile = next_k.to(tl.float32)
        v_tile = next_v.to(tl.float32)
        next_row, next_present = chunk_rows(start, tokens, place, i + 1, rows, M, BLOCK_M)
        next_q = load_tokens(q, next_row, next_present, h, H, E, BLOCK_E)
        next_k = load_tokens(k, next_row, next_present, h, H, E, BLOCK_E)
        next_v = load_tokens(v, next_row, next_present, h, H, E, BLOCK_E)
        weights, A0, B, e, c, eta_end, a_end, b_end = load_coefficients(
            coefficients, start, n, i, h, chunk_slots, traits
        )
        if traits.SEGMENT > 0:
            if i % traits.SEGMENT == 0:
                at = checkpoint_index(start, n, i, h, 0, slots, traits)
                store_matrix(checkpoints, M1_tile, at, E, F, BLOCK_E, BLOCK_F)
                store_matrix(checkpoints, S1_tile, at + traits.DEPTH, E, F, BLOCK_E, BLOCK_F)
                if traits.DEPTH == 2:
                    store_matrix(checkpoints, M2_tile, at + 1, F, E, BLOCK_F, BLOCK_E)
                    store_matrix(checkpoints, S2_tile, at + 3, F, E, BLOCK_F, BLOCK_E)
        begins = (i > 0) | (place == 0)
        if begins & (i == count - 1):
            store_matrix(new_P1, M1_tile, index, E, F, BLOCK_E, BLOCK_F)
            if traits.DEPTH == 2:
                store_matrix(new_P2, M2_tile, index, F, E, BLOCK_F, BLOCK_E)
        P1_tile = M1_tile
        if HAS_STATE:
            if not begins:
                P1_tile = load_layer(first1, P1, fresh, index, h, E, F, BLOCK_E, BLOCK_F, HAS_STATE)
        if traits.DEPTH == 1:
            Y1 = rounded(2.0 * (product(k_tile, P1_tile, PRECISION) - v_tile))
        else:
            P2_tile = M2_tile
            if HAS_STATE:
                if not begins:
                    P2_tile = load_layer(first2, P2, fresh, index, h, F, E, BLOCK_F, BLOCK_E, HAS_STATE)
            inner, error, Y1 = gradients_of_pair(k_tile, v_tile, P1_tile, P2_tile, PRECISION)
        scores = product(q_tile, tl.trans(k_tile), PRECISION)
        o_tile = read(q_tile, scores, weights, Y1, M1_tile, S1_tile, A0, B, PRECISION)
        M1_tile, S1_tile = advance(k_tile, Y1, M1_tile, S1_tile, e, c, eta_end, a_end, b_end, PRECISION)
        if traits.DEPTH == 2:
            x = rounded(o_tile * tl.sigmoid(o_tile))
            scores = product(x, tl.trans(inner), PRECISION)
            o_tile = read(x, scores, weights, error, M2_tile, S2_tile, A0, B, PRECISION)
            M2_tile, S2_tile = advance(inner, error, M2_tile, S2_tile, e, c, eta_end, a_end, b_end, PRECISION)
        store_tokens(o, o_tile, row, present, h, H, E, BLOCK_E)
    store_matrix(new_M1, M1_tile, index, E, F, BLOCK_E, BLOCK_F)
    store_matrix(new_S1, S1_tile, index, E, F, BLOCK_E, BLOCK_F)
    if traits.DEPTH == 2:
        store_matrix(new_M2, M2_tile, index, F, E, BLOCK_F, BLOCK_E)
        store_matrix(new_S2, S2_tile, index, F, E, BLOCK_F, BLOCK_E)
