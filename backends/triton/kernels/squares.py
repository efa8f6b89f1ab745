"""A chunk's two triangular matrices in one square: T = (I + A)^-1 below the diagonal (its own is 1), P^T on and above.

squares [slots, HV, TERMS, C, C] holds the square as a sum of TERMS numbers (prepare.py says what T and P are). With
near-parallel keys T takes differences of neighbours, and what it loses in rounding counts against a small result: where
the operands are bfloat16 and one number is all, T lies there as float16, with 11 bits instead of 8.
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.kernels.layout import dot_terms, two_terms


@triton.jit
def store_squares(base, T, P_T, place, i, C: tl.constexpr, TERMS: tl.constexpr):
    """T without its diagonal, and P^T, float32 [C, C], each zero where the other stands."""
    dtype: tl.constexpr = base.dtype.element_ty
    below = i[:, None] > i[None, :]
    at = base + place * TERMS * C * C + i[:, None] * C + i[None, :]
    if TERMS == 2:
        high, low = two_terms(tl.where(below, T, P_T), dtype)
        tl.store(at, high)
        tl.store(at + C * C, low)
    elif dtype == tl.bfloat16:
        half = T.to(tl.float16).to(tl.int16, bitcast=True)
        bits = tl.where(below, half, P_T.to(dtype).to(tl.int16, bitcast=True))
        tl.store(at, bits.to(dtype, bitcast=True))
    else:
        tl.store(at, tl.where(below, T, P_T).to(dtype))


@triton.jit
def load_squares(base, place, i, C: tl.constexpr, TERMS: tl.constexpr, TERM: tl.constexpr):
    """One term of T, in float16 where it lies so, and of P^T."""
    dtype: tl.constexpr = base.dtype.element_ty
    at = base + (place * TERMS + TERM) * C * C
    if dtype.primitive_bitwidth == 16:
        # two numbers a load: what feeds no product at once is copied ahead of time only in 32 bits
        half = tl.arange(0, C // 2)
        pairs = tl.load(at.to(tl.pointer_type(tl.int32)) + i[:, None] * (C // 2) + half[None, :])
        both = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
        square = tl.reshape(both, [C, C]).to(dtype, bitcast=True)
    else:
        square = tl.load(at + i[:, None] * C + i[None, :])
    kind: tl.constexpr = tl.float16 if TERMS == 1 and dtype == tl.bfloat16 else dtype
    diagonal = tl.where(i[:, None] == i[None, :], 1.0 if TERM == 0 else 0.0, 0.0).to(kind)
    T = tl.where(i[:, None] > i[None, :], square.to(kind, bitcast=True), diagonal)
    return T, tl.where(i[:, None] <= i[None, :], square, 0.0)


@triton.jit
def dot_scaled(x, T):
    """x T, x float32 and T float16, with x as float16, too: its rows are scaled by powers of 2 to that."""
    largest = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True)
    exponent = tl.minimum(largest & 0x7F800000, 0x7E800000)
    down = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    up = exponent.to(tl.float32, bitcast=True)
    return tl.dot((x * down[:, None]).to(tl.float16), T) * up[:, None]


@triton.jit
def dot_square(x, first, second, acc, dtype: tl.constexpr, TERMS: tl.constexpr, PREC: tl.constexpr):
    """acc + x M, with M in its two terms, or in the first alone."""
    acc = dot_terms(x, first, acc, dtype, TERMS, PREC)
    return tl.dot(x.to(dtype), second, acc, input_precision=PREC) if TERMS == 2 else acc
