"""Backward of the chunked update, by segments of chunks: replay the states (forward.scan_kernel), scan dS, gradients.

    dx = scale P^T do + (e^(Gend - G) k) dS',  du = Tg^T dx,  dv = w du
    dS0 = e^Gend dS' + scale (e^G q)^T do - (c e)^T du
    dP = tril(do x^T) scale e^(G_i - G_j),  dA = -tril(du x^T, -1) e^(G_i - G_j)
    dq = scale e^G do S0^T + dP k,  de = b (dA k - e^G du S0^T),
    dk = dP^T q + dA^T (b e) + e^(Gend - G) x dS'^T
    db = e . de / b,  dw = v . du,  d log_decay_t = sum_{i >= t} (q . dq - k . dk + e . de)_i + <dS', state>

C chunk, G cumulative log2 decay in the chunk, H key heads, HV value heads, K key width, V value width
"""

import torch
import triton
import triton.language as tl

from common import first_slot, load_rows, prefetch_rows, sequence_bounds, sequence_of_slot, store_rows
from forward import Saved, decay_kind, key_tiles, launch_config, layout, scan_kernel


@triton.jit
def reverse_scan_kernel(
    q, k, e, do, gates, inverse, reads, dstate, dstates, du, dv, cu, scale, T, segment,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, OWN: tl.constexpr, WRITE: tl.constexpr,
    PACKED: tl.constexpr, SEGMENT: tl.constexpr, WHOLE: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
    READS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, value head, V tile) walks one segment backwards; dS^T [BV, K] in registers.

    dstate [N, HV, V, K] float32 carries dS^T between segments; keeps dS'^T of each chunk in dstates [place, HV, V, K]
    and du [place, C, HV, V]; writes dv.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    nh = pid // NV
    n = nh // HV
    hv = nh % HV
    h = hv // (HV // H)
    start, length = sequence_bounds(n, cu, T, PACKED)
    slot = first_slot(n, cu, T, C, PACKED)
    i = tl.arange(0, C)
    vs = (pid % NV) * BV + tl.arange(0, BV)
    ka = tl.arange(0, K0)
    in_v = vs < V
    in_ka = ka < K
    if K1 > 0:
        kb = K0 + tl.arange(0, K1)
        in_kb = kb < K
    causal = i[:, None] >= i[None, :]
    dtype: tl.constexpr = k.dtype.element_ty
    chunks = tl.cdiv(length, C)
    first = 0
    last = chunks
    if not WHOLE:
        first = segment * SEGMENT
        last = tl.minimum(first + SEGMENT, chunks)

    if first < last:
        carry = dstate + tl.cast(nh, tl.int64) * V * K
        dSa = load_rows(carry, vs, ka, in_v, in_ka, K)
        if K1 > 0:
            dSb = load_rows(carry, vs, kb, in_v, in_kb, K)
        for back in tl.range(0, last - first, num_stages=STAGES):
            c = last - 1 - back
            in_time = i < length - c * C
            row = start + c * C
            key = (row * H + h) * K
            val = (row * HV + hv) * V
            place = tl.cast(slot + c, tl.int64) * HV + hv
            local = slot + c if WHOLE else n * SEGMENT + c - first

            k_a = load_rows(k + key, i, ka, in_time, in_ka, H * K)
            q_a = load_rows(q + key, i, ka, in_time, in_ka, H * K)
            if K1 > 0:
                k_b = load_rows(k + key, i, kb, in_time, in_kb, H * K)
                q_b = load_rows(q + key, i, kb, in_time, in_kb, H * K)
            do_T = tl.load(
                do + val + vs[:, None] + i[None, :] * (HV * V), mask=in_v[:, None] & in_time[None, :], other=0.0
            )
            if PREFETCH:
                ahead = tl.minimum(C, c * C)  # back to the chunk before, or to this one
                prefetch_rows(k + key - ahead * (H * K), i, i < length - c * C + ahead, H * K, K)
                prefetch_rows(q + key - ahead * (H * K), i, i < length - c * C + ahead, H * K, K)
                prefetch_rows(do + val - ahead * (HV * V) + (pid % NV) * BV, i, i < length - c * C + ahead, HV * V, BV)
                following = (place - tl.where(ahead == C, HV, 0)) * C * C
                if DELTA:
                    prefetch_rows(inverse + following, i, i < C, C, C)
                if READS:
                    prefetch_rows(reads + following, i, i < C, C, C)
            at = dstates + (tl.cast(local, tl.int64) * HV + hv) * V * K
            store_rows(at, dSa, vs, ka, in_v, in_ka, K)
            if K1 > 0:
                store_rows(at, dSb, vs, kb, in_v, in_kb, K)

            # dx = scale P^T do + (e^(Gend - G) k) dS'
            dx = tl.dot(dSa.to(dtype), tl.trans(k_a), input_precision=PREC)
            if K1 > 0:
                dx = tl.dot(dSb.to(dtype), tl.trans(k_b), dx, input_precision=PREC)
            if DECAY:
                G = tl.load(gates + place * 3 * C + i)
                Gend = tl.load(gates + place * 3 * C + C - 1)
                dx *= tl.exp2(Gend - G)[None, :]
            if READS:
                P = tl.load(reads + place * C * C + i[:, None] * C + i[None, :])
            else:
                P = tl.dot(q_a, tl.trans(k_a), input_precision=PREC)
                if K1 > 0:
                    P = tl.dot(q_b, tl.trans(k_b), P, input_precision=PREC)
                if DECAY:
                    P *= tl.exp2(tl.where(causal, G[:, None] - G[None, :], 0.0))
                P = tl.where(causal, P * scale, 0.0)
            dx = tl.dot(do_T, P.to(dtype), dx, input_precision=PREC)

            # du = Tg^T dx
            if DELTA:
                Tg = tl.load(inverse + place * C * C + i[:, None] * C + i[None, :])
                dx = tl.dot(dx.to(dtype), Tg, input_precision=PREC)
            in_tile = in_v[:, None] & in_time[None, :]
            at = du + (tl.cast(local, tl.int64) * C * HV + hv) * V
            tl.store(at + vs[:, None] + i[None, :] * (HV * V), dx.to(dtype), mask=in_v[:, None])
            if WRITE:
                write = tl.load(gates + (place * 3 + 2) * C + i)
                tl.store(
                    dv + val + vs[:, None] + i[None, :] * (HV * V), (dx * write[None, :]).to(dtype), mask=in_tile
                )
            else:
                tl.store(dv + val + vs[:, None] + i[None, :] * (HV * V), dx.to(dtype), mask=in_tile)

            # dS0 = e^Gend dS' + scale (e^G q)^T do - (c e)^T du
            doq = do_T.to(tl.float32) * scale
            if DECAY:
                doq *= tl.exp2(G)[None, :]
                dSa *= tl.exp2(Gend)
                if K1 > 0:
                    dSb *= tl.exp2(Gend)
            dSa = tl.dot(doq.to(dtype), q_a, dSa, input_precision=PREC)
            if K1 > 0:
                dSb = tl.dot(doq.to(dtype), q_b, dSb, input_precision=PREC)
            if DELTA:
                if OWN:
                    e_a = load_rows(e + key, i, ka, in_time, in_ka, H * K)
                    if K1 > 0:
                        e_b = load_rows(e + key, i, kb, in_time, in_kb, H * K)
                else:
                    e_a = k_a
                    if K1 > 0:
                        e_b = k_b
                erase = tl.load(gates + (place * 3 + 1) * C + i)
                due = (dx * -erase[None, :]).to(dtype)
                dSa = tl.dot(due, e_a, dSa, input_precision=PREC)
                if K1 > 0:
                    dSb = tl.dot(due, e_b, dSb, input_precision=PREC)
        store_rows(carry, dSa, vs, ka, in_v, in_ka, K)
        if K1 > 0:
            store_rows(carry, dSb, vs, kb, in_v, in_kb, K)


