"""Scan over the chunks of a sequence: outputs, recomputed states for the backward, or the maps of segments.

    x = T (w v - c (S0^T e)),    o = scale 2^G'' (S0^T q) + P x,    S' = 2^Gend S0 + (2^(Gend - G) k)^T x

S0 and S' are the states before and after a chunk. T, P, c = b 2^G' and G'' are those of prepare.py; an additive update
has x = w v. The state stays in registers as S^T, so that the left operand of every product comes from registers. With a
decay per channel q, k and e are the scaled operands of channel/prepare.py, which contain b, scale and all decays but
2^Gend. With v_key, the scaled operand M of channel/dplr_prepare.py, B and R are the second WY tile:

    x = T (S0^T e + B v),    o = S0^T q + P x + R v,    S' = 2^Gend S0 + k^T x + v_key^T v

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
    identity,
    key_columns,
    load_tiles,
    scaled,
    scaled_by_channel,
    store_state_tiles,
    store_tiles,
    store_tiles_column_major,
    to_dtype,
    zero_tiles,
)
from deltazoo.backends.triton.chunk.kernels.portable.wy_tiles import (
    dot_inverse,
    dot_split_both,
    load_inverse,
    load_p_transposed,
    p_terms,
)
from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.device.layout import (
    chunk_range,
    cumulative_decays,
    dot_split_lhs,
    load_gate,
    load_rows,
    load_write_strengths,
    negligible_prefix,
    segment_slot,
    sequence_and_segment,
    store_transposed,
)


@takes(
    pointers="q k e v_key gates decay_bounds wy_tiles state o final checkpoints states v_new starts ends cu carries",
    traits=(
        "H HV K V C K0 K1 BV DECAY DELTA ERASE_KEY WRITE HAS_STATE READ_BEFORE PACKED CHECKPOINT_CHUNKS UNIT "
        "SEGMENT_CHUNKS MODE TERMS PREC STAGES TILED CARRIED"
    ),
)
@triton.jit(do_not_specialize=["T", "window", "windows", "num_segments"])
def scan_kernel(gmem, v, scale, T, window, windows, num_segments, traits: tl.constexpr):
    """Scan the chunks of one segment.

    Grid: sequence, segment, value head, V tile. Each program owns S^T [BV, K] of its segment, in registers, as tiles of
    K0 and K1 keys, and loops over the chunks. Windows and scratch slots are those of `window_bounds`.

    MODE "output": writes o [B, T, HV, V], the state after the last token final [N, HV, K, V], and S^T before every
        CHECKPOINT_CHUNKS-th chunk (0: never) except the first, whose state is an operand, to
        checkpoints [.., HV, V, K]. With SEGMENT_CHUNKS > 0 it starts from starts [segments, HV, V, K].
    MODE "recompute": recomputes states for the backward from the checkpoint at or before the segment. Writes the state
        before each chunk of the segment to states [scratch slot, HV, V, K] and, with DELTA, x to
        v_new [scratch slot, C, HV, V].
    MODE "ends": writes ends [segments, HV, V + K, K]. Rows 0 to V - 1: S^T at the end of each segment, computed from
        a zero state (in the first segment from the initial state). Rows V to V + K - 1, computed by additional V tiles:
        the map [K, K] from the state before the segment to the state after it. combine_kernel reads ends and writes
        starts.
    MODE "maps": the maps alone.
    CARRIED: the state before the sequence is not known yet. MODE "ends" then starts every segment from a zero state,
        and also computes the map of the first segment, and the end of the last one if carries [N] is not 0; its map for
        the backward.

    TERMS = 2: values that feed back into the state are split in two terms (hi + lo). TILED: v is a tensor descriptor.
    """
    H: tl.constexpr = traits.H
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    C: tl.constexpr = traits.C
    BV: tl.constexpr = traits.BV
    DECAY: tl.constexpr = traits.DECAY
    DELTA: tl.constexpr = traits.DELTA
    PACKED: tl.constexpr = traits.PACKED
    CHECKPOINT_CHUNKS: tl.constexpr = traits.CHECKPOINT_CHUNKS
    SEGMENT_CHUNKS: tl.constexpr = traits.SEGMENT_CHUNKS
    MODE: tl.constexpr = traits.MODE
    TERMS: tl.constexpr = traits.TERMS
    PREC: tl.constexpr = traits.PREC
    DPLR: tl.constexpr = gmem.v_key is not None
    WY_TERMS: tl.constexpr = 2 if DPLR else TERMS
    OUTPUT: tl.constexpr = MODE == "output"
    RECOMPUTE: tl.constexpr = MODE == "recompute"
    ENDS: tl.constexpr = MODE == "ends" or MODE == "maps"
    V_TILES: tl.constexpr = 0 if MODE == "maps" else (V + BV - 1) // BV
    TILES: tl.constexpr = V_TILES + (K + BV - 1) // BV if ENDS else V_TILES
    pid = tl.program_id(0)
    hv = pid // TILES % HV
    h = hv // (HV // H)
    n, segment = sequence_and_segment(pid // (TILES * HV), num_segments, TILES * HV)
    start, length, slot, window_first, first_scratch_slot, first, last = chunk_range(
        n, segment, gmem.cu, T, window, windows, C, traits.UNIT, SEGMENT_CHUNKS, PACKED
    )
    segment_index = segment_slot(n, segment, first_scratch_slot, SEGMENT_CHUNKS) * HV + hv
    i = tl.arange(0, C)
    is_map = pid % TILES >= V_TILES
    column = (pid % TILES) * BV
    if ENDS:
        column = tl.where(is_map, column - V_TILES * BV, column)
    vs = column + tl.arange(0, BV)
    in_v = (vs < V) & ((is_map == 0) | (not ENDS))
    v_column = tl.where(is_map, V, column) if ENDS else column
    # v is loaded as pairs of 16-bit values: a load that does not feed a dot directly is pipelined only if its elements
    # have 32 bits.
    PAIRS: tl.constexpr = gmem.k.dtype.element_ty.primitive_bitwidth == 16 and V % 2 == 0
    if PAIRS:
        pairs = column // 2 + tl.arange(0, BV // 2)
        in_pairs = (pairs < V // 2) & ((is_map == 0) | (not ENDS))
    NK: tl.constexpr = 2 if traits.K1 > 0 else 1
    keys, in_keys = key_columns(K, traits.K0, traits.K1)
    causal = i[:, None] < i[None, :] if traits.READ_BEFORE else i[:, None] <= i[None, :]
    state_offset = (tl.cast(n, tl.int64) * HV + hv) * K * V
    dtype: tl.constexpr = gmem.k.dtype.element_ty
    P_TERMS: tl.constexpr = p_terms(gmem.wy_tiles.dtype.element_ty, dtype, TERMS)

    chunks = tl.cdiv(length, C)
    if RECOMPUTE:
        segment_first = first
        first = tl.where(first < last, first // CHECKPOINT_CHUNKS * CHECKPOINT_CHUNKS, first)
    negligible = 0
    if ENDS:
        in_use = first < last
        negligible = negligible_prefix(gmem.decay_bounds, slot + first, last - first, hv, HV, SEGMENT_CHUNKS)
        # combine_kernel reads no map of the first segment, no map whose effect is negligible, and forward no end of the
        # last segment. With CARRIED it reads all maps that are not negligible, and that end if another piece needs it.
        if traits.CARRIED:
            inner = (last == chunks) & (tl.load(gmem.carries + n) == 0)
            unused = (is_map & (negligible > 0)) | (inner & ((segment == 0) | (is_map == 0)))
        else:
            unused = (is_map & ((segment == 0) | (negligible > 0))) | ((last == chunks) & (MODE == "ends"))
        if unused:
            last = first
        first = tl.minimum(first + tl.maximum(negligible - 1, 0), last)
    S = zero_tiles(BV, traits.K0, traits.K1)
    if CHECKPOINT_CHUNKS > 0:
        # index that a checkpoint of chunk 0 would have; it is not stored, because that state is an operand
        checkpoint_offset = (slot // CHECKPOINT_CHUNKS if PACKED else n * ((chunks - 1) // CHECKPOINT_CHUNKS)) - 1
    if RECOMPUTE:
        if (first > 0) & (first < last):
            checkpoint = (
                gmem.checkpoints + (tl.cast(checkpoint_offset + first // CHECKPOINT_CHUNKS, tl.int64) * HV + hv) * V * K
            )
            S = add_rows(S, checkpoint, vs, keys, in_v, in_keys, K, NK)
    elif OUTPUT and SEGMENT_CHUNKS > 0:
        if (first < last) | (segment == 0):
            at_start = gmem.starts + tl.cast(segment_index, tl.int64) * V * K
            S = add_rows(S, at_start, vs, keys, in_v, in_keys, K, NK)
    if traits.HAS_STATE and not (OUTPUT and SEGMENT_CHUNKS > 0):
        from_state = in_v & ((first == 0) if RECOMPUTE else (segment == 0) & (negligible == 0))
        S = add_column_major(S, gmem.state + state_offset, vs, keys, from_state, in_keys, V, NK)
    if ENDS:
        if is_map:
            # A negligible map is zero, not the identity: combine_kernel may apply it, because it sums the bounds in
            # another order.
            S = identity(vs, keys, negligible == 0, NK)

    for c in tl.range(first, last, num_stages=traits.STAGES):
        in_time = i < length - c * C
        row = start + c * C
        key_offset = (row * H + h) * K
        value_offset = (row * HV + hv) * V
        chunk = tl.cast(slot + c, tl.int64) * HV + hv
        k_tiles = load_tiles(gmem.k + key_offset, i, keys, in_time, in_keys, H * K, NK)
        if OUTPUT:
            q_tiles = load_tiles(gmem.q + key_offset, i, keys, in_time, in_keys, H * K, NK)
        if OUTPUT and CHECKPOINT_CHUNKS > 0:
            if (c > 0) & (c % CHECKPOINT_CHUNKS == 0):
                at = (
                    gmem.checkpoints + (tl.cast(checkpoint_offset + c // CHECKPOINT_CHUNKS, tl.int64) * HV + hv) * V * K
                )
                store_state_tiles(at, S, column, keys, in_keys, V, K, True, NK)
        if RECOMPUTE:
            scratch_slot = first_scratch_slot + c - window_first
            at = gmem.states + (tl.cast(scratch_slot, tl.int64) * HV + hv) * V * K
            store_state_tiles(at, S, column, keys, in_keys, V, K, c >= segment_first, NK)

        if DELTA:
            T_hi = tl.trans(load_inverse(gmem.wy_tiles, chunk, i, C, WY_TERMS, 0))
            T_lo = tl.trans(load_inverse(gmem.wy_tiles, chunk, i, C, TERMS, 1)) if TERMS == 2 else T_hi
        if OUTPUT and (DELTA or DECAY == "channel"):
            P_T_hi = load_p_transposed(gmem.wy_tiles, dtype, chunk, i, C, WY_TERMS, 0)
            P_T_lo = load_p_transposed(gmem.wy_tiles, dtype, chunk, i, C, TERMS, 1) if P_TERMS == 2 else P_T_hi
        if DPLR:
            B_T = tl.trans(load_inverse(gmem.wy_tiles, chunk, i, C, WY_TERMS, 1))
            v_key_tiles = load_tiles(gmem.v_key + key_offset, i, keys, in_time, in_keys, H * K, NK)
            if OUTPUT:
                R_T = load_p_transposed(gmem.wy_tiles, dtype, chunk, i, C, WY_TERMS, 1)
        # u = w v - c S0^T e,  x = T u
        S_low = to_dtype(S, dtype, NK)
        if DELTA:
            e_tiles = (
                load_tiles(gmem.e + key_offset, i, keys, in_time, in_keys, H * K, NK) if traits.ERASE_KEY else k_tiles
            )
            y = tl.dot(S_low[0], tl.trans(e_tiles[0]), input_precision=PREC)
            if TERMS == 2:
                y = tl.dot((S[0] - S_low[0].to(tl.float32)).to(dtype), tl.trans(e_tiles[0]), y, input_precision=PREC)
            for t in tl.static_range(1, NK):
                y = dot_split_lhs(S[t], tl.trans(e_tiles[t]), y, dtype, TERMS, PREC)
        # v is loaded after y is computed, because it occupies registers from here on.
        if traits.TILED:
            # A TMA load arrives in shared memory in the layout of an MMA operand. A load through a pointer would not
            # feed a dot, so it would be neither pipelined nor transposed without many barriers.
            v_at = [0, start.to(tl.int32) + c * C, hv, v_column] if PACKED else [n, c * C, hv, v_column]
            v_T = tl.trans(tl.reshape(v.load(v_at), [C, BV]))
            if PACKED:
                v_T = tl.where(in_time[None, :], v_T, 0.0)
        elif PAIRS:
            v_pairs = load_rows(
                (v + value_offset).to(tl.pointer_type(tl.int32)), i, pairs, in_time, in_pairs, HV * V // 2
            )
            both = tl.join(v_pairs.to(tl.int16), (v_pairs >> 16).to(tl.int16))
            v_T = tl.trans(tl.reshape(both, [C, BV])).to(dtype, bitcast=True)
        else:
            v_T = tl.trans(load_rows(v + value_offset, i, vs, in_time, in_v, HV * V))
        x = v_T.to(tl.float32)
        if traits.WRITE:
            x *= load_write_strengths(gmem.gates, chunk, i, K, C, DECAY)[None, :]
        if DPLR:
            x = dot_inverse(x, B_T, B_T, dtype, 1, PREC) + y
            x = dot_inverse(x, T_hi, T_hi, dtype, 1, PREC)
        elif DELTA:
            x -= y if DECAY == "channel" else y * load_gate(gmem.gates, chunk, 1, i, C)[None, :]
            x = dot_inverse(x, T_hi, T_lo, dtype, TERMS, PREC)

        if DECAY != "none" and DECAY != "channel":
            G, G_before, G_end = cumulative_decays(gmem.gates, chunk, i, C)
        if RECOMPUTE and DELTA:
            rows_to_store = tl.where(c >= segment_first, C, 0)
            store_transposed(
                gmem.v_new + (tl.cast(scratch_slot, tl.int64) * C * HV + hv) * V, x, rows_to_store, column, HV * V, V
            )

        if OUTPUT:
            # o = scale 2^G'' S0^T q + P x
            out = dot_transposed(S_low, q_tiles, PREC, NK)
            if DECAY == "none":
                out *= scale
            elif DECAY != "channel":
                G_read = G_before if traits.READ_BEFORE else G
                out *= (tl.exp2(G_read) * scale)[None, :]
            if not DELTA and DECAY != "channel":
                P_T_hi = dot_transposed(k_tiles, q_tiles, PREC, NK)
                if DECAY != "none":
                    P_T_hi *= tl.exp2(tl.where(causal, G_read[None, :] - G[:, None], 0.0))
                P_T_hi = tl.where(causal, P_T_hi * scale, 0.0).to(dtype)
                P_T_lo = P_T_hi
            if DPLR:
                out = tl.dot(v_T, R_T, out, input_precision=PREC)
            if P_TERMS == TERMS:
                out = dot_split_both(x, P_T_hi, P_T_lo, out, dtype, TERMS, PREC)
            else:
                out = dot_split_lhs(x, P_T_hi, out, dtype, TERMS, PREC)
            store_transposed(gmem.o + value_offset, out, length - c * C, column, HV * V, V)

        # S' = 2^Gend S0 + (2^(Gend - G) k)^T x
        if DECAY == "channel":
            S = scaled_by_channel(S, gmem.gates, chunk, keys, in_keys, K, C, NK)
        elif DECAY != "none":
            x *= tl.exp2(G_end - G)[None, :]
            S = scaled(S, tl.exp2(G_end), NK)
        if DPLR:
            S = add_dot(S, v_T, v_key_tiles, PREC, NK)
        S = add_dot_split(S, x, k_tiles, dtype, TERMS, PREC, NK)

    if ENDS:
        rows = tl.where(is_map, vs + V, vs)
        in_rows = tl.where(is_map, vs < K, vs < V) & in_use
        at_end = gmem.ends + tl.cast(segment_index, tl.int64) * (V + K) * K
        store_tiles(at_end, S, rows, keys, in_rows, in_keys, K, NK)
    if OUTPUT:
        if SEGMENT_CHUNKS > 0:
            in_v = in_v & (segment == tl.maximum(chunks - 1, 0) // SEGMENT_CHUNKS)
        store_tiles_column_major(gmem.final + state_offset, S, vs, keys, in_v, in_keys, V, NK)
