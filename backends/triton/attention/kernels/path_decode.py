"""One token of PaTH attention: a query attends to cached keys, which the matrices of all later tokens multiply.

    o = sum_s softmax_s(scale k_s . H_(s+1) ... H_t q_t) v_s,    H_r = I - beta_r w_r w_r^T

The matrices of the last p < C tokens are pending: they are stored, and no cached key has been multiplied by them. They
multiply the query instead, so that the keys are only read. Every C-th token multiplies all keys by the C matrices.

B batch, S slots, H query heads, G key-value heads, R = H / G, D key width, V value width
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.attention.kernels.path_tiles import LOG2E


class DecodeTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        H, G, D, V: sizes. BR, BD, BV: the powers of two from R, D and V on. BS: slots of a tile.
        C: the most pending matrices. STAGES: of the software pipeline of the cache.
        SCALE: factor of the scores.
    """

    H: int
    G: int
    D: int
    V: int
    BR: int
    BD: int
    BV: int
    BS: int
    C: int
    STAGES: int
    SCALE: float


@triton.jit
def load_move(moves, b, i, g, d, traits: tl.constexpr):
    """Load w and beta w of pending token i."""
    at = moves + ((b * traits.C + i) * traits.G + g) * (2 * traits.D) + d
    w = tl.load(at, mask=d < traits.D, other=0.0)
    return w, tl.load(at + traits.D, mask=d < traits.D, other=0.0)


