"""Reverse scan: the gradients of the states of the levels after each chunk, and of v.

With D_j the gradient of level j after the chunk, where a level that moved has the gradient of the level it moved to:

    dv = (M o lambda)^T do + R D_new,    D_j' = 2^Gend D_j - W^T (R D_j) + E^T (lambda_j do)

The gradients of all levels stay in registers as one matrix [BV JP, K]. prepare.py defines M, E, R and W.
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.levels.kernels.tree import (
    as_levels,
    as_rows,
    count_levels,
    first_chunk_of,
    level_bits,
    level_sequence_bounds,
    live_levels,
    load_chunk_keys,
    load_keys,
    load_level_weights,
    load_square,
    load_values_transposed,
    locate_values,
    merged_level,
    states_at,
    store_levels,
    store_values_transposed,
)


@triton.jit(do_not_specialize=["T", "J", "head", "heads", "entries"])
def level_reverse_kernel(
    q, k, weights, gates, mixed, reads, writes, d_o, d_final, dv, d_state, d_states, offsets, first, cu, counts,
    T, J, head, heads, entries, traits: tl.constexpr,
):  # fmt: skip
    """Scan the chunks of a sequence from the last to the first. Grid: sequence, value head of the window, BV values.

    Reads q, k [B, T, H, K]; weights [B, T, HV, L]; d_o [B, T, HV, V]; d_final [N, J, HV, K, V] or None; the results of
    prepare.py. Writes dv [B, T, HV, V]; d_state [N, J, HV, K, V] unless it is None; d_states [heads, entries, V, K],
    the gradients of the live levels after each chunk, in order, from entry offsets[slot] on.
    """
    C: tl.constexpr = traits.C
    BV: tl.constexpr = traits.BV
    KP: tl.constexpr = traits.KP
    ROWS: tl.constexpr = traits.JP * BV
    PREC: tl.constexpr = traits.PREC
    column, local, n = locate_values(heads, traits)
    hv = head + local
    h = hv // (traits.HV // traits.H)
    start, length, number = level_sequence_bounds(n, first, cu, counts, T, traits)
    slot = first_chunk_of(n, cu, T, traits)
    chunks = tl.cdiv(length, C)
    i = tl.arange(0, C)
    ks = tl.arange(0, traits.KP)
    vs = column + tl.arange(0, BV)
    bits = level_bits(traits)
    in_state = (vs < traits.V)[:, None, None] & (ks < traits.K)[None, None, :]
    D = tl.zeros([ROWS, KP], tl.float32)
    if d_final is not None:
        live = (live_levels(number + chunks, J) & bits) > 0
        D += as_rows(tl.load(states_at(d_final, n, hv, ks, vs, J, traits), mask=in_state & live, other=0.0), traits)
    # one after the last entry of the last chunk
    entry = tl.cast(local, tl.int64) * entries
    if chunks > 0:
        entry += tl.load(offsets + slot + chunks - 1) + count_levels(live_levels(number + chunks - 1, J)) + 1
    for done in range(chunks):
        c = chunks - 1 - done
        chunk = tl.cast(slot + c, tl.int64) * traits.HV + hv
        row = start + c * C
        in_time = i < length - c * C
        levels = live_levels(number + c, J)
        merged = merged_level(number + c, J)
        # All loads precede the first dot: a dot waits for its operands and delays the loads after it.
        G = tl.load(gates + chunk * (2 * C) + i)
        G_end = tl.load(gates + chunk * (2 * C) + C - 1)
        do_T = load_values_transposed(d_o, row, hv, i, column, in_time, traits)
        k_tile = load_keys(k, row, h, i, in_time, traits.H, traits)
        level_weights = load_level_weights(weights, row, hv, i, in_time, levels, traits)
        mixed_tile = load_square(mixed, chunk, C)
        if traits.DELTA:
            E = load_chunk_keys(reads, chunk, traits)
            R = load_chunk_keys(writes, chunk, traits)
            W = (tl.load(gates + chunk * (2 * C) + C + i)[:, None] * k_tile).to(do_T.dtype)
        else:
            E = (tl.exp2(G)[:, None] * load_keys(q, row, h, i, in_time, traits.H, traits)).to(do_T.dtype)
            R = (tl.exp2(G_end - G)[:, None] * k_tile).to(do_T.dtype)
        entry -= count_levels(levels) + 1
        store_levels(d_states, entry, D, live_levels(number + c + 1, J), ks, vs, traits)
        weighted = as_rows(level_weights * do_T[:, None, :], traits).to(do_T.dtype)
        if merged > 1:
            D = as_levels(D, traits)
            d_new = tl.sum(tl.where(bits == merged, D, 0.0), 1)
            D = as_rows(tl.where(bits <= merged, d_new[:, None, :], D), traits)
        written = tl.dot(D.to(do_T.dtype), tl.trans(R), input_precision=PREC)
        d_v = tl.sum(tl.where(bits == merged, as_levels(written, traits), 0.0), 1)
        d_v += tl.dot(do_T, mixed_tile, input_precision=PREC)
        store_values_transposed(dv, d_v, row, hv, i, column, in_time, traits)
        D = tl.dot(weighted, E, tl.exp2(G_end) * D, input_precision=PREC)
        if traits.DELTA:
            D = tl.dot((-written).to(do_T.dtype), W, D, input_precision=PREC)
        D = as_rows(tl.where((levels & bits) > 0, as_levels(D, traits), 0.0), traits)
    if d_state is not None:
        inside = in_state & (tl.arange(0, traits.JP) < J)[None, :, None]
        tl.store(states_at(d_state, n, hv, ks, vs, J, traits), as_levels(D, traits), mask=inside)
