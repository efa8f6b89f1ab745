"""Causal convolution with a loop over the taps. `backends/ops/wide_conv.py` has the equation.

B batch, T time, C channels, W taps, P blocks of time of all rows
"""

import triton
import triton.language as tl


@triton.jit
def wide_tile(x, row, t, channel, T, C: tl.constexpr):
    """Load x [B, T, C] at times t [BT] of a row: [BT, BC] in float32, 0 outside."""
    mask = (t >= 0)[:, None] & (t < T)[:, None] & (channel < C)[None, :]
    at = x + row * T * C  # a scalar: addresses of a tile take registers
    return tl.load(at + t[:, None] * C + channel[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def locate_wide_tile(T, C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """Return the row of the batch, the times and the channels of a program, and its block of time."""
    block = tl.program_id(0) // tl.cdiv(C, BC)
    channel = tl.program_id(0) % tl.cdiv(C, BC) * BC + tl.arange(0, BC)
    blocks = tl.cdiv(T, BT)
    t = block % blocks * BT + tl.arange(0, BT)
    return (block // blocks).to(tl.int64), t, channel, block.to(tl.int64)


@triton.jit(do_not_specialize=["T", "W"])
def wide_conv_kernel(
    x, weight, y, T, W, C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, REVERSE: tl.constexpr
):  # fmt: skip
    """Compute y_t = sum_j weight_j x_(t-j), or with REVERSE sum_j weight_j x_(t+j). Grid: P, BC channels."""
    row, t, channel, _ = locate_wide_tile(T, C, BT, BC)
    total = tl.zeros([BT, BC], tl.float32)
    for lag in range(0, W):
        w = tl.load(weight + lag * C + channel, mask=channel < C, other=0.0).to(tl.float32)
        total += wide_tile(x, row, t + lag if REVERSE else t - lag, channel, T, C) * w[None, :]
    mask = (t < T)[:, None] & (channel < C)[None, :]
    tl.store(y + row * T * C + t[:, None] * C + channel[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "W"])
def wide_correlation_kernel(dy, x, partial, T, W, C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """Write partial [P, W, C], the sums of dy_t x_(t-j) over a block of time. Grid: P, BC channels."""
    row, t, channel, block = locate_wide_tile(T, C, BT, BC)
    d = wide_tile(dy, row, t, channel, T, C)
    for lag in range(0, W):
        product = tl.sum(d * wide_tile(x, row, t - lag, channel, T, C), 0)
        tl.store(partial + (block * W + lag) * C + channel, product, mask=channel < C)
