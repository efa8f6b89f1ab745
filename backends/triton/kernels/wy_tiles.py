"""A chunk's two triangular matrices in one square: T = (I + A)^-1 below the diagonal, P^T on and above it.

wy_tiles [slots, HV, TERMS, C, C + 8] holds them as sums of TERMS numbers (prepare.py says what T and P are), cut along
the blocks of 8 on the diagonal: those of P^T lie in the square, those of T in the last 8 columns. So 8 numbers side by
side, a copy of 16 bytes, never belong to both, and a product takes either matrix as it is copied, without a mask.

The dtype of wy_tiles is T's, and P^T has that of the operands. With near-parallel keys T takes differences of
neighbours, and what it loses in rounding counts against a small result: for a backward with bfloat16 operands T lies
there as float16, with 11 bits instead of 8.
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.kernels.layout import dot_split_lhs, mma_rows, split_hi_lo, store_mma_rows


@triton.jit
def store_wy_tiles(base, T, T_blocks, P_T, dtype: tl.constexpr, place, i, C: tl.constexpr, TERMS: tl.constexpr):
    """T and P^T, float32 [C, C], each zero where the other stands, and the blocks of T on the diagonal [C, 8]; dtype:
    P^T's."""
    at = base + place * TERMS * C * (C + 8)
    below = (i // 8)[:, None] > (i // 8)[None, :]
    lies: tl.constexpr = base.dtype.element_ty
    if TERMS == 2:
        square, square_low = split_hi_lo(tl.where(below, T, P_T), dtype)
        T_blocks, blocks_low = split_hi_lo(T_blocks, dtype)
        store_wy_term(at + C * (C + 8), square_low, blocks_low, i, C)
    elif lies == dtype:
        square = tl.where(below, T, P_T).to(dtype)
    else:
        bits = tl.where(below, T.to(lies).to(tl.int16, bitcast=True), P_T.to(dtype).to(tl.int16, bitcast=True))
        square = bits.to(lies, bitcast=True)
    store_wy_term(at, square, T_blocks, i, C)


@triton.jit
def store_wy_term(at, square, T_blocks, i, C: tl.constexpr):
    rows = mma_rows(C, min(16, 4096 // (C * square.dtype.primitive_bitwidth)))
    store_mma_rows(at, square, rows, i, rows < C, i < C, C + 8)
    tl.store(at + i[:, None] * (C + 8) + C + tl.arange(0, 8)[None, :], T_blocks.to(at.dtype.element_ty))


@triton.jit
def load_T(base, place, i, C: tl.constexpr, TERMS: tl.constexpr, TERM: tl.constexpr):
    """One term of T [C, C], in the dtype that it lies in."""
    j = tl.arange(0, C)
    block = (j[None, :] // 8) - (i[:, None] // 8)
    at = (place * TERMS + TERM) * C * (C + 8) + i[:, None] * (C + 8) + tl.where(block == 0, C + j % 8, j)
    return tl.load(base + at, mask=block <= 0, other=0.0)


@triton.jit
def load_P_T(base, dtype: tl.constexpr, place, i, C: tl.constexpr, TERMS: tl.constexpr, TERM: tl.constexpr):
    """One term of P^T [C, C]."""
    j = tl.arange(0, C)
    at = (place * TERMS + TERM) * C * (C + 8) + i[:, None] * (C + 8) + j[None, :]
    here = j[None, :] // 8 >= i[:, None] // 8
    return tl.load(base.to(tl.pointer_type(dtype)) + at, mask=here, other=0.0)


@triton.jit
def dot_T(x, T, T_low, dtype: tl.constexpr, TERMS: tl.constexpr, PREC: tl.constexpr):
    """x T, x float32 [rows, C], T in TERMS terms. Beside a T in float16 x is rounded to that, too, its rows scaled by
    powers of 2."""
    if T.dtype != tl.float16 or TERMS == 2:
        return dot_split_both(x, T, T_low, tl.zeros(x.shape, tl.float32), dtype, TERMS, PREC)
    else:
        largest = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True)
        exponent = tl.minimum(largest & 0x7F800000, 0x7E800000)
        down = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
        up = exponent.to(tl.float32, bitcast=True)
        return tl.dot((x * down[:, None]).to(T.dtype), T) * up[:, None]


@triton.jit
def dot_split_both(x, first, second, acc, dtype: tl.constexpr, TERMS: tl.constexpr, PREC: tl.constexpr):
    """acc + x M, with M in its two terms, or in the first alone."""
    acc = dot_split_lhs(x, first, acc, dtype, TERMS, PREC)
    return tl.dot(x.to(dtype), second, acc, input_precision=PREC) if TERMS == 2 else acc
