"""Chunk-local preparation for a decay per channel: scaled operands, chunk decays and the WY tiles T and P.

    A_ij = sum_c b_i e_ic k_jc 2^(G'_ic - G_jc)  (j < i),   T = (I + A)^-1
    P_ij = scale sum_c q_ic k_jc 2^(G''_ic - G_jc)  (j <= i)

G, G' and G'' are those of ../prepare.py, per channel c. The scans read scaled operands instead of q, k and e:

    Q = scale q 2^G'',   k_decayed = k 2^(Gend - G),   E = b e 2^G'

and see no other decay than 2^Gend, by which a chunk scales the state. C tokens in a chunk, H key heads, HV value heads,
K key width
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.chunk.kernels.portable.channel.decay_levels import (
    is_upper,
    level_factors,
    levels_of,
    load_channel_decays,
    same_block,
    scale_rows,
    sum_selected,
)
from deltazoo.backends.triton.chunk.kernels.portable.prepare import unit_lower_inverse
from deltazoo.backends.triton.chunk.kernels.portable.wy_tiles import store_wy_tiles
from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.device.layout import load_rows, locate_chunk, store_rows


@takes(
    pointers="q k e log_decay b w gates decay_bounds wy_tiles scaled cu",
    traits=(
        "H HV K C BK DELTA ERASE_KEY ERASE_CHANNELS ERASE WRITE ERASE_PREVIOUS READ_BEFORE PACKED OPERAND PREC "
        "PREC_INVERSE BLOCK"
    ),
)
@triton.jit(do_not_specialize=["N", "T"])
def channel_prepare_kernel(gmem, N, T, scale, traits: tl.constexpr):
    """Prepare the chunks of an update with a decay per channel.

    Grid: chunk slot, value head. Each program loops over tiles of BK keys.

    Reads q, k, e [B, T, H, K], with ERASE_CHANNELS the erase key is e k; log_decay [B, T, HV, K]; b, w [B, T, HV].
    Writes scaled [2 or 3, B, T, HV, K] = Q, k_decayed and with DELTA E; gates [slots, HV, K + C] = 2^Gend, w; wy_tiles
    [slots, HV, 1, C, C + 8], T and P (T = 0 without an erase term); decay_bounds [slots, HV] = 0.
    """
    H: tl.constexpr = traits.H
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    C: tl.constexpr = traits.C
    BK: tl.constexpr = traits.BK
    DELTA: tl.constexpr = traits.DELTA
    ERASE_PREVIOUS: tl.constexpr = traits.ERASE_PREVIOUS
    READ_BEFORE: tl.constexpr = traits.READ_BEFORE
    PACKED: tl.constexpr = traits.PACKED
    OPERAND: tl.constexpr = traits.OPERAND
    PREC: tl.constexpr = traits.PREC
    PREC_INVERSE: tl.constexpr = traits.PREC_INVERSE
    pid = tl.program_id(0)
    slot = pid // HV
    hv = pid % HV
    h = hv // (HV // H)
    start, length, t0 = locate_chunk(slot, gmem.cu, N, T, C, PACKED)
    if t0 < length:
        EXACT: tl.constexpr = tl.float32 == OPERAND
        SCALED: tl.constexpr = gmem.q.dtype.element_ty != OPERAND
        i = tl.arange(0, C)
        in_time = i < length - t0
        row = start + t0
        chunk = tl.cast(slot, tl.int64) * HV + hv
        tile_size = (tl.cast(T, tl.int64) if PACKED else tl.cast(N, tl.int64) * T) * HV * K
        gate_row = gmem.gates + chunk * (K + C)
        if traits.WRITE:
            tl.store(gate_row + K + i, tl.load(gmem.w + (row + i) * HV + hv, mask=in_time, other=0.0).to(tl.float32))
        if traits.ERASE:
            erase = tl.load(gmem.b + (row + i) * HV + hv, mask=in_time, other=0.0).to(tl.float32)
        A = tl.zeros([C, C], tl.float32)
        P = tl.zeros([C, C], tl.float32)
        for tile in range((K + BK - 1) // BK):
            ks = tile * BK + tl.arange(0, BK)
            in_k = ks < K
            key_offset = (row * H + h) * K
            value_head_offset = (row * HV + hv) * K
            g = load_channel_decays(gmem.log_decay + value_head_offset, i, ks, in_time, in_k, HV * K)
            k_tile = load_rows(gmem.k + key_offset, i, ks, in_time, in_k, H * K).to(tl.float32)
            q_tile = load_rows(gmem.q + key_offset, i, ks, in_time, in_k, H * K).to(tl.float32) * scale
            G = sum_selected(i[:, None] >= i[None, :], g, EXACT)
            G_before = G
            if READ_BEFORE or (DELTA and ERASE_PREVIOUS):
                G_before = sum_selected(i[:, None] > i[None, :], g, EXACT)
            G_to_end = sum_selected(i[:, None] < i[None, :], g, EXACT)
            tl.store(gate_row + ks, tl.exp2(tl.sum(g, 0)), mask=in_k)
            at = gmem.scaled + value_head_offset
            Q = q_tile * tl.exp2(G_before if READ_BEFORE else G)
            store_rows(at, Q, i, ks, in_time, in_k, HV * K)
            store_rows(at + tile_size, k_tile * tl.exp2(G_to_end), i, ks, in_time, in_k, HV * K)
            if DELTA:
                e_tile = k_tile
                if traits.ERASE_KEY:
                    e_tile = load_rows(gmem.e + key_offset, i, ks, in_time, in_k, H * K).to(tl.float32)
                    if traits.ERASE_CHANNELS:
                        e_tile *= k_tile
                if traits.ERASE:
                    e_tile *= erase[:, None]
                E = e_tile * tl.exp2(G_before if ERASE_PREVIOUS else G)
                store_rows(at + 2 * tile_size, E, i, ks, in_time, in_k, HV * K)
                e_tile, e_scales = scale_rows(e_tile, tl.float32, SCALED)
            if not READ_BEFORE:
                P += tl.where(i[:, None] == i[None, :], tl.sum(q_tile * k_tile, 1)[:, None], 0.0)
            k_tile, k_scales = scale_rows(k_tile, tl.float32, SCALED)
            q_tile, q_scales = scale_rows(q_tile, tl.float32, SCALED)
            for level in tl.range(0, levels_of(C), num_stages=1):
                upper = is_upper(i, level)[:, None]
                in_block = same_block(i, level)
                late = level_factors(g, i, level, False, EXACT)
                early = late
                if READ_BEFORE or (DELTA and ERASE_PREVIOUS):
                    early = level_factors(g, i, level, True, EXACT)
                k_level = tl.trans(tl.where(upper, 0.0, k_tile * late).to(OPERAND))
                q_level = tl.where(upper, q_tile * (early if READ_BEFORE else late), 0.0).to(OPERAND)
                products = tl.dot(q_level, k_level, input_precision=PREC)
                P += tl.where(in_block, products * q_scales[:, None] * k_scales[None, :], 0.0)
                if DELTA:
                    e_level = tl.where(upper, e_tile * (early if ERASE_PREVIOUS else late), 0.0).to(OPERAND)
                    products = tl.dot(e_level, k_level, input_precision=PREC)
                    A += tl.where(in_block, products * e_scales[:, None] * k_scales[None, :], 0.0)
        if DELTA:
            T_inverse, T_blocks = unit_lower_inverse(A, C, OPERAND, PREC_INVERSE, traits.BLOCK)
        else:
            T_inverse = tl.zeros([C, C], tl.float32)
            T_blocks = tl.zeros([C, 8], tl.float32)
        tl.store(gmem.decay_bounds + chunk, 0.0)
        store_wy_tiles(gmem.wy_tiles, T_inverse, T_blocks, tl.trans(P), gmem.q.dtype.element_ty, chunk, i, C, 1)
