"""Storage of a chunk's two triangular matrices, the WY tiles T and P^T, in one tile.

    T = (I + A)^-1 lower triangular,  P^T upper triangular  (prepare.py defines A and P)

wy_tiles [slots, HV, TERMS, C, C + 8] stores both, each as a sum of TERMS terms. The diagonal is made of 8 x 8 blocks:
P^T occupies the diagonal blocks and those above them, T the blocks below, and the last 8 columns hold the diagonal
blocks of T. So 8 adjacent elements, one 16-byte copy, never belong to both matrices, and either can be copied into an
MMA operand without a mask.

The dtype of wy_tiles is that of T; P^T has the dtype of the operands. With near-parallel keys T is applied to
differences of neighbouring tokens, whose result is small compared with the rounding error of T. For a backward pass
with bfloat16 operands T is therefore float16 (11 significant bits instead of 8), and the bits of P^T, bfloat16, are
stored in the same tile. Both terms of T are float16 where the Hopper kernels compute split terms, and P^T then has one
term (p_terms): the second tile is that of T alone.

C chunk, HV value heads
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.device.layout import dot_split_lhs, mma_rows, split_hi_lo, store_mma_rows


@triton.constexpr_function
def p_terms(T_dtype, dtype, TERMS):
    """Return the terms of P^T: those of T, or one if the Hopper kernels compute T in float16 and P^T in bfloat16."""
    return TERMS if T_dtype == dtype else 1


@triton.jit
def store_wy_tiles(base, T, T_blocks, P_T, dtype: tl.constexpr, chunk, i, C: tl.constexpr, TERMS: tl.constexpr):
    """Store T and P^T, float32 [C, C], of one chunk.

    T_blocks [C, 8]: diagonal blocks of T. dtype: of P^T. chunk: index slot * HV + hv. i: 0 to C - 1.
    """
    at = base + chunk * TERMS * C * (C + 8)
    below = (i // 8)[:, None] > (i // 8)[None, :]
    T_dtype: tl.constexpr = base.dtype.element_ty
    if TERMS == 2 and T_dtype == dtype:
        tile, tile_lo = split_hi_lo(tl.where(below, T, P_T), dtype)
        T_blocks, blocks_lo = split_hi_lo(T_blocks, dtype)
        store_wy_term(at + C * (C + 8), tile_lo, blocks_lo, i, C)
    elif T_dtype == dtype:
        tile = tl.where(below, T, P_T).to(dtype)
    else:
        if TERMS == 2:
            T, T_lo = split_hi_lo(T, T_dtype)
            T_blocks, blocks_lo = split_hi_lo(T_blocks, T_dtype)
            store_wy_term(at + C * (C + 8), T_lo, blocks_lo, i, C)
        tile = merge_bits(below, T.to(T_dtype), P_T.to(dtype))
    store_wy_term(at, tile, T_blocks, i, C)


@triton.jit
def merge_bits(below, T, P_T):
    """Return the bits of T where below, else those of P^T of another 16-bit dtype."""
    bits = tl.where(below, T.to(tl.int16, bitcast=True), P_T.to(tl.int16, bitcast=True))
    return bits.to(T.dtype, bitcast=True)


@triton.jit
def store_wy_term(at, tile, T_blocks, i, C: tl.constexpr):
    """Store one term: the combined tile [C, C] and the diagonal blocks of T [C, 8] beside it."""
    rows = mma_rows(C, min(16, 4096 // (C * tile.dtype.primitive_bitwidth)))
    store_mma_rows(at, tile, rows, i, rows < C, i < C, C + 8)
    tl.store(at + i[:, None] * (C + 8) + C + tl.arange(0, 8)[None, :], T_blocks.to(at.dtype.element_ty))


@triton.jit
def load_inverse(base, chunk, i, C: tl.constexpr, TERMS: tl.constexpr, TERM: tl.constexpr):
    """Load one term of T [C, C] in its stored dtype."""
    j = tl.arange(0, C)
    block = (j[None, :] // 8) - (i[:, None] // 8)
    at = (chunk * TERMS + TERM) * C * (C + 8) + i[:, None] * (C + 8) + tl.where(block == 0, C + j % 8, j)
    return tl.load(base + at, mask=block <= 0, other=0.0)


@triton.jit
def load_p_transposed(base, dtype: tl.constexpr, chunk, i, C: tl.constexpr, TERMS: tl.constexpr, TERM: tl.constexpr):
    """Load one term of P^T [C, C]."""
    j = tl.arange(0, C)
    at = (chunk * TERMS + TERM) * C * (C + 8) + i[:, None] * (C + 8) + j[None, :]
    in_P_T = j[None, :] // 8 >= i[:, None] // 8
    return tl.load(base.to(tl.pointer_type(dtype)) + at, mask=in_P_T, other=0.0)


@triton.jit
def dot_inverse(x, T, T_lo, dtype: tl.constexpr, TERMS: tl.constexpr, PREC: tl.constexpr):
    """Return x T for x float32 [rows, C] and T in TERMS terms.

    If T is float16 and the operands are not, x is rounded to float16, too, after its rows are scaled by powers of 2.
    """
    if T.dtype != tl.float16 or (TERMS == 2 and dtype == tl.float16):
        return dot_split_both(x, T, T_lo, tl.zeros(x.shape, tl.float32), dtype, TERMS, PREC)
    else:
        largest = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True)
        exponent = tl.minimum(largest & 0x7F800000, 0x7E800000)
        down = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
        up = exponent.to(tl.float32, bitcast=True)
        scaled = (x * down[:, None]).to(T.dtype)
        product = tl.dot(scaled, T)
        if TERMS == 2:
            product = tl.dot(scaled, T_lo, product)
        return product * up[:, None]


@triton.jit
def dot_split_both(x, M_hi, M_lo, acc, dtype: tl.constexpr, TERMS: tl.constexpr, PREC: tl.constexpr):
    """Return acc + x M, with x and M = M_hi + M_lo in TERMS terms; the product of the low terms is negligible."""
    acc = dot_split_lhs(x, M_hi, acc, dtype, TERMS, PREC)
    return tl.dot(x.to(dtype), M_lo, acc, input_precision=PREC) if TERMS == 2 else acc
