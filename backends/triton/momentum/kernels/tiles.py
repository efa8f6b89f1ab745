"""Loads and stores of the chunks of the delta rule with momentum, which its kernels share.

G chunk slots, C tokens of a chunk, N sequences, H heads, K key width, V value width
"""

from typing import NamedTuple

import triton
import triton.language as tl


class MomentumTraits(NamedTuple):
    """Compile-time properties of a launch. BK, BV: tiles of keys (all of K in the scans) and values."""

    H: int
    K: int
    V: int
    C: int
    BK: int
    BV: int


@triton.jit
def load_gate(gates, chunk, row: tl.constexpr, C: tl.constexpr):
    """Load a row of the gates of a chunk, [C]."""
    return tl.load(gates + (chunk * 6 + row) * C + tl.arange(0, C))


@triton.jit
def load_last(gates, chunk, C: tl.constexpr):
    """Load `kept`, `carried` and `held` of the last token."""
    at = gates + chunk * 6 * C + C - 1
    return tl.load(at), tl.load(at + C), tl.load(at + 5 * C)


@triton.jit
def load_square(x, chunk, C: tl.constexpr):
    """Load a matrix [C, C] of a chunk."""
    i = tl.arange(0, C)
    return tl.load(x + chunk * (C * C) + i[:, None] * C + i[None, :])


@triton.jit
def load_tile(x, slot, h, columns, W: tl.constexpr, traits: tl.constexpr):
    """Load columns of x [G, C, H, W] at a slot: [C, columns]."""
    i = tl.arange(0, traits.C)
    at = x + (slot * traits.C * traits.H + h) * W
    return tl.load(at + i[:, None] * (traits.H * W) + columns[None, :], mask=(columns < W)[None, :], other=0.0)


@triton.jit
def store_tile(x, values, slot, h, columns, W: tl.constexpr, traits: tl.constexpr):
    """Store columns of x [G, C, H, W] at a slot."""
    i = tl.arange(0, traits.C)
    at = x + (slot * traits.C * traits.H + h) * W
    at += i[:, None] * (traits.H * W) + columns[None, :]
    tl.store(at, values.to(x.dtype.element_ty), mask=(columns < W)[None, :])


@triton.jit
def load_state(x, index, ks, vs, traits: tl.constexpr):
    """Load a tile of matrix `index` of x [.., K, V]."""
    at = x + tl.cast(index, tl.int64) * (traits.K * traits.V)
    mask = (ks < traits.K)[:, None] & (vs < traits.V)[None, :]
    return tl.load(at + ks[:, None] * traits.V + vs[None, :], mask=mask, other=0.0)


@triton.jit
def store_state(x, values, index, ks, vs, traits: tl.constexpr):
    """Store a tile of matrix `index` of x [.., K, V]."""
    at = x + tl.cast(index, tl.int64) * (traits.K * traits.V)
    mask = (ks < traits.K)[:, None] & (vs < traits.V)[None, :]
    tl.store(at + ks[:, None] * traits.V + vs[None, :], values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def scaled(x, factor, dtype: tl.constexpr):
    """Multiply the rows of x, and round."""
    return (x.to(tl.float32) * factor[:, None]).to(dtype)


@triton.jit
def locate(starts, G, heads, head, traits: tl.constexpr):
    """Return the sequence, its first slot and the slot after its last, the head, and the value tile of a program."""
    tiles: tl.constexpr = (traits.V + traits.BV - 1) // traits.BV
    tile = tl.program_id(0) % tiles
    n = tl.program_id(0) // tiles // heads
    h = head + tl.program_id(0) // tiles % heads
    begin = tl.minimum(tl.maximum(tl.load(starts + n), 0), G)
    end = tl.minimum(tl.maximum(tl.load(starts + n + 1), begin), G)
    return n, begin.to(tl.int64), end.to(tl.int64), h, tile * traits.BV + tl.arange(0, traits.BV)
