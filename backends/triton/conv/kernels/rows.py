"""Loads of the rows of a short convolution: of x, of dy and of the history, and the inputs of a result.

A row is [R, BC]: one token of each of R strips, BC channels. Rows that wait for their use are packed: two 16-bit values
in a register. See short_conv.py.

Triton's coalescing pass takes a time in proportion to the number of loads and stores times the square of the number of
operations, but skips those whose pointers are carried by a loop. Consecutive loads are therefore written as a loop that
carries the pointer and a tuple of the loaded rows. LLVM unrolls the loop if there are few taps.
"""

import triton
import triton.language as tl


@triton.jit
def pack(values):
    """Pack pairs of 16-bit values [R, BC] into uint32 [R, BC / 2]; return other values unchanged.

    Unpacked, each of them would take a register of 32 bits.
    """
    if values.dtype.primitive_bitwidth == 16 and values.shape[1] > 1:
        halves = values.to(tl.uint16, bitcast=True).to(tl.uint32)
        low, high = tl.split(halves.reshape([values.shape[0], values.shape[1] // 2, 2]))
        values = low | (high << 16)
    return values


@triton.jit
def unpack(values, dtype: tl.constexpr):
    """Return as float32 [R, BC] the values of this dtype that `pack` packed."""
    if values.dtype == tl.uint32:
        if dtype == tl.bfloat16:
            low = (values << 16).to(tl.float32, bitcast=True)
            high = (values & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            low = values.to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
            high = (values >> 16).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        values = tl.join(low, high).reshape([values.shape[0], values.shape[1] * 2])
    return values.to(tl.float32)


@triton.jit
def unpack_rows(rows, dtype: tl.constexpr):
    """Unpack each row."""
    unpacked = ()
    for u in tl.static_range(len(rows)):
        unpacked = unpacked + (unpack(rows[u], dtype),)
    return unpacked


@triton.jit
def row_mask(i, low, high, in_channels):
    """Return the mask [R, BC] of row i if low <= i < high, which is one comparison of unsigned numbers."""
    in_rows = (i - low).to(tl.uint32) < tl.maximum(high - low, 0).to(tl.uint32)
    return in_rows[:, None] & in_channels


@triton.jit
def copies(value, COUNT: tl.constexpr):
    """Return a tuple of COUNT equal values."""
    values = ()
    for _ in tl.static_range(COUNT):
        values = values + (value,)
    return values


@triton.jit
def empty_rows(dtype: tl.constexpr, COUNT: tl.constexpr, traits: tl.constexpr):
    """Return COUNT rows of zeros, packed."""
    R: tl.constexpr = traits.R
    BC: tl.constexpr = traits.BC
    return copies(pack(tl.zeros([R, BC], dtype)), COUNT)


@triton.jit
def load_row(pointers, history, history_offset, t, low, high, row, in_channels, traits: tl.constexpr):
    """Load a row of x, packed. Without a pack, rows before token 0 are history."""
    value = tl.load(pointers, mask=row_mask(row, low, high, in_channels), other=0.0)
    if traits.HISTORY and not traits.PACKED:
        before = (t + row < 0)[:, None]
        in_history = before & ((t + row > -traits.W) & (high > 0))[:, None] & in_channels
        past = tl.load(history + history_offset + (t + row)[:, None] * traits.C, mask=in_history, other=0.0)
        value = tl.where(before, past.to(value.dtype), value)
    return pack(value)


@triton.jit
def load_rows(
    x, x_offset, token_stride, history, history_offset, t, low, high, i, in_channels,
    COUNT: tl.constexpr, traits: tl.constexpr,
):  # fmt: skip
    """Load rows i, i - 1, ..., i - COUNT + 1 of x, packed."""
    rows = empty_rows(x.dtype.element_ty, COUNT, traits)
    pointers = x + x_offset + i * token_stride
    if COUNT > 0:
        for u in range(COUNT):
            rows = rows[1:] + (load_row(pointers, history, history_offset, t, low, high, i - u, in_channels, traits),)
            pointers -= token_stride
    return rows


@triton.jit
def load_gradient(pointers, low, high, row, in_channels):
    """Load a row of dy, packed; it is zero before `low` or from `high` on."""
    mask = row_mask(row, low, high, in_channels)
    return pack(tl.load(pointers, mask=mask, other=0.0))


@triton.jit
def load_gradients(dy, dy_offset, low, high, i, in_channels, COUNT: tl.constexpr, traits: tl.constexpr):
    """Load rows i, i - 1, ..., i - COUNT + 1 of dy, packed. COUNT is at least 1."""
    rows = empty_rows(dy.dtype.element_ty, COUNT, traits)
    pointers = dy + dy_offset + i * traits.CHANNELS
    for u in range(COUNT):
        rows = rows[1:] + (load_gradient(pointers, low, high, i - u, in_channels),)
        pointers -= traits.CHANNELS
    return rows


@triton.jit
def start_pointers(sequence_starts, t, row, traits: tl.constexpr):
    """Return pointers [R] to the starts of the sequences of a row; t without a pack."""
    return sequence_starts + t + row if traits.PACKED else t


@triton.jit
def load_start(pointers, t, high, row, traits: tl.constexpr):
    """Load the rows [R] at which the sequences of a row start; without a pack the result is not used."""
    start = t
    if traits.PACKED:
        start = tl.load(pointers, mask=(row >= 0) & (row < high), other=0) - t
    return start


@triton.jit
def load_starts(sequence_starts, t, high, i, COUNT: tl.constexpr, traits: tl.constexpr):
    """Load the rows [R] at which the sequences of rows i, i - 1, ... start.

    Loaded in a loop, the starts would get a layout that each use must convert.
    """
    starts = ()
    for u in tl.static_range(COUNT):
        starts = starts + (load_start(start_pointers(sequence_starts, t, i - u, traits), t, high, i - u, traits),)
    return starts


@triton.jit
def select_inputs(
    rows, start, history, history_offset, sequence_ids, t, high, i, in_channels, traits: tl.constexpr
):  # fmt: skip
    """Return the inputs x_(i-j) of row i by lag j, from rows i to i - W + 1.

    In a pack, inputs before the start of the row's sequence come from the history, or are zero.
    """
    W: tl.constexpr = traits.W
    age = i - start
    inputs = ()
    for j in tl.static_range(W):
        x_j = rows[j]
        if traits.PACKED and j > 0:
            past = tl.zeros_like(x_j)
            if traits.HISTORY:
                in_history = (age < j) & (i < high)
                n = tl.load(sequence_ids + t + i, mask=in_history, other=0).to(tl.int64)
                at = history_offset + ((n * (W - 1) + age - j) * traits.C)[:, None]
                past = tl.load(history + at, mask=in_history[:, None] & in_channels, other=0.0).to(tl.float32)
            x_j = tl.where((age < j)[:, None], past, x_j)
        inputs = inputs + (x_j,)
    return inputs
