"""Gradients of the operands of a DPLR chunk, in parallel over chunks, from S0, dS', x and du.

    dP = scale tril(do x^T),  dR = scale tril(do v^T),  dA = tril(du x^T, -1),  dB = tril(du v^T, -1)
    dq_ic = scale 2^G''_ic (do S0^T)_ic + sum_j 2^(G''_ic - G_jc) (dP_ij k_jc + dR_ij m_jc)
    de_ic = 2^G'_ic (du S0^T)_ic + sum_j 2^(G'_ic - G_jc) (dA_ij k_jc + dB_ij m_jc)
    dk_jc = 2^(Gend_c - G_jc) (x dS'^T)_jc + sum_i (2^(G''_ic - G_jc) dP_ij q_ic + 2^(G'_ic - G_jc) dA_ij e_ic)
    dm_jc = 2^(Gend_c - G_jc) (v dS'^T)_jc + sum_i (2^(G''_ic - G_jc) dR_ij q_ic + 2^(G'_ic - G_jc) dB_ij e_ic)
    d log_decay_tc = sum_{i >= t} (q dq - k dk - m dm)_ic + sum_{i > t} (e de)_ic + (dS' o S')_c

for channels c; (dS' o S')_c is the sum over values of dS' times S'. dplr_prepare.py defines the symbols, and
dplr_levels.py explains how the sums over pairs of tokens are computed. The diagonals of dP and dR contribute the same
to q dq and to k dk + m dm. They are left out of d log_decay, because with strong decays the difference of these large
terms would cancel.

C tokens in a chunk, HV heads, K key width, V value width
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
from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.device.layout import WEAK, load_rows, locate_scratch_chunk, store_rows


@triton.jit
def add_pair_gradients(
    dq_tile, de_tile, dk_tile, dm_tile, dP, dR, dA, dB, q_tile, k_tile, e_tile, m_tile, g, G, middle, level,
    WHOLE: tl.constexpr, READ_BEFORE: tl.constexpr, EXACT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Add the contributions of the pairs of a level, or with WHOLE of all pairs, to dq, de, dk and dm."""
    dtype: tl.constexpr = dP.dtype
    late, early, write, pairs = pair_factors(g, G, middle, level, WHOLE, dP.shape[0], EXACT)
    read = early if READ_BEFORE else late
    if not WHOLE:
        dP = tl.where(pairs, dP, 0.0)
        dR = tl.where(pairs, dR, 0.0)
        dA = tl.where(pairs, dA, 0.0)
        dB = tl.where(pairs, dB, 0.0)
    k_level = (k_tile.to(tl.float32) * write).to(dtype)
    m_level = (m_tile.to(tl.float32) * write).to(dtype)
    z = tl.dot(dP, k_level, input_precision=PREC)
    dq_tile += read * tl.dot(dR, m_level, z, input_precision=PREC)
    z = tl.dot(dA, k_level, input_precision=PREC)
    de_tile += early * tl.dot(dB, m_level, z, input_precision=PREC)
    q_level = (q_tile.to(tl.float32) * read).to(dtype)
    e_level = (e_tile.to(tl.float32) * early).to(dtype)
    z = tl.dot(tl.trans(dP), q_level, input_precision=PREC)
    dk_tile += write * tl.dot(tl.trans(dA), e_level, z, input_precision=PREC)
    z = tl.dot(tl.trans(dR), q_level, input_precision=PREC)
    dm_tile += write * tl.dot(tl.trans(dB), e_level, z, input_precision=PREC)
    return dq_tile, de_tile, dk_tile, dm_tile


