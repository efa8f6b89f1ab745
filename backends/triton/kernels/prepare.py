"""What each chunk decides alone: cumulative decays, and where updates erase the triangular inverse and the reads.

    A_ij = b_i e^(G'_i - G_j) e_i.k_j  (j < i),   T = (I + A)^-1,   P_ij = scale e^(G''_i - G_j) q_i.k_j  (j <= i)

G'_i is G_i, or G_{i-1} where the erase reads the state before the decay; G''_i is G_i, or G_{i-1} (and j < i) where
the output is read before the update. C chunk, G cumulative log2 decay in the chunk, H key heads, HV value heads, K key
width
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.kernels.layout import (
    LOG2E,
    clamp_log2_decay,
    load_log2_decays,
    load_rows,
    locate_chunk,
)
from deltazoo.backends.triton.kernels.wy_tiles import store_wy_tiles


@triton.jit
def merge_inverse_blocks(X, L, level: tl.constexpr, C: tl.constexpr, OPERAND: tl.constexpr, PREC: tl.constexpr):
    """Merge inverted diagonal blocks of size 2^level into blocks of twice the size: X <- X - X (L o mask) X."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    below = (((i >> level) ^ (j >> level)) == 1) & (i > j)
    M = tl.where(below, L, 0.0).to(OPERAND)
    Y = tl.dot(M, X.to(OPERAND), input_precision=PREC)
    return X - tl.dot(X.to(OPERAND), Y.to(OPERAND), input_precision=PREC)


@triton.jit
def unit_lower_inverse(L, C: tl.constexpr, OPERAND: tl.constexpr, PREC: tl.constexpr, BLOCK: tl.constexpr):
    """(I + L)^-1 for strictly lower L [C, C] by level doubling, s = 1, 2, ..., C / 2; and its blocks of 8 on the
    diagonal.

    Every intermediate is the inverse of the diagonal blocks of size 2s, so none grows beyond the result (a Neumann
    series would). The levels below BLOCK run on the diagonal blocks alone, as one batch.
    """
    R: tl.constexpr = C // BLOCK
    if R > 1:
        batch = tl.arange(0, R)
        own = (batch[:, None] == batch[None, :])[:, None, :, None]
        D = tl.sum(tl.where(own, tl.reshape(L, [R, BLOCK, R, BLOCK]), 0.0), 2)
        i = tl.arange(0, BLOCK)[None, :, None]
        j = tl.arange(0, BLOCK)[None, None, :]
        X = tl.where(i == j, 1.0, tl.where(((i ^ j) == 1) & (i > j), -D, 0.0))
        for level in tl.static_range(1, 7):
            if 2**level < BLOCK:
                below = (((i >> level) ^ (j >> level)) == 1) & (i > j)
                M = tl.where(below, D, 0.0).to(OPERAND)
                Y = tl.dot(M, X.to(OPERAND), input_precision=PREC)
                X -= tl.dot(X.to(OPERAND), Y.to(OPERAND), input_precision=PREC)
        blocks = diagonal_blocks_of_8(X)
        X = tl.reshape(tl.where(own, X[:, :, None, :], 0.0), [C, C])
    else:
        i = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
        X = tl.where(i == j, 1.0, tl.where(((i ^ j) == 1) & (i > j), -L, 0.0))
    for level in tl.static_range(1, 7):
        if 2**level < C:
            if 2**level >= BLOCK or R == 1:
                X = merge_inverse_blocks(X, L, level, C, OPERAND, PREC)
    if R == 1:
        blocks = diagonal_blocks_of_8(X[None, :, :])
    return X, blocks


@triton.jit
def diagonal_blocks_of_8(X):
    """The blocks of 8 on the diagonals of X [R, B, B], one below the other: [R B, 8]."""
    R: tl.constexpr = X.shape[0]
    N: tl.constexpr = X.shape[1] // 8
    n = tl.arange(0, N)
    own = (n[:, None] == n[None, :])[None, :, None, :, None]
    return tl.reshape(tl.sum(tl.where(own, tl.reshape(X, [R, N, 8, N, 8]), 0.0), 3), [R * N * 8, 8])


