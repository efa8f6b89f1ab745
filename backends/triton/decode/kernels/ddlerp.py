"""The data-dependent token shift (ddlerp) of RWKV-6, of one token per row.

    z_i = down_i (x + d mu_x),    d = previous - x      ddlerp_down_kernel, as sums over SPLITS parts of D
    x_i = x + d (mu_i + up_i^T tanh(z_i))               ddlerp_kernel, which adds the sums first

Sums are in float32, in an order that does not depend on the number of rows.

B rows, D width, P inputs, R rank
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.overlap import start_next, wait_for_previous


class DDLerpTraits(NamedTuple):
    """Compile-time properties.

    Args:
        D, P, R: sizes. BR: R, and COLUMNS: the rows, as powers of two of at least 16.
        OUTPUTS, SPAN: of the P R outputs and of the inputs, those of a program of ddlerp_down_kernel; it reads BLOCK of
            the inputs, which divides SPAN, at a time. SPLITS: ceil(D / SPAN).
        ROWS, CHANNELS: rows and channels of a program of ddlerp_kernel. OVERLAP: see device/overlap.py.
    """

    D: int
    P: int
    R: int
    BR: int
    COLUMNS: int
    OUTPUTS: int
    SPAN: int
    BLOCK: int
    SPLITS: int
    ROWS: int
    CHANNELS: int
    OVERLAP: bool


@triton.jit(do_not_specialize=["B", "early"])
def ddlerp_down_kernel(x, previous, mix_x, down, sums, B, early, traits: tl.constexpr):
    """Compute the sums of OUTPUTS numbers z over SPAN inputs, for all rows.

    Grid: blocks of outputs, splits. Reads x, previous [B, D], mix_x [D], down [P R, D]. Writes sums [SPLITS, B, P R]
    float32. early: 1 if the weights may be loaded before the preceding kernel has ended; 0 if it may have written them.
    """
    D: tl.constexpr = traits.D
    N: tl.constexpr = traits.P * traits.R
    OUTPUTS: tl.constexpr = traits.OUTPUTS
    COLUMNS: tl.constexpr = traits.COLUMNS
    BLOCKS: tl.constexpr = traits.SPAN // traits.BLOCK
    if traits.OVERLAP:
        start_next()
        if early == 0:
            wait_for_previous()
    split = tl.program_id(0) % traits.SPLITS
    output = tl.program_id(0) // traits.SPLITS * OUTPUTS + tl.arange(0, OUTPUTS)
    in_n = output < N
    weights = ()
    shares = ()
    for block in tl.static_range(BLOCKS):
        d = split * traits.SPAN + block * traits.BLOCK + tl.arange(0, traits.BLOCK)
        at = down + output[:, None] * D + d[None, :]
        weights = weights + (tl.load(at, mask=in_n[:, None] & (d < D)[None, :], other=0.0),)
        shares = shares + (tl.load(mix_x + d, mask=d < D, other=0.0).to(tl.float32),)
    if traits.OVERLAP:
        wait_for_previous()
    b = tl.arange(0, COLUMNS)
    out = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    for block in tl.static_range(BLOCKS):
        d = split * traits.SPAN + block * traits.BLOCK + tl.arange(0, traits.BLOCK)
        token, delta = load_shift(x, previous, b, d, B, traits)
        mixed = token + delta * shares[block][None, :]
        # weights are the first operand, so that the instruction does not depend on the number of rows
        out = tl.dot(weights[block], tl.trans(mixed.to(down.dtype.element_ty)), out, input_precision="ieee")
    at = (split * B + b)[None, :] * N + output[:, None]
    tl.store(sums + at, out, mask=in_n[:, None] & (b < B)[None, :])


@triton.jit
def load_shift(x, previous, b, d, B, traits: tl.constexpr):
    """Load x and previous - x of rows b and channels d, [rows, channels] in float32."""
    at = b[:, None] * traits.D + d[None, :]
    mask = (b < B)[:, None] & (d < traits.D)[None, :]
    token = tl.load(x + at, mask=mask, other=0.0)
    before = tl.load(previous + at, mask=mask, other=0.0)
    token = token.to(tl.float32)
    return token, before.to(tl.float32) - token


@triton.jit(do_not_specialize=["B", "early"])
def ddlerp_kernel(x, previous, mix, up, sums, shifted, B, early, traits: tl.constexpr):
    """Compute CHANNELS channels of one shifted input of ROWS rows.

    Grid: inputs, blocks of channels, blocks of rows. Reads x, previous [B, D], mix [P, D], up [P, R, D], sums
    [SPLITS, B, P R] float32. Writes shifted [B, P, D]. early: as of ddlerp_down_kernel.
    """
    D: tl.constexpr = traits.D
    P: tl.constexpr = traits.P
    R: tl.constexpr = traits.R
    BR: tl.constexpr = traits.BR
    ROWS: tl.constexpr = traits.ROWS
    SPLITS: tl.constexpr = traits.SPLITS
    BLOCKS: tl.constexpr = (D + traits.CHANNELS - 1) // traits.CHANNELS
    if traits.OVERLAP:
        start_next()
        if early == 0:
            wait_for_previous()
    i = tl.program_id(0) % P
    block = tl.program_id(0) // P
    d = block % BLOCKS * traits.CHANNELS + tl.arange(0, traits.CHANNELS)
    b = block // BLOCKS * ROWS + tl.arange(0, ROWS)
    rank = tl.arange(0, BR)
    in_d = d < D
    in_r = rank < R
    weight = tl.load(up + (i * R + rank)[:, None] * D + d[None, :], mask=in_r[:, None] & in_d[None, :], other=0.0)
    share = tl.load(mix + i * D + d, mask=in_d, other=0.0).to(tl.float32)
    if traits.OVERLAP:
        wait_for_previous()
    in_b = (b < B)[:, None]
    # one load of all sums: the compiler would wait for each of several before the next
    split = tl.arange(0, triton.next_power_of_2(SPLITS))[None, :, None]
    at = sums + (split * B + b[:, None, None]) * (P * R) + (i * R + rank)[None, None, :]
    parts = tl.load(at, mask=in_b[:, :, None] & (split < SPLITS) & in_r[None, None, :], other=0.0)
    token, delta = load_shift(x, previous, b, d, B, traits)
    z = tl.sum(parts, 1)
    inner = (2.0 * tl.sigmoid(2.0 * z) - 1.0).to(shifted.dtype.element_ty)
    low_rank = tl.dot(inner, weight.to(inner.dtype), input_precision="ieee")
    out = token + delta * (share[None, :] + low_rank)
    at = shifted + (b[:, None] * P + i) * D + d[None, :]
    tl.store(at, out.to(shifted.dtype.element_ty), mask=in_b & in_d[None, :])
