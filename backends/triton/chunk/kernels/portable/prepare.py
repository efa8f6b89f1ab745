"""Chunk-local preparation: cumulative decays and, for delta updates, the WY tiles T and P.

    A_ij = b_i 2^(G'_i - G_j) e_i.k_j  (j < i),   T = (I + A)^-1,   P_ij = scale 2^(G''_i - G_j) q_i.k_j  (j <= i)

G is the cumulative log2 decay in the chunk. G' is G, or with ERASE_PREVIOUS (the erase reads the state before the
decay) G before the token. G'' is G, or with READ_BEFORE (the output is read before the update) G before the token; P
then has
j < i. C tokens in a chunk, H key heads, HV value heads, K key width
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.chunk.kernels.portable.wy_tiles import store_wy_tiles
from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.device.layout import (
    LOG2E,
    clamp_log2_decay,
    load_log2_decays,
    load_rows,
    locate_chunk,
)
from deltazoo.backends.triton.device.step_size import store_step_size


@triton.jit
def merge_inverse_blocks(X, L, level: tl.constexpr, C: tl.constexpr, OPERAND: tl.constexpr, PREC: tl.constexpr):
    """Merge inverted diagonal blocks of size 2^level in pairs: X <- X - X (L o mask) X."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    below = (((i >> level) ^ (j >> level)) == 1) & (i > j)
    M = tl.where(below, L, 0.0).to(OPERAND)
    Y = tl.dot(M, X.to(OPERAND), input_precision=PREC)
    return X - tl.dot(X.to(OPERAND), Y.to(OPERAND), input_precision=PREC)


@triton.jit
def unit_lower_inverse(L, C: tl.constexpr, OPERAND: tl.constexpr, PREC: tl.constexpr, BLOCK: tl.constexpr):
    """Return (I + L)^-1 for strictly lower L [C, C], and its 8 x 8 diagonal blocks [C, 8].

    Level doubling, s = 1, 2, ..., C / 2: every intermediate is the inverse of the diagonal blocks of size 2s, so none
    exceeds the result in magnitude; the terms of a Neumann series would. The levels below BLOCK run on the diagonal
    blocks alone, as one batch.
    """
    R: tl.constexpr = C // BLOCK
    if R > 1:
        batch = tl.arange(0, R)
        on_diagonal = (batch[:, None] == batch[None, :])[:, None, :, None]
        D = tl.sum(tl.where(on_diagonal, tl.reshape(L, [R, BLOCK, R, BLOCK]), 0.0), 2)
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
        X = tl.reshape(tl.where(on_diagonal, X[:, :, None, :], 0.0), [C, C])
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
    """Return the 8 x 8 diagonal blocks of X [R, B, B], stacked: [R B, 8]."""
    R: tl.constexpr = X.shape[0]
    N: tl.constexpr = X.shape[1] // 8
    n = tl.arange(0, N)
    on_diagonal = (n[:, None] == n[None, :])[None, :, None, :, None]
    return tl.reshape(tl.sum(tl.where(on_diagonal, tl.reshape(X, [R, N, 8, N, 8]), 0.0), 3), [R * N * 8, 8])


@triton.jit
def dot_key_tiles(x_a, y_a, x_b, y_b, K1: tl.constexpr, PREC: tl.constexpr):
    """Return x y^T, summed over both key tiles."""
    out = tl.dot(x_a, tl.trans(y_a), input_precision=PREC)
    if K1 > 0:
        out = tl.dot(x_b, tl.trans(y_b), out, input_precision=PREC)
    return out


