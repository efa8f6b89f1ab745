"""Loads and stores of numbers, and of pairs of numbers, of consecutive channels."""

import triton
import triton.language as tl


@triton.jit
def load_raw(x, c, mask):
    """Load a number of each channel, in its dtype: a conversion would wait for it before later loads are issued."""
    return tl.load(x + c, mask=mask, other=0.0)


@triton.jit
def load_channels(x, c, mask):
    """Load a number of each channel in float32."""
    return load_raw(x, c, mask).to(tl.float32)


@triton.jit
def load_pairs(x, c, mask):
    """Load the pair of numbers of each channel, [.., 2]."""
    return tl.load(x + 2 * c[:, None] + tl.arange(0, 2)[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def store_pairs(x, c, mask, re, im):
    """Store a pair of numbers of each channel."""
    pairs = tl.join(re, im).to(x.dtype.element_ty)
    tl.store(x + 2 * c[:, None] + tl.arange(0, 2)[None, :], pairs, mask=mask[:, None])
