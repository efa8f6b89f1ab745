"""Forward: the online softmax over tiles of keys, with the forget gates added to the scores.

For a tile of queries and each tile of keys in order

    m' = max(m, max_s x),    p = 2^(x - m'),    l' = 2^(m - m') l + sum_s p,    o' = 2^(m - m') o + p v

tiles.py defines the scores x and the sizes.
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.attention.kernels.tiles import LOG2E, head_rows, load_rows, load_sums
from deltazoo.backends.triton.device.layout import locate_chunk


@triton.jit
def attend_tile(
    o_tile, m, l, q_tile, row, k, v, sums, reference, first, n, length, k_stride, v_stride, low,
    DIAGONAL: tl.constexpr, traits: tl.constexpr,
):  # fmt: skip
    """Add the keys n, ..., n + BN - 1 of a sequence to the online softmax of the queries first, ..., first + BM - 1.

    DIAGONAL: some keys come after some queries, or after the end of the sequence. There the scores include g of the
    query, `row`. In the tiles before they do not, which saves an addition: the gates of these keys lower every score.
    """
    k_tile = load_rows(k, n, length, k_stride, traits.BN, DIAGONAL, traits)
    g = load_sums(sums, n, length, reference, low, traits.BN, DIAGONAL)
    products = tl.dot(q_tile, tl.trans(k_tile), input_precision=traits.PREC) * (traits.SCALE * LOG2E)
    if not DIAGONAL:
        x = products - g[None, :]
    else:
        x = products + (row[:, None] - g[None, :])
        t = first + tl.arange(0, traits.BM)[:, None]
        x = tl.where(n + tl.arange(0, traits.BN)[None, :] <= t, x, float("-inf"))
    m_new = tl.maximum(m, tl.max(x, 1))
    p = tl.exp2(x - m_new[:, None])
    decay = tl.exp2(m - m_new)
    l = l * decay + tl.sum(p, 1)
    v_tile = load_rows(v, n, length, v_stride, traits.BN, DIAGONAL, traits)
    o_tile = tl.dot(p.to(v_tile.dtype), v_tile, o_tile * decay[:, None], input_precision=traits.PREC)
    return o_tile, m_new, l


@triton.jit(do_not_specialize=["T", "N", "R", "slots", "q_stride", "k_stride", "v_stride"])
def attention_kernel(
    q, k, v, sums, cu, o, lse, T, N, R, slots, q_stride, k_stride, v_stride, traits: tl.constexpr,
):  # fmt: skip
    """Compute a tile of o and its log-sum-exp.

    Grid: H x slots, tiles of BM queries; those with most keys first, and the heads that share keys side by side.

    Reads q [B, T, H, E], k and v [B, T, G, E], sums [2, H, R]. Writes o [B, T, H, E] and lse [H, R], log2 of the sum
    over s of 2^x_ts.
    """
    BM: tl.constexpr = traits.BM
    BN: tl.constexpr = traits.BN
    BLOCK: tl.constexpr = traits.BLOCK
    h = tl.program_id(0) // slots
    slot = slots - 1 - tl.program_id(0) % slots
    start, length, first = locate_chunk(slot, cu, N, T, BM, traits.PACKED)
    if first < length:
        q = head_rows(q, start, q_stride, h, traits)
        k = head_rows(k, start, k_stride, h // (traits.H // traits.G), traits)
        v = head_rows(v, start, v_stride, h // (traits.H // traits.G), traits)
        sums += tl.cast(h, tl.int64) * R + start
        low = traits.H * tl.cast(R, tl.int64)
        reference = tl.load(sums + first)
        q_tile = load_rows(q, first, length, q_stride, BM, True, traits)
        row = load_sums(sums, first, length, reference, low, BM, True)
        m = tl.full([BM], float("-inf"), tl.float32)
        l = tl.zeros([BM], tl.float32)
        o_tile = tl.zeros([BM, BLOCK], tl.float32)
        full = first // BN * BN  # keys of whole tiles that all queries see
        for n in range(0, full, BN):
            o_tile, m, l = attend_tile(
                o_tile, m, l, q_tile, row, k, v, sums, reference, first, n, length, k_stride, v_stride, low, False,
                traits,
            )  # fmt: skip
        m += row
        for n in range(full, tl.minimum(first + BM, length), BN):
            o_tile, m, l = attend_tile(
                o_tile, m, l, q_tile, row, k, v, sums, reference, first, n, length, k_stride, v_stride, low, True,
                traits,
            )  # fmt: skip
        at_row = tl.arange(0, BM)
        e = tl.arange(0, BLOCK)[None, :]
        at = ((start + first) * traits.H + h) * traits.E + at_row[:, None] * (traits.H * traits.E) + e
        in_rows = at_row < length - first
        tl.store(o + at, o_tile * (1.0 / l)[:, None], mask=in_rows[:, None] & (e < traits.E))
        lse += tl.cast(h, tl.int64) * R + start + first
        tl.store(lse + at_row, m + tl.log2(l), mask=in_rows)