@takes(
    pointers="q k e log_decay b w gates decay_bounds wy_tiles strengths slopes cu",
    traits=(
        "H HV K C K0 K1 DECAY ERASE_KEY ERASE WRITE ERASE_PREVIOUS READ_BEFORE PACKED OPERAND PREC PREC_INVERSE BLOCK "
        "TERMS BOUND_DECAYS REPARAM DU_IS_DV"
    ),
)
@triton.jit(do_not_specialize=["N", "T"])
def prepare_kernel(gmem, N, T, scale, traits: tl.constexpr):
    """Prepare the chunks of a delta update.

    Grid: chunk slot, key head. Each program owns one chunk of a key head and loops over its value heads.

    Reads q, k, e [B, T, H, K]; b, w [B, T, HV]; log_decay [B, T, HV] or [HV].
    Writes gates [slots, HV, 3, C] = G, b 2^G', w; wy_tiles [slots, HV, TERMS, C, C + 8], see wy_tiles.py;
    decay_bounds [slots, HV]: an upper bound of the log2 of the factor by which the chunk scales any state, 0 unless
    BOUND_DECAYS. With REPARAM "efla" or "longhorn" b is beta, erase and write have the strength of step_size.py, and
    strengths and slopes (defined there) are written unless they are None.
    """
    H: tl.constexpr = traits.H
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    C: tl.constexpr = traits.C
    DECAY: tl.constexpr = traits.DECAY
    PREC_INVERSE: tl.constexpr = traits.PREC_INVERSE
    K1: tl.constexpr = traits.K1
    ERASE_KEY: tl.constexpr = traits.ERASE_KEY
    PREC: tl.constexpr = traits.PREC
    REPARAM: tl.constexpr = traits.REPARAM
    pid = tl.program_id(0)
    slot = pid // H
    h = pid % H
    start, length, t0 = locate_chunk(slot, gmem.cu, N, T, C, traits.PACKED)
    if t0 < length:
        # All loads precede the first dot: a dot waits for its operands and delays the loads after it.
        i = tl.arange(0, C)
        in_time = i < length - t0
        row = start + t0
        ka = tl.arange(0, traits.K0)
        in_ka = ka < K
        key_offset = (row * H + h) * K
        k_a = load_rows(gmem.k + key_offset, i, ka, in_time, in_ka, H * K)
        q_a = load_rows(gmem.q + key_offset, i, ka, in_time, in_ka, H * K)
        if ERASE_KEY:
            e_a = load_rows(gmem.e + key_offset, i, ka, in_time, in_ka, H * K)
        if K1 > 0:
            kb = traits.K0 + tl.arange(0, K1)
            in_kb = kb < K
            k_b = load_rows(gmem.k + key_offset, i, kb, in_time, in_kb, H * K)
            q_b = load_rows(gmem.q + key_offset, i, kb, in_time, in_kb, H * K)
            if ERASE_KEY:
                e_b = load_rows(gmem.e + key_offset, i, kb, in_time, in_kb, H * K)
        else:
            k_b, q_b = k_a, q_a
            if ERASE_KEY:
                e_b = e_a
        GROUP: tl.constexpr = HV // H
        gate_offset = (row + i) * HV + h * GROUP
        erase = tl.where(in_time, 1.0, 0.0)
        write = tl.where(in_time, 1.0, 0.0)
        log2_decay = load_log2_decays(gmem.log_decay, row + i, h * GROUP, in_time, HV, DECAY)
        if traits.ERASE:
            erase = tl.load(gmem.b + gate_offset, mask=in_time, other=0.0).to(tl.float32)
        if traits.WRITE and REPARAM == "none":
            write = tl.load(gmem.w + gate_offset, mask=in_time, other=0.0).to(tl.float32)
        if REPARAM != "none":
            k_dot_k = tl.sum(k_a.to(tl.float32) * k_a.to(tl.float32), 1)
            if K1 > 0:
                k_dot_k += tl.sum(k_b.to(tl.float32) * k_b.to(tl.float32), 1)

        A = dot_key_tiles(e_a if ERASE_KEY else k_a, k_a, e_b if ERASE_KEY else k_b, k_b, K1, PREC)
        # with wide keys the loop below would keep q and k in shared memory: 288 KiB for 256 keys in float32
        HOIST_P: tl.constexpr = GROUP > 1 and K1 > 0
        if HOIST_P:
            KQ = dot_key_tiles(k_a, q_a, k_b, q_b, K1, PREC)
        below = i[:, None] > i[None, :]
        causal_T = i[:, None] < i[None, :] if traits.READ_BEFORE else i[:, None] <= i[None, :]
        for g in tl.range(0, GROUP, num_stages=1):
            hv = h * GROUP + g
            chunk = tl.cast(slot, tl.int64) * HV + hv
            if REPARAM != "none":
                erase = store_step_size(
                    gmem.strengths, gmem.slopes, gate_offset + g, chunk, i, erase, k_dot_k, in_time, C,
                    REPARAM == "efla", traits.DU_IS_DV,
                )  # fmt: skip
                write = erase
            # summed in float64 and rounded once, so that later tokens stay accurate after strong decays
            cumulative = tl.cumsum(log2_decay.to(tl.float64), 0)
            G = cumulative.to(tl.float32)
            G_before = (cumulative - log2_decay).to(tl.float32)
            G_erase = G_before if traits.ERASE_PREVIOUS else G
            G_read = G_before if traits.READ_BEFORE else G
            tl.store(gmem.gates + (chunk * 3 + 0) * C + i, G)
            tl.store(gmem.gates + (chunk * 3 + 1) * C + i, erase * tl.exp2(G_erase))
            tl.store(gmem.gates + (chunk * 3 + 2) * C + i, write)
            # A step scales a state by at most max(1, |1 - b k.k|); with an erase key e != k there is no such bound.
            decay_bound = 0.0
            if traits.BOUND_DECAYS and not (ERASE_KEY or traits.ERASE_PREVIOUS):
                if REPARAM == "none":
                    k_dot_k = tl.sum(tl.where(i[:, None] == i[None, :], A, 0.0), 1)
                factor = tl.maximum(tl.abs(1 - erase * k_dot_k), 1.0, propagate_nan=tl.PropagateNan.ALL)
                decay_bound = tl.sum(log2_decay, 0) + tl.sum(tl.log2(factor), 0)
            tl.store(gmem.decay_bounds + chunk, decay_bound)
            D = tl.exp2(tl.where(below, G_erase[:, None] - G[None, :], 0.0))
            L = tl.where(below, erase[:, None] * A * D, 0.0)
            if GROUP > 1:
                in_next = in_time & (g + 1 < GROUP)
                log2_decay = load_log2_decays(gmem.log_decay, row + i, tl.minimum(hv + 1, HV - 1), in_next, HV, DECAY)
                if traits.ERASE:
                    erase = tl.load(gmem.b + gate_offset + g + 1, mask=in_next, other=0.0).to(tl.float32)
                if traits.WRITE and REPARAM == "none":
                    write = tl.load(gmem.w + gate_offset + g + 1, mask=in_next, other=0.0).to(tl.float32)
            T_inverse, T_blocks = unit_lower_inverse(L, C, traits.OPERAND, PREC_INVERSE, traits.BLOCK)
            # P is computed after the inverse, because it would occupy registers until it is stored.
            P_T = KQ if HOIST_P else dot_key_tiles(k_a, q_a, k_b, q_b, K1, PREC)
            P_T *= tl.exp2(tl.where(causal_T, G_read[None, :] - G[:, None], 0.0)) * scale
            P_T = tl.where(causal_T, P_T, 0.0)
            store_wy_tiles(gmem.wy_tiles, T_inverse, T_blocks, P_T, gmem.q.dtype.element_ty, chunk, i, C, traits.TERMS)


