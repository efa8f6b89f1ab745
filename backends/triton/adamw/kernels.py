"""AdamW in one pass over all weights: each gradient is read once, in its own dtype, and 16-bit copies are written.

m, v: moments of the gradient g; w: the weight in float32
"""

from typing import NamedTuple

import triton
import triton.language as tl


class AdamWTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        CHUNK, BLOCK: elements of a program, and of one of its iterations, which divides CHUNK.
        ROUNDS: whether copies of the weights in another dtype are written.
        ALIGNED: whether all addresses are multiples of 16.
    """

    CHUNK: int
    BLOCK: int
    ROUNDS: bool
    ALIGNED: bool


@triton.jit
def _pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(address).to(dtype)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def adamw_kernel(
    addresses, owners, starts, sizes, gradient, rounded, rate, scale, skip,
    new1, new2, log_beta1, log_beta2, eps, decay,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """w -= rate (decay w + m' / (sqrt(v') + eps)), with m' = m / (1 - beta1^step) and v' = v / (1 - beta2^step).

    Grid: one program per chunk of a weight: `owners` and `starts` hold the weight and the first element of each.
    Nothing is written if `skip` is not 0. new1 = 1 - beta1, new2 = 1 - beta2.

    Reads from row `owner` of `addresses` the pointers to w, m, v, g, the 16-bit copy, and step (counts from 1);
    rate, scale (a factor of the gradients) and skip, scalars in memory. `gradient` and `rounded` have the dtypes of
    the gradients and the copies, and are not read. Updates w, m and v. Writes the copy.
    """
    owner = tl.load(owners + tl.program_id(0))
    row = addresses + owner * 6
    if tl.load(skip) == 0:
        start = tl.multiple_of(tl.load(starts + tl.program_id(0)), CHUNK)
        size = tl.load(sizes + owner)
        weight = _pointer(row, rate.dtype, ALIGNED)
        first = _pointer(row + 1, rate.dtype, ALIGNED)
        second = _pointer(row + 2, rate.dtype, ALIGNED)
        gradients = _pointer(row + 3, gradient.dtype, ALIGNED)
        factor = tl.load(scale)
        lr = tl.load(rate)
        step = tl.load(_pointer(row + 5, rate.dtype, False)).to(tl.float64)
        # in float64: 1 - beta^step loses digits in float32 if beta is near 1
        unbiased1 = (1 - tl.exp(step * log_beta1)).to(tl.float32)
        unbiased2 = (1 - tl.exp(step * log_beta2)).to(tl.float32)
        for begin in range(start, min(start + CHUNK, size), BLOCK):
            at = tl.multiple_of(begin, BLOCK) + tl.arange(0, BLOCK)
            whole = begin + BLOCK <= size
            # masked accesses are no vectors
            if whole:
                g = tl.load(gradients + at).to(tl.float32) * factor
                w = tl.load(weight + at)
                m = tl.load(first + at)
                v = tl.load(second + at)
            else:
                g = tl.load(gradients + at, mask=at < size).to(tl.float32) * factor
                w = tl.load(weight + at, mask=at < size)
                m = tl.load(first + at, mask=at < size)
                v = tl.load(second + at, mask=at < size)
            m += new1 * (g - m)
            v += new2 * (g * g - v)
            w -= lr * decay * w
            w -= lr / unbiased1 * m / (tl.sqrt(v) / tl.sqrt(unbiased2) + eps)
            if whole:
                tl.store(weight + at, w)
                tl.store(first + at, m)
                tl.store(second + at, v)
            else:
                tl.store(weight + at, w, mask=at < size)
                tl.store(first + at, m, mask=at < size)
                tl.store(second + at, v, mask=at < size)
            if ROUNDS:
                copies = _pointer(row + 4, rounded.dtype, ALIGNED)
                if whole:
                    tl.store(copies + at, w.to(rounded.dtype.element_ty))
                else:
                    tl.store(copies + at, w.to(rounded.dtype.element_ty), mask=at < size)
