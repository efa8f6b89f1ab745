"""Forward: the online softmax over tiles of keys, with the forget gates added to the scores.

For a tile of queries and each tile of keys in order

    m' = max(m, max_s x),    p = 2^(x - m'),    l' = 2^(m - m') l + sum_s p,    o' = 2^(m - m') o + p v

tiles.py defines the scores x and the sizes.
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.attention.kernels.tiles import (
    LOG2E,
    block_end_sum,
    first_key,
    head_rows,
    load_rows,
    load_terms,
)
from deltazoo.backends.triton.device.layout import find_sequence, first_chunk_slot, sequence_bounds

LEAST = tl.constexpr(-3.0e38)  # of the maximum: a row without keys


@triton.jit
def update_softmax(o_tile, m, l, x, shift, v_tile, traits: tl.constexpr):
    """Add a tile of scores x - shift to the online softmax."""
    m_new = tl.maximum(tl.maximum(m, tl.max(x, 1) - shift), LEAST)
    p = tl.exp2(x - (m_new + shift)[:, None])
    decay = tl.exp2(m - m_new)
    l = l * decay + tl.sum(p, 1)
    o_tile = tl.dot(p.to(v_tile.dtype), v_tile, o_tile * decay[:, None], input_precision=traits.PREC)
    return o_tile, m_new, l


@triton.jit(do_not_specialize=["T", "S", "N", "R", "slots", "sum_slots", "q_stride", "k_stride", "v_stride"])
def forgetting_attention_kernel(
    q, k, v, sums, norms, cu, before, ends, o, o_low, lse, T, S, N, R, slots, sum_slots, q_stride, k_stride, v_stride,
    traits: tl.constexpr,
):  # fmt: skip
    """Compute a tile of o and its log-sum-exp.

    Grid: H x slots, tiles of BM queries; those with most keys first, and the heads that share keys side by side.

    Reads q [B, T, H, E], k and v [B, T, G, E], sums [3, H, R], norms [G, sum_slots] or
    None. Writes o [B, T, H, E] and lse [H, R], log2 of the sum
    over s of 2^x_ts; o_low, what rounding has removed from o, or None.

    With a cache k and v are [N, S, G, ...] and sums those of its R = N S slots; norms, o_low and lse are None. Query t
    of sequence i has position before[i] + t, and slots from ends[i] on are empty.
    """
    BM: tl.constexpr = traits.BM
    BN: tl.constexpr = traits.BN
    BLOCK: tl.constexpr = traits.BLOCK
    h = tl.program_id(0) // slots
    slot = slots - 1 - tl.program_id(0) % slots
    i = find_sequence(slot, cu, N, 1, 0, BM) if traits.PACKED else slot // tl.cdiv(T, BM)
    start, length = sequence_bounds(i, cu, T, traits.PACKED)
    begin = (slot - first_chunk_slot(i, cu, T, BM, traits.PACKED)) * BM
    if begin < length:
        first, end, key_start = begin, length, start
        if ends is not None:
            first = begin + tl.load(before + i).to(tl.int32)
            end = tl.minimum(tl.load(ends + i), S).to(tl.int32)
            key_start = tl.cast(i, tl.int64) * S
        q = head_rows(q, start, q_stride, h, traits.E, traits)
        k = head_rows(k, key_start, k_stride, h // (traits.H // traits.G), traits.KEY, traits)
        v = head_rows(v, key_start, v_stride, h // (traits.H // traits.G), traits.E, traits)
        sums += tl.cast(h, tl.int64) * R + key_start
        low = traits.H * tl.cast(R, tl.int64)
        reference = tl.load(sums + tl.maximum(tl.minimum(first, end - 1), 0))
        q_tile = load_rows(q, begin, length, q_stride, BM, True, traits)
        high_t, low_t = load_terms(sums, first, end, low, BM, True)
        m = tl.full([BM], float("-inf"), tl.float32)
        l = tl.zeros([BM], tl.float32)
        o_tile = tl.zeros([BM, BLOCK], tl.float32)
        full = tl.minimum(first, end) // BN * BN  # keys of whole tiles that all queries see
        if norms is not None:
            norms += h // (traits.H // traits.G) * sum_slots
            norms += first_chunk_slot(i, cu, T, traits.SUM_BLOCK, traits.PACKED)
        needed = first_key(q_tile, sums, norms, first, full, end, reference, traits)
        following = block_end_sum(sums, needed, end, reference, low, traits)
        for n in range(needed, full, BN):
            # g of the query is the same for all keys and left out here, relative to the reference
            shift = following
            following = block_end_sum(sums, n + BN, end, reference, low, traits)
            k_tile = load_rows(k, n, end, k_stride, BN, False, traits)
            local = tl.load(sums + 2 * low + n + tl.arange(0, BN))
            products = tl.dot(q_tile, tl.trans(k_tile), input_precision=traits.PREC)
            x = products * (traits.SCALE * LOG2E) - local[None, :]
            v_tile = load_rows(v, n, end, v_stride, BN, False, traits)
            o_tile, m, l = update_softmax(o_tile, m, l, x, shift, v_tile, traits)
        m += (high_t - reference) + low_t
        t = first + tl.arange(0, BM)[:, None]
        for n in range(full, tl.minimum(first + BM, end), BN):
            k_tile = load_rows(k, n, end, k_stride, BN, True, traits)
            high_s, low_s = load_terms(sums, n, end, low, BN, True)
            products = tl.dot(q_tile, tl.trans(k_tile), input_precision=traits.PREC)
            gates = (high_t[:, None] - high_s[None, :]) + (low_t[:, None] - low_s[None, :])
            s = n + tl.arange(0, BN)[None, :]
            x = tl.where((s <= t) & (s < end), products * (traits.SCALE * LOG2E) + gates, float("-inf"))
            v_tile = load_rows(v, n, end, v_stride, BN, True, traits)
            o_tile, m, l = update_softmax(o_tile, m, l, x, 0.0, v_tile, traits)
        at_row = tl.arange(0, BM)
        e = tl.arange(0, BLOCK)[None, :]
        at = ((start + begin) * traits.H + h) * traits.E + at_row[:, None] * (traits.H * traits.E) + e
        in_rows = at_row < length - begin
        factor = tl.where(l == 0.0, 0.0, 1.0 / l)
        in_tile = in_rows[:, None] & (e < traits.E)
        o_tile *= factor[:, None]
        rounded = o_tile.to(o.dtype.element_ty)
        tl.store(o + at, rounded, mask=in_tile)
        if o_low is not None:
            tl.store(o_low + at, o_tile - rounded.to(tl.float32), mask=in_tile)
        if lse is not None:
            tl.store(lse + tl.cast(h, tl.int64) * R + start + begin + at_row, m + tl.log2(l), mask=in_rows)
