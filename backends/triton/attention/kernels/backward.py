"""Backward: gradients of the queries, then those of the keys, the values and the sums of the gates.

With p = 2^(x - lse) and dp_ts = do_t . v_s

    ds = p (dp - delta),    delta_t = sum_s p_ts dp_ts
    dq = scale ds k,    dk = scale ds^T q,    dv = p^T do,    dg_s = -sum_t ds_ts

A row of ds adds up to zero, so that only the sums up to the keys have gradients. The gradient of log f_r is the sum of
dg_s over s >= r, in which nearly everything cancels. It is accurate only if delta is the sum of the p dp that the
gradients use. delta computed from o has the rounding of bfloat16; the kernel for the queries adds the sum of the row of
ds that results from it.

tiles.py defines the scores x and the sizes.
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.attention.kernels.tiles import LOG2E, head_rows, load_rows, load_terms
from deltazoo.backends.triton.device.layout import locate_chunk


@triton.jit
def query_gradient_tile(
    dq_tile, sum_ds, q_tile, do_tile, high_t, low_t, delta, k, v, sums, reference, first, n, length, k_stride, v_stride,
    low, DIAGONAL: tl.constexpr, traits: tl.constexpr,
):  # fmt: skip
    """Add the keys n, ..., n + BN - 1 to the gradients of a tile of queries. low_t: the low term of g minus lse.

    DIAGONAL: some keys come after some queries, or after the end of the sequence.
    """
    k_tile = load_rows(k, n, length, k_stride, traits.BN, DIAGONAL, traits)
    v_tile = load_rows(v, n, length, v_stride, traits.BN, DIAGONAL, traits)
    high_s, low_s = load_terms(sums, n, length, low, traits.BN, DIAGONAL)
    products = tl.dot(q_tile, tl.trans(k_tile), input_precision=traits.PREC)
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=traits.PREC)
    if DIAGONAL:
        gates = (high_t[:, None] - high_s[None, :]) + (low_t[:, None] - low_s[None, :])
    else:
        gates = ((high_t - reference) + low_t)[:, None] - ((high_s - reference) + low_s)[None, :]
    p = tl.exp2(products * (traits.SCALE * LOG2E) + gates)
    if DIAGONAL:
        t = first + tl.arange(0, traits.BM)[:, None]
        p = tl.where(n + tl.arange(0, traits.BN)[None, :] <= t, p, 0.0)
    ds = p * (dp - delta[:, None])
    sum_ds += tl.sum(ds, 1)
    dq_tile = tl.dot(ds.to(k_tile.dtype), k_tile, dq_tile, input_precision=traits.PREC)
    return dq_tile, sum_ds


@triton.jit(do_not_specialize=["T", "N", "R", "slots", "q_stride", "k_stride", "v_stride"])
def query_gradients_kernel(
    q, k, v, o, do, sums, lse, cu, dq, rows, T, N, R, slots, q_stride, k_stride, v_stride, traits: tl.constexpr,
):  # fmt: skip
    """Compute a tile of dq, and what the gradients of the keys need of each query.

    Grid: H x slots, tiles of BM queries; those with most keys first, and the heads that share keys side by side.

    Reads q, o, do [B, T, H, E], k and v [B, T, G, E], sums [2, H, R], lse [H, R]; o and do are contiguous. Writes dq
    [B, T, H, E], rows [2, H, R]: the low term of g minus lse; delta.
    """
    BM: tl.constexpr = traits.BM
    BN: tl.constexpr = traits.BN
    BLOCK: tl.constexpr = traits.BLOCK
    h = tl.program_id(0) // slots
    slot = slots - 1 - tl.program_id(0) % slots
    start, length, first = locate_chunk(slot, cu, N, T, BM, traits.PACKED)
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
        o_tile = tl.load(o + at, mask=in_tile, other=0.0)
        delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
        high_t, low_t = load_terms(sums, first, length, low, BM, True)
        low_t -= tl.load(lse + at_head + first + row_m, mask=in_rows, other=0.0)
        dq_tile = tl.zeros([BM, BLOCK], tl.float32)
        sum_ds = tl.zeros([BM], tl.float32)
        full = first // BN * BN
        for n in range(0, full, BN):
            dq_tile, sum_ds = query_gradient_tile(
                dq_tile, sum_ds, q_tile, do_tile, high_t, low_t, delta, k, v, sums, reference, first, n, length,
                k_stride, v_stride, low, False, traits,
            )  # fmt: skip
        for n in range(full, tl.minimum(first + BM, length), BN):
            dq_tile, sum_ds = query_gradient_tile(
                dq_tile, sum_ds, q_tile, do_tile, high_t, low_t, delta, k, v, sums, reference, first, n, length,
                k_stride, v_stride, low, True, traits,
            )  # fmt: skip
        tl.store(dq + at, dq_tile * traits.SCALE, mask=in_tile)
        rows += at_head + first
        tl.store(rows + row_m, low_t, mask=in_rows)
        tl.store(rows + low + row_m, delta + sum_ds, mask=in_rows)


@triton.jit
def key_gradient_tile(
    dk_tile, dv_tile, sum_ds, k_tile, v_tile, high_s, low_s, q, do, sums, rows, reference, first, t, length, q_stride,
    low, DIAGONAL: tl.constexpr, traits: tl.constexpr,
):  # fmt: skip
    """Add the queries t, ..., t + BM - 1 to the gradients of the keys first, ..., first + BN - 1; tiles are [BN, BM].

    DIAGONAL: some queries come before some keys.
    """
    at = t + tl.arange(0, traits.BM)
    q_tile = load_rows(q, t, length, q_stride, traits.BM, True, traits)
    do_tile = load_rows(do, t, length, traits.H * traits.E // traits.UNIT, traits.BM, True, traits)
    high_t = tl.load(sums + at, mask=at < length, other=float("-inf"))  # so that p = 0 after the end
    low_t, delta = load_terms(rows, t, length, low, traits.BM, True)
    products = tl.dot(k_tile, tl.trans(q_tile), input_precision=traits.PREC)
    dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=traits.PREC)
    if DIAGONAL:
        gates = (high_t[None, :] - high_s[:, None]) + (low_t[None, :] - low_s[:, None])
    else:
        gates = ((high_t - reference) + low_t)[None, :] - ((high_s - reference) + low_s)[:, None]
    p = tl.exp2(products * (traits.SCALE * LOG2E) + gates)
    if DIAGONAL:
        p = tl.where(first + tl.arange(0, traits.BN)[:, None] <= at[None, :], p, 0.0)
    dv_tile = tl.dot(p.to(do_tile.dtype), do_tile, dv_tile, input_precision=traits.PREC)
    ds = p * (dp - delta[None, :])
    sum_ds += tl.sum(ds, 1)
    dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile, input_precision=traits.PREC)
    return dk_tile, dv_tile, sum_ds


@triton.jit(do_not_specialize=["T", "N", "R", "slots", "q_stride", "k_stride", "v_stride"])
def key_gradients_kernel(
    q, k, v, do, sums, rows, cu, dk, dv, d_sums, T, N, R, slots, q_stride, k_stride, v_stride, traits: tl.constexpr,
):  # fmt: skip
    """Compute a tile of dk and of dv, and the gradients of the sums of the gates, from all query heads of a key head.

    Grid: G x slots, tiles of BN keys; those with most queries first.

    Reads q, do [B, T, H, E], k and v [B, T, G, E], sums and rows [2, H, R]; do is contiguous, rows are those of
    `query_gradients_kernel`. Writes dk, dv [B, T, G, E], d_sums [H, R].
    """
    BM: tl.constexpr = traits.BM
    BN: tl.constexpr = traits.BN
    BLOCK: tl.constexpr = traits.BLOCK
    GROUP: tl.constexpr = traits.H // traits.G
    head = tl.program_id(0) // slots
    start, length, first = locate_chunk(tl.program_id(0) % slots, cu, N, T, BN, traits.PACKED)
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
        in_rows = row_n < length - first
        begin = first // BM * BM
        full = tl.minimum(tl.cdiv(first + BN, BM) * BM, tl.cdiv(length, BM) * BM)
        for i in range(GROUP):
            h = head * GROUP + i
            at_head = tl.cast(h, tl.int64) * R + start
            q_head = head_rows(q, start, q_stride, h, traits.E, traits)
            do_head = head_rows(do, start, traits.H * traits.E // traits.UNIT, h, traits.E, traits)
            reference = tl.load(sums + at_head + tl.minimum(first + BN, length) - 1)
            high_s, low_s = load_terms(sums + at_head, first, length, low, BN, True)
            sum_ds = tl.zeros([BN], tl.float32)
            for t in range(begin, full, BM):
                dk_tile, dv_tile, sum_ds = key_gradient_tile(
                    dk_tile, dv_tile, sum_ds, k_tile, v_tile, high_s, low_s, q_head, do_head, sums + at_head,
                    rows + at_head, reference, first, t, length, q_stride, low, True, traits,
                )  # fmt: skip
            for t in range(full, length, BM):
                dk_tile, dv_tile, sum_ds = key_gradient_tile(
                    dk_tile, dv_tile, sum_ds, k_tile, v_tile, high_s, low_s, q_head, do_head, sums + at_head,
                    rows + at_head, reference, first, t, length, q_stride, low, False, traits,
                )  # fmt: skip
            tl.store(d_sums + at_head + first + row_n, -sum_ds, mask=in_rows)
        e = tl.arange(0, BLOCK)[None, :]
        at = ((start + first) * traits.G + head) * traits.E + row_n[:, None] * (traits.G * traits.E) + e
        in_tile = in_rows[:, None] & (e < traits.E)
        tl.store(dk + at, dk_tile * traits.SCALE, mask=in_tile)
        tl.store(dv + at, dv_tile, mask=in_tile)