@triton.jit
def dot_key_tiles(x_a, y_a, x_b, y_b, K1: tl.constexpr, PREC: tl.constexpr):
    """x y^T over both tiles of keys."""
    out = tl.dot(x_a, tl.trans(y_a), input_precision=PREC)
    if K1 > 0:
        out = tl.dot(x_b, tl.trans(y_b), out, input_precision=PREC)
    return out


@triton.jit(do_not_specialize=["N", "T"])
def prepare_kernel(
    q, k, e, log_decay, b, w, gates, decay_bounds, wy_tiles, cu, N, T, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
    DECAY: tl.constexpr, OWN: tl.constexpr, ERASE: tl.constexpr, WRITE: tl.constexpr,
    ERASE_EARLY: tl.constexpr, READ_EARLY: tl.constexpr, PACKED: tl.constexpr,
    OPERAND: tl.constexpr, PREC: tl.constexpr, PREC_INVERSE: tl.constexpr, BLOCK: tl.constexpr,
    TERMS: tl.constexpr, BOUND_DECAYS: tl.constexpr,
):  # fmt: skip
    """One program a (slot, key head).

    gates [slots, HV, 3, C] = G, b e^G', w; decay_bounds [slots, HV] bounds the log2 of what the chunk keeps of a state,
    closely with BOUND_DECAYS; wy_tiles [slots, HV, TERMS, C, C + 8] = T and P^T, as wy_tiles.py lays them.
    """
    pid = tl.program_id(0)
    slot = pid // H
    h = pid % H
    start, length, t0 = locate_chunk(slot, cu, N, T, C, PACKED)
    if t0 < length:
        # every load before the first product: a product waits, and with it whatever is loaded later
        i = tl.arange(0, C)
        in_time = i < length - t0
        row = start + t0
        ka = tl.arange(0, K0)
        in_ka = ka < K
        key = (row * H + h) * K
        k_a = load_rows(k + key, i, ka, in_time, in_ka, H * K)
        q_a = load_rows(q + key, i, ka, in_time, in_ka, H * K)
        if OWN:
            e_a = load_rows(e + key, i, ka, in_time, in_ka, H * K)
        if K1 > 0:
            kb = K0 + tl.arange(0, K1)
            in_kb = kb < K
            k_b = load_rows(k + key, i, kb, in_time, in_kb, H * K)
            q_b = load_rows(q + key, i, kb, in_time, in_kb, H * K)
            if OWN:
                e_b = load_rows(e + key, i, kb, in_time, in_kb, H * K)
        else:
            k_b, q_b = k_a, q_a
            if OWN:
                e_b = e_a
        GROUP: tl.constexpr = HV // H
        at = (row + i) * HV + h * GROUP
        erase = tl.where(in_time, 1.0, 0.0)
        write = tl.where(in_time, 1.0, 0.0)
        own_decay = load_log2_decays(log_decay, row + i, h * GROUP, in_time, HV, DECAY)
        if ERASE:
            erase = tl.load(b + at, mask=in_time, other=0.0).to(tl.float32)
        if WRITE:
            write = tl.load(w + at, mask=in_time, other=0.0).to(tl.float32)

        A = dot_key_tiles(e_a if OWN else k_a, k_a, e_b if OWN else k_b, k_b, K1, PREC)
        below = i[:, None] > i[None, :]
        seen = i[:, None] < i[None, :] if READ_EARLY else i[:, None] <= i[None, :]
        for g in tl.range(0, GROUP, num_stages=1):
            hv = h * GROUP + g
            out = tl.cast(slot, tl.int64) * HV + hv
            sums = tl.cumsum(own_decay.to(tl.float64), 0)  # rounded once: strong decays before cost a token few digits
            G = sums.to(tl.float32)
            before = (sums - own_decay).to(tl.float32)
            G_erase = before if ERASE_EARLY else G
            G_read = before if READ_EARLY else G
            tl.store(gates + (out * 3 + 0) * C + i, G)
            tl.store(gates + (out * 3 + 1) * C + i, erase * tl.exp2(G_erase))
            tl.store(gates + (out * 3 + 2) * C + i, write)
            # one step keeps at most max(1, |1 - b k.k|) of a state; with a key of its own nothing bounds it
            fade = 0.0
            if BOUND_DECAYS and not (OWN or ERASE_EARLY):
                square = tl.sum(tl.where(i[:, None] == i[None, :], A, 0.0), 1)
                kept = tl.maximum(tl.abs(1 - erase * square), 1.0, propagate_nan=tl.PropagateNan.ALL)
                fade = tl.sum(own_decay, 0) + tl.sum(tl.log2(kept), 0)
            tl.store(decay_bounds + out, fade)
            D = tl.exp2(tl.where(below, G_erase[:, None] - G[None, :], 0.0))
            L = tl.where(below, erase[:, None] * A * D, 0.0)
            if GROUP > 1:
                more = in_time & (g + 1 < GROUP)
                own_decay = load_log2_decays(log_decay, row + i, tl.minimum(hv + 1, HV - 1), more, HV, DECAY)
                if ERASE:
                    erase = tl.load(b + at + g + 1, mask=more, other=0.0).to(tl.float32)
                if WRITE:
                    write = tl.load(w + at + g + 1, mask=more, other=0.0).to(tl.float32)
            T_inverse, T_blocks = unit_lower_inverse(L, C, OPERAND, PREC_INVERSE, BLOCK)
            # P comes last: until it is stored it would take registers from the inverse
            P_T = dot_key_tiles(k_a, q_a, k_b, q_b, K1, PREC)
            P_T *= tl.exp2(tl.where(seen, G_read[None, :] - G[:, None], 0.0)) * scale
            P_T = tl.where(seen, P_T, 0.0)
            store_wy_tiles(wy_tiles, T_inverse, T_blocks, P_T, q.dtype.element_ty, out, i, C, TERMS)


