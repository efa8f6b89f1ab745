"""The Fenwick tree over the chunks of a sequence, and the tiles that all kernels of log-linear attention share.

At chunk c the past is divided into buckets: level j holds 2^j chunks if bit j of c is set, and else none; the last of J
levels holds all older chunks. After chunk c the levels below the lowest set bit r of c + 1, and the chunk, move to
level r. Levels are given as bits of an integer.

The states of JP levels and BV values are the rows of one matrix [BV JP, K], value by value, so that one product reads
or updates all of them. It is the left operand, and stays in registers; a warp holds all levels of its values.

C tokens in a chunk, H key heads, HV value heads, K key width (KP padded), V value width, J levels of chunks (JP padded)
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.layout import first_chunk_slot, load_rows, locate_chunk, sequence_bounds


class LevelTraits(NamedTuple):
    """Compile-time properties of a launch.

    Args:
        L: levels in all: 1 + log2 C within a chunk, and then those of chunks.
        BV: value columns of a tile. GROUP: value heads that a program of the gradients processes.
        DELTA: with an erase term. PACKED: sequences are those of `cu`.
        POSITIONED: with initial states, whose sequences begin at chunk first[n] of the tree and have counts[n] tokens.
        PREC: of float32 products.
    """

    H: int
    HV: int
    K: int
    V: int
    L: int
    C: int
    KP: int
    JP: int
    BV: int
    GROUP: int
    DELTA: bool
    PACKED: bool
    POSITIONED: bool
    PREC: str


@triton.jit
def live_levels(c, J):
    """Return the levels that hold chunks at chunk c."""
    top = tl.where((c >> (J - 1)) > 0, 1 << (J - 1), 0)
    return (c & ((1 << (J - 1)) - 1)) | top


@triton.jit
def merged_level(c, J):
    """Return the level to which chunk c, and the levels below, move after it."""
    return tl.minimum((c + 1) & -(c + 1), 1 << (J - 1))


@triton.jit
def count_levels(levels):
    """Count the levels of a number, or of each number of a tensor."""
    x = levels - ((levels >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x += x >> 8
    return (x + (x >> 16)) & 0x3F


@triton.jit
def token_levels(C: tl.constexpr):
    """Return the level of token s at token t of a chunk, as [s, t]: the number of binary digits of t xor s."""
    x = tl.arange(0, C)[:, None] ^ tl.arange(0, C)[None, :]
    level = tl.zeros_like(x)
    for digit in tl.static_range(7):
        if 2**digit < C:
            level += (x >= 2**digit).to(tl.int32)
    return level


@triton.jit
def load_token_weights(weights, row, hv, i, in_time, traits: tl.constexpr):
    """Load lambda at the level of token s at token t, as [s, t]; 0 for s > t."""
    C: tl.constexpr = traits.C
    level = token_levels(C)
    at = weights + ((row + i) * traits.HV + hv) * traits.L
    tile = tl.zeros([C, C], tl.float32)
    for l in tl.static_range(8):
        if 2**l <= C:
            w = tl.load(at + l, mask=in_time, other=0.0).to(tl.float32)
            tile = tl.where(level == l, w[None, :], tile)
    return tl.where(i[:, None] <= i[None, :], tile, 0.0)


@triton.jit
def first_level(traits: tl.constexpr):
    """Return the number of the first level of chunks, 1 + log2 C."""
    level: tl.constexpr = traits.C.bit_length()
    return level


@triton.jit
def load_level_weights(weights, row, hv, i, in_time, levels, traits: tl.constexpr):
    """Load lambda [1, JP, C] of the levels of chunks; 0 for those that are not in `levels`."""
    j = tl.arange(0, traits.JP)
    at = weights + ((row + i) * traits.HV + hv)[None, :] * traits.L + first_level(traits) + j[:, None]
    loaded = tl.load(at, mask=in_time[None, :] & (((levels >> j) & 1) > 0)[:, None], other=0.0)
    return loaded.to(tl.float32)[None, :, :]


@triton.jit
def as_levels(x, traits: tl.constexpr):
    """View a matrix [BV JP, columns] as [BV, JP, columns]."""
    BV: tl.constexpr = traits.BV
    JP: tl.constexpr = traits.JP
    columns: tl.constexpr = x.shape[1]
    return tl.reshape(x, [BV, JP, columns])


@triton.jit
def as_rows(x, traits: tl.constexpr):
    """View [BV, JP, columns] as a matrix [BV JP, columns]."""
    rows: tl.constexpr = traits.BV * traits.JP
    columns: tl.constexpr = x.shape[2]
    return tl.reshape(x, [rows, columns])


@triton.jit
def level_bits(traits: tl.constexpr):
    """Return the bit of each level as [1, JP, 1]."""
    return (1 << tl.arange(0, traits.JP))[None, :, None]


@triton.jit
def locate_values(heads, traits: tl.constexpr):
    """Return a program's first value column, its head of the window of `heads`, and its sequence."""
    TILES: tl.constexpr = (traits.V + traits.BV - 1) // traits.BV
    pid = tl.program_id(0)
    return pid % TILES * traits.BV, pid // TILES % heads, pid // (TILES * heads)


