"""Gradients of q, k, the decays, the erase strengths and lambda of a chunk, from those of its reads and writes.

    dM = lambda o (do v^T) - dE W^T,   dW = dW' - M^T dE,   dA = dM T^T,   dX = T dR,   dN = -(M^T dA + R dX^T)

and from them the gradients of q, k, b and G by the definitions in prepare.py, with X = Diag(2^(Gend - G)) k and
R = T^T X. state_gradients.py defines dE, dR and dW'. Without an erase term dA = dM and dX = dR. Tiles [C, C] are held
as [s, t], because the product of a transposed accumulator is wrong on some versions of Triton (docs/compiler-bugs.md).
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.device.layout import load_rows, store_rows
from deltazoo.backends.triton.levels.kernels.tree import (
    load_chunk_keys,
    load_keys,
    load_square,
    load_token_weights,
    load_values,
    locate_level_chunk,
    token_levels,
)


@triton.jit(do_not_specialize=["N", "T", "head", "blocks"])
def level_gradients_kernel(
    q, k, v, erase, weights, gates, plain, inverse, writes, d_o, d_reads, d_writes, d_erases, kept, dq, dk, d_log_decay,
    d_erase, d_weights, first, cu, counts, N, T, head, blocks, traits: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk. Grid: chunk slot, block of GROUP value heads of the window.

    Reads the operands and results of prepare.py, v and d_o [B, T, HV, V], and the results of state_gradients.py.
    Writes dq, dk [B, T, HV / GROUP, K], sums over the heads of a block; d_log_decay [B, T, HV]; d_erase [B, T, HV] with
    an erase term; d_weights [B, T, HV, L] of the levels within the chunk.
    """
    C: tl.constexpr = traits.C
    BV: tl.constexpr = traits.BV
    KP: tl.constexpr = traits.KP
    PREC: tl.constexpr = traits.PREC
    TILES: tl.constexpr = (traits.V + BV - 1) // BV
    LEVELS: tl.constexpr = C.bit_length()
    slot = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    h = (head + block * traits.GROUP) // (traits.HV // traits.H)
    row, count, number = locate_level_chunk(slot, first, cu, counts, N, T, traits)
    if count > 0:
        i = tl.arange(0, C)
        ks = tl.arange(0, KP)
        in_time = i < count
        causal = i[:, None] <= i[None, :]
        level = token_levels(C)
        q_tile = load_keys(q, row, h, i, in_time, traits.H, traits)
        k_tile = load_keys(k, row, h, i, in_time, traits.H, traits)
        dtype: tl.constexpr = q.dtype.element_ty
        KQ = tl.dot(k_tile, tl.trans(q_tile), input_precision=PREC)
        q_sum = tl.zeros([C, KP], tl.float32)
        k_sum = tl.zeros([C, KP], tl.float32)
        dA_sum = tl.zeros([C, C], tl.float32)
        if traits.DELTA:
            dN_sum = tl.zeros([C, C], tl.float32)
        for g in tl.range(0, traits.GROUP, num_stages=1):
            local = block * traits.GROUP + g
            hv = head + local
            chunk = tl.cast(slot, tl.int64) * traits.HV + hv
            in_window = tl.cast(slot, tl.int64) * (blocks * traits.GROUP) + local
            tokens = (row + i) * traits.HV + hv
            G = tl.load(gates + chunk * (2 * C) + i)
            G_end = tl.load(gates + chunk * (2 * C) + C - 1)
            from_start = tl.exp2(G)
            to_end = tl.exp2(G_end - G)
            P = tl.zeros([C, C], tl.float32)
            for tile in tl.range(0, TILES, num_stages=1):
                do = load_values(d_o, row, hv, i, tile * BV, in_time, BV, traits)
                v_tile = load_values(v, row, hv, i, tile * BV, in_time, BV, traits)
                P = tl.dot(v_tile, tl.trans(do), P, input_precision=PREC)
            at = in_window * (C * traits.K)
            dE = load_rows(d_reads + at, i, ks, i >= 0, ks < traits.K, traits.K)
            dR = load_rows(d_writes + at, i, ks, i >= 0, ks < traits.K, traits.K)
            decay = tl.exp2(tl.where(causal, G[None, :] - G[:, None], 0.0))
            M = tl.where(causal, decay * KQ, 0.0)
            if traits.DELTA:
                M_tile = load_square(plain, chunk, C)
                M = tl.trans(M_tile).to(tl.float32)
            read_weights = M * P
            for l in range(LEVELS):  # not unrolled, because it would take most of the time to compile
                total = tl.sum(tl.where(level == l, read_weights, 0.0), 0)
                tl.store(d_weights + tokens * traits.L + l, total, mask=in_time)
            dM = load_token_weights(weights, row, hv, i, in_time, traits) * P
            if traits.DELTA:
                b = tl.load(erase + tokens, mask=in_time, other=0.0).to(tl.float32)
                T_tile = load_square(inverse, chunk, C)
                R = load_chunk_keys(writes, chunk, traits)
                W = ((b * from_start)[:, None] * k_tile).to(dtype)
                crossed = tl.dot(dE, tl.trans(W), input_precision=PREC)
                dM = tl.where(causal, dM - tl.trans(crossed), 0.0)
                dW = load_rows(d_erases + at, i, ks, i >= 0, ks < traits.K, traits.K).to(tl.float32)
                dW -= tl.dot(tl.trans(M_tile), dE, input_precision=PREC)
                w_sums = from_start * tl.sum(dW * k_tile, 1)
                k_sum += (b * from_start)[:, None] * dW
                dA = tl.dot(T_tile, dM.to(dtype), input_precision=PREC)
                dX = tl.dot(T_tile, dR, input_precision=PREC)
                dN = tl.dot(dA.to(dtype), M_tile, input_precision=PREC)
                dN += tl.dot(dX.to(dtype), tl.trans(R), input_precision=PREC)
                dN = tl.where(i[:, None] < i[None, :], -decay * dN, 0.0)
                erase_sums = dN * tl.dot(k_tile, tl.trans(k_tile), input_precision=PREC)
                d_b = tl.sum(erase_sums, 0)
                tl.store(d_erase + tokens, d_b + w_sums, mask=in_time)
                dG = b * (d_b + w_sums) - tl.sum(b[None, :] * erase_sums, 1)
                dN_sum += b[None, :] * dN
                dA = tl.where(causal, decay * dA, 0.0)
            else:
                dA = decay * dM
                dX = dR.to(tl.float32)
                dG = tl.zeros([C], tl.float32)
            pairs = dA * KQ
            x_sums = to_end * tl.sum(dX * k_tile, 1)
            k_sum += to_end[:, None] * dX
            q_sum += from_start[:, None] * dE
            dG += from_start * tl.sum(dE.to(tl.float32) * q_tile, 1) - x_sums + tl.sum(pairs, 0) - tl.sum(pairs, 1)
            d_end = tl.sum(x_sums, 0) + tl.exp2(G_end) * tl.load(kept + in_window)
            dG += tl.where(i == C - 1, d_end, 0.0)
            tl.store(d_log_decay + tokens, tl.cumsum(dG, 0, reverse=True), mask=in_time)
            dA_sum += dA

        dA_sum = dA_sum.to(dtype)
        q_sum += tl.trans(tl.dot(tl.trans(k_tile), dA_sum, input_precision=PREC))
        k_sum += tl.dot(dA_sum, q_tile, input_precision=PREC)
        if traits.DELTA:
            k_sum += tl.dot((dN_sum + tl.trans(dN_sum)).to(dtype), k_tile, input_precision=PREC)
        PARTS: tl.constexpr = traits.HV // traits.GROUP
        at = (row * PARTS + head // traits.GROUP + block) * traits.K
        store_rows(dq + at, q_sum, i, ks, in_time, ks < traits.K, PARTS * traits.K)
        store_rows(dk + at, k_sum, i, ks, in_time, ks < traits.K, PARTS * traits.K)
