"""One token of PaTH attention: every cached key is multiplied by the new matrix, and the query attends to all of them.

    k_s <- k_s - beta (k_s . w) w,    o = sum_s softmax_s(scale q . k_s) v_s

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
    SCALE: float


@triton.jit(do_not_specialize=["S", "splits"])
def path_decode_kernel(
    q, k, v, w, beta, real, seen, cache_k, cache_v, o, partial, S, splits, traits: tl.constexpr,
):  # fmt: skip
    """Update the cached keys of a row and head, append the new token, and attend.

    Grid: B x G x splits; each program has an equal part of the slots in use. Reads q [B, H, D], k, w [B, G, D],
    v [B, G, V], beta [B, G]; real [B] bool, whether there is a token, or None; seen [B] int64, the slots in use.
    Updates cache_k [B, S, G, D] and cache_v [B, S, G, V]. Writes o [B, H, V], or with several splits partial
    [B, H, splits, V + 2] float32: the unnormalised o, the maximum and the sum of exponentials.
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
    total = count + 1
    if real is not None:
        total = count + tl.load(real + b).to(tl.int32)
    total = tl.minimum(total, S)
    d = tl.arange(0, traits.BD)
    in_d = d < D
    c = tl.arange(0, BV)
    in_v = c < V
    r = tl.arange(0, BR)
    h = g * R + r
    w_t = tl.load(w + row * D + d, mask=in_d, other=0.0).to(tl.float32)
    k_t = tl.load(k + row * D + d, mask=in_d, other=0.0).to(tl.float32)
    v_t = tl.load(v + row * V + c, mask=in_v, other=0.0).to(tl.float32)
    erase = w_t * tl.load(beta + row).to(tl.float32)
    q_base = q + b * (traits.H * D)
    q_t = tl.load(q_base + h[:, None] * D + d[None, :], mask=(r < R)[:, None] & in_d[None, :], other=0.0)
    q_t = q_t.to(tl.float32) * (traits.SCALE * LOG2E)
    span = tl.cdiv(tl.cdiv(count + 1, splits), BS) * BS
    last = tl.minimum((split + 1) * span, total)
    m = tl.full([BR], float("-inf"), tl.float32)
    l = tl.zeros([BR], tl.float32)
    o_t = tl.zeros([BR, BV], tl.float32)
    key_base = cache_k + (b * S * G + g) * D
    value_base = cache_v + (b * S * G + g) * V
    for j in range(split * span, last, BS):
        s = j + tl.arange(0, BS)
        in_use = s < last
        is_new = (s == count) & in_use
        keys_at = key_base + s[:, None].to(tl.int64) * (G * D) + d[None, :]
        keys = tl.load(keys_at, mask=(in_use & (s < count))[:, None] & in_d[None, :], other=0.0).to(tl.float32)
        values_at = value_base + s[:, None].to(tl.int64) * (G * V) + c[None, :]
        values = tl.load(values_at, mask=(in_use & (s < count))[:, None] & in_v[None, :], other=0.0).to(tl.float32)
        keys -= tl.sum(keys * w_t[None, :], 1)[:, None] * erase[None, :]
        keys = tl.where(is_new[:, None], k_t[None, :], keys)
        values = tl.where(is_new[:, None], v_t[None, :], values)
        tl.store(keys_at, keys.to(cache_k.dtype.element_ty), mask=in_use[:, None] & in_d[None, :])
        tl.store(values_at, values.to(cache_v.dtype.element_ty), mask=is_new[:, None] & in_v[None, :])
        x = tl.sum(keys[:, None, :] * q_t[None, :, :], 2)
        x = tl.where(in_use[:, None], x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 0))
        p = tl.exp2(x - m_new[None, :])
        decay = tl.exp2(m - m_new)
        l = l * decay + tl.sum(p, 0)
        o_t = o_t * decay[:, None] + tl.sum(p[:, :, None] * values[:, None, :], 0)
        m = m_new
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
