"""Flash attention between sibling blocks: forward, gradients of the moved queries, and of the moved keys and values.

For a tile of queries and all keys of its left siblings, with the score x_ts in units of log 2,

    m' = max(m, max_s x),    p = 2^(x - m'),    l' = 2^(m - m') l + sum_s p,    o' = 2^(m - m') o + p v

starting from the attention within the block. Backward, with p = 2^(x - lse) and delta = o . do,

    ds = p (do v^T - delta),    dq = scale ds k,    dk = scale ds^T q,    dv = p^T do

The gradients of a tile's moved queries and keys are those of their level only. path_tiles.py defines the tree.
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.attention.kernels.online_softmax import add_scores
from deltazoo.backends.triton.attention.kernels.path_tiles import (
    LOG2E,
    C,
    gates_after,
    gates_from,
    load_tile,
    locate_tile,
    store_tile,
    token_rows,
)


@triton.jit
def attend_keys(
    o_t, m, l, q_t, in_rows, gate_q, reference, k_base, v_base, sums_base, j, v_step, BN: tl.constexpr,
    MASKED: tl.constexpr, traits: tl.constexpr,
):  # fmt: skip
    """Add the keys j, ..., j + BN - 1 of a left sibling to the online softmax. MASKED: only some rows attend."""
    H: tl.constexpr = traits.H
    i = j + tl.arange(0, BN)
    all_rows = i >= 0
    k_t = load_tile(k_base, i, all_rows, H * traits.D, traits.D, traits.BD, False)
    x = tl.dot(q_t, tl.trans(k_t), input_precision=traits.PREC) * (traits.SCALE * LOG2E)
    if traits.GATED:
        x += gate_q[:, None] - gates_after(sums_base, i, all_rows, reference, H)[None, :]
    if MASKED:
        x = tl.where(in_rows[:, None], x, float("-inf"))
    p, m, l, o_t = add_scores(x, m, l, o_t)
    v_t = load_tile(v_base, i, all_rows, v_step, traits.V, traits.BV, False)
    o_t = tl.dot(p.to(v_t.dtype), v_t, o_t, input_precision=traits.PREC)
    return o_t, m, l


@triton.jit(do_not_specialize=["N", "T", "LEVELS", "v_stride"])
def path_attention_kernel(
    rows, v, sums, o_local, lse_local, o, lse, cu, N, T, LEVELS, v_stride, BM: tl.constexpr, BN: tl.constexpr,
    traits: tl.constexpr,
):  # fmt: skip
    """Compute a tile of o, and the log2 of the sum of exponentials.

    Grid: tiles of BM queries x H, the last tiles first. Reads rows, v, sums or None, and the attention within each
    block. Writes o [B, T, H, V], lse [B, T, H] float32.
    """
    H: tl.constexpr = traits.H
    D: tl.constexpr = traits.D
    V: tl.constexpr = traits.V
    h = tl.program_id(0) % H
    g = h // (H // traits.G)
    slot = tl.num_programs(0) // H - 1 - tl.program_id(0) // H
    _, start, length, t0 = locate_tile(slot, cu, N, T, BM, traits.PACKED)
    if t0 < length:
        i = t0 + tl.arange(0, BM)
        in_time = i < length
        plane = token_rows(N, T, traits.PACKED) * (H * D)
        v_step = tl.cast(v_stride, tl.int64) * traits.UNIT
        q_base = rows + (start * H + h) * D
        k_base = rows + (start * H + g) * D
        v_base = v + start * v_step + g * V
        sums_base = sums + start * H + h if traits.GATED else 0
        o_t = load_tile(o_local + (start * H + h) * V, i, in_time, H * V, V, traits.BV, True)
        m = tl.load(lse_local + (start + i) * H + h, mask=in_time, other=0.0)
        l = tl.full([BM], 1.0, tl.float32)
        a = t0 // C
        if BM > C:  # the blocks of the tile are siblings at level 0
            is_right = in_time & (i >= t0 + C)
            reference, gate_q = gates_from(sums_base, tl.minimum(t0 + C, length - 1), i, in_time, traits)
            q_t = load_tile(q_base, i, is_right, H * D, D, traits.BD, True)
            if t0 + C < length:
                o_t, m, l = attend_keys(
                    o_t, m, l, q_t, is_right, gate_q, reference, k_base, v_base, sums_base, t0, v_step, C, True, traits
                )
        reference, gate_q = gates_from(sums_base, t0, i, in_time, traits)
        for level in range(BM // (2 * C), LEVELS):
            b = a >> level
            has_sibling = (b & 1) == 1
            q_t = load_tile(q_base + level * plane, i, in_time & has_sibling, H * D, D, traits.BD, True)
            first = ((b - 1) << level) * C
            last = tl.where(has_sibling, b << level, (b - 1) << level) * C
            for j in range(first, last, BN):
                o_t, m, l = attend_keys(
                    o_t, m, l, q_t, in_time, gate_q, reference, k_base + level * plane, v_base, sums_base, j, v_step,
                    BN, False, traits,
                )  # fmt: skip
        store_tile(o + (start * H + h) * V, o_t / l[:, None], i, in_time, H * V, V)
        tl.store(lse + (start + i) * H + h, m + tl.log2(l), mask=in_time)


@triton.jit
def differentiate_queries(
    dq_t, total, q_t, do_t, in_rows, lse_t, delta_t, gate_q, reference, k_base, v_base, sums_base, j, v_step,
    BN: tl.constexpr, MASKED: tl.constexpr, traits: tl.constexpr,
):  # fmt: skip
    """Add the keys j, ..., j + BN - 1 of a left sibling to the gradients of the queries, and to the sums of ds."""
    H: tl.constexpr = traits.H
    i = j + tl.arange(0, BN)
    all_rows = i >= 0
    k_t = load_tile(k_base, i, all_rows, H * traits.D, traits.D, traits.BD, False)
    v_t = load_tile(v_base, i, all_rows, v_step, traits.V, traits.BV, False)
    x = tl.dot(q_t, tl.trans(k_t), input_precision=traits.PREC) * (traits.SCALE * LOG2E)
    dp = tl.dot(do_t, tl.trans(v_t), input_precision=traits.PREC)
    if traits.GATED:
        x += gate_q[:, None] - gates_after(sums_base, i, all_rows, reference, H)[None, :]
    p = tl.exp2(x - lse_t[:, None])
    if MASKED:
        p = tl.where(in_rows[:, None], p, 0.0)
    ds = p * (dp - delta_t[:, None])
    if traits.GATED:
        total += tl.sum(ds, 1)
    dq_t = tl.dot(ds.to(k_t.dtype), k_t, dq_t, input_precision=traits.PREC)
    return dq_t, total


@triton.jit(do_not_specialize=["N", "T", "LEVELS", "v_stride"])
def path_query_gradients_kernel(
    rows, v, sums, o, d_o, lse, d_rows, delta, d_sums, cu, N, T, LEVELS, v_stride, BM: tl.constexpr, BN: tl.constexpr,
    traits: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the moved queries of a tile, at all levels.

    Grid: tiles of BM queries x H, the last tiles first. Reads rows, v, sums or None; o, d_o [B, T, H, V]; lse. Writes
    d_rows as rows, delta = o . d_o [B, T, H], and the sum of ds of each query to d_sums [B, T, H] or None.
    """
    H: tl.constexpr = traits.H
    D: tl.constexpr = traits.D
    V: tl.constexpr = traits.V
    BD: tl.constexpr = traits.BD
    h = tl.program_id(0) % H
    g = h // (H // traits.G)
    slot = tl.num_programs(0) // H - 1 - tl.program_id(0) // H
    _, start, length, t0 = locate_tile(slot, cu, N, T, BM, traits.PACKED)
    if t0 < length:
        i = t0 + tl.arange(0, BM)
        in_time = i < length
        plane = token_rows(N, T, traits.PACKED) * (H * D)
        v_step = tl.cast(v_stride, tl.int64) * traits.UNIT
        q_base = rows + (start * H + h) * D
        k_base = rows + (start * H + g) * D
        dq_base = d_rows + (start * H + h) * D
        v_base = v + start * v_step + g * V
        sums_base = sums + start * H + h if traits.GATED else 0
        o_t = load_tile(o + (start * H + h) * V, i, in_time, H * V, V, traits.BV, True)
        do_t = load_tile(d_o + (start * H + h) * V, i, in_time, H * V, V, traits.BV, True)
        delta_t = tl.sum(o_t.to(tl.float32) * do_t.to(tl.float32), 1)
        tl.store(delta + (start + i) * H + h, delta_t, mask=in_time)
        lse_t = tl.load(lse + (start + i) * H + h, mask=in_time, other=0.0)
        total = tl.zeros([BM], tl.float32)
        a = t0 // C
        if BM > C:
            is_right = in_time & (i >= t0 + C)
            reference, gate_q = gates_from(sums_base, tl.minimum(t0 + C, length - 1), i, in_time, traits)
            q_t = load_tile(q_base, i, is_right, H * D, D, traits.BD, True)
            if t0 + C < length:
                dq_t = tl.zeros([BM, BD], tl.float32)
                dq_t, total = differentiate_queries(
                    dq_t, total, q_t, do_t, is_right, lse_t, delta_t, gate_q, reference, k_base, v_base, sums_base, t0,
                    v_step, C, True, traits,
                )  # fmt: skip
                store_tile(dq_base, dq_t * traits.SCALE, i, is_right, H * D, D)
        reference, gate_q = gates_from(sums_base, t0, i, in_time, traits)
        for level in range(BM // (2 * C), LEVELS):
            b = a >> level
            has_sibling = (b & 1) == 1
            q_t = load_tile(q_base + level * plane, i, in_time & has_sibling, H * D, D, traits.BD, True)
            dq_t = tl.zeros([BM, BD], tl.float32)
            first = ((b - 1) << level) * C
            last = tl.where(has_sibling, b << level, (b - 1) << level) * C
            for j in range(first, last, BN):
                dq_t, total = differentiate_queries(
                    dq_t, total, q_t, do_t, in_time, lse_t, delta_t, gate_q, reference, k_base + level * plane, v_base,
                    sums_base, j, v_step, BN, False, traits,
                )  # fmt: skip
            store_tile(dq_base + level * plane, dq_t * traits.SCALE, i, in_time & has_sibling, H * D, D)
        if traits.GATED:
            tl.store(d_sums + (start + i) * H + h, total, mask=in_time)


@triton.jit(do_not_specialize=["N", "T", "LEVELS", "v_stride"])
def path_key_gradients_kernel(
    rows, v, sums, d_o, lse, delta, d_rows, d_v, d_sums, cu, N, T, LEVELS, v_stride, BM: tl.constexpr, BN: tl.constexpr,
    traits: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the values of a tile and of its moved keys, at all levels.

    Grid: tiles of BN keys x G. Reads rows, v, sums or None, d_o, lse, delta. Writes d_rows as rows, d_v [B, T, G, V]
    without the attention within blocks, and subtracts the sum of ds of each key from d_sums [B, T, H].
    """
    H: tl.constexpr = traits.H
    G: tl.constexpr = traits.G
    D: tl.constexpr = traits.D
    V: tl.constexpr = traits.V
    BD: tl.constexpr = traits.BD
    BV: tl.constexpr = traits.BV
    R: tl.constexpr = H // G
    PREC: tl.constexpr = traits.PREC
    g = tl.program_id(0) % G
    slot = tl.program_id(0) // G
    _, start, length, t0 = locate_tile(slot, cu, N, T, BN, traits.PACKED)
    if t0 < length:
        i = t0 + tl.arange(0, BN)
        in_time = i < length
        plane = token_rows(N, T, traits.PACKED) * (H * D)
        v_step = tl.cast(v_stride, tl.int64) * traits.UNIT
        v_t = load_tile(v + start * v_step + g * V, i, in_time, v_step, V, traits.BV, True)
        dv_t = tl.zeros([BN, BV], tl.float32)
        a = t0 // C
        for level in range(LEVELS):
            b = a >> level
            has_sibling = ((b & 1) == 0) & (((b + 1) << level) * C < length)
            # two blocks of a tile are siblings at level 0: only the keys of the left one are seen
            is_left = in_time & has_sibling
            if BN > C:
                is_left = is_left & ((level > 0) | (i < t0 + C))
            first = ((b + 1) << level) * C
            last = tl.where(has_sibling, tl.minimum(((b + 2) << level) * C, length), first)
            k_t = load_tile(rows + level * plane + (start * H + g) * D, i, is_left, H * D, D, traits.BD, True)
            dk_t = tl.zeros([BN, BD], tl.float32)
            for r in range(R):
                h = g * R + r
                total = tl.zeros([BN], tl.float32)
                reference = 0.0
                gate_k = total
                if traits.GATED:
                    reference = tl.load(sums + (start + tl.minimum(first, length - 1)) * H + h)
                    gate_k = gates_after(sums + start * H + h, i, in_time, reference, H)
                for j in range(first, last, BM):
                    t = j + tl.arange(0, BM)
                    in_rows = t < last
                    q_t = load_tile(rows + level * plane + (start * H + h) * D, t, in_rows, H * D, D, traits.BD, True)
                    do_t = load_tile(d_o + (start * H + h) * V, t, in_rows, H * V, V, traits.BV, True)
                    lse_t = tl.load(lse + (start + t) * H + h, mask=in_rows, other=float("inf"))
                    delta_t = tl.load(delta + (start + t) * H + h, mask=in_rows, other=0.0)
                    x = tl.dot(k_t, tl.trans(q_t), input_precision=PREC) * (traits.SCALE * LOG2E)
                    if traits.GATED:
                        x += gates_after(sums + start * H + h, t, in_rows, reference, H)[None, :] - gate_k[:, None]
                    p = tl.exp2(x - lse_t[None, :])
                    if BN > C:
                        p = tl.where(is_left[:, None], p, 0.0)
                    dv_t = tl.dot(p.to(do_t.dtype), do_t, dv_t, input_precision=PREC)
                    dp = tl.dot(v_t, tl.trans(do_t), input_precision=PREC)
                    ds = p * (dp - delta_t[None, :])
                    if traits.GATED:
                        total += tl.sum(ds, 1)
                    dk_t = tl.dot(ds.to(q_t.dtype), q_t, dk_t, input_precision=PREC)
                if traits.GATED:
                    at = d_sums + (start + i) * H + h
                    tl.store(at, tl.load(at, mask=is_left, other=0.0) - total, mask=is_left)
            store_tile(d_rows + level * plane + (start * H + g) * D, dk_t * traits.SCALE, i, is_left, H * D, D)
        store_tile(d_v + (start * G + g) * V, dv_t, i, in_time, G * V, V)