@triton.jit(do_not_specialize=["N", "T"])
def gates_kernel(
    gates, decay_bounds, log_decay, w, cu, N, T,
    HV: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, DECAY: tl.constexpr, WRITE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """One program a (slot, HEADS value heads): all that an additive update prepares, G and w in gates, and decay_bounds."""
    TILES: tl.constexpr = (HV + HEADS - 1) // HEADS
    slot = tl.program_id(0) // TILES
    hv = tl.program_id(0) % TILES * HEADS + tl.arange(0, HEADS)
    start, length, t0 = locate_chunk(slot, cu, N, T, C, PACKED)
    if t0 < length:
        i = tl.arange(0, C)
        in_time = i < length - t0
        in_heads = hv < HV
        at = start + t0 + i
        place = tl.cast(slot, tl.int64) * HV + hv
        to = gates + place[:, None] * (3 * C) + i[None, :]
        own = tl.zeros([HEADS, C], tl.float32)
        if DECAY == "head":
            own = clamp_log2_decay(load_rows(log_decay, hv, at * HV, in_heads, in_time, 1) * LOG2E)
        elif DECAY == "fixed":
            own += clamp_log2_decay(tl.load(log_decay + hv, mask=in_heads, other=0.0) * LOG2E)[:, None]
            own = tl.where(in_time[None, :], own, 0.0)
        tl.store(to, tl.cumsum(own.to(tl.float64), 1).to(tl.float32), mask=in_heads[:, None])
        tl.store(decay_bounds + place, tl.sum(own, 1), mask=in_heads)
        if WRITE:
            tl.store(to + 2 * C, load_rows(w, hv, at * HV, in_heads, in_time, 1).to(tl.float32), mask=in_heads[:, None])