@triton.jit(do_not_specialize=["S", "splits"])
def path_decode_kernel(
    q, k, v, w, beta, real, seen, pending, cache_k, cache_v, moves, o, partial, S, splits, traits: tl.constexpr,
):  # fmt: skip
    """Append the new token of a row and head, and attend. The C-th pending matrix updates the cached keys.

    Grid: B x G x splits; each program has an equal part of the slots in use. Reads q [B, H, D], k, w [B, G, D],
    v [B, G, V], beta [B, G]; real [B] bool, whether there is a token, or None; seen [B] int64, the slots in use;
    pending [B] int64. Updates cache_k [B, S, G, D], cache_v [B, S, G, V] and moves [B, C, G, 2, D] float32, w and
    beta w of the pending tokens. Writes o [B, H, V], or with several splits partial [B, H, splits, V + 2] float32: the
    unnormalised o, the maximum and the sum of exponentials.
    """
    G: tl.constexpr = traits.G
    D: tl.constexpr = traits.D
    V: tl.constexpr = traits.V
    R: tl.constexpr = traits.H // G
    BS: tl.constexpr = traits.BS
    BR: tl.constexpr = traits.BR
    BV: tl.constexpr = traits.BV
    split = tl.program_id(0) % splits
    row = tl.cast(tl.program_id(0) // splits, tl.int64)  # b G + g
    b = row // G
    g = row % G
    count = tl.minimum(tl.load(seen + b), S).to(tl.int32)
    is_real = 1
    if real is not None:
        is_real = tl.load(real + b).to(tl.int32)
    total = tl.minimum(count + is_real, S)
    waiting = tl.minimum(tl.maximum(tl.load(pending + b).to(tl.int32), 0), traits.C - 1)
    waiting = tl.minimum(waiting, count)
    first_waiting = count - waiting  # slot of the first pending token
    settles = (waiting + is_real) == traits.C
    d = tl.arange(0, traits.BD)
    in_d = d < D
    c = tl.arange(0, BV)
    in_v = c < V
    r = tl.arange(0, BR)
    h = g * R + r
    w_t = tl.load(w + row * D + d, mask=in_d, other=0.0).to(tl.float32)
    k_t = tl.load(k + row * D + d, mask=in_d, other=0.0).to(tl.float32)
    v_t = tl.load(v + row * V + c, mask=in_v, other=0.0).to(tl.float32)
    erase = w_t * tl.load(beta + row).to(tl.float32) * is_real
    if (split == 0) & (is_real > 0):
        if not settles:
            at = moves + ((b * traits.C + waiting) * G + g) * (2 * D) + d
            tl.store(at, w_t, mask=in_d)
            tl.store(at + D, erase, mask=in_d)
    q_base = q + b * (traits.H * D)
    q_t = tl.load(q_base + h[:, None] * D + d[None, :], mask=(r < R)[:, None] & in_d[None, :], other=0.0)
    q_t = q_t.to(tl.float32) * (traits.SCALE * LOG2E)
    moved_q = q_t - tl.sum(q_t * w_t[None, :], 1)[:, None] * erase[None, :]
    for done in range(waiting):
        w_i, erase_i = load_move(moves, b, waiting - 1 - done, g, d, traits)
        moved_q -= tl.sum(moved_q * w_i[None, :], 1)[:, None] * erase_i[None, :]
    span = tl.cdiv(tl.cdiv(count + 1, splits), BS) * BS
    last = tl.minimum((split + 1) * span, total)
    if BR == 1:  # each slot of a tile has a softmax of its own, so that warps need not exchange numbers for each tile
        m = tl.full([BS], float("-inf"), tl.float32)
        l = tl.zeros([BS], tl.float32)
        o_t = tl.zeros([BS, BV], tl.float32)
    else:
        m = tl.full([BR], float("-inf"), tl.float32)
        l = tl.zeros([BR], tl.float32)
        o_t = tl.zeros([BR, BV], tl.float32)
    key_base = cache_k + (b * S * G + g) * D
    value_base = cache_v + (b * S * G + g) * V
    for j in tl.range(split * span, last, BS, num_stages=traits.STAGES):
        s = j + tl.arange(0, BS)
        in_use = s < last
        is_new = (s == count) & in_use
        keys_at = key_base + s[:, None].to(tl.int64) * (G * D) + d[None, :]
        keys = tl.load(keys_at, mask=(in_use & (s < count))[:, None] & in_d[None, :], other=0.0).to(tl.float32)
        values_at = value_base + s[:, None].to(tl.int64) * (G * V) + c[None, :]
        values = tl.load(values_at, mask=(in_use & (s < count))[:, None] & in_v[None, :], other=0.0).to(tl.float32)
        query = moved_q
        if settles | (j + BS > first_waiting):  # keys of pending tokens are multiplied by those of later tokens alone
            for i in range(waiting):
                w_i, erase_i = load_move(moves, b, i, g, d, traits)
                reads = tl.where(s < first_waiting + i, tl.sum(keys * w_i[None, :], 1), 0.0)
                keys -= reads[:, None] * erase_i[None, :]
            keys -= tl.sum(keys * w_t[None, :], 1)[:, None] * erase[None, :]
            keys = tl.where(is_new[:, None], k_t[None, :], keys)
            values = tl.where(is_new[:, None], v_t[None, :], values)
            is_stored = is_new | (in_use & settles)
            tl.store(keys_at, keys.to(cache_k.dtype.element_ty), mask=is_stored[:, None] & in_d[None, :])
            tl.store(values_at, values.to(cache_v.dtype.element_ty), mask=is_new[:, None] & in_v[None, :])
            query = q_t
        if BR == 1:
            x = tl.where(in_use, tl.sum(keys * query, 1), float("-inf"))
            m_new = tl.where(in_use, tl.maximum(m, x), m)
            p = tl.where(in_use, tl.exp2(x - m_new), 0.0)
            decay = tl.where(in_use, tl.exp2(m - m_new), 1.0)
            l = l * decay + p
            o_t = o_t * decay[:, None] + p[:, None] * values
        else:
            x = tl.where(in_use[:, None], tl.sum(keys[:, None, :] * query[None, :, :], 2), float("-inf"))
            m_new = tl.maximum(m, tl.max(x, 0))
            p = tl.exp2(x - m_new[None, :])
            decay = tl.exp2(m - m_new)
            l = l * decay + tl.sum(p, 0)
            o_t = o_t * decay[:, None] + tl.sum(p[:, :, None] * values[:, None, :], 0)
        m = m_new
    if BR == 1:
        of_slot = m
        m = tl.max(of_slot[:, None], 0)
        weight = tl.where(l > 0.0, tl.exp2(of_slot - tl.max(of_slot, 0)), 0.0)
        l = tl.sum((l * weight)[:, None], 0)
        o_t = tl.sum(o_t * weight[:, None], 0)[None, :]
    in_tile = (r < R)[:, None] & in_v[None, :]
    head = b * traits.H + h
    if partial is None:
        o_t = o_t / tl.where(l > 0.0, l, 1.0)[:, None]
        tl.store(o + head[:, None] * V + c[None, :], o_t.to(o.dtype.element_ty), mask=in_tile)
    else:
        at = partial + (head * splits + split) * (V + 2)
        tl.store(at[:, None] + c[None, :], o_t, mask=in_tile)
        tl.store(at + V, m, mask=r < R)
        tl.store(at + V + 1, l, mask=r < R)


@triton.jit(do_not_specialize=["splits"])
def path_combine_kernel(partial, o, splits, V: tl.constexpr, BV: tl.constexpr, MOST: tl.constexpr):
    """Combine the parts of the attention of one query. Grid: B x H. MOST: a power of two >= splits."""
    head = tl.cast(tl.program_id(0), tl.int64)
    c = tl.arange(0, BV)
    n = tl.arange(0, MOST)
    at = partial + (head * splits + n) * (V + 2)
    m = tl.load(at + V, mask=n < splits, other=float("-inf"))
    l = tl.load(at + V + 1, mask=n < splits, other=0.0)
    most = tl.max(m, 0)
    weight = tl.where(l > 0.0, tl.exp2(m - most), 0.0)
    parts = tl.load(at[:, None] + c[None, :], mask=(n < splits)[:, None] & (c < V)[None, :], other=0.0)
    total = tl.sum(l * weight, 0)
    o_t = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(o + head * V + c, o_t.to(o.dtype.element_ty), mask=c < V)
