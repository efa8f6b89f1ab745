"""Preparation of the chunks of log-linear attention.

    A_ts = 2^(G_t - G_s) q_t.k_s  (s <= t),   N_ts = b_t 2^(G_t - G_s) k_t.k_s  (s < t),   T = (I + N)^-1,   M = A T

M reads the value of token s at token t. With lambda at the level of s at t it gives the outputs within the chunk. With
F = 2^G and W = Diag(b F) k the state S before the chunk is read by E = Diag(F) q - M W, and the state after it is

    2^Gend S - R^T (W S) + R^T v,   R = T^T Diag(2^(Gend - G)) k

Without an erase term T = I and W = 0. G is the cumulative log2 decay in the chunk, b the erase strength.
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.chunk.kernels.portable.prepare import unit_lower_inverse
from deltazoo.backends.triton.device.layout import load_log2_decays, store_rows
from deltazoo.backends.triton.levels.kernels.tree import load_keys, load_token_weights, locate_level_chunk


@triton.jit
def store_square(base, chunk, tile, C: tl.constexpr):
    """Store a tile [C, C] of a chunk."""
    i = tl.arange(0, C)
    tl.store(base + chunk * (C * C) + i[:, None] * C + i[None, :], tile.to(base.dtype.element_ty))


@triton.jit(do_not_specialize=["N", "T"])
def level_prepare_kernel(
    q, k, log_decay, erase, weights, gates, mixed, plain, inverse, reads, writes, first, cu, counts,
    N, T,
    OPERAND: tl.constexpr, PREC_INVERSE: tl.constexpr, traits: tl.constexpr,
):  # fmt: skip
    """Prepare the chunks. Grid: chunk slot, value head.

    Reads q, k [B, T, H, K]; log_decay, erase [B, T, HV]; weights, lambda, [B, T, HV, L].
    Writes gates [slots, HV, 2, C] = G, b F; mixed [slots, HV, C, C], M with lambda. With an erase term also reads and
    writes [slots, HV, C, K], E and R; and plain and inverse [slots, HV, C, C], M and T, unless they are None.
    """
    C: tl.constexpr = traits.C
    PREC: tl.constexpr = traits.PREC
    slot = tl.program_id(0) // traits.HV
    hv = tl.program_id(0) % traits.HV
    h = hv // (traits.HV // traits.H)
    row, count, number = locate_level_chunk(slot, first, cu, counts, N, T, traits)
    if count > 0:
        i = tl.arange(0, C)
        in_time = i < count
        chunk = tl.cast(slot, tl.int64) * traits.HV + hv
        q_tile = load_keys(q, row, h, i, in_time, traits.H, traits)
        k_tile = load_keys(k, row, h, i, in_time, traits.H, traits)
        log2_decay = load_log2_decays(log_decay, row + i, hv, in_time, traits.HV, "head")
        # summed in float64 and rounded once, so that later tokens stay accurate after strong decays
        G = tl.cumsum(log2_decay.to(tl.float64), 0).to(tl.float32)
        G_end = tl.sum(log2_decay.to(tl.float64), 0).to(tl.float32)
        tl.store(gates + chunk * (2 * C) + i, G)
        causal = i[:, None] >= i[None, :]
        decay = tl.exp2(tl.where(causal, G[:, None] - G[None, :], 0.0))
        A = tl.where(causal, decay * tl.dot(q_tile, tl.trans(k_tile), input_precision=PREC), 0.0)
        M = A
        if traits.DELTA:
            b = tl.load(erase + (row + i) * traits.HV + hv, mask=in_time, other=0.0).to(tl.float32)
            from_start = tl.exp2(G)
            tl.store(gates + chunk * (2 * C) + C + i, b * from_start)
            below = i[:, None] > i[None, :]
            L = tl.where(below, b[:, None] * decay * tl.dot(k_tile, tl.trans(k_tile), input_precision=PREC), 0.0)
            inverted, _ = unit_lower_inverse(L, C, OPERAND, PREC_INVERSE, 16)
            T_tile = inverted.to(q_tile.dtype)
            M = tl.dot(A.to(q_tile.dtype), T_tile, input_precision=PREC)
            W = ((b * from_start)[:, None] * k_tile).to(q_tile.dtype)
            E = from_start[:, None] * q_tile - tl.dot(M.to(q_tile.dtype), W, input_precision=PREC)
            to_end = (tl.exp2(G_end - G)[:, None] * k_tile).to(q_tile.dtype)
            R_T = tl.dot(tl.trans(to_end), T_tile, input_precision=PREC)
            ks = tl.arange(0, traits.KP)
            at = chunk * (C * traits.K)
            store_rows(reads + at, E, i, ks, i >= 0, ks < traits.K, traits.K)
            store_rows(writes + at, tl.trans(R_T), i, ks, i >= 0, ks < traits.K, traits.K)
            if inverse is not None:
                store_square(inverse, chunk, inverted, C)
                store_square(plain, chunk, M, C)
        token_weights = tl.trans(load_token_weights(weights, row, hv, i, in_time, traits))
        store_square(mixed, chunk, token_weights * M, C)
