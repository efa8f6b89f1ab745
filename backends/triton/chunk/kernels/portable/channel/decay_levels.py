"""Products of decays per channel that cannot overflow, by the dyadic decomposition of a chunk.

The coefficient of tokens j < i is sum_c x_ic y_jc 2^(G_ic - G_jc), with G the cumulative log2 decay of channel c. It is
no matrix product of scaled operands x 2^G and y 2^-G, because 2^-G overflows. At level l = 0, 1, ..., log2(C) - 1
the chunk is divided into blocks of 2^(l+1) tokens. For i in the upper half of a block and j in its lower half,

    2^(G_i - G_j) = 2^(G_i - G_m) 2^(G_m - G_j),    m the last token of the lower half.

Both factors are at most 1, and every pair j < i belongs to exactly one level. The exponents are sums of log2 decays,
computed as products with a matrix of zeros and ones, so that no two large sums are subtracted.

C tokens in a chunk
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.device.layout import LOG2E, clamp_log2_decay, load_rows, split_hi_lo


@triton.jit
def load_channel_decays(log_decay, i, ks, in_time, in_k, stride):
    """Load log2 of each token's decay per channel [C, keys]; zeros outside."""
    return clamp_log2_decay(load_rows(log_decay, i, ks, in_time, in_k, stride).to(tl.float32) * LOG2E)


@triton.jit
def sum_selected(selected, x, EXACT: tl.constexpr):
    """Return selected x, for a mask [R, C] and x [C, keys] float32. EXACT: as accurate as float32, else 22 bits."""
    if EXACT:
        return tl.dot(selected.to(tl.float32), x, input_precision="tf32x3")
    else:
        hi, lo = split_hi_lo(x, tl.float16)
        mask = selected.to(tl.float16)
        return tl.dot(mask, lo, tl.dot(mask, hi))


@triton.constexpr_function
def levels_of(C):
    """Return the number of levels: log2 C."""
    return C.bit_length() - 1


@triton.jit
def is_upper(i, level):
    """Whether tokens are in the upper half of their block of a level."""
    return ((i >> level) & 1) != 0


@triton.jit
def same_block(i, level):
    """Whether tokens i and j are in the same block of a level: [C, C]."""
    return ((i[:, None] ^ i[None, :]) >> (level + 1)) == 0


@triton.jit
def level_pairs(i, level):
    """The pairs of a level: i in the upper and j in the lower half of the same block: [C, C]."""
    return ((i[:, None] ^ i[None, :]) >> level == 1) & is_upper(i, level)[:, None]


@triton.jit
def level_factors(g, i, level, BEFORE: tl.constexpr, EXACT: tl.constexpr):
    """Return 2^(G_i - G_m) for tokens in upper halves, with BEFORE G before the token, 2^(G_m - G_i) in lower ones.

    g [C, keys]: log2 decays.
    """
    return tl.exp2(level_sums(g, i, level, BEFORE, EXACT))


@triton.jit
def level_sums(g, i, level, BEFORE: tl.constexpr, EXACT: tl.constexpr):
    """Return the logarithms of `level_factors`."""
    after = i[None, :] > i[:, None]
    before = i[None, :] < i[:, None] if BEFORE else i[None, :] <= i[:, None]
    same_half = ((i[:, None] ^ i[None, :]) >> level) == 0
    selected = same_half & tl.where(is_upper(i, level)[:, None], before, after)
    return sum_selected(selected, g, EXACT)


@triton.jit
def scale_rows(x, dtype: tl.constexpr, SCALED: tl.constexpr):
    """Round x [rows, keys] to a dtype; SCALED: divided by a power of two per row, so that float16 cannot overflow.

    Returns: the rounded rows, and the scales [rows] to multiply products with.
    """
    scales = tl.full([x.shape[0]], 1.0, tl.float32)
    if SCALED:
        largest = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True)
        exponent = tl.minimum(tl.maximum(largest & 0x7F800000, 0x00800000), 0x7E800000)
        x *= (0x7F000000 - exponent).to(tl.float32, bitcast=True)[:, None]
        scales = exponent.to(tl.float32, bitcast=True)
    return x.to(dtype), scales
