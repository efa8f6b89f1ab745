"""Attention of new tokens over a paged cache: a kernel that stores their keys and values, then one that attends.

    the key of position p of sequence n is in page table[n, p // PAGE], slot p % PAGE
    o_t = sum_(s <= t) softmax_s(scale q_t . k_s) v_s

A tile holds TOKENS consecutive tokens of a sequence, each with all query heads of a key head, which so read a key once.
With PARTS > 1 programs attend to parts of the keys, and `combine_parts_kernel` combines their results. Page 0 is none:
tokens whose position has no page are not stored, and no query sees them.

T tokens of the call, H query heads, G key-value heads, E key width, V value width, N sequences, M pages of a sequence,
P parts
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.attention.kernels.decode import first_row, page_of
from deltazoo.backends.triton.attention.kernels.forward import update_softmax
from deltazoo.backends.triton.attention.kernels.tiles import LOG2E
from deltazoo.backends.triton.device.layout import find_sequence, first_chunk_slot, sequence_bounds


class PagedTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        H, G, E, V: sizes. BE, BV: the powers of two from E and V on, at least 16.
        GROUP: the smallest power of two >= H / G. TOKENS: of a tile; TOKENS x GROUP is at least 16.
        BN: keys of a tile. PAGE: slots of a page, a multiple of BN. PARTS: P, a power of two.
        SCALE: factor of q . k. UNIT: a number by which all strides are divisible, for wide loads.
        PACKED: sequences are those of a pack, not the rows of the batch. PREC: input precision of float32 products.
        OVERLAP: see device/overlap.py; for the kernel that combines the parts.
    """

    H: int
    G: int
    E: int
    V: int
    BE: int
    BV: int
    GROUP: int
    TOKENS: int
    BN: int
    PAGE: int
    PARTS: int
    SCALE: float
    UNIT: int
    PACKED: bool
    PREC: str
    OVERLAP: bool


@triton.jit
def locate_tile(slot, cu, counts, T, N, traits: tl.constexpr):
    """Return the sequence of a tile, its first token in the call, its real tokens, and the tile's offset among them."""
    C: tl.constexpr = traits.TOKENS
    n = find_sequence(slot, cu, N, 1, 0, C) if traits.PACKED else slot // tl.cdiv(T, C)
    start, length = sequence_bounds(n, cu, T, traits.PACKED)
    if counts is not None:
        length = tl.minimum(tl.load(counts + n), length).to(tl.int32)
    return n, start, length, (slot - first_chunk_slot(n, cu, T, C, traits.PACKED)) * C


