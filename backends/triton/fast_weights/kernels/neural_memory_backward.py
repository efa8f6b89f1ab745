"""The neural memory of Titans in chunks: the backward kernel.

A program processes one sequence and head after the other, and the segments of a sequence in reverse order. It
recomputes M and S before each chunk of a segment from the checkpoint and stores them in scratch memory. Then it
processes the chunks in reverse order. M, S and their gradients stay in global memory, which the L2 cache holds, and are
loaded where a product needs them: they would take all registers of the program, and their spills exceed the L2 cache.

N sequences, H heads, M tokens per chunk, E head width, F inner width; rows: of tokens, B T
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.fast_weights.kernels.gates import load_coefficients, store_gradients
from deltazoo.backends.triton.fast_weights.kernels.neural_memory import (
    advance,
    checkpoint_index,
    gradients_of_pair,
    load_layer,
    read,
    slope,
)
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
def load_memory(saved, at, first, state, begins, fresh, index, h, R: tl.constexpr, C: tl.constexpr,
                BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, HAS_STATE: tl.constexpr):  # fmt: skip
    """Load a layer of M': M before the chunk, or that of the state if the chunk began before the first token."""
    values = load_matrix(saved, at, R, C, BLOCK_R, BLOCK_C)
    if HAS_STATE:
        if not begins:
            values = load_layer(first, state, fresh, index, h, R, C, BLOCK_R, BLOCK_C, HAS_STATE)
    return values


