"""Decays between the tokens of a chunk for DPLR: relative to its middle where they are weak, else by dyadic levels.

The coefficient of tokens j < i is sum_c y_ic z_jc 2^(G_ic - G_jc). If no half of the chunk decays any channel by more
than 2^-WEAK, both factors 2^(G_i - G_m) and 2^(G_m - G_j) with m the last token of the first half are at most 2^WEAK,
finite in float32 and bfloat16, and one product of scaled operands has all pairs. RWKV-7's decays are at least
2^-0.875 per token: 2^-28 in half a chunk of 64. With other decays the pairs are computed by the levels of
decay_levels.py, whose factors are at most 1.

C tokens in a chunk
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.kernels.channel.decay_levels import (
    is_upper,
    level_pairs,
    level_sums,
    load_channel_decays,
    sum_selected,
)
from deltazoo.backends.triton.kernels.layout import load_rows


@triton.jit
def load_operands(q, k, e, v_key, log_decay, i, ks, in_time, in_k, STRIDE: tl.constexpr, EXACT: tl.constexpr):
    """Load tiles [C, keys] of q, k, e and m (v_key), and of the log2 decays g.

    Returns: the tiles; the cumulative decays G; the factors 2^(Gend - G).
    """
    g = load_channel_decays(log_decay, i, ks, in_time, in_k, STRIDE)
    q_tile = load_rows(q, i, ks, in_time, in_k, STRIDE)
    k_tile = load_rows(k, i, ks, in_time, in_k, STRIDE)
    e_tile = load_rows(e, i, ks, in_time, in_k, STRIDE)
    m_tile = load_rows(v_key, i, ks, in_time, in_k, STRIDE)
    G = sum_selected(i[:, None] >= i[None, :], g, EXACT)
    to_end = tl.exp2(sum_selected(i[:, None] < i[None, :], g, EXACT))
    return q_tile, k_tile, e_tile, m_tile, g, G, to_end


@triton.jit
def is_weak_decay(G, C: tl.constexpr, BOUND: tl.constexpr):
    """Return whether no half of the chunk decays by more than 2^-BOUND, and G at its middle [keys].

    G [C, keys]: cumulative log2 decays, which do not increase.
    """
    middle = tl.min(tl.where((tl.arange(0, C) < C // 2)[:, None], G, 0.0), 0)
    # NaN is not weak
    return (tl.min(middle, 0) > -BOUND) & (tl.min(tl.min(G, 0) - middle, 0) > -BOUND), middle


@triton.jit
def pair_factors(g, G, middle, level, WHOLE: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr):
    """Return the factors of token i for its read, for its read before its own decay, and of token j for its write.

    Tokens in lower halves of a level's blocks do not read, and those in upper halves do not write. g [C, keys]: log2
    decays, G and middle as in `is_weak_decay`. WHOLE: all pairs relative to the middle; level is then unused.

    Returns: three tiles [C, keys]; the pairs (i, j) with j < i that the level has, [C, C].
    """
    i = tl.arange(0, C)
    if WHOLE:
        to_middle = G - middle[None, :]
        return tl.exp2(to_middle), tl.exp2(to_middle - g), tl.exp2(-to_middle), i[:, None] > i[None, :]
    else:
        upper = is_upper(i, level)[:, None]
        to_boundary = level_sums(g, i, level, False, EXACT)
        late = tl.exp2(to_boundary)
        early = tl.where(upper, tl.exp2(to_boundary - g), 0.0)
        return tl.where(upper, late, 0.0), early, tl.where(upper, 0.0, late), level_pairs(i, level)


@triton.jit
def is_marked(gates, chunk, K: tl.constexpr, C: tl.constexpr, MARKED: tl.constexpr):
    """Whether a chunk is to be computed: all, or with MARKED those that hopper/pair_prepare.py has marked."""
    if MARKED:
        return tl.load(gates + chunk * (K + C) + K) > 0.0
    else:
        return True


@triton.jit
def any_marked(gates, slot, first, last, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr):
    """Whether a chunk of heads `first` to `last` - 1 is marked, loaded at once: mostly none is."""
    hv = first + tl.arange(0, HEADS)
    at = gates + (tl.cast(slot, tl.int64) * HV + hv) * (K + C) + K
    return tl.max(tl.load(at, mask=hv < last, other=0.0), 0) > 0.0