@triton.jit
def chunk_gradients(gmem, scale, start, length, c, scratch_slot, hv, tile, traits: tl.constexpr):
    """Compute the gradients of chunk c of a sequence, for one head and tile of keys."""
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    C: tl.constexpr = traits.C
    BK: tl.constexpr = traits.BK
    BV: tl.constexpr = traits.BV
    READ_BEFORE: tl.constexpr = traits.READ_BEFORE
    EXACT: tl.constexpr = traits.EXACT
    PREC: tl.constexpr = traits.PREC
    STAGES: tl.constexpr = traits.STAGES
    NV: tl.constexpr = (V + BV - 1) // BV
    dtype: tl.constexpr = gmem.states.dtype.element_ty
    # with float16 no decay counts as weak, because operands scaled by up to 2^WEAK may overflow
    BOUND: tl.constexpr = 0.0 if dtype == tl.float16 else WEAK
    i = tl.arange(0, C)
    in_time = i < length - c * C
    row = start + c * C
    ks = tile * BK + tl.arange(0, BK)
    in_k = ks < K
    head = (row * HV + hv) * K
    scratch_chunk = tl.cast(scratch_slot, tl.int64) * HV + hv
    value = (row * HV + hv) * V
    scratch_value = (tl.cast(scratch_slot, tl.int64) * C * HV + hv) * V
    dP = tl.zeros([C, C], tl.float32)
    dR = tl.zeros([C, C], tl.float32)
    dA = tl.zeros([C, C], tl.float32)
    dB = tl.zeros([C, C], tl.float32)
    for tv in tl.range(0, NV, num_stages=STAGES):
        vs = tv * BV + tl.arange(0, BV)
        in_v = vs < V
        do_tile = load_rows(gmem.do + value, i, vs, in_time, in_v, HV * V).to(dtype)
        v_T = tl.trans(load_rows(gmem.v + value, i, vs, in_time, in_v, HV * V).to(dtype))
        x_T = tl.trans(load_rows(gmem.v_new + scratch_value, i, vs, i < C, in_v, HV * V))
        du_tile = load_rows(gmem.du + scratch_value, i, vs, i < C, in_v, HV * V)
        dP = tl.dot(do_tile, x_T, dP, input_precision=PREC)
        dR = tl.dot(do_tile, v_T, dR, input_precision=PREC)
        dA = tl.dot(du_tile, x_T, dA, input_precision=PREC)
        dB = tl.dot(du_tile, v_T, dB, input_precision=PREC)
    diagonal = i[:, None] == i[None, :]
    dP *= scale
    dR *= scale
    dP_diagonal = tl.sum(tl.where(diagonal, dP, 0.0), 1)
    dR_diagonal = tl.sum(tl.where(diagonal, dR, 0.0), 1)
    before = i[:, None] > i[None, :]
    dP = tl.where(before, dP, 0.0).to(dtype)
    dR = tl.where(before, dR, 0.0).to(dtype)
    dA = tl.where(before, dA, 0.0).to(dtype)
    dB = tl.where(before, dB, 0.0).to(dtype)

    dq_tile = tl.zeros([C, BK], tl.float32)  # do S0^T
    de_tile = tl.zeros([C, BK], tl.float32)  # du S0^T
    dk_tile = tl.zeros([C, BK], tl.float32)  # x dS'^T
    dm_tile = tl.zeros([C, BK], tl.float32)  # v dS'^T
    S_dot_dS = tl.zeros([BK], tl.float32)
    for tv in tl.range(0, NV, num_stages=STAGES):
        vs = tv * BV + tl.arange(0, BV)
        in_v = vs < V
        S = load_rows(gmem.states + scratch_chunk * V * K, vs, ks, in_v, in_k, K)
        dS = load_rows(gmem.dstates + scratch_chunk * V * K, vs, ks, in_v, in_k, K)
        do_tile = load_rows(gmem.do + value, i, vs, in_time, in_v, HV * V).to(dtype)
        v_tile = load_rows(gmem.v + value, i, vs, in_time, in_v, HV * V).to(dtype)
        x = load_rows(gmem.v_new + scratch_value, i, vs, i < C, in_v, HV * V)
        du_tile = load_rows(gmem.du + scratch_value, i, vs, i < C, in_v, HV * V)
        dq_tile = tl.dot(do_tile, S, dq_tile, input_precision=PREC)
        de_tile = tl.dot(du_tile, S, de_tile, input_precision=PREC)
        dk_tile = tl.dot(x, dS, dk_tile, input_precision=PREC)
        dm_tile = tl.dot(v_tile, dS, dm_tile, input_precision=PREC)
        S_dot_dS += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)

    q_tile, k_tile, e_tile, m_tile, g, G, to_end = load_operands(
        gmem.q + head, gmem.k + head, gmem.e + head, gmem.v_key + head, gmem.log_decay + head, i, ks, in_time,
        in_k, HV * K, EXACT,
    )  # fmt: skip
    is_weak, middle = is_weak_decay(G, C, BOUND)
    dq_tile *= tl.exp2(G - g if READ_BEFORE else G) * scale
    de_tile *= tl.exp2(G - g)
    dk_tile *= to_end
    dm_tile *= to_end
    state_product = tl.exp2(tl.sum(g, 0)) * S_dot_dS + tl.sum(
        k_tile.to(tl.float32) * dk_tile + m_tile.to(tl.float32) * dm_tile, 0
    )
    if is_weak and not traits.MARKED:
        dq_tile, de_tile, dk_tile, dm_tile = add_pair_gradients(
            dq_tile, de_tile, dk_tile, dm_tile, dP, dR, dA, dB, q_tile, k_tile, e_tile, m_tile, g, G, middle, 0, True,
            READ_BEFORE, EXACT, PREC,
        )  # fmt: skip
    else:
        for level in tl.range(0, levels_of(C), num_stages=1):
            dq_tile, de_tile, dk_tile, dm_tile = add_pair_gradients(
                dq_tile, de_tile, dk_tile, dm_tile, dP, dR, dA, dB, q_tile, k_tile, e_tile, m_tile, g, G, middle,
                level, False, READ_BEFORE, EXACT, PREC,
            )  # fmt: skip
    q_tile = q_tile.to(tl.float32)
    k_tile = k_tile.to(tl.float32)
    e_tile = e_tile.to(tl.float32)
    m_tile = m_tile.to(tl.float32)
    late_terms = -k_tile * dk_tile - m_tile * dm_tile
    early_terms = e_tile * de_tile
    if READ_BEFORE:
        early_terms += q_tile * dq_tile
    else:
        late_terms += q_tile * dq_tile
    dg = tl.cumsum(late_terms + early_terms, 0, reverse=True) - early_terms + state_product[None, :]
    if not traits.HAS_STATE:  # the first decay of a sequence scales nothing
        dg = tl.where((c * C + i > 0)[:, None], dg, 0.0)
    store_rows(gmem.dlog_decay + head, dg, i, ks, in_time, in_k, HV * K)
    if not READ_BEFORE:
        dq_tile += dP_diagonal[:, None] * k_tile + dR_diagonal[:, None] * m_tile
        dk_tile += dP_diagonal[:, None] * q_tile
        dm_tile += dR_diagonal[:, None] * q_tile
    store_rows(gmem.dq + head, dq_tile, i, ks, in_time, in_k, HV * K)
    store_rows(gmem.dk + head, dk_tile, i, ks, in_time, in_k, HV * K)
    store_rows(gmem.de + head, de_tile, i, ks, in_time, in_k, HV * K)
    store_rows(gmem.dv_key + head, dm_tile, i, ks, in_time, in_k, HV * K)


