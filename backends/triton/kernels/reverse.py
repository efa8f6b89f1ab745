"""The reverse scan: the gradient of the state, from the last chunk to the first.

    dx = scale P'^T do + (e^(Gend - G) k) dS',    du = T^T dx,    dv = w du
    dS0 = e^Gend dS' + scale (e^G'' q)^T do - (c e)^T du

with T, P' = P / scale, c and G'' from prepare.py; dS' is the gradient after the chunk, dS0 before it. C chunk,
G cumulative log2 decay in the chunk, H key heads, HV value heads, K key width, V value width
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.kernels.layout import (
    chunk_range,
    clamp_away_from_zero,
    cumulative_decays,
    dot_split_lhs,
    load_column_major,
    load_gate,
    load_rows,
    opaque_zero,
    sequence_and_split,
    significant_prefix,
    store_column_major,
    store_rows,
    store_state,
    store_transposed,
)
from deltazoo.backends.triton.kernels.wy_tiles import dot_T, load_P_T, load_T


@triton.jit(do_not_specialize=["T", "segment", "segments", "parts"])
def reverse_kernel(
    q, k, e, do, gates, decay_bounds, wy_tiles, dstate, dstates, du, dv, begins, ends, cu, scale, T,
    segment, segments, parts,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, OWN: tl.constexpr, WRITE: tl.constexpr, READ_EARLY: tl.constexpr,
    PACKED: tl.constexpr, DU_IS_DV: tl.constexpr, UNIT: tl.constexpr, SPLIT: tl.constexpr,
    MIN_BETA: tl.constexpr, ENDS: tl.constexpr,
    TERMS: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, part, value head, V tile) walks back through one segment; dS^T [BV, K] in registers.

    dstate [N, HV, K, V] float32 takes dS from segment to segment; keeps dS'^T of each chunk in
    dstates [place, HV, V, K] and, with an erase or a write, du [place, C, HV, V], or DU_IS_DV, where w du tells it, none;
    writes dv. With SPLIT > 0 a program is a part of SPLIT chunks, and begins from begins [N parts, HV, V, K]. ENDS,
    before that: what each part but the first hands on when it begins from nothing, into ends [N parts, HV, V + K, K].
    Segments and places are those of `segment_bounds`.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    hv = pid // TILES % HV
    h = hv // (HV // H)
    n, part = sequence_and_split(pid // (TILES * HV), parts, TILES * HV)
    nh = (n * parts + part) * HV + hv
    start, length, slot, first_chunk, first_place, first, last = chunk_range(
        n, part, cu, T, segment, segments, C, UNIT, SPLIT, PACKED
    )
    i = tl.arange(0, C)
    column = (pid % TILES) * BV
    vs = column + tl.arange(0, BV)
    ka = tl.arange(0, K0)
    in_v = vs < V
    in_ka = ka < K
    if K1 > 0:
        kb = K0 + tl.arange(0, K1)
        in_kb = kb < K
    causal = i[:, None] > i[None, :] if READ_EARLY else i[:, None] >= i[None, :]
    dtype: tl.constexpr = k.dtype.element_ty
    if ENDS:
        if part == 0:
            last = first
        # what comes later in the part has faded before its first chunk
        last = first + significant_prefix(decay_bounds, slot + first, last - first, hv, HV, SPLIT)

    if first < last:
        at_carry = dstate + (tl.cast(n, tl.int64) * HV + hv) * V * K
        dSa = tl.zeros([BV, K0], tl.float32)
        if K1 > 0:
            dSb = tl.zeros([BV, K1], tl.float32)
        if not ENDS and SPLIT > 0:
            at_begin = begins + tl.cast(nh, tl.int64) * V * K
            dSa += load_rows(at_begin, vs, ka, in_v, in_ka, K)
            if K1 > 0:
                dSb += load_rows(at_begin, vs, kb, in_v, in_kb, K)
        elif not ENDS:
            dSa += load_column_major(at_carry, vs, ka, in_v, in_ka, V)
            if K1 > 0:
                dSb += load_column_major(at_carry, vs, kb, in_v, in_kb, V)
        for back in tl.range(0, last - first, num_stages=STAGES):
            c = last - 1 - back
            in_time = i < length - c * C
            row = start + c * C
            key = (row * H + h) * K
            place = tl.cast(slot + c, tl.int64) * HV + hv
            local = first_place + c - first_chunk

            k_a = load_rows(k + key, i, ka, in_time, in_ka, H * K)
            q_a = load_rows(q + key, i, ka, in_time, in_ka, H * K)
            if K1 > 0:
                k_b = load_rows(k + key, i, kb, in_time, in_kb, H * K)
                q_b = load_rows(q + key, i, kb, in_time, in_kb, H * K)
            do_T = tl.trans(load_rows(do + (row * HV + hv) * V, i, vs, in_time, in_v, HV * V))
            if not ENDS:
                at = dstates + (tl.cast(local, tl.int64) * HV + hv) * V * K
                store_state(at, dSa, column, ka, in_ka, V, K, True)
                if K1 > 0:
                    store_state(at, dSb, column, kb, in_kb, V, K, True)

            if DELTA:
                T_first = load_T(wy_tiles, place, i, C, TERMS, 0)
                T_rest = load_T(wy_tiles, place, i, C, TERMS, 1) if TERMS == 2 else T_first
            if DELTA:
                P = tl.trans(load_P_T(wy_tiles, dtype, place, i, C, TERMS, 0))
                if TERMS == 2:
                    P_rest = tl.trans(load_P_T(wy_tiles, dtype, place, i, C, TERMS, 1))
            # dx = scale P'^T do + (e^(Gend - G) k) dS'
            dx = dot_split_lhs(dSa, tl.trans(k_a), tl.zeros([BV, C], tl.float32), dtype, TERMS, PREC)
            if K1 > 0:
                dx = dot_split_lhs(dSb, tl.trans(k_b), dx, dtype, TERMS, PREC)
            if DECAY != "none":
                G, G_before, G_end = cumulative_decays(gates, place, i, C)
                G_read = G_before if READ_EARLY else G
                dx *= tl.exp2(G_end - G)[None, :]
            if not DELTA:
                P = tl.dot(q_a, tl.trans(k_a), input_precision=PREC)
                if K1 > 0:
                    P = tl.dot(q_b, tl.trans(k_b), P, input_precision=PREC)
                if DECAY != "none":
                    P *= tl.exp2(tl.where(causal, G_read[:, None] - G[None, :], 0.0))
                P = tl.where(causal, P * scale, 0.0).to(dtype)
            dx = tl.dot(do_T, P, dx, input_precision=PREC)
            if TERMS == 2:
                dx = tl.dot(do_T, P_rest, dx, input_precision=PREC)

            # du = T^T dx
            if DELTA:
                dx = dot_T(dx, T_first, T_rest, dtype, TERMS, PREC)
            if (DELTA or WRITE) and not DU_IS_DV and not ENDS:
                store_transposed(du + (tl.cast(local, tl.int64) * C * HV + hv) * V, dx, C, column, HV * V, V)
            # dS0 = e^Gend dS' + scale (e^G'' q)^T do - (c e)^T du
            doq = do_T.to(tl.float32) * scale
            if DECAY != "none":
                doq *= tl.exp2(G_read)[None, :]
                dSa *= tl.exp2(G_end)
                if K1 > 0:
                    dSb *= tl.exp2(G_end)
            dSa = tl.dot(doq.to(dtype), q_a, dSa, input_precision=PREC)
            if K1 > 0:
                dSb = tl.dot(doq.to(dtype), q_b, dSb, input_precision=PREC)
            if not ENDS:
                dvalue = dx
                if WRITE:
                    write = load_gate(gates, place, 2, i, C)
                    dvalue = dx * (clamp_away_from_zero(write, MIN_BETA) if DU_IS_DV else write)[None, :]
                store_transposed(dv + (row * HV + hv) * V, dvalue, length - c * C, column, HV * V, V)
            if DELTA:
                if OWN:
                    e_a = load_rows(e + key, i, ka, in_time, in_ka, H * K)
                    if K1 > 0:
                        e_b = load_rows(e + key, i, kb, in_time, in_kb, H * K)
                else:
                    e_a = k_a
                    if K1 > 0:
                        e_b = k_b
                due = dx * -load_gate(gates, place, 1, i, C)[None, :]
                dSa = dot_split_lhs(due, e_a, dSa, dtype, TERMS, PREC)
                if K1 > 0:
                    dSb = dot_split_lhs(due, e_b, dSb, dtype, TERMS, PREC)
        if ENDS:
            at_end = ends + tl.cast(nh, tl.int64) * (V + K) * K
            store_rows(at_end, dSa, vs, ka, in_v, in_ka, K)
            if K1 > 0:
                store_rows(at_end, dSb, vs, kb, in_v, in_kb, K)
        elif part == 0:
            at_carry += opaque_zero(last, 30)
            store_column_major(at_carry, dSa, vs, ka, in_v, in_ka, V)
            if K1 > 0:
                store_column_major(at_carry, dSb, vs, kb, in_v, in_kb, V)
