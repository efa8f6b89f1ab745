"""Chunk-local preparation of DPLR with a decay per channel: scaled operands, chunk decays and two WY tiles.

    S_t = D_t S_{t-1} + k_t x_t^T + m_t v_t^T,    x_t = S_{t-1}^T e_t          k, e, m: b, a and k of RWKV-7

With G the cumulative log2 decay per channel c and G'_i = G_(i-1), for a chunk with initial state S0:

    A_ij = sum_c e_ic k_jc 2^(G'_ic - G_jc),    B_ij = sum_c e_ic m_jc 2^(G'_ic - G_jc)          (j < i)
    P_ij = scale sum_c q_ic k_jc 2^(G''_ic - G_jc),    R_ij = scale sum_c q_ic m_jc 2^(G''_ic - G_jc)    (j <= i)
    x = T (E S0 + B v),    T = (I - A)^-1,    o = Q S0 + P x + R v,    S' = 2^Gend S0 + k_decayed^T x + M^T v
    Q = scale q 2^G'',   k_decayed = k 2^(Gend - G),   E = e 2^G',   M = m 2^(Gend - G)

G'' is G, or G' if the output is read before the update; P and R then have j < i.

C tokens in a chunk, HV heads, K key width
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.chunk.kernels.portable.channel.decay_levels import levels_of
from deltazoo.backends.triton.chunk.kernels.portable.channel.dplr_levels import (
    any_marked,
    is_marked,
    is_weak_decay,
    load_operands,
    pair_factors,
)
from deltazoo.backends.triton.chunk.kernels.portable.prepare import diagonal_blocks_of_8, unit_lower_inverse
from deltazoo.backends.triton.chunk.kernels.portable.wy_tiles import store_wy_tiles
from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.device.layout import WEAK, locate_chunk, store_rows


@triton.jit
def round_operand(x, EXACT: tl.constexpr):
    """Round float32 to the 11 bits of tf32, because the product would truncate; EXACT: return it unchanged."""
    if EXACT:
        return x
    else:
        rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)  # of a NaN, the addition overflows


@triton.jit
def add_pairs(
    A, B, P, R, q_tile, k_tile, e_tile, m_tile, g, G, middle, level,
    WHOLE: tl.constexpr, READ_BEFORE: tl.constexpr, EXACT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Add the pairs of a level, or with WHOLE all pairs, to A, B, P and R."""
    late, early, write, pairs = pair_factors(g, G, middle, level, WHOLE, A.shape[0], EXACT)
    k_level = tl.trans(round_operand(k_tile.to(tl.float32) * write, EXACT))
    m_level = tl.trans(round_operand(m_tile.to(tl.float32) * write, EXACT))
    e_level = round_operand(e_tile.to(tl.float32) * early, EXACT)
    A += tl.where(pairs, tl.dot(e_level, k_level, input_precision=PREC), 0.0)
    B += tl.where(pairs, tl.dot(e_level, m_level, input_precision=PREC), 0.0)
    q_level = round_operand(q_tile.to(tl.float32) * (early if READ_BEFORE else late), EXACT)
    P += tl.where(pairs, tl.dot(q_level, k_level, input_precision=PREC), 0.0)
    R += tl.where(pairs, tl.dot(q_level, m_level, input_precision=PREC), 0.0)
    return A, B, P, R


