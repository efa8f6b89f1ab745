"""Scan over the chunks of a sequence: outputs, or the states of the levels before each chunk.

    o = (M o lambda) v + sum_j lambda_j (E S_j),    S_j' = 2^Gend S_j - R^T (W S_j),    S_new = R^T v

After the chunk S_new and the levels below move to one level (tree.py). The states of all levels stay in registers as
one matrix [K, JP BV]. prepare.py defines M, E, R and W; without an erase term E = 2^G q and R = 2^(Gend - G) k.
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
def level_scan_kernel(
    q, k, v, weights, gates, mixed, reads, writes, state, o, final, states, offsets, first, cu, counts,
    T, J, head, heads, entries, traits: tl.constexpr,
):  # fmt: skip
    """Scan the chunks of a sequence. Grid: sequence, value head of the window, tile of BV values.

    Reads q, k [B, T, H, K]; v [B, T, HV, V]; weights [B, T, HV, L]; state [N, J, HV, K, V] or None; the results of
    prepare.py. Writes o [B, T, HV, V] unless it is None; final [N, J, HV, K, V] unless it is None; and unless it is
    None states [heads, entries, V, K], the live levels before each chunk, in order, from entry offsets[slot] on.
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
    i = tl.arange(0, C)
    ks = tl.arange(0, traits.KP)
    vs = column + tl.arange(0, BV)
    bits = level_bits(traits)
    in_state = (vs < traits.V)[:, None, None] & (ks < traits.K)[None, None, :]
    S = tl.zeros([ROWS, KP], tl.float32)
    if state is not None:
        live = (live_levels(number, J) & bits) > 0
        S += as_rows(tl.load(states_at(state, n, hv, ks, vs, J, traits), mask=in_state & live, other=0.0), traits)
    if states is not None:
        entry = tl.cast(local, tl.int64) * entries + tl.load(offsets + slot, mask=length > 0, other=0)
    for c in range(tl.cdiv(length, C)):
        chunk = tl.cast(slot + c, tl.int64) * traits.HV + hv
        row = start + c * C
        in_time = i < length - c * C
        levels = live_levels(number + c, J)
        merged = merged_level(number + c, J)
        # All loads precede the first dot: a dot waits for its operands and delays the loads after it.
        G = tl.load(gates + chunk * (2 * C) + i)
        G_end = tl.load(gates + chunk * (2 * C) + C - 1)
        v_T = load_values_transposed(v, row, hv, i, column, in_time, traits)
        k_tile = load_keys(k, row, h, i, in_time, traits.H, traits)
        if o is not None:
            level_weights = load_level_weights(weights, row, hv, i, in_time, levels, traits)
            mixed_tile = load_square(mixed, chunk, C)
            if traits.DELTA:
                E = load_chunk_keys(reads, chunk, traits)
            else:
                E = (tl.exp2(G)[:, None] * load_keys(q, row, h, i, in_time, traits.H, traits)).to(v_T.dtype)
        if traits.DELTA:
            erase = tl.load(gates + chunk * (2 * C) + C + i)
            W = (erase[:, None] * k_tile).to(v_T.dtype)
            R = load_chunk_keys(writes, chunk, traits)
        else:
            R = (tl.exp2(G_end - G)[:, None] * k_tile).to(v_T.dtype)
        if states is not None:
            store_levels(states, entry, S, levels, ks, vs, traits)
            entry += count_levels(levels) + 1
        if traits.DELTA or o is not None:
            S_operand = S.to(v_T.dtype)
        if o is not None:
            read = as_levels(tl.dot(S_operand, tl.trans(E), input_precision=PREC), traits)
            out = tl.dot(v_T, tl.trans(mixed_tile), input_precision=PREC) + tl.sum(level_weights * read, 1)
            store_values_transposed(o, out, row, hv, i, column, in_time, traits)
        # the rows of the level to which the chunk moves take its write
        x = tl.where(bits == merged, v_T.to(tl.float32)[:, None, :], 0.0)
        if traits.DELTA:
            x -= as_levels(tl.dot(S_operand, tl.trans(W), input_precision=PREC), traits)
        S = tl.dot(as_rows(x, traits).to(v_T.dtype), R, tl.exp2(G_end) * S, input_precision=PREC)
        if merged > 1:
            S = as_levels(S, traits)
            moved = tl.sum(tl.where(bits <= merged, S, 0.0), 1)
            S = as_rows(tl.where(bits == merged, moved[:, None, :], tl.where(bits < merged, 0.0, S)), traits)
    if final is not None:
        inside = in_state & (tl.arange(0, traits.JP) < J)[None, :, None]
        tl.store(states_at(final, n, hv, ks, vs, J, traits), as_levels(S, traits), mask=inside)
