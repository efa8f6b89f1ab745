"""The scan over chunks, with the output; the same text replays states for the backward and computes maps of parts.

    x = T (w v - c (S0^T e)),    o = scale e^G'' (S0^T q) + P x,    S' = e^Gend S0 + (e^(Gend - G) k)^T x

with T, P, c and G'' from prepare.py; an additive update has x = w v. The state stays in registers as S^T, so that every
product takes its left operand from registers. C chunk, H key heads, HV value heads, K key width, V value width
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.kernels.layout import (
    chunk_range,
    cumulative_decays,
    dot_split_lhs,
    load_column_major,
    load_gate,
    load_rows,
    negligible_prefix,
    sequence_and_split,
    store_column_major,
    store_rows,
    store_state,
    store_transposed,
)
from deltazoo.backends.triton.kernels.wy_tiles import dot_split_both, dot_T, load_P_T, load_T


@triton.jit(do_not_specialize=["T", "segment", "segments", "parts"])
def scan_kernel(
    q, k, e, v, gates, decay_bounds, wy_tiles, state, o, final, checkpoints, states, xs, starts, ends, cu,
    scale, T, segment, segments, parts,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, OWN: tl.constexpr, WRITE: tl.constexpr, STATE: tl.constexpr,
    READ_EARLY: tl.constexpr, PACKED: tl.constexpr, CHECKPOINT_EVERY: tl.constexpr, UNIT: tl.constexpr,
    SPLIT: tl.constexpr, MODE: tl.constexpr, TERMS: tl.constexpr, PREC: tl.constexpr,
    STAGES: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, part, value head, V tile); S^T [BV, K] stays in registers, as tiles of K0 and K1 keys.

    MODE "output": o and the final state; checkpoints [place, HV, V, K] keeps S^T every CHECKPOINT_EVERY chunks (0: never), but not
        the initial state. With SPLIT > 0 a program is a part of SPLIT chunks, and
        begins from starts [N parts, HV, V, K].
    MODE "replay": a program is a part of SPLIT chunks of a segment; it walks from the checkpoint at or before the part,
        and keeps the state before each chunk of the part in states [place, HV, V, K] and, with an erase, x in
        xs [place, C, HV, V].
    MODE "ends": the state that each part leaves when it begins from nothing (the first from the initial state) and, in
        further tiles, the map from its beginning to its end: ends [N parts, HV, V + K, K]. "maps": the maps alone.
    TERMS 2: what feeds back into the state is rounded to two numbers instead of one. TILED: v is a descriptor.
    Segments and places are those of `segment_bounds`.
    """
    OUTPUT: tl.constexpr = MODE == "output"
    REPLAY: tl.constexpr = MODE == "replay"
    ENDS: tl.constexpr = MODE == "ends" or MODE == "maps"
    VALUES: tl.constexpr = 0 if MODE == "maps" else (V + BV - 1) // BV
    TILES: tl.constexpr = VALUES + (K + BV - 1) // BV if ENDS else VALUES
    pid = tl.program_id(0)
    hv = pid // TILES % HV
    h = hv // (HV // H)
    n, part = sequence_and_split(pid // (TILES * HV), parts, TILES * HV)
    nh = (n * parts + part) * HV + hv
    start, length, slot, begins, first_place, first, last = chunk_range(
        n, part, cu, T, segment, segments, C, UNIT, SPLIT, PACKED
    )
    i = tl.arange(0, C)
    maps = pid % TILES >= VALUES
    column = (pid % TILES) * BV
    if ENDS:
        column = tl.where(maps, column - VALUES * BV, column)
    vs = column + tl.arange(0, BV)
    in_v = (vs < V) & ((maps == 0) | (not ENDS))
    v_column = tl.where(maps, V, column) if ENDS else column
    # two values a load: what feeds no product at once is copied ahead of time in 32 bits alone
    PAIRS: tl.constexpr = k.dtype.element_ty.primitive_bitwidth == 16 and V % 2 == 0
    if PAIRS:
        pairs = column // 2 + tl.arange(0, BV // 2)
        in_pairs = (pairs < V // 2) & ((maps == 0) | (not ENDS))
    ka = tl.arange(0, K0)
    in_ka = ka < K
    if K1 > 0:
        kb = K0 + tl.arange(0, K1)
        in_kb = kb < K
    causal = i[:, None] < i[None, :] if READ_EARLY else i[:, None] <= i[None, :]
    at_state = (tl.cast(n, tl.int64) * HV + hv) * K * V
    dtype: tl.constexpr = k.dtype.element_ty

    chunks = tl.cdiv(length, C)
    if REPLAY:
        first_kept = first
        first = tl.where(first < last, first // CHECKPOINT_EVERY * CHECKPOINT_EVERY, first)
    forgotten = 0
    if ENDS:
        forgotten = negligible_prefix(decay_bounds, slot + first, last - first, hv, HV, SPLIT)
        # nobody asks for the map of the first part, nor, going forward, for what the last one leaves
        if (maps & ((part == 0) | (forgotten > 0))) | ((last == chunks) & (MODE == "ends")):
            last = first
        first = tl.minimum(first + tl.maximum(forgotten - 1, 0), last)
    Sa = tl.zeros([BV, K0], tl.float32)
    if K1 > 0:
        Sb = tl.zeros([BV, K1], tl.float32)
    if CHECKPOINT_EVERY > 0:
        # of the first one, before any chunk: the state there is an operand, and is not kept
        checkpoint = (slot // CHECKPOINT_EVERY if PACKED else n * ((chunks - 1) // CHECKPOINT_EVERY)) - 1
    if REPLAY:
        if (first > 0) & (first < last):
            begin_at = checkpoints + (tl.cast(checkpoint + first // CHECKPOINT_EVERY, tl.int64) * HV + hv) * V * K
            Sa += load_rows(begin_at, vs, ka, in_v, in_ka, K)
            if K1 > 0:
                Sb += load_rows(begin_at, vs, kb, in_v, in_kb, K)
    elif OUTPUT and SPLIT > 0:
        if (first < last) | (part == 0):
            at_start = starts + tl.cast(nh, tl.int64) * V * K
            Sa += load_rows(at_start, vs, ka, in_v, in_ka, K)
            if K1 > 0:
                Sb += load_rows(at_start, vs, kb, in_v, in_kb, K)
    if STATE and not (OUTPUT and SPLIT > 0):
        from_state = in_v & ((first == 0) if REPLAY else (part == 0) & (forgotten == 0))
        Sa += load_column_major(state + at_state, vs, ka, from_state, in_ka, V)
        if K1 > 0:
            Sb += load_column_major(state + at_state, vs, kb, from_state, in_kb, V)
    if ENDS:
        if maps:
            Sa = tl.where(vs[:, None] == ka[None, :], 1.0, 0.0)
            if K1 > 0:
                Sb = tl.where(vs[:, None] == kb[None, :], 1.0, 0.0)

    for c in tl.range(first, last, num_stages=STAGES):
        in_time = i < length - c * C
        row = start + c * C
        key = (row * H + h) * K
        value = (row * HV + hv) * V
        place = tl.cast(slot + c, tl.int64) * HV + hv
        k_a = load_rows(k + key, i, ka, in_time, in_ka, H * K)
        if K1 > 0:
            k_b = load_rows(k + key, i, kb, in_time, in_kb, H * K)
        if OUTPUT:
            q_a = load_rows(q + key, i, ka, in_time, in_ka, H * K)
            if K1 > 0:
                q_b = load_rows(q + key, i, kb, in_time, in_kb, H * K)
        if OUTPUT and CHECKPOINT_EVERY > 0:
            if (c > 0) & (c % CHECKPOINT_EVERY == 0):
                at = checkpoints + (tl.cast(checkpoint + c // CHECKPOINT_EVERY, tl.int64) * HV + hv) * V * K
                store_state(at, Sa, column, ka, in_ka, V, K, True)
                if K1 > 0:
                    store_state(at, Sb, column, kb, in_kb, V, K, True)
        if REPLAY:
            local = first_place + c - begins
            at = states + (tl.cast(local, tl.int64) * HV + hv) * V * K
            store_state(at, Sa, column, ka, in_ka, V, K, c >= first_kept)
            if K1 > 0:
                store_state(at, Sb, column, kb, in_kb, V, K, c >= first_kept)

        if DELTA:
            T_first = tl.trans(load_T(wy_tiles, place, i, C, TERMS, 0))
            T_rest = tl.trans(load_T(wy_tiles, place, i, C, TERMS, 1)) if TERMS == 2 else T_first
        if OUTPUT and DELTA:
            P_T = load_P_T(wy_tiles, dtype, place, i, C, TERMS, 0)
            P_rest = load_P_T(wy_tiles, dtype, place, i, C, TERMS, 1) if TERMS == 2 else P_T
        # u = w v - c S0^T e,  x = T u
        S_a = Sa.to(dtype)
        if K1 > 0:
            S_b = Sb.to(dtype)
        if DELTA:
            if OWN:
                e_a = load_rows(e + key, i, ka, in_time, in_ka, H * K)
                if K1 > 0:
                    e_b = load_rows(e + key, i, kb, in_time, in_kb, H * K)
            else:
                e_a = k_a
                if K1 > 0:
                    e_b = k_b
            y = tl.dot(S_a, tl.trans(e_a), input_precision=PREC)
            if TERMS == 2:
                y = tl.dot((Sa - S_a.to(tl.float32)).to(dtype), tl.trans(e_a), y, input_precision=PREC)
            if K1 > 0:
                y = dot_split_lhs(Sb, tl.trans(e_b), y, dtype, TERMS, PREC)
        # v comes after y: its registers would be taken from here on
        if TILED:
            # what the tensor memory accelerator copies goes to its place in a product at once; through a pointer it
            # would feed no product, and be neither copied ahead of time nor turned without many barriers
            v_at = [0, start.to(tl.int32) + c * C, hv, v_column] if PACKED else [n, c * C, hv, v_column]
            v_T = tl.trans(tl.reshape(v.load(v_at), [C, BV]))
            if PACKED:
                v_T = tl.where(in_time[None, :], v_T, 0.0)
        elif PAIRS:
            v_pairs = load_rows((v + value).to(tl.pointer_type(tl.int32)), i, pairs, in_time, in_pairs, HV * V // 2)
            both = tl.join(v_pairs.to(tl.int16), (v_pairs >> 16).to(tl.int16))
            v_T = tl.trans(tl.reshape(both, [C, BV])).to(dtype, bitcast=True)
        else:
            v_T = tl.trans(load_rows(v + value, i, vs, in_time, in_v, HV * V))
        x = v_T.to(tl.float32)
        if WRITE:
            x *= load_gate(gates, place, 2, i, C)[None, :]
        if DELTA:
            x -= y * load_gate(gates, place, 1, i, C)[None, :]
            x = dot_T(x, T_first, T_rest, dtype, TERMS, PREC)

        if DECAY != "none":
            G, G_before, G_end = cumulative_decays(gates, place, i, C)
        if REPLAY and DELTA:
            kept_rows = tl.where(c >= first_kept, C, 0)
            store_transposed(xs + (tl.cast(local, tl.int64) * C * HV + hv) * V, x, kept_rows, column, HV * V, V)

        if OUTPUT:
            # o = scale e^G'' S0^T q + P x
            out = tl.dot(S_a, tl.trans(q_a), input_precision=PREC)
            if K1 > 0:
                out = tl.dot(S_b, tl.trans(q_b), out, input_precision=PREC)
            if DECAY != "none":
                G_read = G_before if READ_EARLY else G
                out *= (tl.exp2(G_read) * scale)[None, :]
            else:
                out *= scale
            if not DELTA:
                P_T = tl.dot(k_a, tl.trans(q_a), input_precision=PREC)
                if K1 > 0:
                    P_T = tl.dot(k_b, tl.trans(q_b), P_T, input_precision=PREC)
                if DECAY != "none":
                    P_T *= tl.exp2(tl.where(causal, G_read[None, :] - G[:, None], 0.0))
                P_T = tl.where(causal, P_T * scale, 0.0).to(dtype)
                P_rest = P_T
            out = dot_split_both(x, P_T, P_rest, out, dtype, TERMS, PREC)
            store_transposed(o + value, out, length - c * C, column, HV * V, V)

        # S' = e^Gend S0 + (e^(Gend - G) k)^T x
        if DECAY != "none":
            x *= tl.exp2(G_end - G)[None, :]
            Sa *= tl.exp2(G_end)
            if K1 > 0:
                Sb *= tl.exp2(G_end)
        Sa = dot_split_lhs(x, k_a, Sa, dtype, TERMS, PREC)
        if K1 > 0:
            Sb = dot_split_lhs(x, k_b, Sb, dtype, TERMS, PREC)

    if ENDS:
        rows = tl.where(maps, vs + V, vs)
        in_rows = tl.where(maps, vs < K, vs < V)
        at_end = ends + tl.cast(nh, tl.int64) * (V + K) * K
        store_rows(at_end, Sa, rows, ka, in_rows, in_ka, K)
        if K1 > 0:
            store_rows(at_end, Sb, rows, kb, in_rows, in_kb, K)
    if OUTPUT:
        if SPLIT > 0:
            in_v = in_v & (part == tl.maximum(chunks - 1, 0) // SPLIT)
        store_column_major(final + at_state, Sa, vs, ka, in_v, in_ka, V)
        if K1 > 0:
            store_column_major(final + at_state, Sb, vs, kb, in_v, in_kb, V)
