"""Tiles of flash attention with forget gates, and the scores of a pair of tiles.

The score of query t and key s <= t, in units of log 2, is

    x_ts = scale log2(e) q_t . k_s + g_t - g_s,    g_t = log2 f_1 + ... + log2 f_t

A sum g is stored as two float32 terms, high + low. Where a tile of keys precedes a tile of queries, g_t - g_s is a sum
of differences of one sign, so that none is large unless the weight vanishes: from the key to the end of its block of
SUM_BLOCK keys (stored for each key), from there to a token c between the tiles (one number per tile), and from c to the
query. No operation per key is left. Where the tiles overlap, the terms are subtracted pair by pair, which is exact for
near tokens, whatever the sum.

B batch, T time, N sequences, H query heads, G key-value heads, E head width, R = B T rows
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


class AttentionTraits(NamedTuple):
    """Compile-time parameters of the kernels.

    Args:
        H, G, E: sizes. BLOCK: the power of two from E on, at least 16.
        KEY: numbers from one head of k to the next, E or more.
        BM, BN: queries and keys of a tile; one divides the other.
        SUM_BLOCK, ROW_BLOCK: keys, and queries, of a block to whose end, or start, stored sums are relative.
        QUERY_TILE: queries of a tile of `query_gradients_kernel`.
        SCALE: factor of q . k. UNIT: a number by which all strides are divisible, for wide loads.
        PACKED: sequences are those of a pack, not the rows of the batch. PREC: input precision of float32 products.
    """

    H: int
    G: int
    E: int
    KEY: int
    BLOCK: int
    BM: int
    BN: int
    SUM_BLOCK: int
    ROW_BLOCK: int
    QUERY_TILE: int
    SCALE: float
    UNIT: int
    PACKED: bool
    PREC: str


@triton.jit
def head_rows(x, start, stride, head, WIDTH: tl.constexpr, traits: tl.constexpr):
    """Return the pointer to a sequence's first token in a head of WIDTH. stride: from token to token / UNIT."""
    return x + start * (stride * traits.UNIT) + head * WIDTH


@triton.jit
def load_rows(x, first, length, stride, ROWS: tl.constexpr, MASKED: tl.constexpr, traits: tl.constexpr):
    """Load rows first, ..., first + ROWS - 1 of a head, [ROWS, BLOCK]. MASKED: zeros from row `length` on."""
    row = tl.arange(0, ROWS)[:, None]
    e = tl.arange(0, traits.BLOCK)[None, :]
    tile = x + tl.cast(first, tl.int64) * (stride * traits.UNIT)
    at = tile + row * (stride * traits.UNIT) + e
    if traits.BLOCK == traits.E:
        if MASKED:
            return tl.load(at, mask=row < length - first, other=0.0)
        else:
            return tl.load(at)
    else:
        return tl.load(at, mask=(e < traits.E) & (row < length - first), other=0.0)


@triton.jit
def load_terms(sums, first, length, low, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """Load both terms of g of tokens first, ..., first + ROWS - 1, [ROWS] each. MASKED: 0 from token `length` on.

    Args: sums: [2, .., R] at the first token of the sequence; the low terms are `low` numbers behind.
    """
    at = first + tl.arange(0, ROWS)
    if MASKED:
        return tl.load(sums + at, mask=at < length, other=0.0), tl.load(sums + low + at, mask=at < length, other=0.0)
    else:
        return tl.load(sums + at), tl.load(sums + low + at)


@triton.jit
def block_end_sum(sums, n, end, reference, low, traits: tl.constexpr):
    """Return g minus `reference` at the end of the block of keys that key n belongs to; end: the number of keys."""
    last = tl.maximum(tl.minimum(n // traits.SUM_BLOCK * traits.SUM_BLOCK + traits.SUM_BLOCK, end) - 1, 0)
    return (tl.load(sums + last) - reference) + tl.load(sums + low + last)


@triton.jit
def first_key(q_tile, sums, norms, first, full, length, reference, traits: tl.constexpr):
    """Return the first key of a sequence that a tile of queries needs, a multiple of SUM_BLOCK or `full`.

    The keys before have weights below 2^-26 / length each, so that neither o nor a gradient changes by more than the
    rounding of float32. The weight of a key is at most 2^(x_ts - x_tt), and |q . k| at most |q| |k|.
    Source: adaptive computation pruning, arXiv 2504.06949.

    Args: norms: |k|^2, the largest of each block of the sequence; None: 0 is returned. full: the first key that some
        query does not see. reference: high term of g of the first query.
    """
    needed = 0
    if norms is not None:
        wide = q_tile.to(tl.float32)
        largest_q = tl.sqrt(tl.max(tl.sum(wide * wide, 1), 0)) * (traits.SCALE * LOG2E)
        last = (length - 1) // traits.SUM_BLOCK
        own = tl.maximum(first, 0) // traits.SUM_BLOCK + tl.arange(0, 16)
        in_tile = (own * traits.SUM_BLOCK < first + traits.BM) & (own <= last)
        own_k = tl.sqrt(tl.max(tl.load(norms + own, mask=in_tile, other=0.0), 0))
        blocks = full // traits.SUM_BLOCK
        needed = blocks
        least = -26.0 - tl.log2(length.to(tl.float32))
        for b in range(0, blocks, 64):
            block = b + tl.arange(0, 64)
            in_range = block < blocks
            at_end = block * traits.SUM_BLOCK + traits.SUM_BLOCK - 1
            gates = reference - tl.load(sums + at_end, mask=in_range, other=0.0)
            k_norm = tl.sqrt(tl.load(norms + block, mask=in_range, other=0.0))
            vanishes = largest_q * (k_norm + own_k) + gates < least  # False for NaN
            needed = tl.minimum(needed, tl.min(tl.where(in_range & (vanishes == 0), block, blocks), 0))
    return needed * traits.SUM_BLOCK
