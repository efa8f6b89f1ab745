"""Attention of one token per sequence: norm and rotation of its q and k, its place in the cache, and the attention.

    q, k = norm(q), norm(k)                                 RMS norm of each head, with NORM
    q, k = R_p q, R_p k                                     rotation of the pairs of channels i and i + PAIRS
    cache: k, v at slot p mod S, with PAGE that of the sequence's pages;   p <- p + 1
    o = softmax attention to the filled slots, times sigmoid(gate) with GATE

Programs for parts of the keys, each of which computes q, then a kernel that combines their results; see decode.py.

B batch, S slots, H query heads, G key-value heads, E head width, P parts
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.attention.kernels.decode import (
    attend_part,
    attend_part_by_rows,
    bounds_of,
    combine_parts,
    first_row,
    page_of,
    prefetch_tile,
)
from deltazoo.backends.triton.device.overlap import start_next, wait_for_previous
from deltazoo.backends.triton.rotary.kernels import angle_units, cos_sin


class TokenTraits(NamedTuple):
    """Compile-time parameters; those of `DecodeTraits`, with V = E, and:

    Args:
        QKV_STRIDE, GATE_STRIDE: elements from row to row of qkv and gate.
        PAIRS: of channels that rotate; 0: none. LOG_THETA: logarithm of the base of their frequencies.
        FACTOR, CONSTANT, PER_PAIR, PER_FREQUENCY, AMPLITUDE: of `ScaledFrequencies`, with SCALED.
        NORM, EPS: of q and k. GATE: whether there is one.
        HEADS: a power of two from H / G on. ROWS: 1 if H = G, for `attend_part_by_rows`.
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
    QKV_STRIDE: int
    GATE_STRIDE: int
    PAIRS: int
    LOG_THETA: float
    SCALED: bool
    FACTOR: float
    CONSTANT: float
    PER_PAIR: float
    PER_FREQUENCY: float
    AMPLITUDE: float
    NORM: bool
    EPS: float
    GATE: bool
    PAGE: int
    HEADS: int


@triton.jit
def frequency_of(pair, traits: tl.constexpr):
    """Return the angle per token of a pair of channels, in float64."""
    frequency = tl.exp(pair.to(tl.float64) * (-traits.LOG_THETA / traits.PAIRS))
    if traits.SCALED:
        kept = traits.CONSTANT + traits.PER_PAIR * pair.to(tl.float64) + traits.PER_FREQUENCY * frequency
        kept = tl.minimum(tl.maximum(kept, 0.0), 1.0)
        frequency *= kept + (1.0 - kept) / traits.FACTOR
    return frequency


@triton.jit
def load_heads(x, weight, i, in_heads, cos, sin, traits: tl.constexpr):
    """Load heads [.., BE] of x after norm and rotation, in float32. i: their indices. cos, sin: of their channels."""
    R: tl.constexpr = traits.PAIRS
    e = tl.arange(0, traits.BE)[None, :]
    mask = in_heads & (e < traits.E)
    y = tl.load(x + i * traits.E + e, mask=mask, other=0.0).to(tl.float32)
    factor = 1.0
    if traits.NORM:
        factor = tl.rsqrt(tl.sum(y * y, 1) / traits.E + traits.EPS)[:, None]
        y *= factor * tl.load(weight + e, mask=e < traits.E, other=0.0).to(tl.float32)
    if R > 0:
        partner = tl.where(e < R, e + R, e - R)
        rotates = e < 2 * R
        other = tl.load(x + i * traits.E + partner, mask=mask & rotates, other=0.0).to(tl.float32)
        if traits.NORM:
            other *= factor * tl.load(weight + partner, mask=rotates, other=0.0).to(tl.float32)
        y = tl.where(rotates, y * cos + tl.where(e < R, -other, other) * sin, y)
    return y


@triton.jit
def rotation_at(position, frequency, traits: tl.constexpr):
    """Return cosine and sine of the angles of a position, times AMPLITUDE."""
    cos, sin = cos_sin(angle_units(position.to(tl.float64) * frequency))
    return cos * traits.AMPLITUDE, sin * traits.AMPLITUDE


@triton.jit
def filled(before, table, S, traits: tl.constexpr):
    """Return the slots that hold tokens with the new one; 0 for a row without pages."""
    end = tl.minimum(before + 1, S).to(tl.int32)
    if traits.PAGE > 0:
        end = tl.where(tl.load(table, cache_modifier=".cg") > 0, end, 0)
    return end


