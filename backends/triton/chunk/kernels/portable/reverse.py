"""Reverse scan over the chunks of a sequence: the gradient dS of the state, from the last chunk to the first.

    dx = P^T do + (2^(Gend - G) k) dS',    du = T^T dx,    dv = w du
    dS0 = 2^Gend dS' + scale (2^G'' q)^T do - (c e)^T du

dS' is the gradient of the state after a chunk, dS0 of the state before it. T, P, c = b 2^G' and G'' are those of
prepare.py; an additive update has du = dx. With a decay per channel q, k and e are the scaled operands of
channel/prepare.py, which contain b, scale and all decays but 2^Gend. With v_key (scan.py)

    dx = P^T do + k dS',    du = T^T dx,    dv = R^T do + v_key dS' + B^T du,    dS0 = 2^Gend dS' + q^T do + e^T du

C tokens in a chunk, G cumulative log2 decay in the chunk, H key heads, HV value heads, K key width, V value width
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.chunk.kernels.portable.key_tiles import (
    add_column_major,
    add_dot,
    add_dot_split,
    add_rows,
    dot_transposed,
    key_columns,
    load_pairs,
    load_tiles,
    scaled,
    scaled_by_channel,
    store_state_tiles,
    store_tiles,
    store_tiles_column_major,
    zero_tiles,
)
from deltazoo.backends.triton.chunk.kernels.portable.wy_tiles import (
    dot_inverse,
    load_inverse,
    load_p_transposed,
    p_terms,
)
from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.device.layout import (
    chunk_range,
    clamp_away_from_zero,
    cumulative_decays,
    dot_split_lhs,
    load_gate,
    load_rows,
    load_write_strengths,
    opaque_zero,
    segment_slot,
    sequence_and_segment,
    significant_prefix,
    store_transposed,
)


@takes(
    pointers="q k e v_key do gates decay_bounds wy_tiles dstate dstates du dv starts ends cu carries",
    traits=(
        "H HV K V C K0 K1 BV DECAY DELTA ERASE_KEY WRITE READ_BEFORE PACKED DU_IS_DV UNIT SEGMENT_CHUNKS MIN_BETA ENDS "
        "CARRIED TERMS PREC STAGES"
    ),
)
@triton.jit(do_not_specialize=["T", "window", "windows", "num_segments"])
def reverse_kernel(gmem, scale, T, window, windows, num_segments, traits: tl.constexpr):
    """Scan the chunks of one segment of one window backwards.

    Grid: sequence, segment, value head, V tile. Each program owns dS^T [BV, K] of its segment, in registers, as tiles
    of K0 and K1 keys. Windows and scratch slots are those of `window_bounds`; windows are launched from the last to the
    first, and dstate carries dS from one to the next.

    Reads the operands, do, gates, wy_tiles; dstate [N, HV, K, V] float32, the gradient of the state after the window,
    or with SEGMENT_CHUNKS > 0 that after each segment, starts [segments, HV, V, K].
    Writes dv [B, T, HV, V]; dS'^T of each chunk, dstates [scratch slot, HV, V, K]; with DELTA or WRITE du
    [scratch slot, C, HV, V], unless DU_IS_DV (w du = dv determines it); dstate, the gradient before the window.

    ENDS: an earlier launch, which only writes ends [segments, HV, V + K, K]: in rows 0 to V - 1, dS^T before each
    segment but the first, computed from a zero gradient after the segment. combine_kernel reads ends and writes starts.
    CARRIED: also before the first segment if carries [N] is not 0.
    """
    H: tl.constexpr = traits.H
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    C: tl.constexpr = traits.C
    BV: tl.constexpr = traits.BV
    DECAY: tl.constexpr = traits.DECAY
    DELTA: tl.constexpr = traits.DELTA
    SEGMENT_CHUNKS: tl.constexpr = traits.SEGMENT_CHUNKS
    ENDS: tl.constexpr = traits.ENDS
    TERMS: tl.constexpr = traits.TERMS
    PREC: tl.constexpr = traits.PREC
    DPLR: tl.constexpr = gmem.v_key is not None
    WY_TERMS: tl.constexpr = 2 if DPLR else TERMS
    TILES: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    hv = pid // TILES % HV
    h = hv // (HV // H)
    n, segment = sequence_and_segment(pid // (TILES * HV), num_segments, TILES * HV)
    start, length, slot, window_first, first_scratch_slot, first, last = chunk_range(
        n, segment, gmem.cu, T, window, windows, C, traits.UNIT, SEGMENT_CHUNKS, traits.PACKED
    )
    segment_index = segment_slot(n, segment, first_scratch_slot, SEGMENT_CHUNKS) * HV + hv
    i = tl.arange(0, C)
    column = (pid % TILES) * BV
    vs = column + tl.arange(0, BV)
    NK: tl.constexpr = 2 if traits.K1 > 0 else 1
    keys, in_keys = key_columns(K, traits.K0, traits.K1)
    in_v = vs < V
    causal = i[:, None] > i[None, :] if traits.READ_BEFORE else i[:, None] >= i[None, :]
    dtype: tl.constexpr = gmem.k.dtype.element_ty
    P_TERMS: tl.constexpr = p_terms(gmem.wy_tiles.dtype.element_ty, dtype, TERMS)
    if ENDS:
        unused = (segment == 0) & (tl.load(gmem.carries + n) == 0) if traits.CARRIED else segment == 0
        if unused:
            last = first
        # The contributions of later chunks are negligible before the first chunk of the segment.
        last = first + significant_prefix(gmem.decay_bounds, slot + first, last - first, hv, HV, SEGMENT_CHUNKS)

    if first < last:
        at_dstate = gmem.dstate + (tl.cast(n, tl.int64) * HV + hv) * V * K
        dS = zero_tiles(BV, traits.K0, traits.K1)
        if not ENDS and SEGMENT_CHUNKS > 0:
            at_start = gmem.starts + tl.cast(segment_index, tl.int64) * V * K
            dS = add_rows(dS, at_start, vs, keys, in_v, in_keys, K, NK)
        elif not ENDS:
            dS = add_column_major(dS, at_dstate, vs, keys, in_v, in_keys, V, NK)
        for back in tl.range(0, last - first, num_stages=traits.STAGES):
            c = last - 1 - back
            in_time = i < length - c * C
            row = start + c * C
            key_offset = (row * H + h) * K
            chunk = tl.cast(slot + c, tl.int64) * HV + hv
            scratch_slot = first_scratch_slot + c - window_first

            k_tiles, q_tiles = load_pairs(gmem.k, gmem.q, key_offset, i, keys, in_time, in_keys, H * K, NK)
            do_T = tl.trans(load_rows(gmem.do + (row * HV + hv) * V, i, vs, in_time, in_v, HV * V))
            if not ENDS:
                at = gmem.dstates + (tl.cast(scratch_slot, tl.int64) * HV + hv) * V * K
                store_state_tiles(at, dS, column, keys, in_keys, V, K, True, NK)

            if DELTA:
                T_hi = load_inverse(gmem.wy_tiles, chunk, i, C, WY_TERMS, 0)
                T_lo = load_inverse(gmem.wy_tiles, chunk, i, C, TERMS, 1) if TERMS == 2 else T_hi
            if DELTA or DECAY == "channel":
                P_hi = tl.trans(load_p_transposed(gmem.wy_tiles, dtype, chunk, i, C, WY_TERMS, 0))
                if P_TERMS == 2:
                    P_lo = tl.trans(load_p_transposed(gmem.wy_tiles, dtype, chunk, i, C, TERMS, 1))
            # dx = P^T do + (2^(Gend - G) k) dS'
            if DPLR and not ENDS:
                R = tl.trans(load_p_transposed(gmem.wy_tiles, dtype, chunk, i, C, WY_TERMS, 1))
                v_key_tile = load_rows(gmem.v_key + key_offset, i, keys[0], in_time, in_keys[0], H * K)
                dvalue = tl.dot(dS[0].to(dtype), tl.trans(v_key_tile), input_precision=PREC)
                for t in tl.static_range(1, NK):
                    v_key_tile = load_rows(gmem.v_key + key_offset, i, keys[t], in_time, in_keys[t], H * K)
                    dvalue = tl.dot(dS[t].to(dtype), tl.trans(v_key_tile), dvalue, input_precision=PREC)
                dvalue = tl.dot(do_T, R, dvalue, input_precision=PREC)
            dx = tl.zeros([BV, C], tl.float32)
            for t in tl.static_range(NK):
                dx = dot_split_lhs(dS[t], tl.trans(k_tiles[t]), dx, dtype, TERMS, PREC)
            if DECAY != "none" and DECAY != "channel":
                G, G_before, G_end = cumulative_decays(gmem.gates, chunk, i, C)
                G_read = G_before if traits.READ_BEFORE else G
                dx *= tl.exp2(G_end - G)[None, :]
            if not DELTA and DECAY != "channel":
                P_hi = dot_transposed(q_tiles, k_tiles, PREC, NK)
                if DECAY != "none":
                    P_hi *= tl.exp2(tl.where(causal, G_read[:, None] - G[None, :], 0.0))
                P_hi = tl.where(causal, P_hi * scale, 0.0).to(dtype)
            dx = tl.dot(do_T, P_hi, dx, input_precision=PREC)
            if P_TERMS == 2:
                dx = tl.dot(do_T, P_lo, dx, input_precision=PREC)

            # du = T^T dx
            if DELTA:
                dx = dot_inverse(dx, T_hi, T_lo, dtype, TERMS, PREC)
            if (DELTA or traits.WRITE) and not traits.DU_IS_DV and not ENDS:
                store_transposed(
                    gmem.du + (tl.cast(scratch_slot, tl.int64) * C * HV + hv) * V, dx, C, column, HV * V, V
                )
            # dS0 = 2^Gend dS' + scale (2^G'' q)^T do - (c e)^T du
            doq = do_T.to(tl.float32) * scale
            if DECAY == "channel":
                doq = do_T
                dS = scaled_by_channel(dS, gmem.gates, chunk, keys, in_keys, K, C, NK)
            elif DECAY != "none":
                doq *= tl.exp2(G_read)[None, :]
                dS = scaled(dS, tl.exp2(G_end), NK)
            dS = add_dot(dS, doq.to(dtype), q_tiles, PREC, NK)
            if not ENDS:
                if DPLR:
                    B = load_inverse(gmem.wy_tiles, chunk, i, C, WY_TERMS, 1)
                    dvalue += dot_inverse(dx, B, B, dtype, 1, PREC)
                else:
                    dvalue = dx
                if traits.WRITE:
                    write = load_write_strengths(gmem.gates, chunk, i, K, C, DECAY)
                    dvalue = dx * (clamp_away_from_zero(write, traits.MIN_BETA) if traits.DU_IS_DV else write)[None, :]
                store_transposed(gmem.dv + (row * HV + hv) * V, dvalue, length - c * C, column, HV * V, V)
            if DELTA:
                e_tiles = (
                    load_tiles(gmem.e + key_offset, i, keys, in_time, in_keys, H * K, NK)
                    if traits.ERASE_KEY
                    else k_tiles
                )
                due = (
                    dx if DPLR else -dx if DECAY == "channel" else dx * -load_gate(gmem.gates, chunk, 1, i, C)[None, :]
                )
                dS = add_dot_split(dS, due, e_tiles, dtype, TERMS, PREC, NK)
        if ENDS:
            at_end = gmem.ends + tl.cast(segment_index, tl.int64) * (V + K) * K
            store_tiles(at_end, dS, vs, keys, in_v, in_keys, K, NK)
        elif segment == 0:
            at_dstate += opaque_zero(last, 30)
            store_tiles_column_major(at_dstate, dS, vs, keys, in_v, in_keys, V, NK)