@triton.jit
def gradients_kernel(
    q, k, e, v, b, do, gates, states, dstates, xs, du, dq, dk, de, dgates, kepts, dw, sums, cu, N, slots, scale, T, segment,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, OWN: tl.constexpr, ERASE: tl.constexpr, WRITE: tl.constexpr,
    PACKED: tl.constexpr, SEGMENT: tl.constexpr, WHOLE: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, key head, K tile), looping over the value heads of the key head and over V tiles.

    Reads (q, do) and erases (b e, -du) are stacked, so that one product serves both; eight rows of one alternate with
    eight of the other, which leaves both rows of a token in one thread. dq, dk, de [B, T, H, K]; dw [B, T, HV];
    dgates [K tiles, slots, HV, 3, C] = turn, stored, read and kepts [K tiles, slots, HV] go to gate_gradients_kernel.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    G: tl.constexpr = HV // H
    R: tl.constexpr = 2 * C if DELTA else C
    pid = tl.program_id(0)
    tile = pid % NK
    h = pid // NK % H
    local = pid // NK // H
    if WHOLE:
        n = sequence_of_slot(local, cu, N, T, C, PACKED)
        c = local - first_slot(n, cu, T, C, PACKED)
    else:
        n = local // SEGMENT
        c = segment * SEGMENT + local % SEGMENT
    start, length = sequence_bounds(n, cu, T, PACKED)
    if c * C < length:
        slot = first_slot(n, cu, T, C, PACKED) + c
        i = tl.arange(0, C)
        r = tl.arange(0, R)
        if DELTA:
            t = r // 16 * 8 + r % 8
            erases = r // 8 % 2 == 1
        else:
            t = r
            erases = r < 0
        in_time = i < length - c * C
        in_rows = t < length - c * C
        row = start + c * C
        ks = tile * BK + tl.arange(0, BK)
        in_k = ks < K
        key = (row * H + h) * K
        dtype: tl.constexpr = k.dtype.element_ty
        kc = tl.arange(0, BK)
        sum_at = sums + tl.cast(pid, tl.int64) * 3 * C * BK
        for g in range(0, G):
            hv = h * G + g
            place = tl.cast(slot, tl.int64) * HV + hv
            scratch = tl.cast(local, tl.int64) * HV + hv
            val = (row * HV + hv) * V
            local_val = (tl.cast(local, tl.int64) * C * HV + hv) * V
            inter = tl.zeros([R, BK], tl.float32)  # do S^T over du S^T
            intra = tl.zeros([R, C], tl.float32)  # do x^T over du x^T
            dkS = tl.zeros([C, BK], tl.float32)
            kept = tl.zeros([BV], tl.float32)
            dwrite = tl.zeros([C], tl.float32)
            for tv in tl.range(0, NV, num_stages=STAGES):
                vs = tv * BV + tl.arange(0, BV)
                in_v = vs < V
                out_at = do + val + t[:, None] * (HV * V) + vs[None, :]
                if DELTA:
                    out_at = tl.where(erases[:, None], du + local_val + t[:, None] * (HV * V) + vs[None, :], out_at)
                dout = tl.load(out_at, mask=in_rows[:, None] & in_v[None, :], other=0.0)
                x_tile = load_rows(xs + local_val, i, vs, i < C, in_v, HV * V)
                S = load_rows(states + scratch * V * K, vs, ks, in_v, in_k, K)
                dS = load_rows(dstates + scratch * V * K, vs, ks, in_v, in_k, K)
                inter = tl.dot(dout, S, inter, input_precision=PREC)
                intra = tl.dot(dout, tl.trans(x_tile), intra, input_precision=PREC)
                dkS = tl.dot(x_tile, dS, dkS, input_precision=PREC)
                if DECAY:
                    kept += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
                if WRITE:
                    if tile == 0:
                        v_tile = load_rows(v + val, i, vs, in_time, in_v, HV * V)
                        du_tile = load_rows(du + local_val, i, vs, i < C, in_v, HV * V)
                        dwrite += tl.sum(v_tile.to(tl.float32) * du_tile.to(tl.float32), 1)
            if WRITE:
                if tile == 0:
                    tl.store(dw + (row + i) * HV + hv, dwrite, mask=in_time)

            k_tile = load_rows(k + key, i, ks, in_time, in_k, H * K)
            qe_at = q + key + t[:, None] * (H * K) + ks[None, :]
            if DELTA:
                qe_at = tl.where(erases[:, None], (e if OWN else k) + key + t[:, None] * (H * K) + ks[None, :], qe_at)
            qe = tl.load(qe_at, mask=in_rows[:, None] & in_k[None, :], other=0.0)
            # rows of the reads carry the scale, rows of the erases a minus; a read sees its own token's write
            sign = tl.where(erases, -1.0, scale)
            seen = t[:, None] > i[None, :] - tl.where(erases, 0, 1)[:, None]
            if DECAY:
                cumulative = tl.load(gates + place * 3 * C + i)
                cumulative_r = tl.load(gates + place * 3 * C + t)
                end = tl.load(gates + place * 3 * C + C - 1)
                intra *= tl.exp2(tl.where(seen, cumulative_r[:, None] - cumulative[None, :], 0.0)) * sign[:, None]
                inter *= (tl.exp2(cumulative_r) * sign)[:, None]
                dkS *= tl.exp2(end - cumulative)[:, None]
            else:
                intra *= sign[:, None]
                inter *= sign[:, None]
            low = tl.where(seen, intra, 0.0).to(dtype)
            bqe = qe
            if DELTA and ERASE:
                strength = tl.load(b + (row + t) * HV + hv, mask=in_rows & erases, other=1.0)
                bqe = (qe.to(tl.float32) * strength[:, None]).to(dtype)
            dqe = tl.dot(low, k_tile, inter, input_precision=PREC)
            dk_tile = tl.dot(tl.trans(low), bqe, input_precision=PREC)
            at_gate = dgates + (tl.cast(tile, tl.int64) * slots * HV + place) * 3 * C
            if DECAY:
                turn = tl.sum(bqe.to(tl.float32) * dqe, 1)
                if DELTA:
                    turn = tl.reshape(tl.sum(tl.reshape(turn, [C // 8, 2, 8]), 1), [C])
                turn -= tl.sum(k_tile.to(tl.float32) * dk_tile, 1)
                tl.store(at_gate + i, turn)
                tl.store(at_gate + C + i, tl.sum(k_tile.to(tl.float32) * dkS, 1))
                tl.store(kepts + tl.cast(tile, tl.int64) * slots * HV + place, tl.sum(kept, 0) * tl.exp2(end))
            dk_tile += dkS
            if DELTA:
                if ERASE:
                    tl.store(at_gate + 2 * C + t, tl.sum(qe.to(tl.float32) * dqe, 1), mask=erases)
                    dqe *= strength[:, None]
                pair = tl.permute(tl.reshape(dqe, [C // 8, 2, 8, BK]), [0, 2, 3, 1])
                dq_tile, de_tile = tl.split(tl.reshape(pair, [C, BK, 2]))
                if not OWN:
                    dk_tile += de_tile
            else:
                dq_tile = dqe
            if G > 1:
                # the sum over value heads waits in memory: its registers would spill
                if g > 0:
                    tl.debug_barrier()
                    dq_tile += load_rows(sum_at, i, kc, i < C, kc < BK, BK)
                    dk_tile += load_rows(sum_at + C * BK, i, kc, i < C, kc < BK, BK)
                    if DELTA and OWN:
                        de_tile += load_rows(sum_at + 2 * C * BK, i, kc, i < C, kc < BK, BK)
                    tl.debug_barrier()
                if g < G - 1:
                    store_rows(sum_at, dq_tile, i, kc, i < C, kc < BK, BK)
                    store_rows(sum_at + C * BK, dk_tile, i, kc, i < C, kc < BK, BK)
                    if DELTA and OWN:
                        store_rows(sum_at + 2 * C * BK, de_tile, i, kc, i < C, kc < BK, BK)
            if g == G - 1:
                store_rows(dq + key, dq_tile, i, ks, in_time, in_k, H * K)
                store_rows(dk + key, dk_tile, i, ks, in_time, in_k, H * K)
                if DELTA and OWN:
                    store_rows(de + key, de_tile, i, ks, in_time, in_k, H * K)


@triton.jit
def gate_gradients_kernel(
    dgates, kepts, dlog_decay, db, cu, N, slots, T,
    HV: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr, DECAY: tl.constexpr, ERASE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """One program a (slot, value head): d log_decay and db of a chunk from the sums of every K tile.

    A pair (i, j) of the chunk counts for the tokens from j + 1 to i, what j stored for those after j, what the chunk
    kept of the state for all.
    """
    place = tl.program_id(0)
    slot = place // HV
    hv = place % HV
    n = sequence_of_slot(slot, cu, N, T, C, PACKED)
    start, length = sequence_bounds(n, cu, T, PACKED)
    t0 = (slot - first_slot(n, cu, T, C, PACKED)) * C
    if t0 < length:
        i = tl.arange(0, C)
        at = (start + t0 + i) * HV + hv
        in_time = i < length - t0
        turn = tl.zeros([C], tl.float32)
        stored = tl.zeros([C], tl.float32)
        read = tl.zeros([C], tl.float32)
        kept = 0.0
        for tile in tl.static_range(TILES):
            part = tl.cast(tile, tl.int64) * slots * HV + place
            if DECAY:
                turn += tl.load(dgates + part * 3 * C + i)
                stored += tl.load(dgates + part * 3 * C + C + i)
                kept += tl.load(kepts + part)
            if ERASE:
                read += tl.load(dgates + part * 3 * C + 2 * C + i)
        if DECAY:
            before = tl.sum(tl.where(i[:, None] > i[None, :], stored[None, :], 0.0), 1)
            tl.store(dlog_decay + at, tl.cumsum(turn, 0, reverse=True) + before + kept, mask=in_time)
        if ERASE:
            tl.store(db + at, read, mask=in_time)


def backward(do, dfinal, saved: Saved, q, k, v, log_decay=None, b=None, w=None, e=None, state=None, cu=None, *,
             delta=True, scale=None, config=None, every=16, phases=("replay", "reverse", "gradients")):  # fmt: skip
    """Gradients of forward(..., every=every): dq, dk, dv, dlog_decay [B, T, HV] or [HV], db, dw, de, dstate."""
    config = launch_config(q.dtype, q.shape[-1], v.shape[-1], e is not None, config)
    B, _, H, K = q.shape
    HV, V = v.shape[2:]
    C, PREC = config["C"], config["PREC"]
    N, T, slots = layout(q, v, cu, C)
    scale = K**-0.5 if scale is None else scale
    packed, decayed, own = cu is not None, log_decay is not None, e is not None
    parts = triton.cdiv(triton.cdiv(T, C), every)
    scratch = slots * HV * (K + C) * V * 2 * q.element_size()
    whole = N * every >= slots or scratch <= config["scratch"]
    places = slots if whole else N * every
    segments = min(1, parts) if whole else parts
    parts = parts if whole else 1
    K0, K1 = key_tiles(K)
    BK = min(config["gradients_BK"], K0)

    new = lambda *shape, dtype=q.dtype: torch.empty(*shape, device=q.device, dtype=dtype)  # noqa: E731
    f32 = torch.float32
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    de = torch.empty_like(e) if own else None
    tiles = triton.cdiv(K, BK)
    dlog_decay = new(B, T, HV, dtype=f32) if decayed else None
    db = new(B, T, HV, dtype=f32) if b is not None and delta else None
    dgates, kepts = new(tiles, slots, HV, 3, C, dtype=f32), new(tiles, slots, HV, dtype=f32)
    dw = new(B, T, HV, dtype=f32) if w is not None else None
    states, dstates = new(places, HV, V, K), new(places, HV, V, K)
    sums = new(places * H * tiles if HV > H else 0, 3, C, BK, dtype=f32)
    xs, du = new(places, C, HV, V), new(places, C, HV, V)
    dstate = new(N, HV, V, K, dtype=f32)
    dstate.zero_() if dfinal is None else dstate.copy_(dfinal.transpose(2, 3))

    for segment in reversed(range(segments)):
        if "replay" in phases:
            BV = config["replay_BV"]
            scan_kernel[(N * parts * HV * triton.cdiv(V, BV),)](
                None, k, e, v, saved.gates, saved.inverse, None, None, None, None, saved.checkpoints, states, xs, None, None,
                cu, scale, T, segment, parts, H, HV, K, V, C, K0, K1, BV, decayed, delta, own, w is not None, False, packed,
                every, PREC, config["replay_STAGES"], False, True, whole, every if whole else 0, False, False, config["PREFETCH"],
                num_warps=config["replay_warps"], num_stages=config["replay_STAGES"],
            )  # fmt: skip
        if "reverse" in phases:
            BV = config["reverse_BV"]
            reverse_scan_kernel[(N * HV * triton.cdiv(V, BV),)](
                q, k, e, do, saved.gates, saved.inverse, saved.reads, dstate, dstates, du, dv, cu, scale, T, segment,
                H, HV, K, V, C, K0, K1, BV, decayed, delta, own, w is not None, packed, every, whole, PREC,
                config["reverse_STAGES"], config["reverse_READS"] and config["READS"], config["PREFETCH"], num_warps=config["reverse_warps"], num_stages=config["reverse_STAGES"],
            )  # fmt: skip
        if "gradients" in phases:
            gradients_kernel[(places * H * tiles,)](
                q, k, e, v, b, do, saved.gates, states, dstates, xs, du, dq, dk, de, dgates, kepts, dw, sums, cu, N,
                slots, scale, T, segment, H, HV, K, V, C, BK, config["gradients_BV"], decayed, delta, own,
                b is not None, w is not None, packed, every, whole, PREC, config["gradients_STAGES"],
                num_warps=config["gradients_warps"], num_stages=config["gradients_STAGES"],
                maxnreg=config["gradients_maxnreg"],
            )  # fmt: skip
    if slots and (decayed or db is not None):
        gate_gradients_kernel[(slots * HV,)](
            dgates, kepts, dlog_decay, db, cu, N, slots, T, HV, C, tiles, decayed, db is not None, packed, num_warps=1
        )
    if decay_kind(log_decay) == "fixed":
        dlog_decay = dlog_decay.sum((0, 1))
    return dict(q=dq, k=dk, v=dv, log_decay=dlog_decay, b=db, w=dw, e=de,
                state=None if state is None else dstate.transpose(2, 3))  # fmt: skip
