"""What surrounds the attention of one token of multi-head latent attention, up to the output map.

    c, r = norm(c), R_p r                  stored at slot p mod S of the cache;   p <- p + 1
    q_h = [W_k,h^T q_h, R_p q_h]           the query of c and r, from its K and R channels
    o_h = W_v,h z_h                        times sigmoid(gate) with GATE; z_h is the attention's result

`latent_token_kernel` computes the first two lines, kernels/latent.py the parts of z_h, and `latent_output_kernel` their
combination and the last line.

B rows, S slots, H heads, K key width, V value width, C latent width, R rotary width, P parts
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.attention.kernels.token import frequency_of, rotation_at
from deltazoo.backends.triton.device.overlap import start_next, wait_for_previous


class LatentTokenTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        H, K, V, C, R: sizes. BK, BC, BR: the powers of two from K, C and R on, BK and BC at least 16.
        ROWS, COLUMNS: rows and channels of c of a tile of queries, powers of two from 16 on.
        HEADS: heads whose R channels a program loads at a time, a power of two.
        Q_STRIDE, LATENT_STRIDE: elements from row to row.
        PAIRS: of channels of r that rotate, R / 2; 0: none. LOG_THETA: logarithm of the base of their frequencies.
        FACTOR, CONSTANT, PER_PAIR, PER_FREQUENCY, AMPLITUDE: of `ScaledFrequencies`, with SCALED.
        POSITIONS: whether the position is not the number of tokens before. EPS: of the norm.
        PREC: input precision of float32 products. OVERLAP: see device/overlap.py.
    """

    H: int
    K: int
    V: int
    C: int
    R: int
    BK: int
    BC: int
    BR: int
    ROWS: int
    COLUMNS: int
    HEADS: int
    Q_STRIDE: int
    LATENT_STRIDE: int
    PAIRS: int
    LOG_THETA: float
    SCALED: bool
    FACTOR: float
    CONSTANT: float
    PER_PAIR: float
    PER_FREQUENCY: float
    AMPLITUDE: float
    POSITIONS: bool
    EPS: float
    PREC: str
    OVERLAP: bool


@triton.jit
def load_pairs(x, h, in_h, stride, traits: tl.constexpr):
    """Return R channels of heads h [.., 1]: with PAIRS both halves, [.., BR / 2] each, else all [.., BR], twice."""
    P: tl.constexpr = traits.PAIRS
    WIDTH: tl.constexpr = traits.BR // 2 if P > 0 else traits.BR
    SIZE: tl.constexpr = P if P > 0 else traits.R
    i = tl.arange(0, WIDTH)[None, :]
    x += h * stride
    left = tl.load(x + i, mask=in_h & (i < SIZE), other=0.0)
    right = tl.load(x + P + i, mask=in_h & (i < SIZE), other=0.0)
    return left, right


@triton.jit
def store_rotated(pairs, y, h, in_h, stride, cos, sin, traits: tl.constexpr):
    """Store what `load_pairs` returned, after the rotation by cos and sin [BR / 2]."""
    P: tl.constexpr = traits.PAIRS
    y += h * stride
    left = pairs[0]
    right = pairs[1]
    i = tl.arange(0, left.shape[1])[None, :]
    if P > 0:
        mask = in_h & (i < P)
        left = left.to(tl.float32)
        right = right.to(tl.float32)
        turned = left * cos[None, :] - right * sin[None, :]
        tl.store(y + i, turned.to(y.dtype.element_ty), mask=mask)
        turned = right * cos[None, :] + left * sin[None, :]
        tl.store(y + P + i, turned.to(y.dtype.element_ty), mask=mask)
    else:
        tl.store(y + i, left, mask=in_h & (i < traits.R))


