"""Gradients of the operands of a chunk, in parallel over chunks, from S0, dS', x and du.

    dP = tril(do x^T) scale 2^(G''_i - G_j),    dA = -tril(du x^T, -1) b_i 2^(G'_i - G_j)
    dq = scale 2^G'' do S0^T + dP k,    de = dA k - b 2^G' du S0^T
    dk = dP^T q + dA^T e + 2^(Gend - G) x dS'^T,    db = e . de / b,    dw = v . du
    d log_decay_t = sum_{i >= t} (q . dq - k . dk + e . de)_i + <dS', S'>,    S' = 2^Gend S0 + (2^(Gend - G) k)^T x

S0 is the state before the chunk, S' the state after it, dS' the gradient of S'. dP and dA are the gradients of q k^T
and e k^T: x = (I + A)^-1 u makes -du x^T the gradient of A. G, G', G'' are those of prepare.py. Terms of a read or an
erase that precedes the decay count for i > t only. An additive update has x = w v and needs du for dw alone. Where w is
b, x_i = b_i z_i, and db and dw add up to du . z = du . x / b, whose numerator is the diagonal of a product that is
computed anyway. C tokens in a chunk, H key heads, HV value heads, K key width, V value width

gradients_kernel      dq, dk, de and, for each key tile, the sums of the gate gradients
sum_groups_kernel     sums dq, dk, de over the value heads of a key head
gate_gradients_kernel sums the gate gradients over key tiles: d log_decay, db, dw
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.device.layout import (
    clamp_away_from_zero,
    cumulative_decays,
    load_mma_rows,
    load_rows,
    locate_chunk,
    locate_key_tile,
    locate_scratch_chunk,
    mma_rows,
    store_mma_rows,
    store_rows,
)


@triton.jit
def token_of(i, C: tl.constexpr):
    """Return the token in row i of a tile [C, ..]."""
    return i // 16 * 8 + i // 8 % 2 * (C // 2) + i % 8


@triton.jit
def stacked_token_of(r, DELTA: tl.constexpr):
    """Return the token in stacked row r, and whether the row belongs to the erase."""
    if DELTA:
        return r // 16 * 8 + r % 8, r // 8 % 2 == 1
    else:
        return r, r < 0


@triton.jit
def repeat_for_stacked_rows(x, C: tl.constexpr, DELTA: tl.constexpr):
    """Repeat one number per token [C] for the stacked rows [2 C]."""
    if DELTA:
        return tl.reshape(tl.broadcast_to(tl.reshape(x, [C // 8, 1, 8]), [C // 8, 2, 8]), [2 * C])
    else:
        return x


@triton.jit
def sum_stacked_rows(stacked, C: tl.constexpr):
    """Sum the two stacked rows [2 C] of each token, and return the sums [C] in the row order of `token_of`."""
    pair = tl.sum(tl.reshape(stacked, [2, C // 16, 2, 8]), 2)
    return tl.reshape(tl.permute(pair, [1, 0, 2]), [C])


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@takes(
    pointers="q k e v b do gates states dstates v_new du dq dk de dgates state_products partial slopes cu",
    traits=(
        "H HV K V C BK BV DECAY DELTA ERASE_KEY ERASE WRITE ERASE_PREVIOUS READ_BEFORE PACKED DU_IS_DV MIN_BETA UNIT "
        "PREC STAGES"
    ),
)
@triton.jit(do_not_specialize=["N", "slots", "num_scratch_slots", "T", "window", "windows"])
def gradients_kernel(gmem, N, slots, num_scratch_slots, scale, T, window, windows, traits: tl.constexpr):
    """Compute the gradients of one chunk.

    Grid: scratch slot, value head, K tile. Each program owns [C, BK] of dq, dk and de and loops over V tiles.

    The rows of the read (q, do) and of the erase (e, du) are stacked [2 C], so that one product computes both. Eight
    rows of one alternate with eight of the other, and the tokens of tiles [C, ..] are permuted (`token_of`), so that
    the three rows of a token belong to the same thread. dq, de and dk are computed from one 16-bit matrix, dP stacked
    with dA, so that the terms that cancel in d log_decay cancel exactly. dA uses b clamped away from 0, because db is
    divided by it.
    DU_IS_DV: du holds dv, which contains the factor w (w is b, or absent). The dtype of the
    scratch buffers (states, dstates, v_new, du) may be wider than that of the operands; products are computed in it.

    Reads states, dstates [scratch slot, HV, V, K]; v_new (x of each chunk), du [scratch slot, C, HV, V]; gates; the
    operands and do; with EFLA and Longhorn slopes (step_size.py), for the gradient of k through |k|^2; else None.
    Writes dq, dk, de [B, T, H, K], or with grouped heads partial [3, num_scratch_slots, C, HV, K] for
    sum_groups_kernel; for gate_gradients_kernel dgates [K tiles, slots, HV, 3 or 4, C] and
    state_products [K tiles, slots, HV] = <dS', S'>. Rows of dgates: 0 the terms of d log_decay that count for i >= t;
    1 e . de; 2 v . du (DU_IS_DV: dv . x), complete in each K tile; 3 with GATES_BEFORE the terms that count for i > t.
    """
    H: tl.constexpr = traits.H
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    C: tl.constexpr = traits.C
    BK: tl.constexpr = traits.BK
    BV: tl.constexpr = traits.BV
    DECAY: tl.constexpr = traits.DECAY
    DELTA: tl.constexpr = traits.DELTA
    WRITE: tl.constexpr = traits.WRITE
    DU_IS_DV: tl.constexpr = traits.DU_IS_DV
    PREC: tl.constexpr = traits.PREC
    GATES_BEFORE: tl.constexpr = traits.ERASE_PREVIOUS or traits.READ_BEFORE
    ROWS: tl.constexpr = 4 if GATES_BEFORE else 3
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    GROUP: tl.constexpr = HV // H
    R: tl.constexpr = 2 * C if DELTA else C
    scratch_slot, hv, h, tile = locate_key_tile(NK, traits)
    start, length, slot, c, in_use = locate_scratch_chunk(
        scratch_slot, gmem.cu, N, T, window, windows, C, traits.UNIT, traits.PACKED
    )
    if in_use:
        r = tl.arange(0, R)
        i = tl.arange(0, C)
        if DELTA:
            i = token_of(i, C)
        t, erases = stacked_token_of(r, DELTA)
        in_time = i < length - c * C
        in_rows = t < length - c * C
        row = start + c * C
        ks = tile * BK + tl.arange(0, BK)
        in_k = ks < K
        key_offset = (row * H + h) * K
        dtype: tl.constexpr = gmem.states.dtype.element_ty
        # A read before the update does not see the write of its own token; an erase never does.
        early = tl.where(erases, 1 if traits.ERASE_PREVIOUS else 0, 1 if traits.READ_BEFORE else 0)
        causal = t[:, None] >= i[None, :] + tl.where(erases, 1, 1 if traits.READ_BEFORE else 0)[:, None]
        chunk = tl.cast(slot, tl.int64) * HV + hv
        scratch_chunk = tl.cast(scratch_slot, tl.int64) * HV + hv
        value_offset = (row * HV + hv) * V
        scratch_value_offset = (tl.cast(scratch_slot, tl.int64) * C * HV + hv) * V
        du_offset = value_offset if DU_IS_DV else scratch_value_offset
        inter = tl.zeros([R, BK], tl.float32)  # do S^T stacked with du S^T
        intra = tl.zeros([R, C], tl.float32)  # do x^T stacked with du x^T
        dk_inter = tl.zeros([C, BK], tl.float32)  # x dS'^T
        S_dot_dS = tl.zeros([BV], tl.float32)
        for tv in tl.range(0, NV, num_stages=traits.STAGES):
            vs = tv * BV + tl.arange(0, BV)
            in_v = vs < V
            do_at = gmem.do + value_offset + t[:, None] * (HV * V) + vs[None, :]
            in_tile = in_rows[:, None] & in_v[None, :]
            if DELTA:
                du_at = gmem.du + du_offset + t[:, None] * (HV * V) + vs[None, :]
                if gmem.do.dtype == gmem.du.dtype:
                    do_du = tl.load(tl.where(erases[:, None], du_at, do_at), mask=in_tile, other=0.0)
                else:
                    do_du = tl.load(do_at, mask=in_tile & (erases[:, None] == 0), other=0.0).to(dtype)
                    do_du += tl.load(du_at, mask=in_tile & erases[:, None], other=0.0)
                x = load_rows(gmem.v_new + scratch_value_offset, i, vs, i < C, in_v, HV * V)
            else:
                do_du = tl.load(do_at, mask=in_tile, other=0.0)
                x = load_rows(gmem.v + value_offset, i, vs, in_time, in_v, HV * V)
            S = load_rows(gmem.states + scratch_chunk * V * K, vs, ks, in_v, in_k, K)
            dS = load_rows(gmem.dstates + scratch_chunk * V * K, vs, ks, in_v, in_k, K)
            inter = tl.dot(do_du, S, inter, input_precision=PREC)
            intra = tl.dot(do_du, tl.trans(x), intra, input_precision=PREC)
            dk_inter = tl.dot(x, dS, dk_inter, input_precision=PREC)
            if DECAY != "none":
                S_dot_dS += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)

        gate_row = gmem.dgates + (tl.cast(tile, tl.int64) * slots * HV + chunk) * ROWS * C
        LANES: tl.constexpr = min(16, 4096 // (BK * gmem.k.dtype.element_ty.primitive_bitwidth))
        row_i = mma_rows(C, LANES)
        if DELTA:
            row_i = token_of(row_i, C)
        in_row_i = row_i < length - c * C
        row_t, row_erases = stacked_token_of(mma_rows(R, LANES), DELTA)
        k_tile = load_mma_rows(gmem.k + key_offset, row_i, ks, in_row_i, in_k, H * K).to(dtype)
        qe_base = gmem.q + key_offset
        if DELTA:
            qe_base = tl.where(row_erases, (gmem.e if traits.ERASE_KEY else gmem.k) + key_offset, qe_base)
        qe = load_mma_rows(qe_base, row_t, ks, row_t < length - c * C, in_k, H * K).to(dtype)
        if WRITE and not DELTA:
            write = tl.load(gmem.gates + (chunk * 3 + 2) * C + i)
            intra *= write[None, :]
            dk_inter *= write[:, None]
        if gmem.slopes is not None:
            du_dot_x = tl.sum(tl.where(erases[:, None] & (t[:, None] == i[None, :]), intra, 0.0), 0)
            step_gradient = du_dot_x * tl.load(gmem.slopes + chunk * 2 * C + i)
        if DU_IS_DV and WRITE:
            du_dot_x = tl.sum(tl.where(erases[:, None] & (t[:, None] == i[None, :]), intra, 0.0), 1)
            tl.store(gate_row + 2 * C + t, du_dot_x, mask=erases)
        # A -1 that the compiler cannot fold: otherwise it moves the sign changes between products, which then wait for
        # each other.
        row_scale = tl.where(erases, tl.where(windows > 0, -1.0, 0.0), scale)
        if DELTA and traits.ERASE and not (DU_IS_DV and WRITE):
            erase = tl.load(gmem.b + (row + t) * HV + hv, mask=in_rows & erases, other=0.0).to(tl.float32)
            row_scale = tl.where(erases, -clamp_away_from_zero(erase, traits.MIN_BETA), scale)
        if DECAY != "none":
            G, _, G_end = cumulative_decays(gmem.gates, chunk, i, C, LOOP=False)
            G_of_tokens = gmem.gates + chunk * 3 * C + tl.arange(0, C)
            G_row = repeat_for_stacked_rows(tl.load(G_of_tokens), C, DELTA)
            if GATES_BEFORE:
                G_before = tl.load(G_of_tokens - 1, mask=tl.arange(0, C) > 0, other=0.0)
                G_early = repeat_for_stacked_rows(G_before, C, DELTA)
                G_row = tl.where(early > 0, G_early, G_row)
            intra *= tl.exp2(tl.where(causal, G_row[:, None] - G[None, :], 0.0)) * row_scale[:, None]
            inter *= (tl.exp2(G_row) * row_scale)[:, None]
            dk_inter *= tl.exp2(G_end - G)[:, None]
        else:
            intra *= row_scale[:, None]
            inter *= row_scale[:, None]
        dP_dA = tl.where(causal, intra, 0.0).to(dtype)
        dqe = tl.dot(dP_dA, k_tile, inter, input_precision=PREC)
        dk_tile = tl.dot(tl.trans(dP_dA), qe, input_precision=PREC)
        if DECAY != "none" or traits.ERASE:
            row_dots = tl.sum(qe.to(tl.float32) * dqe, 1)
            if DELTA and traits.ERASE:
                tl.store(gate_row + C + t, row_dots, mask=erases)
        if DECAY != "none":
            dG = row_dots
            if GATES_BEFORE:
                dG = tl.where(early > 0, 0.0, row_dots)
                dG_early = row_dots - dG
                if DELTA:
                    dG_early = sum_stacked_rows(dG_early, C)
                tl.store(gate_row + 3 * C + i, dG_early)
            if DELTA:
                dG = sum_stacked_rows(dG, C)
            k_float32 = k_tile.to(tl.float32)
            k_dot_dk, k_dot_inter = tl.reduce((k_float32 * dk_tile, k_float32 * dk_inter), 1, add_pairs)
            tl.store(gate_row + i, dG - (k_dot_dk + k_dot_inter))
            state_product = tl.sum(S_dot_dS, 0) * tl.exp2(G_end) + tl.sum(k_dot_inter, 0)
            tl.store(gmem.state_products + tl.cast(tile, tl.int64) * slots * HV + chunk, state_product)
        dk_tile += dk_inter
        if gmem.slopes is not None:
            dk_tile += step_gradient[:, None] * k_tile.to(tl.float32)
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
            pair = tl.permute(tl.reshape(dqe, [2, C // 16, 2, 8, BK]), [1, 0, 3, 4, 2])
            dq_tile, de_tile = tl.split(tl.reshape(pair, [C, BK, 2]))
            if traits.ERASE_KEY:
                store_mma_rows(de_at, de_tile, row_i, ks, in_row_i, in_k, STRIDE)
            else:
                dk_tile += de_tile
        else:
            dq_tile = dqe
        store_mma_rows(dq_at, dq_tile, row_i, ks, in_row_i, in_k, STRIDE)
        store_mma_rows(dk_at, dk_tile, row_i, ks, in_row_i, in_k, STRIDE)
        if WRITE and not DU_IS_DV:
            # Each K tile sums a share of the values.
            BW: tl.constexpr = BK if BK * NK >= V else BV
            dwrite = tl.zeros([C], tl.float32)
            for tw in range(tile, (V + BW - 1) // BW, NK):
                vs = tw * BW + tl.arange(0, BW)
                v_tile = load_rows(gmem.v + value_offset, i, vs, in_time, vs < V, HV * V)
                du_tile = load_rows(gmem.du + scratch_value_offset, i, vs, i < C, vs < V, HV * V)
                dwrite += tl.sum(v_tile.to(tl.float32) * du_tile.to(tl.float32), 1)
            tl.store(gate_row + 2 * C + i, dwrite)


@takes(
    pointers="partial dq dk de cu",
    traits="H PROGRAMS K C BK ERASE_KEY PACKED UNIT",
)
@triton.jit(do_not_specialize=["N", "T", "window", "windows", "num_scratch_slots"])
def sum_groups_kernel(gmem, N, T, window, windows, num_scratch_slots, traits: tl.constexpr):
    """Sum dq, dk and de [B, T, H, K] over the value heads of each key head, always in the same order.

    Grid: scratch slot, key head. Reads partial [3, num_scratch_slots, C, PROGRAMS, K].
    """
    H: tl.constexpr = traits.H
    K: tl.constexpr = traits.K
    C: tl.constexpr = traits.C
    BK: tl.constexpr = traits.BK
    GROUP: tl.constexpr = traits.PROGRAMS // H
    pid = tl.program_id(0)
    h = pid % H
    scratch_slot = pid // H
    start, length, _, c, in_use = locate_scratch_chunk(
        scratch_slot, gmem.cu, N, T, window, windows, C, traits.UNIT, traits.PACKED
    )
    if in_use:
        i = tl.arange(0, C)
        in_time = i < length - c * C
        for tile in range((K + BK - 1) // BK):
            ks = tile * BK + tl.arange(0, BK)
            in_k = ks < K
            key_offset = ((start + c * C) * H + h) * K
            for which in tl.static_range(3 if traits.ERASE_KEY else 2):
                out = gmem.dq if which == 0 else gmem.dk if which == 1 else gmem.de
                first_head = (
                    tl.cast(which, tl.int64) * num_scratch_slots + scratch_slot
                ) * C * traits.PROGRAMS + h * GROUP
                heads = gmem.partial + first_head * K
                total = tl.zeros([C, BK], tl.float32)
                for g in range(GROUP):
                    total += load_rows(heads + g * K, i, ks, in_time, in_k, traits.PROGRAMS * K).to(tl.float32)
                store_rows(out + key_offset, total, i, ks, in_time, in_k, H * K)


@takes(
    pointers="dgates state_products v b dlog_decay db dw dv slopes cu",
    traits="HV V C TILES K_TILES NEEDS_LOG_DECAY NEEDS_B NEEDS_W TIED DU_IS_DV MIN_BETA GATES_BEFORE HAS_STATE PACKED",
)
@triton.jit(do_not_specialize=["N", "slots", "T"])
def gate_gradients_kernel(gmem, N, slots, T, traits: tl.constexpr):
    """Sum the gate gradients of a chunk over tiles: d log_decay, db and dw [B, T, HV].

    Grid: chunk slot, value head.
    Reads dgates and state_products of all TILES: K_TILES key tiles for each V tile of the gradients.
    The terms in row 0 of dgates count for the tokens up to their own, those in row 3 for the tokens before it, and
    state_products for all tokens.

    TIED: w is b, and db contains both gradients. With x_i = b_i z_i they add up to du . z, which is dv . x / b^2 with
    DU_IS_DV. Where |b| < MIN_BETA, x does not determine z; then db is the sum of both, e . de and v . dv, divided by
    the clamped b that dv contains. slopes: with EFLA and Longhorn the derivatives of b (step_size.py), and db is the
    gradient of beta; else None.
    """
    HV: tl.constexpr = traits.HV
    TILES: tl.constexpr = traits.TILES
    K_TILES: tl.constexpr = traits.K_TILES
    V: tl.constexpr = traits.V
    C: tl.constexpr = traits.C
    ROWS: tl.constexpr = 4 if traits.GATES_BEFORE else 3
    chunk = tl.program_id(0)
    slot = chunk // HV
    hv = chunk % HV
    start, length, t0 = locate_chunk(slot, gmem.cu, N, T, C, traits.PACKED)
    if t0 < length:
        i = tl.arange(0, C)
        offsets = (start + t0 + i) * HV + hv
        in_time = i < length - t0
        dG = tl.zeros([C], tl.float32)
        e_dot_de = tl.zeros([C], tl.float32)
        dG_early = tl.zeros([C], tl.float32)
        state_product = 0.0
        v_dot_du = tl.zeros([C], tl.float32)
        for tile in tl.static_range(TILES):
            chunk_of_tile = tl.cast(tile, tl.int64) * slots * HV + chunk
            row = gmem.dgates + chunk_of_tile * ROWS * C + i
            if traits.NEEDS_LOG_DECAY:
                dG += tl.load(row)
                state_product += tl.load(gmem.state_products + chunk_of_tile)
                if traits.GATES_BEFORE:
                    dG_early += tl.load(row + 3 * C)
            if traits.NEEDS_B:
                e_dot_de += tl.load(row + C)
            if traits.NEEDS_W or (traits.TIED and (tile % K_TILES == 0 or not traits.DU_IS_DV)):
                v_dot_du += tl.load(row + 2 * C)
        if traits.NEEDS_W:
            tl.store(gmem.dw + offsets, v_dot_du, mask=in_time)
        if traits.NEEDS_LOG_DECAY:
            total = tl.cumsum(dG, 0, reverse=True) + state_product
            if traits.GATES_BEFORE:
                total += tl.sum(tl.where(i[:, None] < i[None, :], dG_early[None, :], 0.0), 1)
            if not traits.HAS_STATE:  # the first decay of a sequence scales nothing
                total = tl.where(t0 + i > 0, total, 0.0)
            tl.store(gmem.dlog_decay + offsets, total, mask=in_time)
        if traits.NEEDS_B:
            b_i = tl.load(gmem.b + offsets, mask=in_time, other=1.0).to(tl.float32)
            clamped_b = clamp_away_from_zero(b_i, traits.MIN_BETA)
            b_db = e_dot_de
            if traits.TIED and traits.DU_IS_DV:
                b_db = v_dot_du / clamped_b
                if tl.min(tl.abs(b_i), 0) < traits.MIN_BETA:
                    v_dot_dv = tl.zeros([C], tl.float32)
                    for column in range(V):
                        v_i = tl.load(gmem.v + offsets * V + column, mask=in_time, other=0.0).to(tl.float32)
                        v_dot_dv += v_i * tl.load(gmem.dv + offsets * V + column, mask=in_time, other=0.0).to(
                            tl.float32
                        )
                    b_db = e_dot_de + v_dot_dv
            elif traits.TIED:
                b_db = e_dot_de + v_dot_du * clamped_b
            db_i = b_db / clamped_b
            if gmem.slopes is not None:
                db_i *= tl.load(gmem.slopes + (chunk * 2 + 1) * C + i)
            tl.store(gmem.db + offsets, db_i, mask=in_time)