@takes(
    pointers="gates decay_bounds log_decay w cu",
    traits="HV C HEADS DECAY WRITE PACKED",
)
@triton.jit(do_not_specialize=["N", "T"])
def gates_kernel(gmem, N, T, traits: tl.constexpr):
    """Prepare the chunks of an additive update: G and w.

    Grid: chunk slot, tile of HEADS value heads.
    Reads log_decay [B, T, HV] or [HV]; w [B, T, HV].
    Writes gates [slots, HV, 3, C] = G, unused, w; decay_bounds [slots, HV] = G at the end.
    """
    HV: tl.constexpr = traits.HV
    C: tl.constexpr = traits.C
    HEADS: tl.constexpr = traits.HEADS
    TILES: tl.constexpr = (HV + HEADS - 1) // HEADS
    slot = tl.program_id(0) // TILES
    hv = tl.program_id(0) % TILES * HEADS + tl.arange(0, HEADS)
    start, length, t0 = locate_chunk(slot, gmem.cu, N, T, C, traits.PACKED)
    if t0 < length:
        i = tl.arange(0, C)
        in_time = i < length - t0
        in_heads = hv < HV
        tokens = start + t0 + i
        chunk = tl.cast(slot, tl.int64) * HV + hv
        gate_rows = gmem.gates + chunk[:, None] * (3 * C) + i[None, :]
        log2_decay = tl.zeros([HEADS, C], tl.float32)
        if traits.DECAY == "head":
            log2_decay = clamp_log2_decay(load_rows(gmem.log_decay, hv, tokens * HV, in_heads, in_time, 1) * LOG2E)
        elif traits.DECAY == "fixed":
            log2_decay += clamp_log2_decay(tl.load(gmem.log_decay + hv, mask=in_heads, other=0.0) * LOG2E)[:, None]
            log2_decay = tl.where(in_time[None, :], log2_decay, 0.0)
        tl.store(gate_rows, tl.cumsum(log2_decay.to(tl.float64), 1).to(tl.float32), mask=in_heads[:, None])
        tl.store(gmem.decay_bounds + chunk, tl.sum(log2_decay, 1), mask=in_heads)
        if traits.WRITE:
            write_rows = gate_rows + 2 * C
            write = load_rows(gmem.w, hv, tokens * HV, in_heads, in_time, 1).to(tl.float32)
            tl.store(write_rows, write, mask=in_heads[:, None])
