"""Tiles of PaTH attention: the tree of blocks of a sequence, and loads and stores of its operands.

A sequence is divided into blocks of C tokens (level 0), pairs of those (level 1), pairs of those pairs, and so on. A
query t and a key s are in the same block of C tokens, or in exactly one pair of sibling blocks, s in the left one and t
in the right one. With H_r the matrices of the paper,

    k_s^T H_(s+1) ... H_t q_t = (k_s moved to the end of its sibling)^T (q_t moved to the start of its own)

so the tokens of two siblings need plain softmax attention. `rows` [L, B T, H, D] holds the moved rows of each level: of
tokens in right siblings the query, of tokens in left siblings the key, which takes the first G heads.

C = 64 tokens of a block at level 0, B batch, T tokens, H query heads, G key-value heads, D key width, V value width, N
sequences, L levels
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.layout import find_sequence, first_chunk_slot, sequence_bounds

LOG2E = tl.constexpr(1.4426950408889634)
C = tl.constexpr(64)


class PathTraits(NamedTuple):
    """Compile-time parameters of the kernels.

    Args:
        H, G, D, V: sizes. BD, BV: the powers of two from D and V on, at least 64.
        SCALE: factor of the scores. GATED: the scores have sums of log gates.
        UNIT: a number by which all strides are divisible, for wide loads.
        PACKED: sequences are those of a pack, not the rows of the batch.
        PREC: input precision of float32 products.
        CACHE: channels of a cached key; 0: there is no cache.
    """

    H: int
    G: int
    D: int
    V: int
    BD: int
    BV: int
    SCALE: float
    GATED: bool
    UNIT: int
    PACKED: bool
    PREC: str
    CACHE: int


@triton.jit
def locate_tile(slot, cu, N, T, ROWS: tl.constexpr, PACKED: tl.constexpr):
    """Return the sequence of a tile of ROWS tokens, its first token and length, and the tile's offset in tokens."""
    n = find_sequence(slot, cu, N, 1, 0, ROWS) if PACKED else slot // tl.cdiv(T, ROWS)
    start, length = sequence_bounds(n, cu, T, PACKED)
    return n, start, length, (slot - first_chunk_slot(n, cu, T, ROWS, PACKED)) * ROWS


@triton.jit
def locate_block(slot, cu, N, T, size, PACKED: tl.constexpr):
    """Return the sequence of a block of `size` tokens, its first token and length, and the block's index in it."""
    n = find_sequence(slot, cu, N, 1, 0, size) if PACKED else slot // tl.cdiv(T, size)
    start, length = sequence_bounds(n, cu, T, PACKED)
    return n, start, length, slot - first_block(n, start, T, size, PACKED)


@triton.jit
def token_rows(N, T, PACKED: tl.constexpr):
    """Return the number of tokens of all sequences."""
    return tl.cast(T, tl.int64) if PACKED else tl.cast(N, tl.int64) * T


@triton.jit
def block_slots(N, T, size, PACKED: tl.constexpr):
    """Return the number of slots for blocks of `size` tokens."""
    return tl.cast(T // size + N if PACKED else N * tl.cdiv(T, size), tl.int64)


@triton.jit
def first_block(n, start, T, size, PACKED: tl.constexpr):
    """Return the slot of the first block of `size` tokens of sequence n, as `first_chunk_slot` does."""
    return start // size + n if PACKED else tl.cast(n * tl.cdiv(T, size), tl.int64)


@triton.jit
def load_tile(base, i, in_rows, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Load rows i of a matrix, [len(i), BLOCK]; zeros outside. Not MASKED: all rows exist."""
    d = tl.arange(0, BLOCK)
    at = base + i[:, None].to(tl.int64) * stride + d[None, :]
    if MASKED:
        return tl.load(at, mask=in_rows[:, None] & (d < WIDTH)[None, :], other=0.0)
    elif WIDTH == BLOCK:
        return tl.load(at)
    else:
        return tl.load(at, mask=(d < WIDTH)[None, :], other=0.0)


@triton.jit
def store_tile(base, tile, i, in_rows, stride, WIDTH: tl.constexpr):
    """Store rows i of a matrix."""
    d = tl.arange(0, tile.shape[1])
    at = base + i[:, None].to(tl.int64) * stride + d[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=in_rows[:, None] & (d < WIDTH)[None, :])


@triton.jit
def load_square(base, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load a square matrix in float32."""
    i = tl.arange(0, BLOCK)
    return load_tile(base, i, i < WIDTH, WIDTH, WIDTH, BLOCK, WIDTH != BLOCK).to(tl.float32)


@triton.jit
def store_square(base, tile, WIDTH: tl.constexpr):
    """Store a square matrix."""
    i = tl.arange(0, tile.shape[0])
    store_tile(base, tile, i, i < WIDTH, WIDTH, WIDTH)


@triton.jit
def gates_after(sums, i, in_rows, reference, H: tl.constexpr):
    """Return log2 of the gates after the token of the reference up to each token, 0 outside. sums: float64."""
    return ((tl.load(sums + i * H, mask=in_rows, other=reference) - reference) * LOG2E).to(tl.float32)


@triton.jit
def gates_from(sums, token, i, in_rows, traits: tl.constexpr):
    """Return the sum of log gates up to a token, and log2 of the gates after it up to each token. Without gates: 0."""
    if traits.GATED:
        reference = tl.load(sums + token * traits.H)
        return reference, gates_after(sums, i, in_rows, reference, traits.H)
    else:
        return 0.0, tl.zeros([i.shape[0]], tl.float32)


@triton.jit
def scores_in_block(q_t, k_t, q_w, M_t, sums, row, h, i, in_time, traits: tl.constexpr):
    """Return the scores of a block in units of log 2, without the causal mask. q_w: tril(q W^T)."""
    x = tl.dot(q_t, tl.trans(k_t), input_precision=traits.PREC) - tl.dot(q_w, M_t, input_precision=traits.PREC)
    x *= traits.SCALE * LOG2E
    if traits.GATED:
        log_gate = tl.load(sums + (row + i) * traits.H + h, mask=in_time, other=0.0)
        x += ((log_gate[:, None] - log_gate[None, :]) * LOG2E).to(tl.float32)
    return x
