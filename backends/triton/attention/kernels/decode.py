"""One query per sequence over a cache: programs for parts of the keys, then a kernel that combines their results.

    part p:    m = max_s x_s,    lse = m + log2 sum_s 2^(x_s - m),    o_p = sum_s 2^(x_s - lse) v_s
    combined:  o = sum_p 2^(lse_p) o_p / sum_p 2^(lse_p)

with x_s = scale log2(e) q . k_s. Gates are channels of q and k.

The slots of a sequence are contiguous in a cache, or with PAGE > 0 in pages of a pool, which a table lists in order.

B batch, S slots, H query heads, G key-value heads, E key width, V value width, P parts, M pages per sequence
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.attention.kernels.online_softmax import add_scores
from deltazoo.backends.triton.attention.kernels.tiles import LOG2E
from deltazoo.backends.triton.device.overlap import LINE, prefetch_line, start_next, wait_for_previous


class DecodeTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        H, G, E, V: sizes. BE, BV: the powers of two from E and V on, at least 16.
        ROWS: the power of two from H / G on, at least 16. BN: keys of a tile. PARTS: P, a power of two.
        SCALE: factor of q . k. PREC: input precision of float32 products. OVERLAP: see device/overlap.py.
        PAGE: slots of a page, a multiple of BN; 0: the cache is not paged.
    """

    H: int
    G: int
    E: int
    V: int
    BE: int
    BV: int
    ROWS: int
    BN: int
    PARTS: int
    SCALE: float
    PREC: str
    OVERLAP: bool
    PAGE: int = 0


