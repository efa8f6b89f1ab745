"""Kernels of additive updates whose value heads, of width 1, share a key head, computed in chunks by matrix products.

    S_t = S_(t-1) Diag(a_t) + k_t v_t^T,    o_t = scale S_t^T q_t,    S in R^{K x M}

Within a chunk, with A = scale lower(q k^T) and the cumulative log2 decay G per value head,

    o_t = 2^G_t S^T q_t scale + sum_(i <= t) A_ti 2^(G_t - G_i) v_i

The decay of a pair i < t is the product of two factors of at most 1, relative to the last token r before the half of a
block of 2^(l+1) tokens to which t belongs and i does not: 2^(G_t - G_r) and 2^(G_r - G_i). So each level l is one
product for all value heads, whatever the decays.

C tokens in a chunk, H key heads, M value heads per key head, HV = H M, K key width
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.layout import (
    LOG2E,
    MIN_LOG2_DECAY,
    first_chunk_slot,
    locate_chunk,
    sequence_bounds,
)


class SharedKeyTraits(NamedTuple):
    """Compile-time properties of a launch. LEVELS: log2 C. BK: key columns of a tile. BM: M, padded."""

    H: int
    K: int
    M: int
    C: int
    LEVELS: int
    BK: int
    BM: int
    PACKED: bool


@triton.jit
def load_columns(x, row, count, first, width, columns, stride, C: tl.constexpr):
    """Load columns [first, first + width) of rows row to row + count of x [rows, stride]: [C, columns]."""
    i = tl.arange(0, C)
    mask = (i < count)[:, None] & (columns < width)[None, :]
    return tl.load(x + row * stride + first + i[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_columns(x, values, row, count, first, width, columns, stride, C: tl.constexpr):
    """Store values [C, columns] as `load_columns` loads them."""
    i = tl.arange(0, C)
    mask = (i < count)[:, None] & (columns < width)[None, :]
    at = x + row * stride + first + i[:, None] * stride + columns[None, :]
    tl.store(at, values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_matrix(x, index, ks, ms, traits: tl.constexpr):
    """Load a tile of matrix `index` of x [.., K, M]."""
    mask = (ks < traits.K)[:, None] & (ms < traits.M)[None, :]
    at = x + tl.cast(index, tl.int64) * (traits.K * traits.M)
    return tl.load(at + ks[:, None] * traits.M + ms[None, :], mask=mask, other=0.0)


@triton.jit
def store_matrix(x, values, index, ks, ms, traits: tl.constexpr):
    """Store a tile of matrix `index` of x [.., K, M]."""
    mask = (ks < traits.K)[:, None] & (ms < traits.M)[None, :]
    at = x + tl.cast(index, tl.int64) * (traits.K * traits.M)
    tl.store(at + ks[:, None] * traits.M + ms[None, :], values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def state_pointers(x, n, h, ks, ms, traits: tl.constexpr):
    """Return pointers to a tile of the states x [N, H M, K, 1] as [ks, ms], and their mask."""
    first = (tl.cast(n, tl.int64) * traits.H + h) * (traits.M * traits.K)
    mask = (ks < traits.K)[:, None] & (ms < traits.M)[None, :]
    return x + first + ms[None, :] * traits.K + ks[:, None], mask


@triton.jit
def load_decays(sums, slot, h, ms, traits: tl.constexpr):
    """Load G of a chunk, [C, BM]."""
    i = tl.arange(0, traits.C)
    at = sums + (slot.to(tl.int64) * traits.C * traits.H + h) * traits.M
    return tl.load(at + i[:, None] * (traits.H * traits.M) + ms[None, :], mask=(ms < traits.M)[None, :], other=0.0)


@triton.jit
def load_last_decays(sums, slot, h, ms, traits: tl.constexpr):
    """Load G of the last token of a chunk, [BM]."""
    at = sums + ((slot.to(tl.int64) * traits.C + traits.C - 1) * traits.H + h) * traits.M
    return tl.load(at + ms, mask=ms < traits.M, other=0.0)


@triton.jit
def level_factors(sums, slot, h, G, ms, level, traits: tl.constexpr):
    """Return the factors of later tokens and of earlier ones at a level, [C, BM] each, 0 for the other tokens."""
    i = tl.arange(0, traits.C)
    later = ((i >> level) & 1) == 1
    reference = (i >> (level + 1) << (level + 1)) + ((1 << level) - 1)
    at = sums + (slot.to(tl.int64) * traits.C * traits.H + h) * traits.M
    at += reference[:, None] * (traits.H * traits.M)
    R = tl.load(at + ms[None, :], mask=(ms < traits.M)[None, :], other=0.0)
    later_factor = tl.where(later[:, None], tl.exp2(tl.where(later[:, None], G - R, 0.0)), 0.0)
    earlier_factor = tl.where(later[:, None], 0.0, tl.exp2(tl.where(later[:, None], 0.0, R - G)))
    return later_factor, earlier_factor


@triton.jit
def same_block(level, C: tl.constexpr):
    """Whether two tokens are in the same block of 2^(level + 1) tokens, [C, C]."""
    i = tl.arange(0, C)
    return ((i[:, None] ^ i[None, :]) >> (level + 1)) == 0


@triton.jit(do_not_specialize=["N", "T"])
def shared_key_sums_kernel(log_decay, cu, sums, N, T, traits: tl.constexpr):
    """Write sums [slots, C, HV], G in float32. Grid: slot, key head. Reads log_decay [B, T, HV]."""
    C: tl.constexpr = traits.C
    slot, h = tl.program_id(0) // traits.H, tl.program_id(0) % traits.H
    start, length, offset = locate_chunk(slot, cu, N, T, C, traits.PACKED)
    ms = tl.arange(0, traits.BM)
    HV: tl.constexpr = traits.H * traits.M
    decay = load_columns(log_decay, start + offset, length - offset, h * traits.M, traits.M, ms, HV, C)
    G = tl.cumsum(tl.maximum(decay.to(tl.float32) * LOG2E, MIN_LOG2_DECAY), 0)
    store_columns(sums, G, slot.to(tl.int64) * C, C, h * traits.M, traits.M, ms, HV, C)


@triton.jit(do_not_specialize=["N", "T"])
def shared_key_scan_kernel(
    keys, values, sums, initial, cu, states, final, scale, N, T, REVERSE: tl.constexpr, traits: tl.constexpr
):
    """Scan the chunks of a sequence. Grid: sequence, key head, key tile.

    Reads keys k [B, T, H, K], values v [B, T, HV]; initial [N, HV, K, 1], unless None. Writes states [slots, H, K, M],
    before each chunk, and final, like initial. REVERSE: keys are q and values d_o; the gradients of the states after
    each chunk, from those after the last one to those before the first one.
    """
    C: tl.constexpr = traits.C
    HV: tl.constexpr = traits.H * traits.M
    BK: tl.constexpr = traits.BK
    BM: tl.constexpr = traits.BM
    tiles: tl.constexpr = (traits.K + traits.BK - 1) // traits.BK
    dtype: tl.constexpr = keys.dtype.element_ty
    n, h = tl.program_id(0) // tiles // traits.H, tl.program_id(0) // tiles % traits.H
    ks = tl.program_id(0) % tiles * traits.BK + tl.arange(0, traits.BK)
    ms = tl.arange(0, traits.BM)
    start, length = sequence_bounds(n, cu, T, traits.PACKED)
    first, chunks = first_chunk_slot(n, cu, T, C, traits.PACKED), tl.cdiv(length, C)
    at, mask = state_pointers(final if initial is None else initial, n, h, ks, ms, traits)
    S = tl.zeros([BK, BM], tl.float32)
    if initial is not None:
        S = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for step in range(chunks):
        c = chunks - 1 - step if REVERSE else step
        slot = first + c
        store_matrix(states, S, slot.to(tl.int64) * traits.H + h, ks, ms, traits)
        row, count = start + c * C, length - c * C
        k_tile = load_columns(keys, row, count, h * traits.K, traits.K, ks, traits.H * traits.K, C)
        v_tile = load_columns(values, row, count, h * traits.M, traits.M, ms, HV, C).to(tl.float32)
        G = load_decays(sums, slot, h, ms, traits)
        G_end = load_last_decays(sums, slot, h, ms, traits)
        weight = tl.exp2(G) * scale if REVERSE else tl.exp2(G_end[None, :] - G)
        S = tl.dot(tl.trans(k_tile), (v_tile * weight).to(dtype), tl.exp2(G_end)[None, :] * S)
    at, mask = state_pointers(final, n, h, ks, ms, traits)
    tl.store(at, S, mask=mask)


@triton.jit(do_not_specialize=["N", "T"])
def shared_key_output_kernel(q, k, v, sums, states, cu, o, scale, N, T, traits: tl.constexpr):
    """Compute o [B, T, HV]. Grid: slot, key head. Reads q, k [B, T, H, K]; v [B, T, HV]; states [slots, H, K, M]."""
    C: tl.constexpr = traits.C
    HV: tl.constexpr = traits.H * traits.M
    BM: tl.constexpr = traits.BM
    dtype: tl.constexpr = q.dtype.element_ty
    slot, h = tl.program_id(0) // traits.H, tl.program_id(0) % traits.H
    start, length, offset = locate_chunk(slot, cu, N, T, C, traits.PACKED)
    row, count = start + offset, length - offset
    if count > 0:
        ms = tl.arange(0, traits.BM)
        A = tl.zeros([C, C], tl.float32)
        out = tl.zeros([C, BM], tl.float32)
        for first in range(0, traits.K, traits.BK):
            ks = first + tl.arange(0, traits.BK)
            q_tile = load_columns(q, row, count, h * traits.K, traits.K, ks, traits.H * traits.K, C)
            k_tile = load_columns(k, row, count, h * traits.K, traits.K, ks, traits.H * traits.K, C)
            A = tl.dot(q_tile, tl.trans(k_tile), A)
            S = load_matrix(states, slot.to(tl.int64) * traits.H + h, ks, ms, traits)
            out = tl.dot(q_tile, S, out)
        v_tile = load_columns(v, row, count, h * traits.M, traits.M, ms, HV, C).to(tl.float32)
        G = load_decays(sums, slot, h, ms, traits)
        i = tl.arange(0, C)
        out = tl.exp2(G) * out + tl.sum(tl.where(i[:, None] == i[None, :], A, 0.0), 1)[:, None] * v_tile
        for level in range(traits.LEVELS):  # not unrolled, which would hoist all loads
            later, earlier = level_factors(sums, slot, h, G, ms, level, traits)
            pairs = tl.where(same_block(level, C), A, 0.0).to(dtype)
            out += later * tl.dot(pairs, (earlier * v_tile).to(dtype))
        store_columns(o, scale * out, row, count, h * traits.M, traits.M, ms, HV, C)


@triton.jit(do_not_specialize=["N", "T"])
def shared_key_gradients_kernel(
    q, k, v, log_decay, sums, states, d_states, d_o, cu, d_q, d_k, d_v, d_log_decay, scale, N, T, traits: tl.constexpr
):
    """Compute the gradients of a chunk. Grid: slot, key head.

    Reads the operands, d_o [B, T, HV], states and d_states [slots, H, K, M]. Writes the gradients of the operands. That
    of G_t is d_o_t o_t - v_t d_v_t per value head, without the pair of a token and itself, which cancels.
    """
    C: tl.constexpr = traits.C
    HV: tl.constexpr = traits.H * traits.M
    BM: tl.constexpr = traits.BM
    dtype: tl.constexpr = q.dtype.element_ty
    slot, h = tl.program_id(0) // traits.H, tl.program_id(0) % traits.H
    chunk = slot.to(tl.int64) * traits.H + h
    start, length, offset = locate_chunk(slot, cu, N, T, C, traits.PACKED)
    row, count = start + offset, length - offset
    if count > 0:
        ms = tl.arange(0, traits.BM)
        i = tl.arange(0, C)
        A = tl.zeros([C, C], tl.float32)
        A_T = tl.zeros([C, C], tl.float32)  # not tl.trans(A), which some versions of Triton miscompile
        out = tl.zeros([C, BM], tl.float32)
        d_value = tl.zeros([C, BM], tl.float32)
        kept = tl.zeros([BM], tl.float32)
        for first in range(0, traits.K, traits.BK):
            ks = first + tl.arange(0, traits.BK)
            q_tile = load_columns(q, row, count, h * traits.K, traits.K, ks, traits.H * traits.K, C)
            k_tile = load_columns(k, row, count, h * traits.K, traits.K, ks, traits.H * traits.K, C)
            S, dS = load_matrix(states, chunk, ks, ms, traits), load_matrix(d_states, chunk, ks, ms, traits)
            A = tl.dot(q_tile, tl.trans(k_tile), A)
            A_T = tl.dot(k_tile, tl.trans(q_tile), A_T)
            out, d_value = tl.dot(q_tile, S, out), tl.dot(k_tile, dS, d_value)
            kept += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
        v_tile = load_columns(v, row, count, h * traits.M, traits.M, ms, HV, C).to(tl.float32)
        d_out = load_columns(d_o, row, count, h * traits.M, traits.M, ms, HV, C).to(tl.float32) * scale
        G = load_decays(sums, slot, h, ms, traits)
        G_end = load_last_decays(sums, slot, h, ms, traits)
        to_end = tl.exp2(G_end[None, :] - G)
        out *= tl.exp2(G)
        d_value *= to_end
        kept = kept * tl.exp2(G_end) + tl.sum(v_tile * d_value, 0)
        dA = tl.zeros([C, C], tl.float32)
        dA_T = tl.zeros([C, C], tl.float32)
        for level in range(traits.LEVELS):  # not unrolled, which would hoist all loads
            later, earlier = level_factors(sums, slot, h, G, ms, level, traits)
            block = same_block(level, C)
            pairs, pairs_T = tl.where(block, A, 0.0).to(dtype), tl.where(block, A_T, 0.0).to(dtype)
            read, written = (later * d_out).to(dtype), (earlier * v_tile).to(dtype)
            out += later * tl.dot(pairs, written)
            d_value += earlier * tl.dot(pairs_T, read)
            dA += tl.where(block, tl.dot(read, tl.trans(written)), 0.0)
            dA_T += tl.where(block, tl.dot(written, tl.trans(read)), 0.0)
        # The sum over j >= t of the gradients of G_j, and what the end of the chunk adds to every token.
        dG = d_out * out - v_tile * d_value
        d_decay = tl.sum(dG, 0)[None, :] - tl.cumsum(dG, 0) + dG + kept[None, :]
        decay = load_columns(log_decay, row, count, h * traits.M, traits.M, ms, HV, C).to(tl.float32)
        d_decay = tl.where(decay * LOG2E > MIN_LOG2_DECAY, d_decay, 0.0)
        store_columns(d_log_decay, d_decay, row, count, h * traits.M, traits.M, ms, HV, C)
        is_diagonal = i[:, None] == i[None, :]
        A_diagonal = tl.sum(tl.where(is_diagonal, A, 0.0), 1)
        d_value += A_diagonal[:, None] * d_out
        store_columns(d_v, d_value, row, count, h * traits.M, traits.M, ms, HV, C)
        diagonal = tl.where(is_diagonal, tl.sum(d_out * v_tile, 1)[:, None], 0.0)
        dA_half, dA_T_half = (dA + diagonal).to(dtype), (dA_T + diagonal).to(dtype)
        read, written = (tl.exp2(G) * d_out).to(dtype), (to_end * v_tile).to(dtype)
        for first in range(0, traits.K, traits.BK):
            ks = first + tl.arange(0, traits.BK)
            q_tile = load_columns(q, row, count, h * traits.K, traits.K, ks, traits.H * traits.K, C)
            k_tile = load_columns(k, row, count, h * traits.K, traits.K, ks, traits.H * traits.K, C)
            S, dS = load_matrix(states, chunk, ks, ms, traits), load_matrix(d_states, chunk, ks, ms, traits)
            d_query = tl.dot(read, tl.trans(S)) + tl.dot(dA_half, k_tile)
            d_key = tl.dot(written, tl.trans(dS)) + tl.dot(dA_T_half, q_tile)
            store_columns(d_q, d_query, row, count, h * traits.K, traits.K, ks, traits.H * traits.K, C)
            store_columns(d_k, d_key, row, count, h * traits.K, traits.K, ks, traits.H * traits.K, C)
