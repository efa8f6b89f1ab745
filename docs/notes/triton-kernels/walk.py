"""Every gradient, walking each segment forward from its checkpoint: no state and no x is stored."""

import triton
import triton.language as tl

from deltazoo.backends.triton.kernels.layout import (
    cumulative_decays,
    first_slot,
    load_rows,
    load_square,
    sequence_bounds,
    sequence_of_slot,
    store_rows,
)


@triton.jit
def stack(reads, erases, C: tl.constexpr, W: tl.constexpr):
    """Rows of two matrices [C, W], eight of one and eight of the other by turns: both rows of a token in one thread."""
    both = tl.reshape(tl.join(reads, erases), [C // 8, 8, W, 2])
    return tl.reshape(tl.permute(both, [0, 3, 1, 2]), [2 * C, W])


@triton.jit
def unstack(both, C: tl.constexpr, W: tl.constexpr):
    pair = tl.permute(tl.reshape(both, [C // 8, 2, 8, W]), [0, 2, 3, 1])
    return tl.split(tl.reshape(pair, [C, W, 2]))


@triton.jit
def walk_kernel(
    q, k, e, v, log_decay, b, w, do, gates, inverse, checkpoints, dstates, du, dq, dk, de, dgates, kepts, dw, partial, cu,
    scale, T, segment, parts, held,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, OWN: tl.constexpr, ERASE: tl.constexpr, WRITE: tl.constexpr,
    ERASE_EARLY: tl.constexpr, READ_EARLY: tl.constexpr, PACKED: tl.constexpr, PREPARED: tl.constexpr,
    EVERY: tl.constexpr, SEGMENT: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr, VARIANT: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HV // H
    pid = tl.program_id(0)
    hv = pid % HV
    part = pid // HV % parts
    n = pid // HV // parts
    h = hv // (HV // H)
    start, length = sequence_bounds(n, cu, T, PACKED)
    chunks = tl.cdiv(length, C)
    first = segment * SEGMENT + part * EVERY
    last = tl.minimum(first + EVERY, chunks)
    if first < last:
        slot = first_slot(n, cu, T, C, PACKED)
        i = tl.arange(0, C)
        R: tl.constexpr = 2 * C if DELTA else C
        r = tl.arange(0, R)
        if DELTA:
            t = r // 16 * 8 + r % 8
            erases = r // 8 % 2 == 1
        else:
            t = r
            erases = r < 0
        early = tl.where(erases, 1 if ERASE_EARLY else 0, 1 if READ_EARLY else 0)
        seen = t[:, None] >= i[None, :] + tl.where(erases, 1, 1 if READ_EARLY else 0)[:, None]
        sign = tl.where(erases, -1.0, scale)
        vs = tl.arange(0, BV)
        in_v = vs < V
        ks = tl.arange(0, BK)
        in_k = ks < K
        dtype: tl.constexpr = k.dtype.element_ty
        checkpoint = slot // EVERY + n if PACKED else n * tl.cdiv(chunks, EVERY)
        begin_at = checkpoints + (tl.cast(checkpoint + first // EVERY, tl.int64) * HV + hv) * V * K
        S = load_rows(begin_at, vs, ks, in_v, in_k, K)
        for c in tl.range(first, last, num_stages=STAGES):
            in_time = i < length - c * C
            row = start + c * C
            key = (row * H + h) * K
            value = (row * HV + hv) * V
            place = tl.cast(slot + c, tl.int64) * HV + hv
            local = n * SEGMENT + c - segment * SEGMENT if SEGMENT > 0 else slot + c
            local_value = (tl.cast(local, tl.int64) * C * HV + hv) * V
            dstate = dstates + (tl.cast(local, tl.int64) * HV + hv) * V * K
            G, G_before, G_end = cumulative_decays(
                gates, log_decay, place, row + i, hv, i, in_time, HV, C, DECAY, PREPARED
            )

            # x
            S0 = S.to(dtype)
            k_tile = load_rows(k + key, i, ks, in_time, in_k, H * K)
            if OWN:
                e_tile = load_rows(e + key, i, ks, in_time, in_k, H * K)
            else:
                e_tile = k_tile
            if DELTA:
                y = tl.dot(S0, tl.trans(e_tile), input_precision=PREC)
            v_tile = load_rows(v + value, i, vs, in_time, in_v, HV * V)
            x = tl.trans(v_tile).to(tl.float32)
            if WRITE:
                if PREPARED:
                    x *= tl.load(gates + (place * 3 + 2) * C + i)[None, :]
                else:
                    x *= tl.load(w + (row + i) * HV + hv, mask=in_time, other=0.0).to(tl.float32)[None, :]
            if DELTA:
                x -= y * tl.load(gates + (place * 3 + 1) * C + i)[None, :]
                T_inverse = load_square(inverse, place, i, C, 1, 0)
                x = tl.dot(x.to(dtype), tl.trans(T_inverse), input_precision=PREC)
            X = x.to(dtype)
            dS = load_rows(dstate, vs, ks, in_v, in_k, K)
            if DECAY != "none":
                kept = tl.sum(tl.sum(S0.to(tl.float32) * dS.to(tl.float32), 1), 0)
                S *= tl.exp2(G_end)
                x *= tl.exp2(G_end - G)[None, :]
            S = tl.dot(x.to(dtype), k_tile, S, input_precision=PREC)

            du_tile = load_rows(du + local_value, i, vs, i < C, in_v, HV * V)
            if WRITE:
                tl.store(
                    dw + (row + i) * HV + hv, tl.sum(v_tile.to(tl.float32) * du_tile.to(tl.float32), 1), mask=in_time
                )
            if VARIANT == 1 and DELTA:
                out_at = do + value + t[:, None] * (HV * V) + vs[None, :]
                out_at = tl.where(erases[:, None], du + local_value + t[:, None] * (HV * V) + vs[None, :], out_at)
                dout = tl.load(out_at, mask=(t < length - c * C)[:, None] & in_v[None, :], other=0.0)
            else:
                do_tile = load_rows(do + value, i, vs, in_time, in_v, HV * V)
                if DELTA:
                    dout = stack(do_tile, du_tile, C, BV)
                else:
                    dout = do_tile
            low = tl.dot(dout, X, input_precision=PREC) * sign[:, None]
            dqe = tl.dot(dout, S0, input_precision=PREC)
            row_scale = sign
            if DECAY != "none":
                if PREPARED:
                    G_row = tl.load(gates + place * 3 * C + t - early, mask=t >= early, other=0.0)
                else:
                    G_row = G_before if READ_EARLY else G
                low *= tl.exp2(tl.where(seen, G_row[:, None] - G[None, :], 0.0))
                row_scale *= tl.exp2(G_row)
            low = tl.where(seen, low, 0.0).to(dtype)
            dqe *= row_scale[:, None]
            dqe = tl.dot(low, k_tile, dqe, input_precision=PREC)
            q_tile = load_rows(q + key, i, ks, in_time, in_k, H * K)
            if DELTA:
                be = e_tile
                if ERASE:
                    strength = tl.load(b + (row + i) * HV + hv, mask=in_time, other=0.0).to(tl.float32)
                    be = (e_tile.to(tl.float32) * strength[:, None]).to(dtype)
                dq_tile, de_tile = unstack(dqe, C, BK)
            else:
                dq_tile = dqe
            at_gate = dgates + place * 4 * C
            if GROUP > 1:
                out = (tl.cast(local, tl.int64) * C * HV + hv) * K
                whole = tl.cast(held, tl.int64) * C * HV * K
                dq_at, dk_at, de_at = partial + out, partial + whole + out, partial + 2 * whole + out
                OUT: tl.constexpr = HV * K
            else:
                dq_at, dk_at, de_at = dq + key, dk + key, de + key if OWN else dk
                OUT: tl.constexpr = H * K
            store_rows(dq_at, dq_tile, i, ks, in_time, in_k, OUT)
            if DECAY != "none":
                turn = tl.sum(q_tile.to(tl.float32) * dq_tile, 1)
                if READ_EARLY:
                    ahead = turn
                    turn = tl.zeros([C], tl.float32)
                if DELTA:
                    turned = tl.sum(be.to(tl.float32) * de_tile, 1)
                    if ERASE_EARLY:
                        ahead = turned + ahead if READ_EARLY else turned
                    else:
                        turn += turned
                if READ_EARLY or ERASE_EARLY:
                    tl.store(at_gate + 3 * C + i, ahead)
            if DELTA:
                if ERASE:
                    tl.store(at_gate + 2 * C + i, tl.sum(e_tile.to(tl.float32) * de_tile, 1))
                    de_tile *= strength[:, None]
                if OWN:
                    store_rows(de_at, de_tile, i, ks, in_time, in_k, OUT)
                bqe = stack(q_tile, be, C, BK)
            else:
                bqe = q_tile
            if VARIANT == 2:
                dk_tile = tl.trans(tl.dot(tl.trans(bqe), low, input_precision=PREC))
            else:
                dk_tile = tl.dot(tl.trans(low), bqe, input_precision=PREC)
            if DECAY != "none":
                turn -= tl.sum(k_tile.to(tl.float32) * dk_tile, 1)
                tl.store(at_gate + i, turn)
                tl.store(kepts + place, kept * tl.exp2(G_end))
            if DELTA and not OWN:
                dk_tile += de_tile
            if VARIANT == 2:
                dk_stored = tl.trans(tl.dot(tl.trans(dS), X, input_precision=PREC))
            else:
                dk_stored = tl.dot(tl.trans(X), dS, input_precision=PREC)
            if DECAY != "none":
                dk_stored *= tl.exp2(G_end - G)[:, None]
                tl.store(at_gate + C + i, tl.sum(k_tile.to(tl.float32) * dk_stored, 1))
            dk_tile += dk_stored
            store_rows(dk_at, dk_tile, i, ks, in_time, in_k, OUT)


@triton.jit
def sum_groups_kernel(
    partial, dq, dk, de, cu, T, segment, N, held,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, OWN: tl.constexpr,
    PACKED: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, key head): dq, dk and de are the sums over its value heads, always in the same order."""
    pid = tl.program_id(0)
    h = pid % H
    local = pid // H
    if SEGMENT > 0:
        n = local // SEGMENT
        c = segment * SEGMENT + local % SEGMENT
    else:
        n = sequence_of_slot(local, cu, N, T, C, PACKED)
        c = local - first_slot(n, cu, T, C, PACKED)
    start, length = sequence_bounds(n, cu, T, PACKED)
    if c * C < length:
        GROUP: tl.constexpr = HV // H
        i = tl.arange(0, C)
        in_time = i < length - c * C
        ks = tl.arange(0, BK)
        in_k = ks < K
        key = ((start + c * C) * H + h) * K
        for which in tl.static_range(3 if OWN else 2):
            out = dq if which == 0 else dk if which == 1 else de
            base = partial + ((tl.cast(which, tl.int64) * held + local) * C * HV + h * GROUP) * K
            total = tl.zeros([C, BK], tl.float32)
            for g in tl.static_range(GROUP):
                total += load_rows(base + g * K, i, ks, in_time, in_k, HV * K).to(tl.float32)
            store_rows(out + key, total, i, ks, in_time, in_k, H * K)
