"""Every gradient of a chunk, in parallel over chunks, from its state S0, the gradient dS' after it, x and du.

    dP = tril(do x^T) scale e^(G''_i - G_j),    dA = -tril(du x^T, -1) b_i e^(G'_i - G_j)
    dq = scale e^G'' do S0^T + dP k,    de = dA k - b e^G' du S0^T
    dk = dP^T q + dA^T e + e^(Gend - G) x dS'^T,    db = e . de / b,    dw = v . du
    d log_decay_t = sum_{i >= t} (q . dq - k . dk + e . de)_i + <dS', S'>,    S' = e^Gend S0 + (e^(Gend - G) k)^T x

where reads and erases that come before the decay count for i > t only. Of an additive update x is w v, and du counts
for dw alone. Where w is b, x_i = b_i z_i, and db and dw make du . z = du . x / b together: the diagonal of a product
that is taken anyway.

x = (I + A)^-1 u gives -du x^T for the gradient of A at once; dP and dA here are those of q k^T and e k^T. C chunk,
G cumulative log2 decay, G' and G'' as in prepare.py
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.kernels.layout import (
    clamp_away_from_zero,
    cumulative_decays,
    load_mma_rows,
    load_rows,
    locate_chunk,
    locate_scratch_chunk,
    mma_rows,
    store_mma_rows,
    store_rows,
)


@triton.jit
def token_of(i, C: tl.constexpr):
    """The token of row i of a tile [C, ..]."""
    return i // 16 * 8 + i // 8 % 2 * (C // 2) + i % 8


@triton.jit
def stacked_token_of(r, DELTA: tl.constexpr):
    """The token of stacked row r, and whether it is of the erases."""
    if DELTA:
        return r // 16 * 8 + r % 8, r // 8 % 2 == 1
    else:
        return r, r < 0


@triton.jit
def repeat_for_stacked_rows(x, C: tl.constexpr, DELTA: tl.constexpr):
    """Of a number [C] for each token one for each stacked row [2 C]; so few are loaded where they are wanted."""
    if DELTA:
        return tl.reshape(tl.broadcast_to(tl.reshape(x, [C // 8, 1, 8]), [C // 8, 2, 8]), [2 * C])
    else:
        return x


@triton.jit
def add_each(a, b, c, d):
    return a + c, b + d


@triton.jit
def sum_stacked_rows(stacked, C: tl.constexpr):
    """Of a number [2 C] for each stacked row the sum of each token's [C], in the order of the rows of a tile."""
    pair = tl.sum(tl.reshape(stacked, [2, C // 16, 2, 8]), 2)
    return tl.reshape(tl.permute(pair, [1, 0, 2]), [C])


@triton.jit(do_not_specialize=["N", "slots", "held", "T", "segment", "segments"])
def gradients_kernel(
    q, k, e, v, b, do, gates, states, dstates, xs, du, dq, dk, de, dgates, state_products, partial, cu, N,
    slots, held, scale, T, segment, segments,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, OWN: tl.constexpr, ERASE: tl.constexpr, WRITE: tl.constexpr,
    ERASE_EARLY: tl.constexpr, READ_EARLY: tl.constexpr, PACKED: tl.constexpr,
    DU_IS_DV: tl.constexpr, MIN_BETA: tl.constexpr, UNIT: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head, K tile), looping over V tiles.

    Reads (q, do) and erases (e, du) are stacked, so that one product serves both; eight rows of one alternate with
    eight of the other, and the tokens i of a tile [C, ..] come in an order that leaves all three rows of a token in one
    thread. One matrix, dP over dA, makes dq, de and dk, so that what cancels in d log_decay cancels exactly. b is held
    away from 0 in dA, for db is divided by it. DU_IS_DV: du is dv, which has w in it (w is b, or none). The scratch
    (states, dstates, xs, du) may be wider than the operands; products are taken in its dtype.

    dq, dk, de [B, T, H, K], or with grouped heads partial [3, held, C, HV, K], for sum_groups_kernel;
    dgates [K tiles, slots, HV, 3 or 4, C] = turn, read (e . de), write (v . du, or DU_IS_DV dv . x, whole in each K
    tile), early (where something is), and state_products [K tiles, slots, HV] = <dS', S'> go to gate_gradients_kernel.
    """
    EARLY: tl.constexpr = ERASE_EARLY or READ_EARLY
    ROWS: tl.constexpr = 4 if EARLY else 3
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    GROUP: tl.constexpr = HV // H
    R: tl.constexpr = 2 * C if DELTA else C
    pid = tl.program_id(0)
    tile = pid % NK
    hv = pid // NK % HV
    h = hv // GROUP
    local = pid // NK // HV
    start, length, slot, c, held_here = locate_scratch_chunk(local, cu, N, T, segment, segments, C, UNIT, PACKED)
    if held_here:
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
        key = (row * H + h) * K
        dtype: tl.constexpr = states.dtype.element_ty
        # a read before the update sees no write of its own token, an erase never does
        early = tl.where(erases, 1 if ERASE_EARLY else 0, 1 if READ_EARLY else 0)
        seen = t[:, None] >= i[None, :] + tl.where(erases, 1, 1 if READ_EARLY else 0)[:, None]
        place = tl.cast(slot, tl.int64) * HV + hv
        scratch = tl.cast(local, tl.int64) * HV + hv
        value = (row * HV + hv) * V
        local_value = (tl.cast(local, tl.int64) * C * HV + hv) * V
        du_value = value if DU_IS_DV else local_value
        inter = tl.zeros([R, BK], tl.float32)  # do S^T over du S^T
        intra = tl.zeros([R, C], tl.float32)  # do x^T over du x^T
        dk_stored = tl.zeros([C, BK], tl.float32)
        kept = tl.zeros([BV], tl.float32)
        for tv in tl.range(0, NV, num_stages=STAGES):
            vs = tv * BV + tl.arange(0, BV)
            in_v = vs < V
            out_at = do + value + t[:, None] * (HV * V) + vs[None, :]
            here = in_rows[:, None] & in_v[None, :]
            if DELTA:
                du_at = du + du_value + t[:, None] * (HV * V) + vs[None, :]
                if do.dtype == du.dtype:
                    dout = tl.load(tl.where(erases[:, None], du_at, out_at), mask=here, other=0.0)
                else:
                    dout = tl.load(out_at, mask=here & (erases[:, None] == 0), other=0.0).to(dtype)
                    dout += tl.load(du_at, mask=here & erases[:, None], other=0.0)
                x = load_rows(xs + local_value, i, vs, i < C, in_v, HV * V)
            else:
                dout = tl.load(out_at, mask=here, other=0.0)
                x = load_rows(v + value, i, vs, in_time, in_v, HV * V)
            S = load_rows(states + scratch * V * K, vs, ks, in_v, in_k, K)
            dS = load_rows(dstates + scratch * V * K, vs, ks, in_v, in_k, K)
            inter = tl.dot(dout, S, inter, input_precision=PREC)
            intra = tl.dot(dout, tl.trans(x), intra, input_precision=PREC)
            dk_stored = tl.dot(x, dS, dk_stored, input_precision=PREC)
            if DECAY != "none":
                kept += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)

        at_gate = dgates + (tl.cast(tile, tl.int64) * slots * HV + place) * ROWS * C
        LANES: tl.constexpr = min(16, 4096 // (BK * k.dtype.element_ty.primitive_bitwidth))
        row_i = mma_rows(C, LANES)
        if DELTA:
            row_i = token_of(row_i, C)
        in_row_i = row_i < length - c * C
        row_t, row_erases = stacked_token_of(mma_rows(R, LANES), DELTA)
        k_tile = load_mma_rows(k + key, row_i, ks, in_row_i, in_k, H * K).to(dtype)
        qe_base = tl.where(row_erases, (e if OWN else k) + key, q + key) if DELTA else q + key
        qe = load_mma_rows(qe_base, row_t, ks, row_t < length - c * C, in_k, H * K).to(dtype)
        if WRITE and not DELTA:
            write = tl.load(gates + (place * 3 + 2) * C + i)
            intra *= write[None, :]
            dk_stored *= write[:, None]
        if DU_IS_DV and WRITE:
            of_write = tl.sum(tl.where(erases[:, None] & (t[:, None] == i[None, :]), intra, 0.0), 1)
            tl.store(at_gate + 2 * C + t, of_write, mask=erases)
        # -1, which the compiler must not know: it changes signs between products then, which wait for one another
        strength = tl.where(erases, tl.where(segments > 0, -1.0, 0.0), scale)
        if DELTA and ERASE and not (DU_IS_DV and WRITE):
            erase = tl.load(b + (row + t) * HV + hv, mask=in_rows & erases, other=0.0).to(tl.float32)
            strength = tl.where(erases, -clamp_away_from_zero(erase, MIN_BETA), scale)
        if DECAY != "none":
            G, _, G_end = cumulative_decays(gates, place, i, C, LOOP=False)
            of_token = gates + place * 3 * C + tl.arange(0, C)
            G_row = repeat_for_stacked_rows(tl.load(of_token), C, DELTA)
            if EARLY:
                G_early = repeat_for_stacked_rows(tl.load(of_token - 1, mask=tl.arange(0, C) > 0, other=0.0), C, DELTA)
                G_row = tl.where(early > 0, G_early, G_row)
            intra *= tl.exp2(tl.where(seen, G_row[:, None] - G[None, :], 0.0)) * strength[:, None]
            inter *= (tl.exp2(G_row) * strength)[:, None]
            dk_stored *= tl.exp2(G_end - G)[:, None]
        else:
            intra *= strength[:, None]
            inter *= strength[:, None]
        low = tl.where(seen, intra, 0.0).to(dtype)
        dqe = tl.dot(low, k_tile, inter, input_precision=PREC)
        dk_tile = tl.dot(tl.trans(low), qe, input_precision=PREC)
        if DECAY != "none" or ERASE:
            turned = tl.sum(qe.to(tl.float32) * dqe, 1)
            if DELTA and ERASE:
                tl.store(at_gate + C + t, turned, mask=erases)
        if DECAY != "none":
            turn = turned
            if EARLY:
                turn = tl.where(early > 0, 0.0, turned)
                ahead = turned - turn
                if DELTA:
                    ahead = sum_stacked_rows(ahead, C)
                tl.store(at_gate + 3 * C + i, ahead)
            if DELTA:
                turn = sum_stacked_rows(turn, C)
            wide_k = k_tile.to(tl.float32)
            turn_k, stored = tl.reduce((wide_k * dk_tile, wide_k * dk_stored), 1, add_each)
            tl.store(at_gate + i, turn - (turn_k + stored))
            kept_here = tl.sum(kept, 0) * tl.exp2(G_end) + tl.sum(stored, 0)
            tl.store(state_products + tl.cast(tile, tl.int64) * slots * HV + place, kept_here)
        dk_tile += dk_stored
        if GROUP > 1:
            out = (tl.cast(local, tl.int64) * C * HV + hv) * K
            whole = tl.cast(held, tl.int64) * C * HV * K
            dq_at, dk_at, de_at = partial + out, partial + whole + out, partial + 2 * whole + out
        else:
            dq_at, dk_at, de_at = dq + key, dk + key, de + key if OWN else dk
        STRIDE: tl.constexpr = HV * K
        if DELTA:
            pair = tl.permute(tl.reshape(dqe, [2, C // 16, 2, 8, BK]), [1, 0, 3, 4, 2])
            dq_tile, de_tile = tl.split(tl.reshape(pair, [C, BK, 2]))
            if OWN:
                store_mma_rows(de_at, de_tile, row_i, ks, in_row_i, in_k, STRIDE)
            else:
                dk_tile += de_tile
        else:
            dq_tile = dqe
        store_mma_rows(dq_at, dq_tile, row_i, ks, in_row_i, in_k, STRIDE)
        store_mma_rows(dk_at, dk_tile, row_i, ks, in_row_i, in_k, STRIDE)
        if WRITE and not DU_IS_DV:
            # each K tile takes a share of the values
            BW: tl.constexpr = BK if BK * NK >= V else BV
            dwrite = tl.zeros([C], tl.float32)
            for tw in range(tile, (V + BW - 1) // BW, NK):
                vs = tw * BW + tl.arange(0, BW)
                v_tile = load_rows(v + value, i, vs, in_time, vs < V, HV * V)
                du_tile = load_rows(du + local_value, i, vs, i < C, vs < V, HV * V)
                dwrite += tl.sum(v_tile.to(tl.float32) * du_tile.to(tl.float32), 1)
            tl.store(at_gate + 2 * C + i, dwrite)


@triton.jit(do_not_specialize=["N", "T", "segment", "segments", "held"])
def sum_groups_kernel(
    partial, dq, dk, de, cu, N, T, segment, segments, held,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, OWN: tl.constexpr,
    PACKED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, key head): dq, dk and de are sums over its value heads, always in the same order."""
    GROUP: tl.constexpr = HV // H
    pid = tl.program_id(0)
    h = pid % H
    local = pid // H
    start, length, _, c, held_here = locate_scratch_chunk(local, cu, N, T, segment, segments, C, UNIT, PACKED)
    if held_here:
        i = tl.arange(0, C)
        in_time = i < length - c * C
        for tile in range((K + BK - 1) // BK):
            ks = tile * BK + tl.arange(0, BK)
            in_k = ks < K
            key = ((start + c * C) * H + h) * K
            for which in tl.static_range(3 if OWN else 2):
                out = dq if which == 0 else dk if which == 1 else de
                part = partial + ((tl.cast(which, tl.int64) * held + local) * C * HV + h * GROUP) * K
                total = tl.zeros([C, BK], tl.float32)
                for g in range(GROUP):
                    total += load_rows(part + g * K, i, ks, in_time, in_k, HV * K).to(tl.float32)
                store_rows(out + key, total, i, ks, in_time, in_k, H * K)


@triton.jit(do_not_specialize=["N", "slots", "T"])
def gate_gradients_kernel(
    dgates, state_products, v, b, dlog_decay, db, dw, dv, cu, N, slots, T,
    HV: tl.constexpr, V: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr, OF_K: tl.constexpr, DECAY: tl.constexpr,
    ERASE: tl.constexpr, WRITE: tl.constexpr, TIED: tl.constexpr, DU_IS_DV: tl.constexpr, MIN_BETA: tl.constexpr,
    EARLY: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One program a (slot, value head): d log_decay, db and dw of a chunk from the sums of all TILES, which are OF_K
    tiles of the keys for each tile of the values that had a program.

    Where w is b (TIED), db has both: x_i = b_i z_i, so that the two make du . z, which is dv . x / b^2 (DU_IS_DV). Where
    b is too near to 0 to tell z, it is what the two are, e . de and v . dv, divided by the b that dv has.
    What a token turned counts for the tokens up to it, what the chunk kept of the state for all; an early read or erase
    for the tokens before it.
    """
    ROWS: tl.constexpr = 4 if EARLY else 3
    place = tl.program_id(0)
    slot = place // HV
    hv = place % HV
    start, length, t0 = locate_chunk(slot, cu, N, T, C, PACKED)
    if t0 < length:
        i = tl.arange(0, C)
        at = (start + t0 + i) * HV + hv
        in_time = i < length - t0
        turn = tl.zeros([C], tl.float32)
        read = tl.zeros([C], tl.float32)
        early = tl.zeros([C], tl.float32)
        kept = 0.0
        write = tl.zeros([C], tl.float32)
        for tile in tl.static_range(TILES):
            part = tl.cast(tile, tl.int64) * slots * HV + place
            row = dgates + part * ROWS * C + i
            if DECAY:
                turn += tl.load(row)
                kept += tl.load(state_products + part)
                if EARLY:
                    early += tl.load(row + 3 * C)
            if ERASE:
                read += tl.load(row + C)
            if WRITE or (TIED and (tile % OF_K == 0 or not DU_IS_DV)):
                write += tl.load(row + 2 * C)
        if WRITE:
            tl.store(dw + at, write, mask=in_time)
        if DECAY:
            total = tl.cumsum(turn, 0, reverse=True) + kept
            if EARLY:
                total += tl.sum(tl.where(i[:, None] < i[None, :], early[None, :], 0.0), 1)
            tl.store(dlog_decay + at, total, mask=in_time)
        if ERASE:
            strength = tl.load(b + at, mask=in_time, other=1.0).to(tl.float32)
            held = clamp_away_from_zero(strength, MIN_BETA)
            if TIED and DU_IS_DV:
                read_and_write = write / held
                if tl.min(tl.abs(strength), 0) < MIN_BETA:
                    values = tl.zeros([C], tl.float32)
                    for column in range(V):
                        v_i = tl.load(v + at * V + column, mask=in_time, other=0.0).to(tl.float32)
                        values += v_i * tl.load(dv + at * V + column, mask=in_time, other=0.0).to(tl.float32)
                    read_and_write = read + values
                read = read_and_write
            elif TIED:
                read += write * held
            tl.store(db + at, read / held, mask=in_time)