@triton.jit
def page_of(table, n, end, traits: tl.constexpr):
    """Return the page of slot n of a sequence; page 0, which no sequence has, from slot `end` on or without pages."""
    page = tl.cast(0, tl.int32)
    if traits.PAGE > 0:
        page = tl.load(table + n // traits.PAGE, mask=n < end, other=0)
    return page


@triton.jit
def first_row(page, n, traits: tl.constexpr):
    """Return the row of k and v of slot n, the first one of a tile: of the sequence, or with PAGE of the pool."""
    row = tl.cast(n, tl.int64)
    if traits.PAGE > 0:
        row = page.to(tl.int64) * traits.PAGE + n % traits.PAGE
    return row


@triton.jit
def bounds_of(part, end, traits: tl.constexpr):
    """Return the first slot of a part and the end of its slots; the tiles of `end` slots are spread over the parts."""
    tiles = tl.cdiv(end, traits.BN)
    stop = (part + 1) * tiles // traits.PARTS * traits.BN
    return part * tiles // traits.PARTS * traits.BN, tl.minimum(stop, end)


@triton.jit
def prefetch_tile(k, v, table, n, end, traits: tl.constexpr):
    """Prefetch the keys and values of the tile from slot n on into the L2 cache. Other arguments: of `attend_part`."""
    SIZE: tl.constexpr = k.dtype.element_ty.primitive_bitwidth // 8
    last = tl.maximum(end - 1, 0)
    n = tl.minimum(n, last)
    row = tl.minimum(n + tl.arange(0, traits.BN), last).to(tl.int64)
    if traits.PAGE > 0:
        row += (page_of(table, n, end, traits) - n // traits.PAGE).to(tl.int64) * traits.PAGE
    e = tl.arange(0, max(1, traits.BE * SIZE // LINE)) * (LINE // SIZE)
    c = tl.arange(0, max(1, traits.BV * SIZE // LINE)) * (LINE // SIZE)
    prefetch_line(k + row[:, None] * (traits.G * traits.E) + tl.minimum(e, traits.E - 1)[None, :])
    prefetch_line(v + row[:, None] * (traits.G * traits.V) + tl.minimum(c, traits.V - 1)[None, :])


@triton.jit
def attend_part(q_tile, k, v, table, partial, lse, row, part, end, traits: tl.constexpr):
    """Attend from the queries [ROWS, BE] of a key head to one part of its keys, and store the result.

    k, v: of the first slot of the sequence, or with PAGE of the pool. table: of the sequence [M] int32. row: the first
    query head in partial and lse. end: filled slots.
    """
    GROUP: tl.constexpr = traits.H // traits.G
    ROWS: tl.constexpr = traits.ROWS
    BN: tl.constexpr = traits.BN
    BV: tl.constexpr = traits.BV
    begin, stop = bounds_of(part, end, traits)
    i = tl.arange(0, ROWS)[:, None]
    e = tl.arange(0, traits.BE)[None, :]
    c = tl.arange(0, BV)[None, :]
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    o_tile = tl.zeros([ROWS, BV], tl.float32)
    page = page_of(table, begin, stop, traits)
    for n in range(begin, stop, BN):
        s = n + tl.arange(0, BN)
        at = (first_row(page, n, traits) + tl.arange(0, BN))[:, None] * traits.G
        page = page_of(table, n + BN, stop, traits)  # one tile ahead: its loads do not wait for the table
        k_tile = tl.load(k + at * traits.E + e, mask=(s < end)[:, None] & (e < traits.E), other=0.0)
        v_tile = tl.load(v + at * traits.V + c, mask=(s < end)[:, None] & (c < traits.V), other=0.0)
        x = tl.dot(q_tile, tl.trans(k_tile), input_precision=traits.PREC) * (traits.SCALE * LOG2E)
        x = tl.where((s < end)[None, :], x, float("-inf"))
        p, m, l, o_tile = add_scores(x, m, l, o_tile)
        o_tile = tl.dot(p.to(v_tile.dtype), v_tile, o_tile, input_precision=traits.PREC)
    o_tile *= tl.where(l == 0.0, 0.0, 1.0 / l)[:, None]
    at = (row + i) * traits.PARTS + part
    tl.store(partial + at * traits.V + c, o_tile, mask=(i < GROUP) & (c < traits.V))
    heads = tl.arange(0, ROWS)
    tl.store(lse + (row + heads) * traits.PARTS + part, m + tl.log2(l), mask=heads < GROUP)


@triton.jit
def attend_part_by_rows(q, k, v, table, partial, lse, row, part, end, traits: tl.constexpr):
    """Attend from one query [BE] in float32, without tensor cores; other arguments: of `attend_part`.

    Row i of the tiles has a softmax of its own, so that threads exchange nothing but q . k before the last tile.
    """
    BN: tl.constexpr = traits.BN
    BV: tl.constexpr = traits.BV
    e = tl.arange(0, traits.BE)[None, :]
    c = tl.arange(0, BV)[None, :]
    m = tl.full([BN], float("-inf"), tl.float32)
    l = tl.zeros([BN], tl.float32)
    o_tile = tl.zeros([BN, BV], tl.float32)
    begin, stop = bounds_of(part, end, traits)
    page = page_of(table, begin, stop, traits)
    for n in range(begin, stop, BN):
        filled = n + tl.arange(0, BN) < stop
        at = (first_row(page, n, traits) + tl.arange(0, BN))[:, None] * traits.G
        page = page_of(table, n + BN, stop, traits)
        k_tile = tl.load(k + at * traits.E + e, mask=filled[:, None] & (e < traits.E), other=0.0)
        v_tile = tl.load(v + at * traits.V + c, mask=filled[:, None] & (c < traits.V), other=0.0)
        x = tl.where(filled, tl.sum(q[None, :] * k_tile.to(tl.float32), 1) * (traits.SCALE * LOG2E), float("-inf"))
        m_new = tl.maximum(m, x)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(x - shift)
        decay = tl.exp2(m - shift)
        l = l * decay + p
        o_tile = o_tile * decay[:, None] + p[:, None] * v_tile.to(tl.float32)
        m = m_new
    largest = tl.max(m, 0)
    weight = tl.where(m == float("-inf"), 0.0, tl.exp2(m - largest))
    total = tl.sum(l * weight, 0)
    o = tl.sum(o_tile * weight[:, None], 0) * tl.where(total == 0.0, 0.0, 1.0 / total)
    channel = tl.arange(0, BV)
    at_part = row * traits.PARTS + part
    tl.store(partial + at_part * traits.V + channel, o, mask=channel < traits.V)
    tl.store(lse + at_part, largest + tl.log2(total))


@triton.jit(do_not_specialize=["S"])
def decode_attention_kernel(q, k, v, ends, partial, lse, S, traits: tl.constexpr):
    """Attend to one part of the keys of a sequence and key head, with all query heads of it.

    Grid: B x G x P. Reads q [B, H, E], k [B, S, G, E], v [B, S, G, V], ends [B] int64, the number of filled slots.
    Writes partial [B, H, P, V] and lse [B, H, P], float32.
    """
    GROUP: tl.constexpr = traits.H // traits.G
    if traits.OVERLAP:
        start_next()
        wait_for_previous()
    part = tl.program_id(0) % traits.PARTS
    g = tl.program_id(0) // traits.PARTS % traits.G
    b = tl.program_id(0) // (traits.PARTS * traits.G)
    end = tl.minimum(tl.load(ends + b), S).to(tl.int32)
    i = tl.arange(0, traits.ROWS)[:, None]
    e = tl.arange(0, traits.BE)[None, :]
    row = tl.cast(b, tl.int64) * traits.H + g * GROUP
    q_tile = tl.load(q + row * traits.E + i * traits.E + e, mask=(i < GROUP) & (e < traits.E), other=0.0)
    k += (tl.cast(b, tl.int64) * S * traits.G + g) * traits.E
    v += (tl.cast(b, tl.int64) * S * traits.G + g) * traits.V
    attend_part(q_tile, k, v, None, partial, lse, row, part, end, traits)


@triton.jit
def combine_parts(partial, lse, row, traits: tl.constexpr):
    """Combine the parts of head `row` of all rows' heads. Returns [BV] float32; 0 for an empty cache."""
    part = tl.arange(0, traits.PARTS)
    c = tl.arange(0, traits.BV)[None, :]
    of_part = tl.load(lse + row * traits.PARTS + part)
    largest = tl.max(of_part, 0)
    weight = tl.where(of_part == float("-inf"), 0.0, tl.exp2(of_part - largest))
    total = tl.sum(weight, 0)
    at = (row * traits.PARTS + part[:, None]) * traits.V + c
    values = tl.load(partial + at, mask=c < traits.V, other=0.0)
    return tl.sum(values * weight[:, None], 0) * tl.where(total == 0.0, 0.0, 1.0 / total)


@triton.jit
def combine_parts_kernel(partial, lse, o, traits: tl.constexpr):
    """Combine the parts of a head. Grid: B x H. Reads partial and lse. Writes o [B, H, V]."""
    if traits.OVERLAP:
        start_next()
        wait_for_previous()
    row = tl.cast(tl.program_id(0), tl.int64)
    channel = tl.arange(0, traits.BV)
    tl.store(o + row * traits.V + channel, combine_parts(partial, lse, row, traits), mask=channel < traits.V)
