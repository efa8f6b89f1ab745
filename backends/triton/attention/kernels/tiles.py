"""Tiles of flash attention with forget gates, and the scores of a pair of tiles.

The score of query t and key s <= t, in units of log 2, is

    x_ts = scale log2(e) q_t . k_s + g_t - g_s,    g_t = log2 f_1 + ... + log2 f_t

A sum g is stored as two float32 numbers, high + low. Kernels subtract from it the high part at one token of their own
tile, which is exact near that token. Far from it the difference is large and the weight vanishes, or all gates between
are near 1.

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
def load_sums(sums, first, length, reference, low, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """Load g minus `reference` of tokens first, ..., first + ROWS - 1, [ROWS].

    Args: sums: [2, .., R] at the first token of the sequence; the low terms are `low` numbers behind.
    """
    at = first + tl.arange(0, ROWS)
    if MASKED:
        high = tl.load(sums + at, mask=at < length, other=0.0)
        rest = tl.load(sums + low + at, mask=at < length, other=0.0)
    else:
        high = tl.load(sums + at)
        rest = tl.load(sums + low + at)
    return (high - reference) + rest
