"""The filter of Hyena: a network of three layers with sine activations computes it from the distance t of two tokens.

    z_0 = (t / (L - 1), cos(2 pi f t / L), -sin(2 pi f t / L)) with all frequencies f
    z_i = sin(w (W_i z_(i-1) + b_i)),    h_t = exp(-t r / (L - 1)) V z_3

A product has float32 accuracy: of three terms in the dtype of the weights, or in TF32 for float32.

B rows, S distances, D channels, F hidden channels
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.overlap import start_next, wait_for_previous
from deltazoo.backends.triton.element.kernels.complex_step import cos_and_sin

TURNS: tl.constexpr = tl.constexpr(0.15915494309189535)  # of a radian
_COUNTERS: tl.constexpr = tl.constexpr(128)  # rows whose numbers of tokens a program reads at once


class ImplicitFilterTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        D, F: sizes. FP: F as a power of two, at least 16. BANDS: frequencies, from LOWEST on at distances of SPACING.
        LENGTH: L. SLOWEST: r of the first channel. SLOPE: difference of r from channel to channel.
        BS, BD: distances, and channels of a product. TILES: products of a program.
        EARLY: distances that are computed before the preceding kernel has ended, also if no token is so far away.
        OVERLAP: see device/overlap.py.
    """

    D: int
    F: int
    FP: int
    BANDS: int
    LOWEST: float
    SPACING: float
    LENGTH: int
    SLOWEST: float
    SLOPE: float
    BS: int
    BD: int
    TILES: int
    EARLY: int
    OVERLAP: bool


@triton.jit
def most_tokens(seen, B):
    """Return the largest of the numbers of tokens [B]."""
    most = tl.zeros([_COUNTERS], tl.int64)
    for first in range(0, B, _COUNTERS):
        row = first + tl.arange(0, _COUNTERS)
        most = tl.maximum(most, tl.load(seen + row, mask=row < B, other=0))
    return tl.max(most, 0)


@triton.jit
def count_token(seen, B):
    """Add 1 to the numbers of tokens [B]."""
    for first in range(0, B, _COUNTERS):
        row = first + tl.arange(0, _COUNTERS)
        before = tl.load(seen + row, mask=row < B, other=0)
        tl.debug_barrier()  # several threads may have loaded a number
        tl.store(seen + row, before + 1, mask=row < B)


@triton.jit
def load_hidden(x, f, F: tl.constexpr):
    """Load a number of each hidden channel in float32."""
    return tl.load(x + f, mask=f < F, other=0.0).to(tl.float32)


@triton.jit
def activate(z, frequency):
    """Return sin(frequency z)."""
    turn = frequency[None, :] * z * TURNS
    _, sin = cos_and_sin(turn - tl.floor(turn))
    return sin


@triton.jit
def input_layer(t, weight, bias, frequency, f, traits: tl.constexpr):
    """Return the first hidden features of the distances t: [BS, FP]."""
    F: tl.constexpr = traits.F
    BANDS: tl.constexpr = traits.BANDS
    weight += f * (2 * BANDS + 1)
    z = load_hidden(bias, f, F)[None, :] + (t * (1.0 / (traits.LENGTH - 1)))[:, None] * load_column(weight, f, F)
    for band in range(BANDS):
        turn = (traits.LOWEST + band * traits.SPACING) * (t * (1.0 / traits.LENGTH))
        cos, sin = cos_and_sin(turn - tl.floor(turn))
        z += cos[:, None] * load_column(weight + 1 + band, f, F)
        z -= sin[:, None] * load_column(weight + 1 + BANDS + band, f, F)
    return activate(z, frequency)


@triton.jit
def load_column(weight, f, F: tl.constexpr):
    """Load a column of a weight in float32, [1, FP]. Args: weight: pointers to the rows' entries."""
    return tl.load(weight, mask=f < F, other=0.0).to(tl.float32)[None, :]


