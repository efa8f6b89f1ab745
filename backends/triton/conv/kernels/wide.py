"""Causal convolution with a loop over the taps. `backends/ops/wide_conv.py` has the equation.

B batch, T time, C channels, W taps, P blocks of time of all rows
"""

import triton
import triton.language as tl


@triton.jit
def wide_tile(x, row, first, channel, T, C: tl.constexpr, BT: tl.constexpr):
    """Load x [B, T, C] at BT times from `first` on of a row: [BT, BC] in float32, 0 outside."""
    i = tl.arange(0, BT)
    mask = (first + i >= 0)[:, None] & (first + i < T)[:, None] & (channel < C)[None, :]
    at = x + (row * T + first) * C  # a scalar: addresses of a tile take registers
    return tl.load(at + i[:, None] * C + channel[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def locate_wide_tile(T, C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """Return the row of the batch, the first time and the channels of a program, and its block of time."""
    block = tl.program_id(0) // tl.cdiv(C, BC)
    channel = tl.program_id(0) % tl.cdiv(C, BC) * BC + tl.arange(0, BC)
    blocks = tl.cdiv(T, BT)
    return (block // blocks).to(tl.int64), block % blocks * BT, channel, block.to(tl.int64)


@triton.jit(do_not_specialize=["T", "W"])
def wide_conv_kernel(
    x, weight, y, T, W, C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, REVERSE: tl.constexpr
):  # fmt: skip
    """Compute y_t = sum_j weight_j x_(t-j), or with REVERSE sum_j weight_j x_(t+j). Grid: P, BC channels."""
    row, first, channel, _ = locate_wide_tile(T, C, BT, BC)
    total = tl.zeros([BT, BC], tl.float32)
    for lag in range(0, W):
        w = tl.load(weight + lag * C + channel, mask=channel < C, other=0.0).to(tl.float32)
        total += wide_tile(x, row, first + lag if REVERSE else first - lag, channel, T, C, BT) * w[None, :]
    i = tl.arange(0, BT)
    mask = (first + i < T)[:, None] & (channel < C)[None, :]
    at = y + (row * T + first) * C
    tl.store(at + i[:, None] * C + channel[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "W"])
def wide_correlation_kernel(dy, x, partial, T, W, C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """Write partial [P, W, C], the sums of dy_t x_(t-j) over a block of time. Grid: P, BC channels."""
    row, first, channel, block = locate_wide_tile(T, C, BT, BC)
    d = wide_tile(dy, row, first, channel, T, C, BT)
    for lag in range(0, W):
        product = tl.sum(d * wide_tile(x, row, first - lag, channel, T, C, BT), 0)
        tl.store(partial + (block * W + lag) * C + channel, product, mask=channel < C)
