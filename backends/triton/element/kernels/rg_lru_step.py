"""One token of RG-LRU from the convolved values up to the output map.

    r, i = sigmoid(W_a u + b_a), sigmoid(W_x u + b_x),    log a = -8 softplus(L) r
    h <- a h + sqrt(1 - a^2) i u,    o = h gelu(gate)

W_a and W_x are block-diagonal. B rows, C channels, W channels of a block
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.decode.kernels.step_parts import softplus
from deltazoo.backends.triton.device.overlap import start_next, wait_for_previous
from deltazoo.backends.triton.element.kernels.channels import load_raw
from deltazoo.backends.triton.gemv.kernels.gemv import activate


class RGLRUTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        C, W: sizes. ROWS, CHANNELS: of a program, powers of two from 16 on. INPUTS: of one of its products, likewise.
        STRIDE: elements from row to row of u and gate. OVERLAP: see device/overlap.py.
    """

    C: int
    W: int
    ROWS: int
    CHANNELS: int
    INPUTS: int
    STRIDE: int
    OVERLAP: bool


@triton.jit
def one_minus_exp(x):
    """Return 1 - exp(x) for x <= 0, near 0 by a polynomial, because the difference would cancel."""
    series = 1.0 + x / 5 * (1.0 + x / 6 * (1.0 + x / 7 * (1.0 + x / 8)))
    series = -x * (1.0 + x / 2 * (1.0 + x / 3 * (1.0 + x / 4 * series)))
    return tl.where(x > -0.25, series, 1.0 - tl.exp(x))


@triton.jit(do_not_specialize=["B"])
def rg_lru_step_kernel(u, gate, weight, bias, L, states, o, B, traits: tl.constexpr):
    """Decode the token of ROWS rows.

    Grid: ROWS rows, blocks, CHANNELS channels of a block. Reads u, gate [B, C] with a row stride, weight [2, C / W, W,
    W] (inputs before outputs) and bias [2, C] of r and i, and L [C]. Updates states [B, C] float32 in place. Writes o
    [B, C].
    """
    C: tl.constexpr = traits.C
    W: tl.constexpr = traits.W
    ROWS: tl.constexpr = traits.ROWS
    CHANNELS: tl.constexpr = traits.CHANNELS
    INPUTS: tl.constexpr = traits.INPUTS
    TILES: tl.constexpr = (W + CHANNELS - 1) // CHANNELS
    PROGRAMS: tl.constexpr = C // W * TILES
    if traits.OVERLAP:
        start_next()
        wait_for_previous()
    row = (tl.program_id(0) // PROGRAMS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(0) % PROGRAMS // TILES
    output = tl.program_id(0) % TILES * CHANNELS + tl.arange(0, CHANNELS)
    channel = block * W + output
    in_b = row < B
    in_w = output < W
    mask = in_b[:, None] & in_w[None, :]
    at = states + row[:, None] * C + channel[None, :]
    h = tl.load(at, mask=mask, other=0.0)
    of_row = row[:, None] * traits.STRIDE
    value = tl.load(u + of_row + channel[None, :], mask=mask, other=0.0)
    g = tl.load(gate + of_row + channel[None, :], mask=mask, other=0.0)
    bias_r = load_raw(bias, channel, in_w)
    bias_i = load_raw(bias + C, channel, in_w)
    log_rate = load_raw(L, channel, in_w)
    r = tl.zeros([ROWS, CHANNELS], tl.float32)
    i = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in tl.static_range(0, W, INPUTS):
        c = start + tl.arange(0, INPUTS)
        inputs = tl.load(u + of_row + (block * W + c)[None, :], mask=in_b[:, None] & (c < W)[None, :], other=0.0)
        at_weight = weight + (block * W + c)[:, None] * W + output[None, :]
        in_weight = (c < W)[:, None] & in_w[None, :]
        r = tl.dot(inputs, tl.load(at_weight, mask=in_weight, other=0.0), r, input_precision="ieee")
        i = tl.dot(inputs, tl.load(at_weight + C * W, mask=in_weight, other=0.0), i, input_precision="ieee")
    r = tl.sigmoid(r + bias_r.to(tl.float32)[None, :])
    i = tl.sigmoid(i + bias_i.to(tl.float32)[None, :])
    log_a = -8.0 * softplus(log_rate.to(tl.float32))[None, :] * r
    h = tl.exp(log_a) * h + tl.sqrt(tl.maximum(one_minus_exp(2.0 * log_a), 1e-12)) * i * value.to(tl.float32)
    tl.store(at, h, mask=mask)
    out = h * activate(g.to(tl.float32), "gelu")
    tl.store(o + row[:, None] * C + channel[None, :], out.to(o.dtype.element_ty), mask=mask)
