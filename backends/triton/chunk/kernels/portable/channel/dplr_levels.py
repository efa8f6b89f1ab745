"""Decays between the tokens of a DPLR chunk: relative to the middle of the chunk if they are weak, else by levels.

The coefficient of tokens j < i is sum_c y_ic z_jc 2^(G_ic - G_jc). Let m be the last token of the first half. If no
half of the chunk decays any channel by more than 2^-WEAK, the factors 2^(G_i - G_m) and 2^(G_m - G_j) are at most
2^WEAK, finite in float32 and bfloat16, and one product of scaled operands has all pairs. RWKV-7's decays are at least
2^-0.875 per token, so 2^-28 in half a chunk of 64. With stronger decays the pairs are computed by the dyadic levels of
decay_levels.py, whose factors are at most 1.

C tokens in a chunk. late, early: the factors of a token that reads the state after or before its own decay
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.chunk.kernels.portable.channel.decay_levels import (
    is_upper,
    level_pairs,
    level_sums,
    load_channel_decays,
    sum_selected,
)
from deltazoo.backends.triton.device.layout import load_rows


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
    """Return whether no half of the chunk decays any channel by more than 2^-BOUND, and G at its middle [keys].

    G [C, keys]: cumulative log2 decays, which do not increase.
    """
    middle = tl.min(tl.where((tl.arange(0, C) < C // 2)[:, None], G, 0.0), 0)
    # tl.min ignores NaN, which propagates with weak decays as with others
    return (tl.min(middle, 0) > -BOUND) & (tl.min(tl.min(G, 0) - middle, 0) > -BOUND), middle


@triton.jit
def pair_factors(g, G, middle, level, WHOLE: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr):
    """Return the factors late and early of reading tokens i, those of writing tokens j, and the pairs of a level.

    At a level only tokens in upper halves of blocks read, and only those in lower halves write: other factors are 0.
    g [C, keys]: log2 decays; G and middle as in `is_weak_decay`. WHOLE: all pairs, relative to the middle; level is
    then unused.

    Returns: three tiles [C, keys]; a mask of pairs (i, j) with j < i, [C, C].
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
    """Return whether to compute a chunk: always, or with MARKED if sm90/dplr_prepare.py has marked it.

    chunk: index slot * HV + hv. The mark is the first of the C elements after the K decays in gates.
    """
    if MARKED:
        return tl.load(gates + chunk * (K + C) + K) > 0.0
    else:
        return True


@triton.jit
def any_marked(gates, slot, first, last, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr):
    """Return whether a chunk slot is marked for any of the heads `first` to `last` - 1; usually none is."""
    hv = first + tl.arange(0, HEADS)
    at = gates + (tl.cast(slot, tl.int64) * HV + hv) * (K + C) + K
    return tl.max(tl.load(at, mask=hv < last, other=0.0), 0) > 0.0