@triton.jit
def locate_level_chunk(slot, first, cu, counts, N, T, traits: tl.constexpr):
    """Locate a chunk.

    Returns: its first token (row of the flattened batch); how many tokens it has, 0 or less if the slot is not in use;
        its number in the tree.
    """
    start, length, t0 = locate_chunk(slot, cu, N, T, traits.C, traits.PACKED)
    number = t0 // traits.C
    if traits.POSITIONED:
        n = slot // tl.cdiv(T, traits.C)
        length = tl.minimum(length, tl.load(counts + n))
        number += tl.load(first + n)
    return start + t0, length - t0, number


@triton.jit
def level_sequence_bounds(n, first, cu, counts, T, traits: tl.constexpr):
    """Return the first token of sequence n, its length, and the number of its first chunk in the tree."""
    start, length = sequence_bounds(n, cu, T, traits.PACKED)
    number = 0
    if traits.POSITIONED:
        length = tl.minimum(length, tl.load(counts + n))
        number += tl.load(first + n)
    return start, length, number


@triton.jit
def load_keys(x, row, h, i, in_time, heads: tl.constexpr, traits: tl.constexpr):
    """Load a tile [C, KP] of an operand [tokens, heads, K]."""
    k = tl.arange(0, traits.KP)
    return load_rows(x + (row * heads + h) * traits.K, i, k, in_time, k < traits.K, heads * traits.K)


@triton.jit
def load_values(x, row, hv, i, column, in_time, BV: tl.constexpr, traits: tl.constexpr):
    """Load a tile [C, BV] of an operand [tokens, HV, V] from a value column on."""
    v = column + tl.arange(0, BV)
    return load_rows(x + (row * traits.HV + hv) * traits.V, i, v, in_time, v < traits.V, traits.HV * traits.V)


@triton.jit
def load_square(x, chunk, C: tl.constexpr):
    """Load a tile [C, C] of a chunk."""
    i = tl.arange(0, C)
    return tl.load(x + chunk * (C * C) + i[:, None] * C + i[None, :])


@triton.jit
def load_chunk_keys(x, chunk, traits: tl.constexpr):
    """Load a tile [C, KP] of a buffer [chunks, C, K]."""
    i = tl.arange(0, traits.C)
    k = tl.arange(0, traits.KP)
    return load_rows(x + chunk * (traits.C * traits.K), i, k, i >= 0, k < traits.K, traits.K)


@triton.jit
def load_values_transposed(x, row, hv, i, column, in_time, traits: tl.constexpr):
    """Load a tile [BV, C] of an operand [tokens, HV, V], transposed, from a value column on."""
    v = column + tl.arange(0, traits.BV)
    at = x + ((row + i) * traits.HV + hv)[None, :] * traits.V + v[:, None]
    return tl.load(at, mask=in_time[None, :] & (v < traits.V)[:, None], other=0.0)


@triton.jit
def store_values_transposed(x, tile, row, hv, i, column, in_time, traits: tl.constexpr):
    """Store a tile [BV, C] to a result [tokens, HV, V], transposed, from a value column on."""
    v = column + tl.arange(0, traits.BV)
    at = x + ((row + i) * traits.HV + hv)[None, :] * traits.V + v[:, None]
    tl.store(at, tile.to(x.dtype.element_ty), mask=in_time[None, :] & (v < traits.V)[:, None])


@triton.jit
def store_levels(base, entry, x, levels, k, v, traits: tl.constexpr):
    """Store the levels of a matrix [BV JP, KP] in order, from an entry of [.., V, K] on."""
    bits = level_bits(traits)
    at = base + (entry + count_levels(levels & (bits - 1))) * (traits.K * traits.V)
    at += v[:, None, None] * traits.K + k[None, None, :]
    inside = (v < traits.V)[:, None, None] & (k < traits.K)[None, None, :] & ((levels & bits) > 0)
    tl.store(at, as_levels(x, traits).to(base.dtype.element_ty), mask=inside)


@triton.jit
def states_at(base, n, hv, k, v, J, traits: tl.constexpr):
    """Return the addresses of a tile [BV, JP, KP] of states [N, J, HV, K, V]."""
    j = tl.arange(0, traits.JP)[None, :, None]
    head = (tl.cast(n, tl.int64) * J + j) * traits.HV + hv
    return base + (head * traits.K + k[None, None, :]) * traits.V + v[:, None, None]


@triton.jit
def first_chunk_of(n, cu, T, traits: tl.constexpr):
    """Return the chunk slot of the first chunk of sequence n."""
    return first_chunk_slot(n, cu, T, traits.C, traits.PACKED)
