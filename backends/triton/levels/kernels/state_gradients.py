"""Gradients of the reads and writes of a chunk, from the states before it and their gradients after it.

With S_j the state of level j before the chunk, and D_j the gradient of what becomes of it after the chunk:

    dE = sum_j lambda_j (do S_j^T),   dlambda_j = rowsum((do S_j^T) * E)
    dR = v D_new^T - sum_j (W S_j) D_j^T,   dW' = -sum_j (R D_j) S_j^T

dW' is the part of dW that is not through E, and D_new the gradient of the level that the chunk joins. prepare.py
defines E, R and W; without an erase term E = 2^G q, R = 2^(Gend - G) k and W = 0.
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.device.layout import store_rows
from deltazoo.backends.triton.levels.kernels.tree import (
    count_levels,
    first_level,
    live_levels,
    load_chunk_keys,
    load_keys,
    load_values,
    locate_level_chunk,
    merged_level,
)


@triton.jit
def load_state(base, entry, column, traits: tl.constexpr):
    """Load a tile [BV, KP] of an entry of states [.., V, K]."""
    k = tl.arange(0, traits.KP)
    v = column + tl.arange(0, traits.BV)
    at = base + entry * (traits.K * traits.V) + v[:, None] * traits.K + k[None, :]
    return tl.load(at, mask=(v < traits.V)[:, None] & (k < traits.K)[None, :], other=0.0)


@triton.jit(do_not_specialize=["N", "T", "J", "head", "heads", "entries"])
def level_state_gradients_kernel(
    q, k, v, weights, gates, reads, writes, d_o, states, d_states, d_reads, d_writes, d_erases, kept, d_weights,
    offsets, first, cu, counts, N, T, J, head, heads, entries, traits: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk. Grid: chunk slot, one of `heads` value heads from `head` on.

    Reads q, k [B, T, H, K]; v, d_o [B, T, HV, V]; weights [B, T, HV, L]; the results of prepare.py, scan.py and
    reverse.py. Writes d_reads, d_writes and, with an erase term, d_erases [slots, heads, C, K] = dE, dR, dW'; kept
    [slots, heads] = sum_j <S_j, D_j>; d_weights [B, T, HV, L] of the levels that hold chunks.
    """
    C: tl.constexpr = traits.C
    BV: tl.constexpr = traits.BV
    KP: tl.constexpr = traits.KP
    PREC: tl.constexpr = traits.PREC
    TILES: tl.constexpr = (traits.V + BV - 1) // BV
    slot = tl.program_id(0) // heads
    local = tl.program_id(0) % heads
    hv = head + local
    h = hv // (traits.HV // traits.H)
    row, count, number = locate_level_chunk(slot, first, cu, counts, N, T, traits)
    if count > 0:
        i = tl.arange(0, C)
        in_time = i < count
        levels = live_levels(number, J)
        live = count_levels(levels)
        below = count_levels(levels & (merged_level(number, J) - 1))  # live levels that move
        top = count_levels(live_levels(number + 1, J)) - 1
        dtype: tl.constexpr = q.dtype.element_ty
        chunk = tl.cast(slot, tl.int64) * traits.HV + hv
        tokens = (row + i) * traits.HV + hv
        entry = tl.cast(local, tl.int64) * entries + tl.load(offsets + slot)
        if traits.DELTA:
            E = load_chunk_keys(reads, chunk, traits)
            R = load_chunk_keys(writes, chunk, traits)
            W = load_keys(k, row, h, i, in_time, traits.H, traits)
            W = (tl.load(gates + chunk * (2 * C) + C + i)[:, None] * W).to(dtype)
            dW = tl.zeros([C, KP], tl.float32)
        else:
            E = load_keys(q, row, h, i, in_time, traits.H, traits)
            E = (tl.exp2(tl.load(gates + chunk * (2 * C) + i))[:, None] * E).to(dtype)
        dE = tl.zeros([C, KP], tl.float32)
        dR = tl.zeros([C, KP], tl.float32)
        for tile in tl.range(0, TILES, num_stages=1):
            v_tile = load_values(v, row, hv, i, tile * BV, in_time, BV, traits)
            d_new = load_state(d_states, entry, tile * BV, traits)
            dR = tl.dot(v_tile, d_new, dR, input_precision=PREC)
        total = 0.0
        left = levels
        for e in range(live):
            bit = left & -left
            left = left ^ bit
            after = tl.minimum(tl.maximum(e - below + 1, 0), top)
            read = tl.zeros([C, KP], tl.float32)
            for tile in range(TILES):
                do = load_values(d_o, row, hv, i, tile * BV, in_time, BV, traits)
                S = load_state(states, entry + e, tile * BV, traits)
                D = load_state(d_states, entry + after, tile * BV, traits)
                read = tl.dot(do, S, read, input_precision=PREC)
                total += tl.sum(tl.sum(S.to(tl.float32) * D.to(tl.float32), 1), 0)
                if traits.DELTA:
                    erased = tl.dot(W, tl.trans(S), input_precision=PREC)
                    dR -= tl.dot(erased.to(dtype), D, input_precision=PREC)
                    written = tl.dot(R, tl.trans(D), input_precision=PREC)
                    dW -= tl.dot(written.to(dtype), S, input_precision=PREC)
            at = tokens * traits.L + first_level(traits) + count_levels(bit - 1)
            tl.store(d_weights + at, tl.sum(read * E, 1), mask=in_time)
            dE += tl.load(weights + at, mask=in_time, other=0.0).to(tl.float32)[:, None] * read
        ks = tl.arange(0, KP)
        in_window = tl.cast(slot, tl.int64) * heads + local
        at = in_window * (C * traits.K)
        store_rows(d_reads + at, dE, i, ks, i >= 0, ks < traits.K, traits.K)
        store_rows(d_writes + at, dR, i, ks, i >= 0, ks < traits.K, traits.K)
        if traits.DELTA:
            store_rows(d_erases + at, dW, i, ks, i >= 0, ks < traits.K, traits.K)
        tl.store(kept + in_window, total)