@triton.jit
def store_token(q, latent, norm_weight, position, cache, seen, query, S, early, traits: tl.constexpr):
    """Store c and r of a row in the cache and the R channels of its queries, and count the token."""
    H: tl.constexpr = traits.H
    K: tl.constexpr = traits.K
    C: tl.constexpr = traits.C
    R: tl.constexpr = traits.R
    P: tl.constexpr = traits.PAIRS
    HEADS: tl.constexpr = traits.HEADS
    b = tl.program_id(0).to(tl.int64)
    number = position if traits.POSITIONS else seen
    q += b * traits.Q_STRIDE
    latent += b * traits.LATENT_STRIDE
    query += b * (H * (C + R))
    c = tl.arange(0, traits.BC)
    one = tl.arange(0, 1)[:, None]
    cos = 1.0
    sin = 0.0
    if traits.OVERLAP:
        if early == 0:
            wait_for_previous()
    scale = tl.load(norm_weight + c, mask=c < C, other=0.0)
    if P > 0:
        frequency = frequency_of(tl.arange(0, traits.BR // 2), traits)
        guess = tl.load(number + b, cache_modifier=".cg")  # a kernel that has not ended may yet write it
        cos, sin = rotation_at(guess, frequency, traits)
    if traits.OVERLAP:
        wait_for_previous()
    # all loads before the first use: after a use the next load would wait for this one
    p = tl.load(number + b)
    before = tl.load(seen + b)
    y = tl.load(latent + c, mask=c < C, other=0.0)
    if R > 0:
        own = load_pairs(latent + C, one, one == 0, 0, traits)
        of_heads = ()
        for first in tl.static_range(0, H, HEADS):
            h = (first + tl.arange(0, HEADS))[:, None]
            of_heads = of_heads + (load_pairs(q + K, h, h < H, K + R, traits),)
    if P > 0:
        if p != guess:
            cos, sin = rotation_at(p, frequency, traits)
    cache += (b * S + before % S) * (C + R)
    y = y.to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, 0) / C + traits.EPS)
    y *= scale.to(tl.float32)
    tl.store(cache + c, y.to(cache.dtype.element_ty), mask=c < C)
    if R > 0:
        store_rotated(own, cache + C, one, one == 0, 0, cos, sin, traits)
        for first in tl.static_range(0, H, HEADS):
            h = (first + tl.arange(0, HEADS))[:, None]
            store_rotated(of_heads[first // HEADS], query + C, h, h < H, C + R, cos, sin, traits)
    tl.debug_barrier()  # after every thread has loaded the number
    tl.store(seen + b, before + 1)


@triton.jit
def map_queries(q, weight, query, B, early, traits: tl.constexpr):
    """Multiply W_k of a head into ROWS of its queries, for COLUMNS channels of c."""
    H: tl.constexpr = traits.H
    K: tl.constexpr = traits.K
    C: tl.constexpr = traits.C
    R: tl.constexpr = traits.R
    ROWS: tl.constexpr = traits.ROWS
    COLUMNS: tl.constexpr = traits.COLUMNS
    TILES: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    # a product of all K takes 32 KB of shared memory, which leaves too little for the attention to start on the same SM
    BLOCK: tl.constexpr = min(64, traits.BK)
    number = tl.program_id(0) - B
    h = number // TILES % H
    c = number % TILES * COLUMNS + tl.arange(0, COLUMNS)
    if traits.OVERLAP:
        if early == 0:
            wait_for_previous()
    weights = ()
    for start in tl.static_range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        at_weight = weight + (h * (K + traits.V) + k).to(tl.int64)[:, None] * C + c[None, :]
        weights = weights + (tl.load(at_weight, mask=(k < K)[:, None] & (c < C)[None, :], other=0.0),)
    if traits.OVERLAP:
        wait_for_previous()
    row = (number // (TILES * H) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    y = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.static_range(len(weights)):
        k = i * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(q + row * traits.Q_STRIDE + h * (K + R) + k[None, :], mask=(row < B) & (k < K)[None, :], other=0.0)
        y = tl.dot(x, weights[i], y, input_precision=traits.PREC)
    at = query + (row * H + h) * (C + R) + c[None, :]
    tl.store(at, y.to(query.dtype.element_ty), mask=(row < B) & (c < C)[None, :])


@triton.jit(do_not_specialize=["B", "S", "early"])
def latent_token_kernel(
    q, latent, norm_weight, weight, position, cache, seen, query, B, S, early, traits: tl.constexpr
):  # fmt: skip
    """Store the token in the cache, and compute the queries of its heads.

    Grid: rows; then blocks of ROWS rows x H x blocks of COLUMNS channels of c. Reads q [B, H (K + R)] and latent
    [B, C + R] with row strides, norm_weight [C], weight [H, K + V, C], position [B] int64. Updates cache [B, S, C + R]
    and seen [B] int64, the tokens before this one, in place. Writes query [B, H, C + R]. early: 1 if the weights may be
    loaded before the preceding kernel has ended; 0 if that kernel may have written them.
    """
    if traits.OVERLAP:
        start_next()
    if tl.program_id(0) < B:
        store_token(q, latent, norm_weight, position, cache, seen, query, S, early, traits)
    else:
        map_queries(q, weight, query, B, early, traits)


class LatentOutputTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        H, K, V, C: sizes. BLOCK: channels of c of a product, a power of two from 16 on. PARTS: P, a power of two.
        ROWS: rows of a program, a power of two up to 16. AT_ONCE: parts that it loads at a time, a power of two.
        COLUMNS: value channels of a program, a power of two from 16 on.
        GATE: 0: none; 1: one per head; V: one per channel. GATE_STRIDE: elements from row to row.
        OVERLAP: see device/overlap.py.
    """

    H: int
    K: int
    V: int
    C: int
    BLOCK: int
    PARTS: int
    ROWS: int
    AT_ONCE: int
    COLUMNS: int
    GATE: int
    GATE_STRIDE: int
    OVERLAP: bool


@triton.jit
def combine_rows(partial, lse, row, in_rows, traits: tl.constexpr):
    """Combine the parts of rows of [B H]. Returns blocks of C, [ROWS, BLOCK] each, float32; 0 for an empty cache."""
    C: tl.constexpr = traits.C
    P: tl.constexpr = traits.PARTS
    BLOCK: tl.constexpr = traits.BLOCK
    AT_ONCE: tl.constexpr = traits.AT_ONCE
    at_part = row[:, None] * P
    mask = in_rows[:, None]
    every = tl.load(lse + at_part + tl.arange(0, P)[None, :], mask=mask, other=float("-inf"))
    largest = tl.max(every, 1)[:, None]
    total = tl.sum(tl.where(every == float("-inf"), 0.0, tl.exp2(every - largest)), 1)[:, None]
    blocks = ()
    for first in tl.static_range(0, P, AT_ONCE):
        part = at_part + first + tl.arange(0, AT_ONCE)[None, :]
        of_part = tl.load(lse + part, mask=mask, other=float("-inf"))
        share = tl.where(of_part == float("-inf"), 0.0, tl.exp2(of_part - largest) / total)
        sums = ()
        for start in tl.static_range(0, C, BLOCK):
            c = start + tl.arange(0, BLOCK)[None, None, :]
            values = tl.load(partial + part[:, :, None] * C + c, mask=mask[:, :, None] & (c < C), other=0.0)
            z = tl.sum(values * share[:, :, None], 1)
            sums = sums + (z if first == 0 else z + blocks[start // BLOCK],)
        blocks = sums
    return blocks


@triton.jit(do_not_specialize=["B", "early"])
def latent_output_kernel(partial, lse, weight, gate, o, B, early, traits: tl.constexpr):
    """Combine the parts of ROWS rows of a head, and multiply COLUMNS rows of W_v.

    Grid: blocks of ROWS rows x H x blocks of COLUMNS channels. Reads partial [B, H, P, C], lse [B, H, P] and weight
    [H, K + V, C], with GATE gate [B, H GATE] with a row stride. Writes o [B, H V]. early: as for `latent_token_kernel`.
    """
    H: tl.constexpr = traits.H
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    C: tl.constexpr = traits.C
    ROWS: tl.constexpr = traits.ROWS
    BLOCK: tl.constexpr = traits.BLOCK
    COLUMNS: tl.constexpr = traits.COLUMNS
    TILES: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    REPEATED: tl.constexpr = 16 // ROWS  # a product needs 16 rows
    if traits.OVERLAP:
        start_next()
        if early == 0:
            wait_for_previous()
    h = tl.program_id(0) // TILES % H
    first = tl.program_id(0) // (TILES * H) * ROWS
    v = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    at_weight = weight + (h * (K + V) + K + v).to(tl.int64)[:, None] * C
    loaded = ()
    for start in tl.static_range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)[None, :]
        loaded = loaded + (tl.load(at_weight + c, mask=(v < V)[:, None] & (c < C), other=0.0),)
    if traits.OVERLAP:
        wait_for_previous()
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    blocks = combine_rows(partial, lse, row * H + h, row < B, traits)
    y = tl.zeros([16, COLUMNS], tl.float32)
    for start in tl.static_range(0, C, BLOCK):
        z = blocks[start // BLOCK].to(weight.dtype.element_ty)
        if REPEATED > 1:
            z = tl.reshape(tl.broadcast_to(z[None, :, :], [REPEATED, ROWS, BLOCK]), [16, BLOCK])
        y = tl.dot(z, tl.trans(loaded[start // BLOCK]), y, input_precision="ieee")
    i = tl.arange(0, 16)
    row = (first + i).to(tl.int64)[:, None]
    mask = ((i < ROWS)[:, None] & (row < B)) & (v < V)[None, :]
    if traits.GATE > 0:
        channel = h * traits.GATE + (v if traits.GATE > 1 else v * 0)
        raw = tl.load(gate + row * traits.GATE_STRIDE + channel[None, :], mask=mask, other=0.0)
        y *= tl.sigmoid(raw.to(tl.float32))
    tl.store(o + row * (H * V) + h * V + v[None, :], y.to(o.dtype.element_ty), mask=mask)