@triton.jit(do_not_specialize=["T", "N", "M", "slots", "k_stride", "v_stride"])
def store_pages_kernel(
    k, v, k_pages, v_pages, table, before, counts, cu, T, N, M, slots, k_stride, v_stride, traits: tl.constexpr,
):  # fmt: skip
    """Store the keys and values of a tile of tokens.

    Grid: G x slots. Reads k [.., T, G E], v [.., T, G V], table [N, M] int32, before [N] int64, counts [N] int64, the
    real tokens of each row, or None: all are. Writes k_pages [pages, PAGE, G, E] and v_pages [pages, PAGE, G, V].
    """
    E: tl.constexpr = traits.E
    V: tl.constexpr = traits.V
    g = tl.program_id(0) // slots
    n, start, length, begin = locate_tile(tl.program_id(0) % slots, cu, counts, T, N, traits)
    if begin < length:
        token = begin + tl.arange(0, traits.TOKENS)
        e = tl.arange(0, traits.BE)[None, :]
        c = tl.arange(0, traits.BV)[None, :]
        position = tl.load(before + n) + token
        known = (token < length) & (position < M * traits.PAGE)
        page = tl.load(table + tl.cast(n, tl.int64) * M + position // traits.PAGE, mask=known, other=0)
        stored = (page > 0)[:, None]
        row = (page.to(tl.int64) * traits.PAGE + position % traits.PAGE)[:, None] * traits.G + g
        source = (start + token)[:, None]
        k_tile = tl.load(k + source * (k_stride * traits.UNIT) + g * E + e, mask=stored & (e < E), other=0.0)
        v_tile = tl.load(v + source * (v_stride * traits.UNIT) + g * V + c, mask=stored & (c < V), other=0.0)
        tl.store(k_pages + row * E + e, k_tile, mask=stored & (e < E))
        tl.store(v_pages + row * V + c, v_tile, mask=stored & (c < V))


@triton.jit(do_not_specialize=["T", "N", "M", "slots", "q_stride"])
def paged_attention_kernel(
    q, k_pages, v_pages, table, before, counts, cu, o, partial, lse, T, N, M, slots, q_stride, traits: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of tokens, with the query heads of a key head, to a part of the keys up to each token.

    Grid: slots x G x P, the tiles with most keys first. Reads q [.., T, H E], k_pages [pages, PAGE, G, E], v_pages
    [pages, PAGE, G, V], table [N, M] int32, before and counts [N] int64. Writes o [.., T, H, V], or with PARTS > 1
    partial [.., T, H, P, V] and lse [.., T, H, P], float32.
    """
    H: tl.constexpr = traits.H
    G: tl.constexpr = traits.G
    E: tl.constexpr = traits.E
    V: tl.constexpr = traits.V
    BN: tl.constexpr = traits.BN
    BV: tl.constexpr = traits.BV
    ROWS: tl.constexpr = traits.TOKENS * traits.GROUP
    part = tl.program_id(0) % traits.PARTS
    g = tl.program_id(0) // traits.PARTS % G
    slot = slots - 1 - tl.program_id(0) // (traits.PARTS * G)
    n, start, length, begin = locate_tile(slot, cu, counts, T, N, traits)
    if begin < length:
        table += tl.cast(n, tl.int64) * M
        first = tl.load(before + n).to(tl.int32) + begin
        end = tl.minimum(first + tl.minimum(traits.TOKENS, length - begin), M * traits.PAGE)
        end = tl.where(tl.load(table) > 0, end, 0)
        i = tl.arange(0, ROWS)
        e = tl.arange(0, traits.BE)[None, :]
        c = tl.arange(0, BV)[None, :]
        token = i // traits.GROUP
        head = g * (H // G) + i % traits.GROUP
        in_rows = (begin + token < length) & (i % traits.GROUP < H // G)
        row = start + begin + token
        q_mask = in_rows[:, None] & (e < E)
        q_tile = tl.load(q + row[:, None] * (q_stride * traits.UNIT) + head[:, None] * E + e, mask=q_mask, other=0.0)
        k_pages += g * E
        v_pages += g * V
        t = first + token[:, None]
        keys = tl.cdiv(tl.cdiv(end, BN), traits.PARTS) * BN  # of a part
        stop = tl.minimum((part + 1) * keys, end)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        o_tile = tl.zeros([ROWS, BV], tl.float32)
        page = page_of(table, part * keys, stop, traits)
        for at in range(part * keys, stop, BN):
            s = at + tl.arange(0, BN)
            filled = (s < stop) & (page > 0)
            slot_row = (first_row(page, at, traits) + tl.arange(0, BN))[:, None] * G
            page = page_of(table, at + BN, stop, traits)  # one tile ahead: its loads do not wait for the table
            k_tile = tl.load(k_pages + slot_row * E + e, mask=filled[:, None] & (e < E), other=0.0)
            products = tl.dot(q_tile, tl.trans(k_tile), input_precision=traits.PREC)
            x = tl.where((s[None, :] <= t) & filled[None, :], products * (traits.SCALE * LOG2E), float("-inf"))
            v_tile = tl.load(v_pages + slot_row * V + c, mask=filled[:, None] & (c < V), other=0.0)
            o_tile, m, l = update_softmax(o_tile, m, l, x, 0.0, v_tile, traits)
        o_tile *= tl.where(l == 0.0, 0.0, 1.0 / l)[:, None]
        at_head = row * H + head
        mask = in_rows[:, None] & (c < V)
        if traits.PARTS == 1:
            tl.store(o + at_head[:, None] * V + c, o_tile.to(o.dtype.element_ty), mask=mask)
        else:
            tl.store(partial + (at_head[:, None] * traits.PARTS + part) * V + c, o_tile, mask=mask)
            tl.store(lse + at_head * traits.PARTS + part, m + tl.log2(l), mask=in_rows)