@triton.jit
def multiply(z, w):
    """Return z w in float32. |z| <= 1 is rounded to 24 bits, in float16 to 2 ** -25."""
    if w.dtype == tl.float32:
        y = tl.dot(z, w, input_precision="tf32x3")
    else:
        high = z.to(w.dtype)
        rest = z - high.to(tl.float32)
        middle = rest.to(w.dtype)
        low = (rest - middle.to(tl.float32)).to(w.dtype)
        y = tl.dot(low, w)
        y = tl.dot(middle, w, y)
        y = tl.dot(high, w, y)
    return y


@triton.jit
def hidden_layer(z, weight, bias, frequency, f, F: tl.constexpr):
    """Return the next hidden features: [BS, FP]."""
    mask = (f < F)[:, None] & (f < F)[None, :]
    w = tl.load(weight + f[None, :] * F + f[:, None], mask=mask, other=0.0)
    return activate(multiply(z, w) + load_hidden(bias, f, F)[None, :], frequency)


@triton.jit(do_not_specialize=["B", "S", "early"])
def implicit_filter_kernel(
    first_weight, first_bias, second_weight, second_bias, third_weight, third_bias, last_weight, frequency, seen,
    filter, B, S, early, traits: tl.constexpr,
):  # fmt: skip
    """Compute TILES x BD channels at BS distances, and count a token.

    Grid: BS distances, TILES x BD channels. Reads first_weight [F, 1 + 2 BANDS], second_weight and third_weight [F, F],
    their biases [F], last_weight [D, F] and frequency [F]. Writes filter [S, D] float32, at least as far as the largest
    of `seen` [B] int64, the tokens of each row before this one, and adds 1 to `seen`.

    early: 1 if the weights may be loaded before the preceding kernel has ended; 0 if that kernel may have written them.
    """
    D: tl.constexpr = traits.D
    F: tl.constexpr = traits.F
    BD: tl.constexpr = traits.BD
    TILES: tl.constexpr = traits.TILES
    BLOCKS: tl.constexpr = (D + BD * TILES - 1) // (BD * TILES)
    start = tl.program_id(0) // BLOCKS * traits.BS
    first_d = tl.program_id(0) % BLOCKS * (BD * TILES)
    is_read = start < S
    if traits.OVERLAP:
        start_next()
        if (early == 0) | (start >= traits.EARLY):
            wait_for_previous()
            is_read = start <= most_tokens(seen, B)
    else:
        is_read = start <= most_tokens(seen, B)
    if is_read:  # the first program may already have counted the token: one distance more
        s = start + tl.arange(0, traits.BS)
        f = tl.arange(0, traits.FP)
        t = s.to(tl.float32)
        w = load_hidden(frequency, f, F)
        z = input_layer(t, first_weight, first_bias, w, f, traits)
        z = hidden_layer(z, second_weight, second_bias, w, f, F)
        z = hidden_layer(z, third_weight, third_bias, w, f, F)
        tiles = ()
        for tile in tl.static_range(TILES):
            d = first_d + tile * BD + tl.arange(0, BD)
            mask = (d < D)[None, :] & (f < F)[:, None]
            v = tl.load(last_weight + d[None, :] * F + f[:, None], mask=mask, other=0.0)
            rate = traits.SLOWEST + d.to(tl.float32) * traits.SLOPE
            window = tl.exp((t * (-1.0 / (traits.LENGTH - 1)))[:, None] * rate[None, :])
            tiles = tiles + (multiply(z, v) * window,)
        if traits.OVERLAP:
            wait_for_previous()
        for tile in tl.static_range(TILES):
            d = first_d + tile * BD + tl.arange(0, BD)
            tl.store(filter + s[:, None] * D + d[None, :], tiles[tile], mask=(s < S)[:, None] & (d < D)[None, :])
    if tl.program_id(0) == 0:
        count_token(seen, B)