@triton.jit(do_not_specialize=["S"])
def token_attention_kernel(
    qkv, q_weight, k_weight, k, v, table, position, partial, lse, S, traits: tl.constexpr,
):  # fmt: skip
    """Attend to one part of the keys of a sequence and key head, with all query heads of it.

    Grid: B x G x P. Reads qkv [B, (H + 2 G) E], with NORM weights [E], position [B] int64. The program whose part has
    the token's slot stores its key and value in k, v [B, S, G, E]. Writes partial [B, H, P, E] and lse [B, H, P],
    float32.

    With PAGE k, v are [pages, PAGE, G, E], and table [B, S / PAGE] int32 lists the pages of each row; page 0 is none. A
    row without pages stores nothing, and its output is 0.
    """
    H: tl.constexpr = traits.H
    G: tl.constexpr = traits.G
    E: tl.constexpr = traits.E
    R: tl.constexpr = traits.PAIRS
    GROUP: tl.constexpr = H // G
    if traits.OVERLAP:
        start_next()
    part = tl.program_id(0) % traits.PARTS
    g = tl.program_id(0) // traits.PARTS % G
    b = tl.cast(tl.program_id(0) // (traits.PARTS * G), tl.int64)
    e = tl.arange(0, traits.BE)[None, :]
    frequency = frequency_of(tl.where(e < R, e, e - R), traits) if R > 0 else 0.0
    start = tl.cast(0, tl.int64) if traits.PAGE > 0 else b * S
    k += (start * G + g) * E
    v += (start * G + g) * E
    if traits.PAGE > 0:
        table += b * (S // traits.PAGE)
    before = tl.load(position + b, cache_modifier=".cg")
    cos = 1.0
    sin = 0.0
    if R > 0:
        cos, sin = rotation_at(before, frequency, traits)
    if traits.OVERLAP:
        # A kernel that has not ended may yet write the position: the one above is a guess, which is wrong if one of the
        # last kernels counted a token of the same cache.
        begin, stop = bounds_of(part, filled(before, table, S, traits), traits)
        prefetch_tile(k, v, table, begin, stop, traits)
        wait_for_previous()
        guess = before
        before = tl.load(position + b)
        if R > 0:
            if before != guess:
                cos, sin = rotation_at(before, frequency, traits)
    end = filled(before, table, S, traits)
    slot = (before % S).to(tl.int32)
    qkv += b * traits.QKV_STRIDE
    i = tl.arange(0, traits.HEADS)[:, None]
    heads = load_heads(qkv + g * GROUP * E, q_weight, i, i < GROUP, cos, sin, traits).to(k.dtype.element_ty)
    one = tl.arange(0, 1)[:, None]
    k_new = load_heads(qkv + (H + g) * E, k_weight, one, one == 0, cos, sin, traits).to(k.dtype.element_ty)
    begin, stop = bounds_of(part, end, traits)
    if (slot >= begin) & (slot < stop):
        v_new = tl.load(qkv + (H + G + g) * E + e, mask=e < E, other=0.0)
        at = first_row(page_of(table, slot, end, traits), slot, traits) * G * E + e
        tl.store(k + at, k_new, mask=e < E)
        tl.store(v + at, v_new.to(v.dtype.element_ty), mask=e < E)
    tl.debug_barrier()  # other threads of the program read what one has stored
    if traits.ROWS == 1:
        query = tl.sum(heads.to(tl.float32), 0)  # the rows after the first are 0
        attend_part_by_rows(query, k, v, table, partial, lse, b * H + g, part, end, traits)
    else:  # tensor cores need ROWS queries: the heads are repeated
        copies = tl.broadcast_to(heads[None, :, :], [traits.ROWS // traits.HEADS, traits.HEADS, traits.BE])
        q_tile = tl.reshape(copies, [traits.ROWS, traits.BE])
        attend_part(q_tile, k, v, table, partial, lse, b * H + g * GROUP, part, end, traits)


@triton.jit
def combine_token_kernel(partial, lse, gate, position, o, traits: tl.constexpr):
    """Combine the parts of a head, apply its gate, and count the token.

    Grid: B x H. Reads partial, lse, with GATE gate [B, H E]. Increments position [B]. Writes o [B, H E].
    """
    H: tl.constexpr = traits.H
    if traits.OVERLAP:
        start_next()
        wait_for_previous()
    row = tl.cast(tl.program_id(0), tl.int64)
    b = row // H
    h = row % H
    channel = tl.arange(0, traits.BV)
    in_head = channel < traits.E
    y = combine_parts(partial, lse, row, traits)
    if traits.GATE:
        raw = tl.load(gate + b * traits.GATE_STRIDE + h * traits.E + channel, mask=in_head, other=0.0)
        y *= tl.sigmoid(raw.to(tl.float32))
    tl.store(o + row * traits.E + channel, y.to(o.dtype.element_ty), mask=in_head)
    if h == 0:
        tl.store(position + b, tl.load(position + b) + 1)
