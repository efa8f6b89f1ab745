"""Backward: gradients of the queries, then those of the keys, the values and the sums of the gates.

With p = 2^(x - lse) and dp_ts = do_t . v_s

    ds = p (dp - delta),    delta_t = sum_s p_ts dp_ts
    dq = scale ds k,    dk = scale ds^T q,    dv = p^T do,    dg_s = -sum_t ds_ts

A row of ds adds up to zero, so that only the sums up to the keys have gradients. The gradient of log f_r is the sum of
dg_s over s >= r, in which nearly everything cancels. It is accurate only if delta is the sum of the p dp that the
gradients use. delta computed from o, stored in two terms, still has the rounding of p in o; the kernel for the queries
adds the sum of the row of ds that results from it.

tiles.py defines the scores x and the sizes.
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.attention.kernels.tiles import (
    LOG2E,
    block_end_sum,
    first_key,
    head_rows,
    load_rows,
    load_terms,
)
from deltazoo.backends.triton.device.layout import find_sequence, first_chunk_slot, sequence_bounds


@triton.jit
def query_gradient_tile(dq_tile, sum_ds, p, do_tile, delta, k_tile, v_tile, traits: tl.constexpr):
    """Add a tile of keys with weights p to the gradients of a tile of queries."""
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=traits.PREC)
    ds = p * (dp - delta[:, None])
    sum_ds += tl.sum(ds, 1)
    dq_tile = tl.dot(ds.to(k_tile.dtype), k_tile, dq_tile, input_precision=traits.PREC)
    return dq_tile, sum_ds


@triton.jit(do_not_specialize=["T", "N", "R", "slots", "sum_slots", "q_stride", "k_stride", "v_stride"])
def query_gradients_kernel(
    q, k, v, o, o_low, do, sums, norms, lse, cu, dq, rows, starts, T, N, R, slots, sum_slots, q_stride, k_stride,
    v_stride, traits: tl.constexpr,
):  # fmt: skip
    """Compute a tile of dq, and what the gradients of the keys need of each query.

    Grid: H x slots, tiles of BM queries; those with most keys first, and the heads that share keys side by side.

    Reads q, o, o_low, do [B, T, H, E], k and v [B, T, G, E], sums [3, H, R], lse [H, R]; o, o_low (the rest of o, or
    None) and do are contiguous. Writes dq
    [B, T, H, E]; rows [2, H, R]: g minus lse and minus g at the first token of the block of ROW_BLOCK; delta; starts
    [H, slots], the first key that each tile needs.
    """
    BM: tl.constexpr = traits.BM
    BN: tl.constexpr = traits.BN
    BLOCK: tl.constexpr = traits.BLOCK
    h = tl.program_id(0) // slots
    slot = slots - 1 - tl.program_id(0) % slots
    i = find_sequence(slot, cu, N, 1, 0, BM) if traits.PACKED else slot // tl.cdiv(T, BM)
    start, length = sequence_bounds(i, cu, T, traits.PACKED)
    first = (slot - first_chunk_slot(i, cu, T, BM, traits.PACKED)) * BM
    if first < length:
        q = head_rows(q, start, q_stride, h, traits.E, traits)
        k = head_rows(k, start, k_stride, h // (traits.H // traits.G), traits.E, traits)
        v = head_rows(v, start, v_stride, h // (traits.H // traits.G), traits.E, traits)
        at_head = tl.cast(h, tl.int64) * R + start
        sums += at_head
        low = traits.H * tl.cast(R, tl.int64)
        reference = tl.load(sums + first)
        q_tile = load_rows(q, first, length, q_stride, BM, True, traits)
        row_m = tl.arange(0, BM)
        e = tl.arange(0, BLOCK)[None, :]
        at = ((start + first) * traits.H + h) * traits.E + row_m[:, None] * (traits.H * traits.E) + e
        in_rows = row_m < length - first
        in_tile = in_rows[:, None] & (e < traits.E)
        do_tile = tl.load(do + at, mask=in_tile, other=0.0)
        o_tile = tl.load(o + at, mask=in_tile, other=0.0).to(tl.float32)
        if o_low is not None:
            o_tile += tl.load(o_low + at, mask=in_tile, other=0.0).to(tl.float32)
        delta = tl.sum(o_tile * do_tile.to(tl.float32), 1)
        high_t, low_t = load_terms(sums, first, length, low, BM, True)
        block = (first + row_m) // traits.ROW_BLOCK * traits.ROW_BLOCK
        high_b = tl.load(sums + block, mask=in_rows, other=0.0)
        low_b = tl.load(sums + low + block, mask=in_rows, other=0.0)
        lse_tile = tl.load(lse + at_head + first + row_m, mask=in_rows, other=0.0)
        rows += at_head + first
        tl.store(rows + row_m, (high_t - high_b) + (low_t - low_b - lse_tile), mask=in_rows)
        low_t -= lse_tile
        row = (high_t - reference) + low_t
        dq_tile = tl.zeros([BM, BLOCK], tl.float32)
        sum_ds = tl.zeros([BM], tl.float32)
        full = first // BN * BN
        norms += h // (traits.H // traits.G) * sum_slots + first_chunk_slot(i, cu, T, traits.SUM_BLOCK, traits.PACKED)
        needed = first_key(q_tile, sums, norms, first, full, length, reference, traits)
        tl.store(starts + h * slots + slot, needed)
        following = block_end_sum(sums, needed, length, reference, low, traits)
        for n in range(needed, full, BN):
            from_end = row - following
            following = block_end_sum(sums, n + BN, length, reference, low, traits)
            k_tile = load_rows(k, n, length, k_stride, BN, False, traits)
            v_tile = load_rows(v, n, length, v_stride, BN, False, traits)
            local = tl.load(sums + 2 * low + n + tl.arange(0, BN))
            products = tl.dot(q_tile, tl.trans(k_tile), input_precision=traits.PREC)
            p = tl.exp2((products * (traits.SCALE * LOG2E) - local[None, :]) + from_end[:, None])
            dq_tile, sum_ds = query_gradient_tile(dq_tile, sum_ds, p, do_tile, delta, k_tile, v_tile, traits)
        t = first + row_m[:, None]
        for n in range(full, tl.minimum(first + BM, length), BN):
            k_tile = load_rows(k, n, length, k_stride, BN, True, traits)
            v_tile = load_rows(v, n, length, v_stride, BN, True, traits)
            high_s, low_s = load_terms(sums, n, length, low, BN, True)
            products = tl.dot(q_tile, tl.trans(k_tile), input_precision=traits.PREC)
            gates = (high_t[:, None] - high_s[None, :]) + (low_t[:, None] - low_s[None, :])
            p = tl.exp2(products * (traits.SCALE * LOG2E) + gates)
            p = tl.where(n + tl.arange(0, BN)[None, :] <= t, p, 0.0)
            dq_tile, sum_ds = query_gradient_tile(dq_tile, sum_ds, p, do_tile, delta, k_tile, v_tile, traits)
        tl.store(dq + at, dq_tile * traits.SCALE, mask=in_tile)
        tl.store(rows + low + row_m, delta + sum_ds, mask=in_rows)


@triton.jit
def last_query(starts, first, full, length, traits: tl.constexpr):
    """Return the end of the queries that need a tile of keys: a multiple of BM, or `length`.

    Args: starts: the first key that each tile of queries of the sequence needs. full: the first query that sees all
        keys of the tile.
    """
    tiles = tl.cdiv(length, traits.QUERY_TILE)
    stop = full
    for i in range(0, tiles, 64):
        tile = i + tl.arange(0, 64)
        start = tl.load(starts + tile, mask=tile < tiles, other=2147483647)
        needs = start < first + traits.BN
        stop = tl.maximum(stop, tl.max(tl.where(needs, (tile + 1) * traits.QUERY_TILE, 0), 0))
    return tl.minimum(tl.cdiv(stop, traits.BM) * traits.BM, length)


@triton.jit
def key_gradient_tile(dk_tile, dv_tile, sum_ds, p, v_tile, q_tile, do_tile, delta, traits: tl.constexpr):
    """Add a tile of queries with weights p [BN, BM] to the gradients of a tile of keys."""
    dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=traits.PREC)
    dv_tile = tl.dot(p.to(do_tile.dtype), do_tile, dv_tile, input_precision=traits.PREC)
    ds = p * (dp - delta[None, :])
    sum_ds += tl.sum(ds, 1)
    dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile, input_precision=traits.PREC)
    return dk_tile, dv_tile, sum_ds


@triton.jit(do_not_specialize=["T", "N", "R", "slots", "query_slots", "q_stride", "k_stride", "v_stride"])
def key_gradients_kernel(
    q, k, v, do, sums, lse, rows, starts, cu, dk, dv, d_sums, T, N, R, slots, query_slots, q_stride, k_stride, v_stride,
    traits: tl.constexpr,
):  # fmt: skip
    """Compute a tile of dk and of dv, and the gradients of the sums of the gates, from all query heads of a key head.

    Grid: G x slots, tiles of BN keys; those with most queries first.

    Reads q, do [B, T, H, E], k and v [B, T, G, E], sums [3, H, R], lse [H, R], rows [2, H, R] and starts
    [H, query_slots]; do is contiguous, rows and starts are those of `query_gradients_kernel` with ROW_BLOCK = BM.
    Writes dk, dv [B, T, G, E], d_sums [H, R].
    """
    BM: tl.constexpr = traits.BM
    BN: tl.constexpr = traits.BN
    BLOCK: tl.constexpr = traits.BLOCK
    GROUP: tl.constexpr = traits.H // traits.G
    head = tl.program_id(0) // slots
    slot = tl.program_id(0) % slots
    n = find_sequence(slot, cu, N, 1, 0, BN) if traits.PACKED else slot // tl.cdiv(T, BN)
    start, length = sequence_bounds(n, cu, T, traits.PACKED)
    first = (slot - first_chunk_slot(n, cu, T, BN, traits.PACKED)) * BN
    if first < length:
        k_tile = load_rows(
            head_rows(k, start, k_stride, head, traits.E, traits), first, length, k_stride, BN, True, traits
        )
        v_tile = load_rows(
            head_rows(v, start, v_stride, head, traits.E, traits), first, length, v_stride, BN, True, traits
        )
        low = traits.H * tl.cast(R, tl.int64)
        dk_tile = tl.zeros([BN, BLOCK], tl.float32)
        dv_tile = tl.zeros([BN, BLOCK], tl.float32)
        row_n = tl.arange(0, BN)
        row_t = tl.arange(0, BM)
        do_stride: tl.constexpr = traits.H * traits.E // traits.UNIT
        in_rows = row_n < length - first
        begin = first // BM * BM
        full = tl.cdiv(first + BN, BM) * BM  # from here on queries see all keys
        overlapping = tl.cdiv(tl.minimum(full, length) - begin, BM)
        starts += first_chunk_slot(n, cu, T, traits.QUERY_TILE, traits.PACKED)
        for i in range(GROUP):
            h = head * GROUP + i
            at_head = tl.cast(h, tl.int64) * R + start
            q_head = head_rows(q, start, q_stride, h, traits.E, traits)
            do_head = head_rows(do, start, do_stride, h, traits.E, traits)
            sums_head = sums + at_head
            rows_head = rows + at_head
            reference = tl.load(sums_head + tl.minimum(first + BN, length) - 1)
            high_s, low_s = load_terms(sums_head, first, length, low, BN, True)
            g = (high_s - reference) + low_s
            stop = last_query(starts + h * query_slots, first, full, length, traits)
            whole = tl.maximum(stop // BM * BM, full)  # from here on a tile is not whole
            edges = overlapping + tl.cdiv(tl.maximum(stop - whole, 0), BM)
            sum_ds = tl.zeros([BN], tl.float32)
            for edge in range(0, edges):
                t = tl.where(edge < overlapping, begin + edge * BM, whole)
                q_tile = load_rows(q_head, t, length, q_stride, BM, True, traits)
                do_tile = load_rows(do_head, t, length, do_stride, BM, True, traits)
                at_t = t + row_t
                in_time = at_t < length
                high_t = tl.load(sums_head + at_t, mask=in_time, other=float("-inf"))  # p = 0 after the end
                low_t = tl.load(sums_head + low + at_t, mask=in_time, other=0.0)
                low_t -= tl.load(lse + at_head + at_t, mask=in_time, other=0.0)
                delta = tl.load(rows_head + low + at_t, mask=in_time, other=0.0)
                products = tl.dot(k_tile, tl.trans(q_tile), input_precision=traits.PREC)
                gates = (high_t[None, :] - high_s[:, None]) + (low_t[None, :] - low_s[:, None])
                p = tl.exp2(products * (traits.SCALE * LOG2E) + gates)
                p = tl.where(first + row_n[:, None] <= at_t[None, :], p, 0.0)
                dk_tile, dv_tile, sum_ds = key_gradient_tile(
                    dk_tile, dv_tile, sum_ds, p, v_tile, q_tile, do_tile, delta, traits
                )
            at_block = tl.minimum(full, length - 1)
            following = (tl.load(sums_head + at_block) - reference) + tl.load(sums_head + low + at_block)
            for t in range(full, whole, BM):
                to_block = following - g
                at_block = tl.minimum(t + BM, length - 1)
                following = (tl.load(sums_head + at_block) - reference) + tl.load(sums_head + low + at_block)
                q_tile = load_rows(q_head, t, length, q_stride, BM, False, traits)
                do_tile = load_rows(do_head, t, length, do_stride, BM, False, traits)
                local = tl.load(rows_head + t + row_t)
                delta = tl.load(rows_head + low + t + row_t)
                products = tl.dot(k_tile, tl.trans(q_tile), input_precision=traits.PREC)
                p = tl.exp2((products * (traits.SCALE * LOG2E) + local[None, :]) + to_block[:, None])
                dk_tile, dv_tile, sum_ds = key_gradient_tile(
                    dk_tile, dv_tile, sum_ds, p, v_tile, q_tile, do_tile, delta, traits
                )
            tl.store(d_sums + at_head + first + row_n, -sum_ds, mask=in_rows)
        e = tl.arange(0, BLOCK)[None, :]
        at = ((start + first) * traits.G + head) * traits.E + row_n[:, None] * (traits.G * traits.E) + e
        in_tile = in_rows[:, None] & (e < traits.E)
        tl.store(dk + at, dk_tile * traits.SCALE, mask=in_tile)
        tl.store(dv + at, dv_tile, mask=in_tile)
