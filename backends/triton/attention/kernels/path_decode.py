"""One token of PaTH attention: a query attends to cached keys, which the matrices of all later tokens multiply.

    o = sum_s softmax_s(scale k_s . H_(s+1) ... H_t q_t) v_s,    H_r = I - beta_r w_r w_r^T,    beta = 2 sigmoid(logit)

The matrices of the last p < C tokens are pending: they are stored, and no cached key has been multiplied by them. They
multiply the query instead, so that the keys are only read. Every C-th token multiplies all keys by the C matrices.

B batch, S slots, H query heads, G key-value heads, R = H / G, D key width, V value width
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.attention.kernels.path_tiles import LOG2E
from deltazoo.backends.triton.device.overlap import LINE, prefetch_line, start_next, wait_for_previous

NUMBERS: tl.constexpr = tl.constexpr(4)  # of a key that a thread loads: 16 bytes


class DecodeTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        H, G, D, V: sizes. BR, BD, BV: the powers of two from R, D and V on. BS: slots of a tile.
        C: the most pending matrices, at most BS.
        STAGES: of the software pipeline of the cache. PREFETCHED: tiles that are prefetched, with OVERLAP.
        Q, K, VALUES, W, LOGIT: elements from row to row of q, k, v, w and logit.
        SCALE: factor of the scores. OVERLAP: see device/overlap.py.
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
    PREFETCHED: int
    Q: int
    K: int
    VALUES: int
    W: int
    LOGIT: int
    SCALE: float
    OVERLAP: bool


@triton.jit
def load_move(moves, b, i, g, d, traits: tl.constexpr):
    """Load w and beta w of pending token i."""
    at = moves + ((b * traits.C + i) * traits.G + g) * (2 * traits.D) + d
    w = tl.load(at, mask=d < traits.D, other=0.0)
    return w, tl.load(at + traits.D, mask=d < traits.D, other=0.0)


@triton.jit
def counts_of(seen, pending, b, S, CACHE: tl.constexpr, traits: tl.constexpr):
    """Return the slots in use, and the pending tokens. CACHE: the modifier of the loads."""
    count = tl.minimum(tl.load(seen + b, cache_modifier=CACHE), S).to(tl.int32)
    waiting = tl.load(pending + b, cache_modifier=CACHE).to(tl.int32)
    waiting = tl.minimum(tl.maximum(waiting, 0), traits.C - 1)
    return count, tl.minimum(waiting, count)


@triton.jit
def bounds_of(split, splits, settled, BS: tl.constexpr):
    """Return the first slot of a split and the end of its slots; the `settled` ones have no pending matrix."""
    span = tl.cdiv(tl.cdiv(settled, splits), BS) * BS
    return split * span, tl.minimum((split + 1) * span, settled)


@triton.jit
def prefetch_rows(x, row, stride, WIDTH: tl.constexpr):
    """Prefetch rows of WIDTH numbers that are `stride` numbers apart."""
    SIZE: tl.constexpr = LINE // (x.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = triton.next_power_of_2((WIDTH + SIZE - 1) // SIZE)
    at = tl.minimum(tl.arange(0, LINES) * SIZE, WIDTH - 1)
    prefetch_line(x + row.to(tl.int64)[:, None] * stride + at[None, :])


@triton.jit
def add_tile(keys, values, in_use, query, m, l, o_t, BR: tl.constexpr):
    """Add a tile of slots to the softmax, and return its maximum, its sum and the unnormalised output."""
    if BR == 1:
        x = tl.where(in_use, tl.sum(keys * query, 1), float("-inf"))
        m_new = tl.maximum(m, x)
        p = tl.where(in_use, tl.exp2(x - m_new), 0.0)
        decay = tl.where(in_use, tl.exp2(m - m_new), 1.0)
        l = l * decay + p
        o_t = o_t * decay[:, None] + p[:, None] * values
    else:
        x = tl.where(in_use[:, None], tl.sum(keys[:, None, :] * query[None, :, :], 2), float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(x - shift[None, :])
        decay = tl.exp2(m - shift)
        l = l * decay + tl.sum(p, 0)
        o_t = o_t * decay[:, None] + tl.sum(p[:, :, None] * values[:, None, :], 0)
    return m_new, l, o_t


@triton.jit
def move_keys(keys, s, moves, b, g, waiting, w_t, erase, traits: tl.constexpr):
    """Multiply keys by the pending matrices of later tokens and by the new one. s: slots, 0: the first pending one."""
    d = tl.arange(0, traits.BD)
    for i in range(waiting):
        w_i, erase_i = load_move(moves, b, i, g, d, traits)
        keys -= tl.where(s < i, tl.sum(keys * w_i[None, :], 1), 0.0)[:, None] * erase_i[None, :]
    return keys - tl.sum(keys * w_t[None, :], 1)[:, None] * erase[None, :]


@triton.jit(do_not_specialize=["S", "splits"])
def path_decode_kernel(
    q, k, v, w, logit, real, seen, pending, cache_k, cache_v, moves, o, partial, S, splits, traits: tl.constexpr,
):  # fmt: skip
    """Append the new token of a row and head, and attend. The C-th pending matrix updates the cached keys.

    Grid: B x G x splits; each program has an equal part of the slots in use. Reads q [B, H D], k, w [B, G D],
    v [B, G V], logit [B, G]; real [B] bool, whether there is a token, or None; seen [B] int64, the slots in use;
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
    BC: tl.constexpr = triton.next_power_of_2(traits.C)
    PREFETCHED: tl.constexpr = traits.PREFETCHED
    if traits.OVERLAP:
        start_next()
    split = tl.program_id(0) % splits
    row = tl.cast(tl.program_id(0) // splits, tl.int64)  # b G + g
    b = row // G
    g = row % G
    key_base = cache_k + (b * S * G + g) * D
    value_base = cache_v + (b * S * G + g) * V
    if traits.OVERLAP:
        # kernels that have not ended may yet write the counts: these are guesses, and good enough for a prefetch
        count, waiting = counts_of(seen, pending, b, S, ".cg", traits)
        begin, stop = bounds_of(split, splits, count - waiting, BS)
        moved = tl.minimum(tl.arange(0, BC), traits.C - 1)
        prefetch_rows(moves + (b * traits.C * G + g) * (2 * D), moved, G * 2 * D, 2 * D)
        recent = tl.minimum(count - waiting + tl.arange(0, BC), tl.maximum(count - 1, 0))
        prefetch_rows(key_base, recent, G * D, D)
        prefetch_rows(value_base, recent, G * V, V)
        for tile in tl.static_range(PREFETCHED):
            s = tl.minimum(begin + tile * BS + tl.arange(0, BS), tl.maximum(stop - 1, 0))
            prefetch_rows(key_base, s, G * D, D)
            prefetch_rows(value_base, s, G * V, V)
        wait_for_previous()
    count, waiting = counts_of(seen, pending, b, S, "", traits)
    settled = count - waiting  # also the slot of the first pending token
    is_real = 1
    if real is not None:
        is_real = tl.load(real + b).to(tl.int32)
    settles = (waiting + is_real) == traits.C
    is_first = split == 0
    d = tl.arange(0, traits.BD)
    in_d = d < D
    c = tl.arange(0, BV) // NUMBERS * NUMBERS + tl.arange(0, BV) % NUMBERS  # threads load as many as of a key
    in_v = c < V
    r = tl.arange(0, BR)
    h = g * R + r
    w_t = tl.load(w + b * traits.W + g * D + d, mask=in_d, other=0.0).to(tl.float32)
    k_t = tl.load(k + b * traits.K + g * D + d, mask=in_d, other=0.0).to(tl.float32)
    v_t = tl.load(v + b * traits.VALUES + g * V + c, mask=in_v, other=0.0).to(tl.float32)
    # a row without a token stores no keys: its w changes the query alone, whose result nobody reads
    erase = w_t * (2.0 * tl.sigmoid(tl.load(logit + b * traits.LOGIT + g).to(tl.float32)))
    q_at = q + b * traits.Q + h[:, None] * D + d[None, :]
    q_t = tl.load(q_at, mask=(r < R)[:, None] & in_d[None, :], other=0.0).to(tl.float32) * (traits.SCALE * LOG2E)
    if is_first & (is_real > 0):
        if not settles:
            at = moves + ((b * traits.C + waiting) * G + g) * (2 * D) + d
            tl.store(at, w_t, mask=in_d)
            tl.store(at + D, erase, mask=in_d)
    query = q_t - tl.sum(q_t * w_t[None, :], 1)[:, None] * erase[None, :]
    for done in range(waiting):
        w_i, erase_i = load_move(moves, b, waiting - 1 - done, g, d, traits)
        query -= tl.sum(query * w_i[None, :], 1)[:, None] * erase_i[None, :]
    if BR == 1:  # each slot of a tile has a softmax of its own, so that warps need not exchange numbers for each tile
        m = tl.full([BS], float("-inf"), tl.float32)
        l = tl.zeros([BS], tl.float32)
        o_t = tl.zeros([BS, BV], tl.float32)
    else:
        m = tl.full([BR], float("-inf"), tl.float32)
        l = tl.zeros([BR], tl.float32)
        o_t = tl.zeros([BR, BV], tl.float32)
    if is_first:  # keys of pending tokens are multiplied by the matrices of later tokens alone
        s = tl.arange(0, BS)
        is_pending = s < waiting
        is_new = (s == waiting) & (is_real > 0) & (count < S)
        keys_at = key_base + (settled + s)[:, None].to(tl.int64) * (G * D) + d[None, :]
        values_at = value_base + (settled + s)[:, None].to(tl.int64) * (G * V) + c[None, :]
        keys = tl.load(keys_at, mask=is_pending[:, None] & in_d[None, :], other=0.0).to(tl.float32)
        values = tl.load(values_at, mask=is_pending[:, None] & in_v[None, :], other=0.0).to(tl.float32)
        keys = move_keys(keys, s, moves, b, g, waiting, w_t, erase, traits)
        keys = tl.where(is_new[:, None], k_t[None, :], keys)
        values = tl.where(is_new[:, None], v_t[None, :], values)
        is_stored = is_new | (is_pending & settles)
        tl.store(keys_at, keys.to(cache_k.dtype.element_ty), mask=is_stored[:, None] & in_d[None, :])
        tl.store(values_at, values.to(cache_v.dtype.element_ty), mask=is_new[:, None] & in_v[None, :])
        m, l, o_t = add_tile(keys, values, is_pending | is_new, q_t, m, l, o_t, BR)
    begin, stop = bounds_of(split, splits, settled, BS)
    i = tl.arange(0, BS)
    for j in tl.range(begin, stop, BS, num_stages=traits.STAGES):
        s = j + i
        loads = s < stop
        keys_at = key_base + s[:, None].to(tl.int64) * (G * D) + d[None, :]
        values_at = value_base + s[:, None].to(tl.int64) * (G * V) + c[None, :]
        keys = tl.load(keys_at, mask=loads[:, None] & in_d[None, :], other=0.0).to(tl.float32)
        values = tl.load(values_at, mask=loads[:, None] & in_v[None, :], other=0.0).to(tl.float32)
        # masks and addresses of their own: those of the loads would take registers for each stage
        in_use = i < stop - j
        m, l, o_t = add_tile(keys, values, in_use, query, m, l, o_t, BR)
        if settles:
            n = j - settled + i
            keys = move_keys(keys, n, moves, b, g, waiting, w_t, erase, traits)
            at = key_base + settled.to(tl.int64) * (G * D) + n[:, None].to(tl.int64) * (G * D) + d[None, :]
            tl.store(at, keys.to(cache_k.dtype.element_ty), mask=in_use[:, None] & in_d[None, :])
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


@triton.jit(do_not_specialize=["B"])
def path_count_kernel(seen, pending, real, B, C: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr):
    """Count the new token of each row. Grid: ROWS rows. Updates seen and pending; other arguments as above."""
    if OVERLAP:
        start_next()
        wait_for_previous()
    b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_b = b < B
    added = 1
    if real is not None:
        added = tl.load(real + b, mask=in_b, other=0).to(tl.int64)
    tl.store(seen + b, tl.load(seen + b, mask=in_b, other=0) + added, mask=in_b)
    tl.store(pending + b, (tl.load(pending + b, mask=in_b, other=0) + added) % C, mask=in_b)


@triton.jit(do_not_specialize=["splits"])
def path_combine_kernel(
    partial, o, splits, V: tl.constexpr, BV: tl.constexpr, MOST: tl.constexpr, OVERLAP: tl.constexpr
):
    """Combine the parts of the attention of one query. Grid: B x H. MOST: a power of two >= splits."""
    if OVERLAP:
        start_next()
        wait_for_previous()
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