@takes(
    pointers="q k e v_key v log_decay do gates states dstates v_new du dq dk de dv_key dlog_decay cu",
    traits="HV K V C BK BV READ_BEFORE HAS_STATE PACKED UNIT EXACT PREC STAGES HEADS MARKED",
)
@triton.jit(do_not_specialize=["N", "T", "window", "windows"])
def dplr_gradients_kernel(gmem, N, scale, T, window, windows, traits: tl.constexpr):
    """Compute the gradients of the operands of DPLR chunks.

    Grid: scratch slot, block of HEADS heads, K tile. For each head a program computes [C, BK] of the gradients. MARKED:
    it computes only the chunks that sm90/dplr_prepare.py has marked in gates.

    Reads states, dstates [scratch slot, HV, V, K]; v_new (x of each chunk), du [scratch slot, C, HV, V]; the operands
    and do. Writes dq, dk, de, dv_key (dm), dlog_decay [B, T, HV, K].
    """
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    C: tl.constexpr = traits.C
    BK: tl.constexpr = traits.BK
    HEADS: tl.constexpr = traits.HEADS
    NK: tl.constexpr = (K + BK - 1) // BK
    BLOCKS: tl.constexpr = (HV + HEADS - 1) // HEADS
    pid = tl.program_id(0)
    tile = pid % NK
    first = pid // NK % BLOCKS * HEADS
    scratch_slot = pid // NK // BLOCKS
    start, length, slot, c, in_use = locate_scratch_chunk(
        scratch_slot, gmem.cu, N, T, window, windows, C, traits.UNIT, traits.PACKED
    )
    last = tl.where(in_use, tl.minimum(first + HEADS, HV), first)
    if traits.MARKED:
        last = tl.where(any_marked(gmem.gates, slot, first, last, HV, K, C, HEADS), last, first)
    for hv in tl.range(first, last, num_stages=1):
        if is_marked(gmem.gates, tl.cast(slot, tl.int64) * HV + hv, K, C, traits.MARKED):
            chunk_gradients(gmem, scale, start, length, c, scratch_slot, hv, tile, traits)