@triton.jit
def layer_backward(
    r, X, Y, d_out, scores, weights, A0, B, e, c, eta_end, b_end, saved, M_at, S_at, dM, dS, index, R: tl.constexpr,
    C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Differentiate `read` and `advance` of a layer, and update dS; the caller updates dM.

    Returns: the gradients of r, X, Y; of C_ts theta_s, A_t, B_t; of C_Ms theta_s [s], E_Ms theta_s [s]; of the last
    A_t, B_t and E_t.
    """
    d_weights = -product(d_out, tl.trans(Y), PRECISION)
    d_scores = rounded(weights * d_weights)
    dr = product(d_scores, X, PRECISION)
    dX = product(tl.trans(d_scores), r, PRECISION)
    dY = -product(tl.trans(rounded(weights * scores)), d_out, PRECISION)
    dM_tile = load_matrix(dM, index, R, C, BLOCK_R, BLOCK_C)
    Y_dM = product(Y, tl.trans(dM_tile), PRECISION)
    dC_row = -tl.sum(X * Y_dM, 1)
    dX -= c[:, None] * Y_dM
    dY -= c[:, None] * product(X, dM_tile, PRECISION)
    M_tile = load_matrix(saved, M_at, R, C, BLOCK_R, BLOCK_C)
    dA_end = tl.sum(dM_tile * M_tile)
    from_M = product(d_out, tl.trans(M_tile), PRECISION)
    dA = tl.sum(r * from_M, 1)
    dr += A0[:, None] * from_M
    S_tile = load_matrix(saved, S_at, R, C, BLOCK_R, BLOCK_C)
    dB_end = tl.sum(dM_tile * S_tile)
    from_S = product(d_out, tl.trans(S_tile), PRECISION)
    dB = tl.sum(r * from_S, 1)
    dr += B[:, None] * from_S
    dS_tile = load_matrix(dS, index, R, C, BLOCK_R, BLOCK_C)
    dE_end = tl.sum(dS_tile * S_tile)
    Y_dS = product(Y, tl.trans(dS_tile), PRECISION)
    dE_row = -tl.sum(X * Y_dS, 1)
    dX -= e[:, None] * Y_dS
    dY -= e[:, None] * product(X, dS_tile, PRECISION)
    dS_tile = eta_end * dS_tile + b_end * dM_tile
    dS_tile += product(tl.trans(r), rounded(B[:, None] * d_out), PRECISION)
    store_matrix(dS, dS_tile, index, R, C, BLOCK_R, BLOCK_C)
    return dr, dX, dY, d_weights * scores, dA, dB, dC_row, dE_row, dA_end, dB_end, dE_end


@triton.jit
def update_gradient(
    dM, dP, P_sum, r, d_out, A0, a_end, begins, is_first, is_last, index, R: tl.constexpr, C: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update the gradients dM and dP of M and M'. P_sum: that of M' from this chunk.

    In the last chunk dP holds the gradient of the new M'. A chunk that begins here has M' = M.
    """
    if is_last:
        P_sum += load_matrix(dP, index, R, C, BLOCK_R, BLOCK_C)
    dM_tile = load_matrix(dM, index, R, C, BLOCK_R, BLOCK_C)
    dM_tile = a_end * dM_tile + product(tl.trans(r), rounded(A0[:, None] * d_out), PRECISION)
    dM_tile += tl.where(begins, P_sum, 0.0)
    store_matrix(dM, dM_tile, index, R, C, BLOCK_R, BLOCK_C)
    if is_first:
        tl.debug_barrier()  # if this chunk is also the last, dP has been loaded
        store_matrix(dP, tl.where(begins, 0.0, P_sum), index, R, C, BLOCK_R, BLOCK_C)


@triton.jit(do_not_specialize=["rows", "slots", "chunk_slots", "items"])
def neural_memory_backward_kernel(
    q, k, v, d_o, first1, first2, P1, P2, spans, coefficients, checkpoints, scratch, d_q, d_k, d_v, d_coefficients,
    d_M1, d_M2, d_P1, d_P2, d_S1, d_S2, rows, slots, chunk_slots, items, traits: tl.constexpr,
):  # fmt: skip
    """Compute the gradients.

    Grid: any number of programs; program i processes the sequences and heads i, i + programs, ... of N H.

    Reads the operands, d_o, the coefficients [chunk_slots, H, M + 5, M], and the checkpoints [slots, H, 2 DEPTH, E F].
    Writes the gradients of q, k, v and of the coefficients. d_M1 to d_S2, [N, H, ..]: the gradients of the new state,
    which become those of the state before the first token. scratch: [programs, SEGMENT, 2 DEPTH, E F] float32.
    """
    H: tl.constexpr = traits.H
    E: tl.constexpr = traits.E
    F: tl.constexpr = traits.F
    M: tl.constexpr = traits.M
    BLOCK_E: tl.constexpr = traits.BLOCK_E
    BLOCK_F: tl.constexpr = traits.BLOCK_F
    BLOCK_M: tl.constexpr = traits.BLOCK_M
    DEPTH: tl.constexpr = traits.DEPTH
    HAS_STATE: tl.constexpr = traits.HAS_STATE
    SEGMENT: tl.constexpr = traits.SEGMENT
    PRECISION: tl.constexpr = traits.PRECISION
    scratch_matrix = tl.program_id(0) * (SEGMENT * 2 * DEPTH)
    for index in range(tl.program_id(0), items, tl.num_programs(0)):
        n = index // H
        h = index % H
        start, tokens, place, fresh = load_span(spans, n)
        count = count_chunks(tokens, place, M)
        segments = tl.cdiv(count, SEGMENT)
        for j in range(0, segments):
            segment_start = (segments - 1 - j) * SEGMENT
            segment_end = tl.minimum(count, segment_start + SEGMENT)
            at = checkpoint_index(start, n, segment_start, h, 0, slots, traits)
            M1_tile = load_matrix(checkpoints, at, E, F, BLOCK_E, BLOCK_F)
            S1_tile = load_matrix(checkpoints, at + DEPTH, E, F, BLOCK_E, BLOCK_F)
            store_matrix(scratch, M1_tile, scratch_matrix, E, F, BLOCK_E, BLOCK_F)
            store_matrix(scratch, S1_tile, scratch_matrix + DEPTH, E, F, BLOCK_E, BLOCK_F)
            if DEPTH == 2:
                M2_tile = load_matrix(checkpoints, at + 1, F, E, BLOCK_F, BLOCK_E)
                S2_tile = load_matrix(checkpoints, at + 3, F, E, BLOCK_F, BLOCK_E)
                store_matrix(scratch, M2_tile, scratch_matrix + 1, F, E, BLOCK_F, BLOCK_E)
                store_matrix(scratch, S2_tile, scratch_matrix + 3, F, E, BLOCK_F, BLOCK_E)
            for i in range(segment_start, segment_end - 1):
                new = scratch_matrix + (i + 1 - segment_start) * (2 * DEPTH)
                begins = (i > 0) | (place == 0)
                row, present = chunk_rows(start, tokens, place, i, rows, M, BLOCK_M)
                k_tile = load_tokens(k, row, present, h, H, E, BLOCK_E).to(tl.float32)
                v_tile = load_tokens(v, row, present, h, H, E, BLOCK_E).to(tl.float32)
                weights, A0, B, e, c, eta_end, a_end, b_end = load_coefficients(
                    coefficients, start, n, i, h, chunk_slots, traits
                )
                P1_tile = M1_tile
                if HAS_STATE:
                    if not begins:
                        P1_tile = load_layer(first1, P1, fresh, index, h, E, F, BLOCK_E, BLOCK_F, HAS_STATE)
                if DEPTH == 1:
                    Y1 = rounded(2.0 * (product(k_tile, P1_tile, PRECISION) - v_tile))
                else:
                    P2_tile = M2_tile
                    if HAS_STATE:
                        if not begins:
                            P2_tile = load_layer(first2, P2, fresh, index, h, F, E, BLOCK_F, BLOCK_E, HAS_STATE)
                    inner, error, Y1 = gradients_of_pair(k_tile, v_tile, P1_tile, P2_tile, PRECISION)
                M1_tile, S1_tile = advance(k_tile, Y1, M1_tile, S1_tile, e, c, eta_end, a_end, b_end, PRECISION)
                store_matrix(scratch, M1_tile, new, E, F, BLOCK_E, BLOCK_F)
                store_matrix(scratch, S1_tile, new + DEPTH, E, F, BLOCK_E, BLOCK_F)
                if DEPTH == 2:
                    M2_tile, S2_tile = advance(inner, error, M2_tile, S2_tile, e, c, eta_end, a_end, b_end, PRECISION)
                    store_matrix(scratch, M2_tile, new + 1, F, E, BLOCK_F, BLOCK_E)
                    store_matrix(scratch, S2_tile, new + 3, F, E, BLOCK_F, BLOCK_E)
            tl.debug_barrier()  # threads load what others have stored
            for l in range(segment_start, segment_end):
                i = segment_start + segment_end - 1 - l
                saved = scratch_matrix + (i - segment_start) * (2 * DEPTH)
                begins = (i > 0) | (place == 0)
                row, present = chunk_rows(start, tokens, place, i, rows, M, BLOCK_M)
                q_tile = load_tokens(q, row, present, h, H, E, BLOCK_E).to(tl.float32)
                k_tile = load_tokens(k, row, present, h, H, E, BLOCK_E).to(tl.float32)
                v_tile = load_tokens(v, row, present, h, H, E, BLOCK_E).to(tl.float32)
                do = load_tokens(d_o, row, present, h, H, E, BLOCK_E).to(tl.float32)
                weights, A0, B, e, c, eta_end, a_end, b_end = load_coefficients(
                    coefficients, start, n, i, h, chunk_slots, traits
                )
                P1_tile = load_memory(
                    scratch, saved, first1, P1, begins, fresh, index, h, E, F, BLOCK_E, BLOCK_F, HAS_STATE
                )
                inner_h = product(k_tile, P1_tile, PRECISION)
                scores = product(q_tile, tl.trans(k_tile), PRECISION)
                if DEPTH == 1:
                    Y1 = rounded(2.0 * (inner_h - v_tile))
                    d_h = do
                else:
                    P2_tile = load_memory(
                        scratch, saved + 1, first2, P2, begins, fresh, index, h, F, E, BLOCK_F, BLOCK_E, HAS_STATE
                    )
                    gate = tl.sigmoid(inner_h)
                    inner = rounded(inner_h * gate)
                    error = rounded(2.0 * (product(inner, P2_tile, PRECISION) - v_tile))
                    back = product(error, tl.trans(P2_tile), PRECISION)
                    Y1 = rounded(back * slope(inner_h, gate))
                    M1_tile = load_matrix(scratch, saved, E, F, BLOCK_E, BLOCK_F)
                    S1_tile = load_matrix(scratch, saved + 2, E, F, BLOCK_E, BLOCK_F)
                    x_h = read(q_tile, scores, weights, Y1, M1_tile, S1_tile, A0, B, PRECISION)
                    x = rounded(x_h * tl.sigmoid(x_h))
                    inner_scores = product(x, tl.trans(inner), PRECISION)
                    dx, d_inner, d_Y2, dC_2, dA_2, dB_2, dC_row_2, dE_row_2, dA_end_2, dB_end_2, dE_end_2 = (
                        layer_backward(
                            x, inner, error, do, inner_scores, weights, A0, B, e, c, eta_end, b_end, scratch, saved + 1,
                            saved + 3, d_M2, d_S2, index, F, E, BLOCK_F, BLOCK_E, PRECISION,
                        )
                    )  # fmt: skip
                    d_h = rounded(dx * slope(x_h, tl.sigmoid(x_h)))
                # loaded again, here and below: they would be spilled in between
                q_tile = load_tokens(q, row, present, h, H, E, BLOCK_E).to(tl.float32)
                k_tile = load_tokens(k, row, present, h, H, E, BLOCK_E).to(tl.float32)
                dq, dk, dY1, dC, dA, dB, dC_row, dE_row, dA_end, dB_end, dE_end = layer_backward(
                    q_tile, k_tile, Y1, d_h, scores, weights, A0, B, e, c, eta_end, b_end, scratch, saved,
                    saved + DEPTH, d_M1, d_S1, index, E, F, BLOCK_E, BLOCK_F, PRECISION,
                )  # fmt: skip
                store_tokens(d_q, dq, row, present, h, H, E, BLOCK_E)
                if DEPTH == 2:
                    dC += dC_2
                    dA += dA_2
                    dB += dB_2
                    dC_row += dC_row_2
                    dE_row += dE_row_2
                    dA_end += dA_end_2
                    dB_end += dB_end_2
                    dE_end += dE_end_2
                store_gradients(
                    d_coefficients, start, n, i, h, chunk_slots, dC, dA, dB, dC_row, dE_row, dA_end, dB_end, dE_end,
                    traits,
                )  # fmt: skip
                is_last = i == count - 1
                if DEPTH == 1:
                    d_error = rounded(2.0 * dY1)
                    d_inner_h = d_error
                else:
                    P2_tile = load_memory(
                        scratch, saved + 1, first2, P2, begins, fresh, index, h, F, E, BLOCK_F, BLOCK_E, HAS_STATE
                    )
                    gate = tl.sigmoid(inner_h)
                    d_back = rounded(dY1 * slope(inner_h, gate))
                    d_error = rounded(2.0 * (d_Y2 + product(d_back, P2_tile, PRECISION)))
                    d_inner += product(d_error, tl.trans(P2_tile), PRECISION)
                    curvature = gate * (1.0 - gate) * (2.0 + inner_h * (1.0 - 2.0 * gate))
                    d_inner_h = rounded(dY1 * back * curvature + d_inner * slope(inner_h, gate))
                    dP2 = product(tl.trans(d_back), error, PRECISION) + product(tl.trans(inner), d_error, PRECISION)
                    update_gradient(
                        d_M2, d_P2, dP2, x, do, A0, a_end, begins, i == 0, is_last, index, F, E, BLOCK_F, BLOCK_E,
                        PRECISION,
                    )  # fmt: skip
                store_tokens(d_v, -d_error, row, present, h, H, E, BLOCK_E)
                P1_tile = load_memory(
                    scratch, saved, first1, P1, begins, fresh, index, h, E, F, BLOCK_E, BLOCK_F, HAS_STATE
                )
                dk += product(d_inner_h, tl.trans(P1_tile), PRECISION)
                store_tokens(d_k, dk, row, present, h, H, E, BLOCK_E)
                dP1 = product(tl.trans(k_tile), d_inner_h, PRECISION)
                update_gradient(
                    d_M1, d_P1, dP1, q_tile, d_h, A0, a_end, begins, i == 0, is_last, index, E, F, BLOCK_E, BLOCK_F,
                    PRECISION,
                )  # fmt: skip
                tl.debug_barrier()  # threads load what others have stored
            tl.debug_barrier()  # the scratch memory is reused
