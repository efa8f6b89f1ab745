"""The short convolution of one token per row, with SiLU and norm; the history is updated in place.

W taps, C channels
"""

from typing import NamedTuple

import triton
import triton.language as tl


class ConvStepTraits(NamedTuple):
    """Compile-time properties of a step.

    Args:
        C, W: channels and taps. X_STRIDE: elements from row to row of x. PARTS: their number.
        CHANNELS, SILU, UNIT: of each part. FIRST, TILES: channels and tiles before each part; TILES also those of all.
        STEP: channels of a program, a head if a part has a norm. BC, BW: STEP and W rounded up to powers of two.
    """

    C: int
    W: int
    X_STRIDE: int
    PARTS: int
    CHANNELS: tuple[int, ...]
    SILU: tuple[int, ...]
    UNIT: tuple[int, ...]
    FIRST: tuple[int, ...]
    TILES: tuple[int, ...]
    STEP: int
    BC: int
    BW: int
    EPS: float
    BIAS: bool


@triton.jit(do_not_specialize=["rows"])
def conv_step_kernel(x, weight, bias, history, y, rows, traits: tl.constexpr):
    """Convolve a token.

    Grid: row, STEP channels of a part. Reads x [rows, C], weight [C, W], bias [C]. Updates history [rows, W - 1, C] in
    place. Writes y, which holds [rows, CHANNELS] of each part, one after the other.
    """
    C: tl.constexpr = traits.C
    W: tl.constexpr = traits.W
    PARTS: tl.constexpr = traits.PARTS
    TILES: tl.constexpr = traits.TILES[PARTS]
    row = tl.cast(tl.program_id(0) // TILES, tl.int64)
    tile = tl.program_id(0) % TILES
    size = tile * 0 + traits.CHANNELS[0]
    first = tile * 0
    before = tile * 0
    silu = tile * 0 + traits.SILU[0]
    unit = tile * 0 + traits.UNIT[0]
    for i in tl.static_range(1, PARTS):
        is_after = tile >= traits.TILES[i]
        size = tl.where(is_after, traits.CHANNELS[i], size)
        first = tl.where(is_after, traits.FIRST[i], first)
        before = tl.where(is_after, traits.TILES[i], before)
        silu = tl.where(is_after, traits.SILU[i], silu)
        unit = tl.where(is_after, traits.UNIT[i], unit)
    within = tl.arange(0, traits.BC)
    channel = (tile - before) * traits.STEP + within
    in_channels = (within < traits.STEP) & (channel < size)
    i = tl.arange(0, traits.BW)[:, None]
    at = (first + channel)[None, :]
    history += row * (W - 1) * C
    past = tl.load(history + i * C + at, mask=(i < W - 1) & in_channels[None, :], other=0.0)
    x += row * traits.X_STRIDE
    current = tl.load(x + at + 0 * i, mask=(i == W - 1) & in_channels[None, :], other=0.0)
    inputs = tl.where(i == W - 1, current.to(past.dtype), past)
    taps = tl.load(weight + at * W + i, mask=(i < W) & in_channels[None, :], other=0.0).to(tl.float32)
    a = tl.sum(inputs.to(tl.float32) * taps, 0)
    if traits.BIAS:
        a += tl.load(bias + first + channel, mask=in_channels, other=0.0).to(tl.float32)
    a = tl.where(silu > 0, a * tl.sigmoid(a), a)
    a = tl.where(in_channels, a, 0.0)
    norm = tl.rsqrt(tl.sum(a * a, 0) + traits.EPS)
    a = tl.where(unit > 0, a * norm, a)
    y += rows.to(tl.int64) * first
    tl.store(y + row * size + channel, a.to(y.dtype.element_ty), mask=in_channels)
    tl.debug_barrier()  # several threads may have loaded an input, and one of them stores it one row earlier
    tl.store(history + (i - 1) * C + at, inputs, mask=(i > 0) & (i < W) & in_channels[None, :])
