"""Forward of the chunked update: per-chunk triangular inverse (prepare), then the scan over chunks with the output.

    x = Tg (w v - c (S0^T e)),  o = scale e^G (S0^T q) + P x,  S' = e^Gend S0 + (e^(Gend - G) k)^T x
    Tg = (I + A)^-1,  A_ij = b_i e^(G_i - G_j) e_i.k_j (j < i),  P_ij = scale e^(G_i - G_j) q_i.k_j (j <= i),  c = b e^G

C chunk, G cumulative log2 decay in the chunk, H key heads, HV value heads, K key width, V value width
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from common import (
    chunks_forgotten,
    first_slot,
    load_rows,
    prefetch_rows,
    sequence_bounds,
    sequence_of_slot,
    store_rows,
    unit_lower_inverse,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def prepare_kernel(
    q, k, e, log_decay, b, w, gates, inverse, reads, cu, N, T, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, OWN: tl.constexpr, ERASE: tl.constexpr, WRITE: tl.constexpr,
    PACKED: tl.constexpr, OPERAND: tl.constexpr, PREC: tl.constexpr, PREC_INV: tl.constexpr, BLOCK: tl.constexpr,
    READS: tl.constexpr,
):  # fmt: skip
    """One program a (slot, key head): gates [slot, HV, 3, C] = G, c, w, inverse [slot, HV, C, C] = Tg, reads = P."""
    pid = tl.program_id(0)
    slot = pid // H
    h = pid % H
    n = sequence_of_slot(slot, cu, N, T, C, PACKED)
    start, length = sequence_bounds(n, cu, T, PACKED)
    t0 = (slot - first_slot(n, cu, T, C, PACKED)) * C
    if t0 < length:
        # every load before the first product: a product waits, and with it whatever is loaded later
        i = tl.arange(0, C)
        in_time = i < length - t0
        row = start + t0
        ka = tl.arange(0, K0)
        in_ka = ka < K
        key = (row * H + h) * K
        if DELTA or READS:
            k_a = load_rows(k + key, i, ka, in_time, in_ka, H * K)
            if READS:
                q_a = load_rows(q + key, i, ka, in_time, in_ka, H * K)
            if DELTA and OWN:
                e_a = load_rows(e + key, i, ka, in_time, in_ka, H * K)
        if K1 > 0:
            kb = K0 + tl.arange(0, K1)
            in_kb = kb < K
            k_b = load_rows(k + key, i, kb, in_time, in_kb, H * K)
            if READS:
                q_b = load_rows(q + key, i, kb, in_time, in_kb, H * K)
            if DELTA and OWN:
                e_b = load_rows(e + key, i, kb, in_time, in_kb, H * K)
        G: tl.constexpr = HV // H
        at = (row + i) * HV + h * G
        erase = tl.where(in_time, 1.0, 0.0)
        write = tl.where(in_time, 1.0, 0.0)
        step = tl.zeros([C], tl.float32)
        if DECAY == "head":
            step = tl.load(log_decay + at, mask=in_time, other=0.0)
        if ERASE:
            erase = tl.load(b + at, mask=in_time, other=0.0)
        if WRITE:
            write = tl.load(w + at, mask=in_time, other=0.0)

        if DELTA:
            A = tl.dot(e_a if OWN else k_a, tl.trans(k_a), input_precision=PREC)
            if K1 > 0:
                A = tl.dot(e_b if OWN else k_b, tl.trans(k_b), A, input_precision=PREC)
        if READS:
            P = tl.dot(q_a, tl.trans(k_a), input_precision=PREC) * scale
            if K1 > 0:
                P += tl.dot(q_b, tl.trans(k_b), input_precision=PREC) * scale
        causal = i[:, None] >= i[None, :]
        for g in range(G):
            hv = h * G + g
            out = tl.cast(slot, tl.int64) * HV + hv
            if DECAY == "fixed":
                decays = tl.load(log_decay + hv) * LOG2E * (tl.minimum(i, length - t0 - 1) + 1)
            else:
                decays = tl.cumsum(step * LOG2E, 0)
            tl.store(gates + (out * 3 + 0) * C + i, decays)
            tl.store(gates + (out * 3 + 1) * C + i, erase * tl.exp2(decays))
            tl.store(gates + (out * 3 + 2) * C + i, write)
            D = tl.where(causal, tl.exp2(tl.where(causal, decays[:, None] - decays[None, :], 0.0)), 0.0)
            if DELTA:
                L = tl.where(i[:, None] > i[None, :], erase[:, None] * A * D, 0.0)
            if G > 1:
                in_next = in_time & (g + 1 < G)
                if DECAY == "head":
                    step = tl.load(log_decay + at + g + 1, mask=in_next, other=0.0)
                if ERASE:
                    erase = tl.load(b + at + g + 1, mask=in_next, other=0.0)
                if WRITE:
                    write = tl.load(w + at + g + 1, mask=in_next, other=0.0)
            if READS:
                tl.store(reads + out * C * C + i[:, None] * C + i[None, :], (P * D).to(reads.dtype.element_ty))
            if DELTA:
                X = unit_lower_inverse(L, C, OPERAND, PREC_INV, BLOCK)
                tl.store(inverse + out * C * C + i[:, None] * C + i[None, :], X.to(inverse.dtype.element_ty))


@triton.jit
def scan_kernel(
    q, k, e, v, gates, inverse, reads, state, o, final, checkpoints, states, xs, starts, ends, cu, scale, T, segment, parts,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, OWN: tl.constexpr, WRITE: tl.constexpr, STATE: tl.constexpr,
    PACKED: tl.constexpr, EVERY: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr, READS: tl.constexpr,
    REPLAY: tl.constexpr, WHOLE: tl.constexpr, SPLIT: tl.constexpr, ENDS: tl.constexpr, CONTRACTS: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, value head, V tile); S^T [BV, K] stays in registers, as tiles of K0 and K1 keys.

    checkpoints [place, HV, V, K] keeps S^T every EVERY chunks (0: never). REPLAY starts from a checkpoint and walks one
    segment of EVERY chunks (WHOLE: all of them at once, as parts), keeping the state before each chunk in states [place, HV, V, K] and
    x in xs [place, C, HV, V]; it writes no output. SPLIT > 0: one program a part of SPLIT chunks, which begins from
    starts [N * parts, HV, V, K]. ENDS, before that: the state that a part leaves when it begins from nothing (the first
    from the initial state) and, in further tiles, the map from its beginning to its end: ends [N * parts, HV, V + K, K].
    """
    OUTPUT: tl.constexpr = not REPLAY and not ENDS
    NV: tl.constexpr = (V + BV - 1) // BV
    TILES: tl.constexpr = NV + (K + BV - 1) // BV if ENDS else NV
    pid = tl.program_id(0)
    nh = pid // TILES
    n = nh // HV
    hv = nh % HV
    h = hv // (HV // H)
    part = 0
    if SPLIT > 0:
        part = n % parts
        n = n // parts
    maps = pid % TILES >= NV
    start, length = sequence_bounds(n, cu, T, PACKED)
    slot = first_slot(n, cu, T, C, PACKED)
    i = tl.arange(0, C)
    vs = (pid % TILES) * BV + tl.arange(0, BV)
    if ENDS:
        vs = tl.where(maps, vs - NV * BV, vs)
    ka = tl.arange(0, K0)
    in_v = vs < V
    in_ka = ka < K
    if K1 > 0:
        kb = K0 + tl.arange(0, K1)
        in_kb = kb < K
    causal = i[:, None] >= i[None, :]
    at_state = (tl.cast(n, tl.int64) * HV + hv) * K * V
    dtype: tl.constexpr = k.dtype.element_ty

    chunks = tl.cdiv(length, C)
    first = 0
    last = chunks
    if REPLAY and not WHOLE:
        first = segment * EVERY
        last = tl.minimum(first + EVERY, chunks)
    if SPLIT > 0:
        first = part * SPLIT
        last = tl.minimum(first + SPLIT, chunks)
    vanished = 0
    if ENDS:
        if CONTRACTS:
            vanished = chunks_forgotten(gates, slot + first, last - first, hv, HV, C, SPLIT)
        # nobody asks for the end of the last part, nor for the map of the first
        if (last == chunks) | (maps & ((part == 0) | (vanished > 0))):
            last = first
        first = tl.minimum(first + tl.maximum(vanished - 1, 0), last)
        in_v = in_v & (maps == 0)
    # two values a load: bf16 carried round the loop would be unpacked, and so waited for, right after its load
    PAIRS: tl.constexpr = dtype.primitive_bitwidth == 16 and V % 2 == 0
    if PAIRS:
        pairs = (pid % TILES) * (BV // 2) + tl.arange(0, BV // 2)
        in_pairs = pairs < V // 2
        if ENDS:
            in_pairs = in_pairs & (maps == 0)
    if EVERY > 0:
        if PACKED:
            checkpoint = slot // EVERY + n
        else:
            checkpoint = n * tl.cdiv(chunks, EVERY)

    Sa = tl.zeros([BV, K0], tl.float32)
    if K1 > 0:
        Sb = tl.zeros([BV, K1], tl.float32)
    if REPLAY:
        if first < last:
            begin_at = checkpoints + (tl.cast(checkpoint + (part if WHOLE else segment), tl.int64) * HV + hv) * V * K
            Sa += load_rows(begin_at, vs, ka, in_v, in_ka, K)
            if K1 > 0:
                Sb += load_rows(begin_at, vs, kb, in_v, in_kb, K)
    elif SPLIT > 0 and not ENDS:
        if (first < last) | (part == 0):
            at_start = (tl.cast(nh, tl.int64)) * V * K
            Sa += load_rows(starts + at_start, vs, ka, in_v, in_ka, K)
            if K1 > 0:
                Sb += load_rows(starts + at_start, vs, kb, in_v, in_kb, K)
    elif STATE:
        state_v = state + at_state + vs[:, None]
        Sa += tl.load(state_v + ka[None, :] * V, mask=in_v[:, None] & in_ka[None, :], other=0.0)
        if K1 > 0:
            Sb += tl.load(state_v + kb[None, :] * V, mask=in_v[:, None] & in_kb[None, :], other=0.0)

    if ENDS:
        if maps:
            Sa = tl.where(vs[:, None] == ka[None, :], 1.0, 0.0)
            if K1 > 0:
                Sb = tl.where(vs[:, None] == kb[None, :], 1.0, 0.0)
        elif (part > 0) | (vanished > 0):
            Sa = tl.zeros([BV, K0], tl.float32)
            if K1 > 0:
                Sb = tl.zeros([BV, K1], tl.float32)

    # The pipeline drains at a checkpoint, so that its store shares the shared memory of the loads.
    STRIDE: tl.constexpr = EVERY if EVERY > 0 and OUTPUT else 1 << 30
    for begin in range(first, last, STRIDE):
        if EVERY > 0 and OUTPUT:
            at = checkpoints + (tl.cast(checkpoint + begin // EVERY, tl.int64) * HV + hv) * V * K
            store_rows(at, Sa, vs, ka, in_v, in_ka, K)
            if K1 > 0:
                store_rows(at, Sb, vs, kb, in_v, in_kb, K)
        for c in tl.range(begin, tl.minimum(begin + STRIDE, last), num_stages=STAGES):
            in_time = i < length - c * C
            row = start + c * C
            key = (row * H + h) * K
            val = (row * HV + hv) * V
            place = tl.cast(slot + c, tl.int64) * HV + hv
            k_a = load_rows(k + key, i, ka, in_time, in_ka, H * K)
            if K1 > 0:
                k_b = load_rows(k + key, i, kb, in_time, in_kb, H * K)
            if OUTPUT:
                q_a = load_rows(q + key, i, ka, in_time, in_ka, H * K)
                if K1 > 0:
                    q_b = load_rows(q + key, i, kb, in_time, in_kb, H * K)
            if PAIRS:
                v_pairs = tl.load(
                    v.to(tl.pointer_type(tl.int32)) + val // 2 + pairs[:, None] + i[None, :] * (HV * V // 2),
                    mask=in_pairs[:, None] & in_time[None, :],
                    other=0,
                )
            else:
                v_T = tl.load(
                    v + val + vs[:, None] + i[None, :] * (HV * V), mask=in_v[:, None] & in_time[None, :], other=0.0
                )

            if PREFETCH:
                ahead = tl.minimum(C, length - 1 - c * C)  # the next chunk, or a row that is there
                in_next = i < length - c * C - C
                prefetch_rows(k + key + ahead * (H * K), i, in_next, H * K, K)
                prefetch_rows(v + val + ahead * (HV * V) + (pid % TILES) * BV, i, in_next, HV * V, BV)
                following = (place + tl.where(ahead == C, HV, 0)) * C * C
                if DELTA:
                    prefetch_rows(inverse + following, i, i < C, C, C)
                if OUTPUT:
                    prefetch_rows(q + key + ahead * (H * K), i, in_next, H * K, K)
                    if READS:
                        prefetch_rows(reads + following, i, i < C, C, C)

            if REPLAY:
                local = slot + c if WHOLE else n * EVERY + c - first
                at = states + (tl.cast(local, tl.int64) * HV + hv) * V * K
                store_rows(at, Sa, vs, ka, in_v, in_ka, K)
                if K1 > 0:
                    store_rows(at, Sb, vs, kb, in_v, in_kb, K)

            # u = w v - c S0^T e,  x = Tg u
            S_a = Sa.to(dtype)
            if K1 > 0:
                S_b = Sb.to(dtype)
            if PAIRS:
                both = tl.join(v_pairs.to(tl.int16), (v_pairs >> 16).to(tl.int16))
                v_T = tl.reshape(tl.permute(both, [0, 2, 1]), [BV, C]).to(dtype, bitcast=True)
            if DELTA:
                if OWN:
                    e_a = load_rows(e + key, i, ka, in_time, in_ka, H * K)
                    if K1 > 0:
                        e_b = load_rows(e + key, i, kb, in_time, in_kb, H * K)
                else:
                    e_a = k_a
                    if K1 > 0:
                        e_b = k_b
                y = tl.dot(S_a, tl.trans(e_a), input_precision=PREC)
                if K1 > 0:
                    y = tl.dot(S_b, tl.trans(e_b), y, input_precision=PREC)
                erase = tl.load(gates + (place * 3 + 1) * C + i)
                u = v_T.to(tl.float32)
                if WRITE:
                    u *= tl.load(gates + (place * 3 + 2) * C + i)[None, :]
                u -= y * erase[None, :]
                Tg = tl.load(inverse + place * C * C + i[:, None] * C + i[None, :])
                x = tl.dot(u.to(dtype), tl.trans(Tg), input_precision=PREC)
            else:
                x = v_T.to(tl.float32)
                if WRITE:
                    x *= tl.load(gates + (place * 3 + 2) * C + i)[None, :]

            if DECAY:
                G = tl.load(gates + place * 3 * C + i)
                Gend = tl.load(gates + place * 3 * C + C - 1)
            if REPLAY:
                at = xs + (tl.cast(local, tl.int64) * C * HV + hv) * V
                tl.store(at + vs[:, None] + i[None, :] * (HV * V), x.to(xs.dtype.element_ty), mask=in_v[:, None])
            if OUTPUT:
                # o = scale e^G S0^T q + P x
                out = tl.dot(S_a, tl.trans(q_a), input_precision=PREC)
                if K1 > 0:
                    out = tl.dot(S_b, tl.trans(q_b), out, input_precision=PREC)
                if DECAY:
                    out *= (tl.exp2(G) * scale)[None, :]
                else:
                    out *= scale
                if READS:
                    P = tl.load(reads + place * C * C + i[:, None] * C + i[None, :])
                else:
                    P = tl.dot(q_a, tl.trans(k_a), input_precision=PREC)
                    if K1 > 0:
                        P = tl.dot(q_b, tl.trans(k_b), P, input_precision=PREC)
                    if DECAY:
                        P *= tl.exp2(tl.where(causal, G[:, None] - G[None, :], 0.0))
                    P = tl.where(causal, P * scale, 0.0)
                out = tl.dot(x.to(dtype), tl.trans(P.to(dtype)), out, input_precision=PREC)
                tl.store(
                    o + val + vs[:, None] + i[None, :] * (HV * V),
                    out.to(o.dtype.element_ty),
                    mask=in_v[:, None] & in_time[None, :],
                )

            # S' = e^Gend S0 + (e^(Gend - G) k)^T x
            if DECAY:
                x *= tl.exp2(Gend - G)[None, :]
                Sa *= tl.exp2(Gend)
                if K1 > 0:
                    Sb *= tl.exp2(Gend)
            Sa = tl.dot(x.to(dtype), k_a, Sa, input_precision=PREC)
            if K1 > 0:
                Sb = tl.dot(x.to(dtype), k_b, Sb, input_precision=PREC)

    if ENDS:
        rows = tl.where(maps, vs + V, vs)
        in_rows = tl.where(maps, vs < K, vs < V)
        at_end = tl.cast(nh, tl.int64) * (V + K) * K
        store_rows(ends + at_end, Sa, rows, ka, in_rows, in_ka, K)
        if K1 > 0:
            store_rows(ends + at_end, Sb, rows, kb, in_rows, in_kb, K)
    if OUTPUT and SPLIT > 0:
        in_v = in_v & (part == tl.maximum(chunks - 1, 0) // SPLIT)
    if OUTPUT:
        final_v = final + at_state + vs[:, None]
        tl.store(final_v + ka[None, :] * V, Sa, mask=in_v[:, None] & in_ka[None, :])
        if K1 > 0:
            tl.store(final_v + kb[None, :] * V, Sb, mask=in_v[:, None] & in_kb[None, :])


@triton.jit
def join_kernel(
    gates, state, starts, ends, cu, T, parts,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, BV: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr, CONTRACTS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, value head, V tile): starts[part + 1] = map[part] starts[part] + ends[part], in order."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    n = pid // NV // HV
    hv = pid // NV % HV
    start, length = sequence_bounds(n, cu, T, PACKED)
    slot = first_slot(n, cu, T, C, PACKED)
    used = tl.cdiv(tl.cdiv(length, C), SPLIT)
    vs = (pid % NV) * BV + tl.arange(0, BV)
    ka = tl.arange(0, K0)
    in_v = vs < V
    in_ka = ka < K
    Sa = tl.zeros([BV, K0], tl.float32)
    if K1 > 0:
        kb = K0 + tl.arange(0, K1)
        in_kb = kb < K
        Sb = tl.zeros([BV, K1], tl.float32)
    if STATE:
        state_v = state + (tl.cast(n, tl.int64) * HV + hv) * K * V + vs[:, None]
        Sa += tl.load(state_v + ka[None, :] * V, mask=in_v[:, None] & in_ka[None, :], other=0.0)
        if K1 > 0:
            Sb += tl.load(state_v + kb[None, :] * V, mask=in_v[:, None] & in_kb[None, :], other=0.0)
    place = tl.cast(n, tl.int64) * parts * HV + hv
    store_rows(starts + place * V * K, Sa, vs, ka, in_v, in_ka, K)
    if K1 > 0:
        store_rows(starts + place * V * K, Sb, vs, kb, in_v, in_kb, K)
    for part in range(0, used - 1):
        end = ends + place * (V + K) * K
        Na = load_rows(end, vs, ka, in_v, in_ka, K)
        if K1 > 0:
            Nb = load_rows(end, vs, kb, in_v, in_kb, K)
        mapped = part > 0
        if CONTRACTS:
            mapped = mapped & (chunks_forgotten(gates, slot + part * SPLIT, SPLIT, hv, HV, C, SPLIT) == 0)
        if mapped:
            M = load_rows(end, V + ka, ka, in_ka, in_ka, K)
            Na = tl.dot(Sa, M, Na, input_precision=PREC)
            if K1 > 0:
                Na = tl.dot(Sb, load_rows(end, V + kb, ka, in_kb, in_ka, K), Na, input_precision=PREC)
                Nb = tl.dot(Sa, load_rows(end, V + ka, kb, in_ka, in_kb, K), Nb, input_precision=PREC)
                Nb = tl.dot(Sb, load_rows(end, V + kb, kb, in_kb, in_kb, K), Nb, input_precision=PREC)
        Sa = Na
        if K1 > 0:
            Sb = Nb
        place += HV
        store_rows(starts + place * V * K, Sa, vs, ka, in_v, in_ka, K)
        if K1 > 0:
            store_rows(starts + place * V * K, Sb, vs, kb, in_v, in_kb, K)


def key_tiles(K):
    """K as one or two power-of-two tiles: 64 -> (64, 0), 128 -> (128, 0), 192 -> (128, 64), 200 -> (128, 128)."""
    first = min(128, max(16, triton.next_power_of_2(K)))
    rest = K - first
    return first, 0 if rest <= 0 else max(16, triton.next_power_of_2(rest))


def layout(q, v, cu, C):
    """N sequences, T tokens in a row of the batch, number of slots."""
    B, T = q.shape[:2]
    if cu is None:
        return B, T, B * triton.cdiv(T, C)
    return cu.numel() - 1, T, T // C + cu.numel() - 1


class Saved(NamedTuple):
    """gates [slots, HV, 3, C] = G, c, w; inverse [slots, HV, C, C] = Tg; reads (or [1]) = P; checkpoints [places, HV, V, K] = S^T."""

    gates: torch.Tensor
    inverse: torch.Tensor
    reads: torch.Tensor
    checkpoints: torch.Tensor


def decay_kind(log_decay):
    return "none" if log_decay is None else "fixed" if log_decay.dim() == 1 else "head"


def prepare(q, k, v, log_decay, b, w, e, cu, *, delta, scale, config):
    """Launch the chunk-local part; returns gates, inverse and reads (P, on demand)."""
    H, K = q.shape[2:]
    HV = v.shape[2]
    C = config["C"]
    N, T, slots = layout(q, v, cu, C)
    gates = torch.empty(slots, HV, 3, C, device=q.device, dtype=torch.float32)
    inverse = torch.empty((slots, HV, C, C) if delta else (1,), device=q.device, dtype=q.dtype)
    reads = torch.empty((slots, HV, C, C) if config["READS"] else (1,), device=q.device, dtype=q.dtype)
    if slots:
        prepare_kernel[(slots * H,)](
            q, k, e, log_decay, b, w, gates, inverse, reads, cu, N, T, scale, H, HV, K, C, *key_tiles(K),
            decay_kind(log_decay), delta, e is not None, b is not None, w is not None, cu is not None,
            config["OPERAND"], config["PREC"], config["PREC_INV"], config["BLOCK"], config["READS"],
            num_warps=config["prepare_warps"], num_stages=1, maxnreg=config["prepare_maxnreg"],
        )  # fmt: skip
    return gates, inverse, reads


def scan(q, k, v, gates, inverse, reads, log_decay, w, e, state, cu, *, delta, scale, config, every):
    """Launch the scan over chunks; returns o, final, checkpoints. config["SPLIT"] > 0 runs parts of a sequence in parallel."""
    H, K = q.shape[2:]
    HV, V = v.shape[2:]
    C, BV, split = config["C"], config["BV"], config["SPLIT"]
    N, T, slots = layout(q, v, cu, C)
    new = lambda *shape: torch.empty(*shape, device=q.device, dtype=torch.float32)  # noqa: E731
    o = torch.empty_like(v)
    final = new(N, HV, K, V)
    places = (slots // every + N if cu is not None else N * triton.cdiv(triton.cdiv(T, C), every)) if every else 0
    checkpoints = new(places, HV, V, K)
    K0, K1 = key_tiles(K)
    parts = max(1, triton.cdiv(triton.cdiv(T, C), split)) if split else 1
    split = split if parts > 1 else 0
    starts = ends = None
    contracts = log_decay is not None and config["CONTRACTS"]

    def launch(tiles, split, ends_only):
        scan_kernel[(N * parts * HV * tiles,)](
            q, k, e, v, gates, inverse, reads, state, o, final, checkpoints, None, None, starts, ends, cu,
            scale, T, 0, parts,
            H, HV, K, V, C, K0, K1, BV, log_decay is not None, delta, e is not None, w is not None, state is not None,
            cu is not None, 0 if ends_only else every, config["PREC"], config["STAGES"], config["READS"],
            False, False, split, ends_only, contracts, config["PREFETCH"],
            num_warps=config["scan_warps"], num_stages=config["STAGES"],
        )  # fmt: skip

    if split:
        starts, ends = new(N * parts, HV, V, K), new(N * parts, HV, V + K, K)
        launch(triton.cdiv(V, BV) + triton.cdiv(K, BV), split, True)
        join_kernel[(N * HV * triton.cdiv(V, BV),)](
            gates, state, starts, ends, cu, T, parts, HV, K, V, C, K0, K1, BV, state is not None, cu is not None,
            split, contracts, config["PREC_JOIN"], num_warps=4, num_stages=1,
        )  # fmt: skip
    launch(triton.cdiv(V, BV), split, False)
    return o, final, checkpoints


def forward(q, k, v, log_decay=None, b=None, w=None, e=None, state=None, cu=None, *, delta=True, scale=None,
            config=None, every=0):  # fmt: skip
    """q, k, e [B, T, H, K]; v [B, T, HV, V]; log_decay [B, T, HV] or [HV]; b, w [B, T, HV]; returns o, final, saved."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    config = launch_config(q.dtype, q.shape[-1], v.shape[-1], e is not None, config)
    gates, inverse, reads = prepare(q, k, v, log_decay, b, w, e, cu, delta=delta, scale=scale, config=config)
    o, final, checkpoints = scan(
        q, k, v, gates, inverse, reads, log_decay, w, e, state, cu, delta=delta, scale=scale, config=config, every=every
    )
    return o, final, Saved(gates, inverse, reads, checkpoints)


def launch_config(dtype, K, V, own, changes=None):
    """The launch config for a dtype, widths and whether the erase key is its own, with changes."""
    config = dict(CONFIG)
    if dtype == torch.float32:
        config |= FLOAT32
    elif K <= 128 and V > 64:
        config |= WIDE | (OWN_KEY if own else {})
    return config | (changes or {})


CONFIG = {
    "C": 64, "PREC": "tf32",
    "prepare_warps": 4, "prepare_maxnreg": None, "OPERAND": tl.float16, "PREC_INV": "tf32", "BLOCK": 16, "READS": True,
    "BV": 64, "STAGES": 2, "scan_warps": 4, "PREFETCH": False, "SPLIT": 0, "CONTRACTS": False, "PREC_JOIN": "tf32x3",
    "replay_BV": 64, "replay_STAGES": 2, "replay_warps": 4, "scratch": 2**29,
    "reverse_BV": 64, "reverse_STAGES": 2, "reverse_warps": 4, "reverse_READS": False,
    "gradients_BK": 64, "gradients_BV": 64, "gradients_STAGES": 2, "gradients_warps": 4, "gradients_maxnreg": None,
}  # fmt: skip
WIDE = {  # one program an SM, loads two chunks ahead: 9 to 28 % quicker than two programs an SM, one chunk ahead
    "BV": 128, "STAGES": 3, "scan_warps": 8,
    "replay_BV": 128, "replay_STAGES": 3, "replay_warps": 8,
    "reverse_BV": 128, "reverse_STAGES": 3, "reverse_warps": 8, "reverse_READS": True,
}  # fmt: skip
OWN_KEY = {"STAGES": 2, "replay_STAGES": 2, "reverse_STAGES": 2}  # a third key tile: three stages pass 227 KB
FLOAT32 = {
    "OPERAND": tl.float32, "STAGES": 1, "replay_STAGES": 1, "reverse_STAGES": 1, "gradients_STAGES": 1,
    "BV": 32, "replay_BV": 32, "reverse_BV": 32, "gradients_BV": 32, "gradients_BK": 32,
}  # fmt: skip
