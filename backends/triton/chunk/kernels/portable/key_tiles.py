"""Tuples of tiles along the keys: NK tiles, so that their widths are powers of two whatever K is.

A state S^T [values, K] is a tuple of NK tiles; so are the rows of keys and queries [tokens, K].
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.device.layout import (
    dot_split_lhs,
    load_chunk_decay,
    load_column_major,
    load_rows,
    store_column_major,
    store_rows,
    store_state,
)


@triton.jit
def key_columns(K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr):
    """Return the keys of each tile, K0 and the next K1 (0: there is one tile), and whether they are below K."""
    keys = (tl.arange(0, K0),)
    in_keys = (keys[0] < K,)
    if K1 > 0:
        more = K0 + tl.arange(0, K1)
        keys = keys + (more,)
        in_keys = in_keys + (more < K,)
    return keys, in_keys


@triton.jit
def zero_tiles(R: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr):
    """Return float32 tiles [R, K0] and [R, K1] of zeros."""
    tiles = (tl.zeros([R, K0], tl.float32),)
    if K1 > 0:
        tiles = tiles + (tl.zeros([R, K1], tl.float32),)
    return tiles


@triton.jit
def load_tiles(base, rows, keys, in_rows, in_keys, stride, NK: tl.constexpr):
    """Load the tiles of a row-major matrix [rows, K]."""
    tiles = (load_rows(base, rows, keys[0], in_rows, in_keys[0], stride),)
    for t in tl.static_range(1, NK):
        tiles = tiles + (load_rows(base, rows, keys[t], in_rows, in_keys[t], stride),)
    return tiles


@triton.jit
def load_pairs(x, y, offset, rows, keys, in_rows, in_keys, stride, NK: tl.constexpr):
    """Load the tiles of two row-major matrices [rows, K] at an offset, tile by tile."""
    x_tiles = (load_rows(x + offset, rows, keys[0], in_rows, in_keys[0], stride),)
    y_tiles = (load_rows(y + offset, rows, keys[0], in_rows, in_keys[0], stride),)
    for t in tl.static_range(1, NK):
        x_tiles = x_tiles + (load_rows(x + offset, rows, keys[t], in_rows, in_keys[t], stride),)
        y_tiles = y_tiles + (load_rows(y + offset, rows, keys[t], in_rows, in_keys[t], stride),)
    return x_tiles, y_tiles


@triton.jit
def add_rows(S, base, rows, keys, in_rows, in_keys, stride, NK: tl.constexpr):
    """Add the tiles of a row-major matrix [rows, K] to S."""
    tiles = (S[0] + load_rows(base, rows, keys[0], in_rows, in_keys[0], stride),)
    for t in tl.static_range(1, NK):
        tiles = tiles + (S[t] + load_rows(base, rows, keys[t], in_rows, in_keys[t], stride),)
    return tiles


@triton.jit
def add_column_major(S, base, rows, keys, in_rows, in_keys, stride, NK: tl.constexpr):
    """Add the tiles of a column-major matrix [rows, K] to S."""
    tiles = (S[0] + load_column_major(base, rows, keys[0], in_rows, in_keys[0], stride),)
    for t in tl.static_range(1, NK):
        tiles = tiles + (S[t] + load_column_major(base, rows, keys[t], in_rows, in_keys[t], stride),)
    return tiles


@triton.jit
def add_tiles(S, R, NK: tl.constexpr):
    """Add the tiles of R to those of S."""
    tiles = (S[0] + R[0],)
    for t in tl.static_range(1, NK):
        tiles = tiles + (S[t] + R[t],)
    return tiles


@triton.jit
def identity(rows, keys, enabled, NK: tl.constexpr):
    """Return the tiles of the identity, or zeros."""
    tiles = (tl.where((rows[:, None] == keys[0][None, :]) & enabled, 1.0, 0.0),)
    for t in tl.static_range(1, NK):
        tiles = tiles + (tl.where((rows[:, None] == keys[t][None, :]) & enabled, 1.0, 0.0),)
    return tiles


@triton.jit
def store_tiles(base, S, rows, keys, in_rows, in_keys, stride, NK: tl.constexpr):
    """Store S to a row-major matrix [rows, K]."""
    for t in tl.static_range(NK):
        store_rows(base, S[t], rows, keys[t], in_rows, in_keys[t], stride)


@triton.jit
def store_tiles_column_major(base, S, rows, keys, in_rows, in_keys, stride, NK: tl.constexpr):
    """Store S to a column-major matrix [rows, K]."""
    for t in tl.static_range(NK):
        store_column_major(base, S[t], rows, keys[t], in_rows, in_keys[t], stride)


@triton.jit
def store_state_tiles(base, S, column, keys, in_keys, WIDTH: tl.constexpr, K: tl.constexpr, enabled, NK: tl.constexpr):
    """Store S^T to the rows from `column` up to WIDTH, if enabled (layout.store_state)."""
    for t in tl.static_range(NK):
        store_state(base, S[t], column, keys[t], in_keys[t], WIDTH, K, enabled)


@triton.jit
def to_dtype(S, dtype: tl.constexpr, NK: tl.constexpr):
    """Round the tiles."""
    tiles = (S[0].to(dtype),)
    for t in tl.static_range(1, NK):
        tiles = tiles + (S[t].to(dtype),)
    return tiles


@triton.jit
def scaled(S, factor, NK: tl.constexpr):
    """Return factor S."""
    tiles = (S[0] * factor,)
    for t in tl.static_range(1, NK):
        tiles = tiles + (S[t] * factor,)
    return tiles


@triton.jit
def scaled_by_channel(S, gates, chunk, keys, in_keys, K: tl.constexpr, C: tl.constexpr, NK: tl.constexpr):
    """Return S, each key scaled by its decay over the chunk."""
    tiles = (S[0] * load_chunk_decay(gates, chunk, keys[0], in_keys[0], K, C)[None, :],)
    for t in tl.static_range(1, NK):
        tiles = tiles + (S[t] * load_chunk_decay(gates, chunk, keys[t], in_keys[t], K, C)[None, :],)
    return tiles


@triton.jit
def dot_transposed(x, y, PREC: tl.constexpr, NK: tl.constexpr):
    """Return x y^T, summed over the key tiles."""
    total = tl.dot(x[0], tl.trans(y[0]), input_precision=PREC)
    for t in tl.static_range(1, NK):
        total = tl.dot(x[t], tl.trans(y[t]), total, input_precision=PREC)
    return total


@triton.jit
def add_dot(S, x, y, PREC: tl.constexpr, NK: tl.constexpr):
    """Return S + x y, for x [rows, tokens] and tiles y [tokens, K]."""
    tiles = (tl.dot(x, y[0], S[0], input_precision=PREC),)
    for t in tl.static_range(1, NK):
        tiles = tiles + (tl.dot(x, y[t], S[t], input_precision=PREC),)
    return tiles


@triton.jit
def add_dot_split(S, x, y, dtype: tl.constexpr, TERMS: tl.constexpr, PREC: tl.constexpr, NK: tl.constexpr):
    """Return S + x y, with x rounded to TERMS terms (layout.dot_split_lhs)."""
    tiles = (dot_split_lhs(x, y[0], S[0], dtype, TERMS, PREC),)
    for t in tl.static_range(1, NK):
        tiles = tiles + (dot_split_lhs(x, y[t], S[t], dtype, TERMS, PREC),)
    return tiles
