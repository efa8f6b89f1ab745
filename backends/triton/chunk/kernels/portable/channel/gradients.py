"""Gradients of the operands of a chunk with a decay per channel, in parallel over chunks, from S0, dS', x and du.

    dP = scale tril(do x^T),    dA = -tril(du x^T, -1)
    dq_ic = scale 2^G''_ic (do S0^T)_ic + sum_j dP_ij 2^(G''_ic - G_jc) k_jc
    dy_ic = -2^G'_ic (du S0^T)_ic + sum_j dA_ij 2^(G'_ic - G_jc) k_jc,    y = b e,    de = b dy,    db = e . dy
    dk_jc = 2^(Gend_c - G_jc) (x dS'^T)_jc + sum_i 2^(G''_ic - G_jc) dP_ij q_ic + sum_i 2^(G'_ic - G_jc) dA_ij y_ic
    d log_decay_tc = sum_{i >= t} (q dq + y dy - k dk)_ic + (dS' o S')_c,    S' = 2^Gend S0 + (2^(Gend - G) k)^T x

for channels c; (dS' o S')_c is the sum over values. S0 is the state before the chunk, dS' the gradient of the state S'
after it. G, G', G'' are those of prepare.py, and decay_levels.py defines how the sums over pairs of tokens are
computed. Terms of a read or an erase that precedes the decay count for i > t only. The diagonal of dP, which adds the
same to q dq and k dk, is left out of d log_decay, so that strong decays leave no difference of large terms. An additive
update has x = w v and no dA. dw = v . du. C tokens in a chunk, H key heads, HV value heads, K key width, V value width
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.chunk.kernels.portable.channel.decay_levels import (
    is_upper,
    level_factors,
    level_pairs,
    levels_of,
    load_channel_decays,
    sum_selected,
)
from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.device.layout import (
    clamp_away_from_zero,
    load_rows,
    locate_key_tile,
    locate_scratch_chunk,
    store_rows,
)


@takes(
    pointers="q k e v log_decay b w do states dstates v_new du dq dk de dlog_decay dgates partial cu",
    traits=(
        "H HV K V C BK BV DELTA ERASE_KEY ERASE_CHANNELS ERASE WRITE STORED_DU ERASE_PREVIOUS READ_BEFORE HAS_STATE "
        "PACKED MIN_BETA UNIT EXACT PREC STAGES"
    ),
)
@triton.jit(do_not_specialize=["N", "slots", "num_scratch_slots", "T", "window", "windows"])
def channel_gradients_kernel(gmem, N, slots, num_scratch_slots, scale, T, window, windows, traits: tl.constexpr):
    """Compute the gradients of one chunk.

    Grid: scratch slot, value head, K tile. Each program owns [C, BK] of dq, dk and de and loops over V tiles.

    Reads states, dstates [scratch slot, HV, V, K]; with DELTA v_new (x of each chunk), with STORED_DU du
    [scratch slot, C, HV, V]; the operands and do. Without STORED_DU du holds dv, which contains the factor w (w is b,
    or absent); then row 2 of dgates is dv . x, complete in each K tile.
    Writes dlog_decay [B, T, HV, K]; dq, dk, de [B, T, H, K], or with grouped heads partial
    [3, num_scratch_slots, C, HV, K] for sum_groups_kernel; for gate_gradients_kernel rows 1 (e . de) and 2 (v . du) of
    dgates [K tiles, slots, HV, 3, C]. de contains b clamped away from 0, because db is e . de divided by it.
    ERASE_CHANNELS: e holds the erase strength of each channel, and the erase key is e k; de is then the gradient of the
    strengths.
    """
    H: tl.constexpr = traits.H
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    C: tl.constexpr = traits.C
    BK: tl.constexpr = traits.BK
    BV: tl.constexpr = traits.BV
    DELTA: tl.constexpr = traits.DELTA
    WRITE: tl.constexpr = traits.WRITE
    ERASE_PREVIOUS: tl.constexpr = traits.ERASE_PREVIOUS
    READ_BEFORE: tl.constexpr = traits.READ_BEFORE
    EXACT: tl.constexpr = traits.EXACT
    PREC: tl.constexpr = traits.PREC
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    GROUP: tl.constexpr = HV // H
    RECOVER_DU: tl.constexpr = DELTA and WRITE and not traits.STORED_DU
    ANY_EARLY: tl.constexpr = READ_BEFORE or (DELTA and ERASE_PREVIOUS)
    scratch_slot, hv, h, tile = locate_key_tile(NK, traits)
    start, length, slot, c, in_use = locate_scratch_chunk(
        scratch_slot, gmem.cu, N, T, window, windows, C, traits.UNIT, traits.PACKED
    )
    if in_use:
        dtype: tl.constexpr = gmem.states.dtype.element_ty
        i = tl.arange(0, C)
        in_time = i < length - c * C
        row = start + c * C
        ks = tile * BK + tl.arange(0, BK)
        in_k = ks < K
        key_offset = (row * H + h) * K
        value_head_offset = (row * HV + hv) * K
        scratch_chunk = tl.cast(scratch_slot, tl.int64) * HV + hv
        value_offset = (row * HV + hv) * V
        scratch_value_offset = (tl.cast(scratch_slot, tl.int64) * C * HV + hv) * V
        if WRITE:
            write = tl.load(gmem.w + (row + i) * HV + hv, mask=in_time, other=0.0).to(tl.float32)
        dq_tile = tl.zeros([C, BK], tl.float32)  # do S0^T
        dy_tile = tl.zeros([C, BK], tl.float32)  # du S0^T
        dk_tile = tl.zeros([C, BK], tl.float32)  # x dS'^T
        dP = tl.zeros([C, C], tl.float32)
        dA = tl.zeros([C, C], tl.float32)
        S_dot_dS = tl.zeros([BK], tl.float32)
        dwrite = tl.zeros([C], tl.float32)
        for tv in tl.range(0, NV, num_stages=traits.STAGES):
            vs = tv * BV + tl.arange(0, BV)
            in_v = vs < V
            do_tile = load_rows(gmem.do + value_offset, i, vs, in_time, in_v, HV * V).to(dtype)
            if DELTA:
                x = load_rows(gmem.v_new + scratch_value_offset, i, vs, i < C, in_v, HV * V)
            else:
                x = load_rows(gmem.v + value_offset, i, vs, in_time, in_v, HV * V)
                if WRITE:
                    x = x.to(tl.float32) * write[:, None]
                x = x.to(dtype)
            S = load_rows(gmem.states + scratch_chunk * V * K, vs, ks, in_v, in_k, K)
            dS = load_rows(gmem.dstates + scratch_chunk * V * K, vs, ks, in_v, in_k, K)
            dq_tile = tl.dot(do_tile, S, dq_tile, input_precision=PREC)
            dP = tl.dot(do_tile, tl.trans(x), dP, input_precision=PREC)
            dk_tile = tl.dot(x, dS, dk_tile, input_precision=PREC)
            S_dot_dS += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
            if DELTA or WRITE:
                du_rows = gmem.du + (scratch_value_offset if traits.STORED_DU else value_offset)
                du_tile = load_rows(du_rows, i, vs, (i < C) if traits.STORED_DU else in_time, in_v, HV * V).to(dtype)
            if DELTA:
                dy_tile = tl.dot(du_tile, S, dy_tile, input_precision=PREC)
                dA = tl.dot(du_tile, tl.trans(x), dA, input_precision=PREC)
            if WRITE and not RECOVER_DU:
                v_tile = load_rows(gmem.v + value_offset, i, vs, in_time, in_v, HV * V).to(tl.float32)
                dwrite += tl.sum(v_tile * du_tile.to(tl.float32), 1)

        g = load_channel_decays(gmem.log_decay + value_head_offset, i, ks, in_time, in_k, HV * K)
        k_tile = load_rows(gmem.k + key_offset, i, ks, in_time, in_k, H * K).to(tl.float32)
        q_tile = load_rows(gmem.q + key_offset, i, ks, in_time, in_k, H * K).to(tl.float32)
        decay = tl.exp2(sum_selected(i[:, None] >= i[None, :], g, EXACT))
        decay_early = decay
        if ANY_EARLY:
            decay_early = tl.exp2(sum_selected(i[:, None] > i[None, :], g, EXACT))
        dq_tile *= (decay_early if READ_BEFORE else decay) * scale
        dk_tile *= tl.exp2(sum_selected(i[:, None] < i[None, :], g, EXACT))
        state_product = tl.exp2(tl.sum(g, 0)) * S_dot_dS + tl.sum(k_tile * dk_tile, 0)
        dP *= scale
        read_diagonal = tl.sum(tl.where(i[:, None] == i[None, :], dP, 0.0), 1)
        if DELTA:
            e_tile = k_tile
            if traits.ERASE_KEY:
                e_tile = load_rows(gmem.e + key_offset, i, ks, in_time, in_k, H * K).to(tl.float32)
                if traits.ERASE_CHANNELS:
                    erase_tile = e_tile
                    e_tile *= k_tile
            y_tile = e_tile
            if traits.ERASE:
                erase = tl.load(gmem.b + (row + i) * HV + hv, mask=in_time, other=0.0).to(tl.float32)
                y_tile = e_tile * erase[:, None]
            if RECOVER_DU:
                dwrite = tl.sum(tl.where(i[:, None] == i[None, :], dA, 0.0), 1)
                dA /= clamp_away_from_zero(erase, traits.MIN_BETA)[:, None]
                dy_tile /= clamp_away_from_zero(erase, traits.MIN_BETA)[:, None]
            dy_tile *= -(decay_early if ERASE_PREVIOUS else decay)
        for level in tl.range(0, levels_of(C), num_stages=1):
            upper = is_upper(i, level)[:, None]
            pairs = level_pairs(i, level)
            late = level_factors(g, i, level, False, EXACT)
            early = late
            if ANY_EARLY:
                early = level_factors(g, i, level, True, EXACT)
            to_boundary = tl.where(upper, 0.0, late)
            k_level = (k_tile * to_boundary).to(dtype)
            dP_level = tl.where(pairs, dP, 0.0).to(dtype)
            read = tl.where(upper, early if READ_BEFORE else late, 0.0)
            dq_tile += read * tl.dot(dP_level, k_level, input_precision=PREC)
            dk_level = tl.dot(tl.trans(dP_level), (q_tile * read).to(dtype), input_precision=PREC)
            if DELTA:
                dA_level = tl.where(pairs, -dA, 0.0).to(dtype)
                erased = tl.where(upper, early if ERASE_PREVIOUS else late, 0.0)
                dy_tile += erased * tl.dot(dA_level, k_level, input_precision=PREC)
                dk_level = tl.dot(tl.trans(dA_level), (y_tile * erased).to(dtype), dk_level, input_precision=PREC)
            dk_tile += to_boundary * dk_level
        late_terms = -k_tile * dk_tile
        early_terms = tl.zeros([C, BK], tl.float32)
        if READ_BEFORE:
            early_terms += q_tile * dq_tile
        else:
            late_terms += q_tile * dq_tile
        if DELTA:
            if ERASE_PREVIOUS:
                early_terms += y_tile * dy_tile
            else:
                late_terms += y_tile * dy_tile
        dg = tl.cumsum(late_terms, 0, reverse=True) + state_product[None, :]
        if ANY_EARLY:
            dg += tl.cumsum(early_terms, 0, reverse=True) - early_terms
        if not traits.HAS_STATE:  # the first decay of a sequence scales nothing
            dg = tl.where((c * C + i > 0)[:, None], dg, 0.0)
        store_rows(gmem.dlog_decay + value_head_offset, dg, i, ks, in_time, in_k, HV * K)
        if not READ_BEFORE:
            dq_tile += read_diagonal[:, None] * k_tile
            dk_tile += read_diagonal[:, None] * q_tile
        gate_row = gmem.dgates + (tl.cast(tile, tl.int64) * slots * HV + tl.cast(slot, tl.int64) * HV + hv) * 3 * C
        if WRITE:
            complete: tl.constexpr = NK == 1 or RECOVER_DU
            tl.store(gate_row + 2 * C + i, dwrite if complete else tl.where(tile == 0, dwrite, 0.0))
        if GROUP > 1:
            partial_dq = gmem.partial + (tl.cast(scratch_slot, tl.int64) * C * HV + hv) * K
            partial_size = tl.cast(num_scratch_slots, tl.int64) * C * HV * K
            dq_at, dk_at, de_at = partial_dq, partial_dq + partial_size, partial_dq + 2 * partial_size
        else:
            dq_at, dk_at, de_at = (
                gmem.dq + key_offset,
                gmem.dk + key_offset,
                gmem.de + key_offset if traits.ERASE_KEY else gmem.dk,
            )
        STRIDE: tl.constexpr = HV * K
        if DELTA:
            if traits.ERASE:
                dy_tile *= clamp_away_from_zero(erase, traits.MIN_BETA)[:, None]
                tl.store(gate_row + C + i, tl.sum(e_tile * dy_tile, 1))
            if traits.ERASE_KEY:
                if traits.ERASE_CHANNELS:
                    dk_tile += dy_tile * erase_tile
                    dy_tile *= k_tile
                store_rows(de_at, dy_tile, i, ks, in_time, in_k, STRIDE)
            else:
                dk_tile += dy_tile
        store_rows(dq_at, dq_tile, i, ks, in_time, in_k, STRIDE)
        store_rows(dk_at, dk_tile, i, ks, in_time, in_k, STRIDE)