@triton.jit
def prepare_chunk(gmem, N, T, scale, start, length, t0, chunk, hv, traits: tl.constexpr):
    """Prepare the chunk that starts at token t0 of a sequence, for one head."""
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    C: tl.constexpr = traits.C
    BK: tl.constexpr = traits.BK
    READ_BEFORE: tl.constexpr = traits.READ_BEFORE
    PREC: tl.constexpr = traits.PREC
    PREC_INVERSE: tl.constexpr = traits.PREC_INVERSE
    EXACT: tl.constexpr = tl.float32 == traits.OPERAND
    i = tl.arange(0, C)
    in_time = i < length - t0
    head = ((start + t0) * HV + hv) * K
    gate_row = gmem.gates + chunk * (K + C)
    tile_size = (T.to(tl.int64) if traits.PACKED else N.to(tl.int64) * T) * HV * K
    A = tl.zeros([C, C], tl.float32)
    B = tl.zeros([C, C], tl.float32)
    P = tl.zeros([C, C], tl.float32)
    R = tl.zeros([C, C], tl.float32)
    diagonal = i[:, None] == i[None, :]
    for tile in range((K + BK - 1) // BK):
        ks = tile * BK + tl.arange(0, BK)
        in_k = ks < K
        q_tile, k_tile, e_tile, m_tile, g, G, to_end = load_operands(
            gmem.q + head, gmem.k + head, gmem.e + head, gmem.v_key + head, gmem.log_decay + head, i, ks, in_time,
            in_k, HV * K, EXACT,
        )  # fmt: skip
        is_weak, middle = is_weak_decay(G, C, WEAK)
        tl.store(gate_row + ks, tl.exp2(tl.sum(g, 0)), mask=in_k)
        at = gmem.scaled + head
        store_rows(
            at, q_tile.to(tl.float32) * scale * tl.exp2(G - g if READ_BEFORE else G), i, ks, in_time, in_k, HV * K
        )
        store_rows(at + tile_size, k_tile * to_end, i, ks, in_time, in_k, HV * K)
        store_rows(at + 2 * tile_size, e_tile * tl.exp2(G - g), i, ks, in_time, in_k, HV * K)
        store_rows(at + 3 * tile_size, m_tile * to_end, i, ks, in_time, in_k, HV * K)
        if not READ_BEFORE:
            q_float32 = q_tile.to(tl.float32)
            P += tl.where(diagonal, tl.sum(q_float32 * k_tile.to(tl.float32), 1)[:, None], 0.0)
            R += tl.where(diagonal, tl.sum(q_float32 * m_tile.to(tl.float32), 1)[:, None], 0.0)
        if is_weak and not traits.MARKED:
            A, B, P, R = add_pairs(
                A, B, P, R, q_tile, k_tile, e_tile, m_tile, g, G, middle, 0, True, READ_BEFORE, EXACT, PREC
            )
        else:
            for level in tl.range(0, levels_of(C), num_stages=1):
                A, B, P, R = add_pairs(
                    A, B, P, R, q_tile, k_tile, e_tile, m_tile, g, G, middle, level, False, READ_BEFORE, EXACT, PREC
                )
    P *= scale
    R *= scale
    dtype: tl.constexpr = gmem.q.dtype.element_ty
    tl.store(gmem.decay_bounds + chunk, 0.0)
    store_wy_tiles(gmem.wy_tiles, B, diagonal_blocks_of_8(B[None, :, :]), tl.trans(R), dtype, chunk * 2 + 1, i, C, 1)
    T_inverse, T_blocks = unit_lower_inverse(-A, C, traits.OPERAND, PREC_INVERSE, traits.BLOCK)
    store_wy_tiles(gmem.wy_tiles, T_inverse, T_blocks, tl.trans(P), dtype, chunk * 2, i, C, 1)


@takes(
    pointers="q k e v_key log_decay gates decay_bounds wy_tiles scaled cu",
    traits="HV K C BK READ_BEFORE PACKED OPERAND PREC PREC_INVERSE BLOCK HEADS MARKED",
)
@triton.jit(do_not_specialize=["N", "T"])
def dplr_prepare_kernel(gmem, N, T, scale, traits: tl.constexpr):
    """Prepare the chunks of a DPLR update.

    Grid: chunk slot, block of HEADS heads. MARKED: it prepares only the chunks that sm90/dplr_prepare.py has marked
    in gates.

    Reads q, k, e, v_key, log_decay [B, T, HV, K].
    Writes scaled [4, B, T, HV, K] = Q, k_decayed, E, M; gates [slots, HV, K + C], of which 2^Gend per channel; wy_tiles
    [slots, HV, 2, C, C + 8] = T with P and B with R, each as in ../wy_tiles.py; decay_bounds [slots, HV] = 0.
    """
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    C: tl.constexpr = traits.C
    PACKED: tl.constexpr = traits.PACKED
    HEADS: tl.constexpr = traits.HEADS
    BLOCKS: tl.constexpr = (HV + HEADS - 1) // HEADS
    slot = tl.program_id(0) // BLOCKS
    first = tl.program_id(0) % BLOCKS * HEADS
    start, length, t0 = locate_chunk(slot, gmem.cu, N, T, C, PACKED)
    last = tl.where(t0 < length, tl.minimum(first + HEADS, HV), first)
    if traits.MARKED:
        last = tl.where(any_marked(gmem.gates, slot, first, last, HV, K, C, HEADS), last, first)
    for hv in tl.range(first, last, num_stages=1):
        chunk = tl.cast(slot, tl.int64) * HV + hv
        if is_marked(gmem.gates, chunk, K, C, traits.MARKED):
            prepare_chunk(gmem, N, T, scale, start, length, t0, chunk, hv, traits)
