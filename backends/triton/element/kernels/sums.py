"""Sums of partial gradients over the lanes and warps of a program.

Summed one by one, the tiles of GROUP tokens would take log2(lanes) shuffles each. `fold_lanes` exchanges half of the
tiles at each step: a lane then holds half as many tiles, each summed over twice as many lanes. At the end the lanes
hold the sums of different tokens. The axes of a tile are those of tile.py.
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.element.kernels.tile import tile_at


@triton.jit
def sum_thread_channels(xs, NUMBER: tl.constexpr):
    """Sum tiles over the channels of a thread."""
    sums = ()
    for i in tl.static_range(NUMBER):
        sums = sums + (tl.sum(xs[i], 2, keep_dims=True),)
    return sums


@triton.jit
def is_lower_lane(AXIS: tl.constexpr, STEP: tl.constexpr, traits: tl.constexpr):
    """Return whether the bit STEP, a power of two, of a lane's index along an axis (4: keys, 5: channels) is 0."""
    if AXIS == 4:
        return tl.arange(0, traits.TN)[None, None, None, None, :, None] & STEP == 0
    else:
        return tl.arange(0, traits.TC)[None, None, None, None, None, :] & STEP == 0


@triton.jit
def exchange(x, AXIS: tl.constexpr, STEP: tl.constexpr):
    """Return the x of the lane whose index along an axis differs in bit STEP.

    x ^ (x ^ y) = y: the exclusive or of a pair of lanes compiles to one shuffle, and the compiler removes both xors.
    """
    bits = x.to(tl.int32, bitcast=True)
    ROWS: tl.constexpr = x.shape[0] * x.shape[1] * x.shape[2] * x.shape[3]
    shape: tl.constexpr = (
        (ROWS, x.shape[4] // (2 * STEP), 2, STEP * x.shape[5])
        if AXIS == 4
        else (ROWS * x.shape[4], x.shape[5] // (2 * STEP), 2, STEP)
    )
    pairs = tl.reshape(bits, shape)
    other = tl.reshape(pairs ^ tl.xor_sum(pairs, 2, keep_dims=True), x.shape)
    return other.to(tl.float32, bitcast=True)


@triton.jit
def fold_lanes(xs, NUMBER: tl.constexpr, FIRST: tl.constexpr, AXIS: tl.constexpr, traits: tl.constexpr):
    """Sum each of NUMBER tiles over the lanes along an axis; FIRST adjacent lanes have different tiles already.

    At each step a lane keeps half of its tiles, sends the others to its partner, and adds those that it receives, so
    that the number of tiles halves. If one tile is left before all lanes are summed, `sum_lanes` completes the sum.
    """
    LANES: tl.constexpr = traits.TN if AXIS == 4 else traits.TC
    for level in tl.static_range(5):
        if (FIRST << level) < LANES and (NUMBER >> level) > 1:
            is_first = is_lower_lane(AXIS, FIRST << level, traits)
            folded = ()
            for i in tl.static_range(NUMBER >> (level + 1)):
                kept = tl.where(is_first, xs[2 * i], xs[2 * i + 1])
                sent = tl.where(is_first, xs[2 * i + 1], xs[2 * i])
                folded = folded + (kept + exchange(sent, AXIS, FIRST << level),)
            xs = folded
    return xs


@triton.jit
def sum_lanes(x, FIRST: tl.constexpr, AXIS: tl.constexpr, traits: tl.constexpr):
    """Sum a tile over the lanes along an axis, except over FIRST adjacent lanes, which have different tiles."""
    LANES: tl.constexpr = traits.TN if AXIS == 4 else traits.TC
    for level in tl.static_range(5):
        if (FIRST << level) < LANES:
            x += exchange(x, AXIS, FIRST << level)
    return x


@triton.jit
def store_folded_rows(
    base, xs, factor, t, STRIDE: tl.constexpr, offsets, mask, AXIS: tl.constexpr, LENGTH: tl.constexpr,
    traits: tl.constexpr,
):  # fmt: skip
    """Store factor times the rows of GROUP tokens. xs: from `fold_lanes`; each lane along the keys stores one token."""
    TN: tl.constexpr = traits.TN
    TOKENS: tl.constexpr = min(traits.TN, traits.GROUP)
    tn = tl.arange(0, TN)[None, None, None, None, :, None]
    for j in tl.static_range(traits.GROUP // TOKENS):
        token = j * TOKENS + tn
        at = tile_at(base + tl.cast(t, tl.int64) * STRIDE, offsets + token * STRIDE, AXIS, LENGTH)
        x = sum_lanes(xs[j], TOKENS, 4, traits) * factor
        tl.store(at, x.to(base.dtype.element_ty), mask=mask & (tn < TOKENS))


@triton.jit
def store_folded_keys(scratch, d_qs, d_ks, group, traits: tl.constexpr):
    """Store the d_q and d_k of GROUP tokens from the channels of each warp; `sum_warps` adds those of the warps.

    d_qs, d_ks: from `fold_lanes` over the lanes along the channels. group: the number of the group in its interval.
    scratch: [W, CHECKPOINT_TOKENS / GROUP, 2, GROUP, RN TN]. If there are more lanes than tokens, some lanes store d_q,
    others d_k.
    """
    KP: tl.constexpr = traits.RN * traits.TN
    TOKENS: tl.constexpr = min(traits.TC, traits.GROUP)
    SIZE: tl.constexpr = 2 * traits.CHECKPOINT_TOKENS * KP
    rn = tl.arange(0, traits.RN)[:, None, None, None, None, None]
    w = tl.arange(0, traits.W)[None, None, None, :, None, None]
    tn = tl.arange(0, traits.TN)[None, None, None, None, :, None]
    tc = tl.arange(0, traits.TC)[None, None, None, None, None, :]
    offsets = w * SIZE + tn * traits.RN + rn + group * (2 * traits.GROUP * KP)
    if TOKENS < traits.TC:
        x = sum_lanes(fold_lanes((d_qs[0], d_ks[0]), 2, TOKENS, 5, traits)[0], 2 * TOKENS, 5, traits)
        tl.store(tile_at(scratch, offsets + tc * KP, 0, traits.RN), x, mask=tc < 2 * TOKENS)
    else:
        for j in tl.static_range(traits.GROUP // TOKENS):
            at = offsets + (j * TOKENS + tc) * KP
            tl.store(tile_at(scratch, at, 0, traits.RN), d_qs[j])
            tl.store(tile_at(scratch, at + traits.GROUP * KP, 0, traits.RN), d_ks[j])


@triton.jit
def sum_warps(scratch, d_q, d_k, t, last, rows, block, h, traits: tl.constexpr):
    """Sum the d_q and d_k that the warps stored for CHECKPOINT_TOKENS tokens from t on, up to token `last` - 1.

    Writes the sums of a block of channels to d_q, d_k [blocks, rows, H, K].
    """
    KP: tl.constexpr = traits.RN * traits.TN
    SIZE: tl.constexpr = 2 * traits.CHECKPOINT_TOKENS * KP
    BATCH: tl.constexpr = min(SIZE, 1024)  # elements per iteration, so that they fit the registers
    VECTOR: tl.constexpr = 4 if traits.K % 4 == 0 else 1
    for batch in range(SIZE // BATCH):
        element = batch * BATCH + tl.arange(0, BATCH)
        n = element % KP
        token = element // (2 * traits.GROUP * KP) * traits.GROUP + element // KP % traits.GROUP
        x = tl.sum(tl.load(scratch + tl.arange(0, traits.W)[:, None] * SIZE + element[None, :]), 0)
        row = (block * tl.cast(rows, tl.int64) + t + token) * traits.H + h
        base = tl.where(element // (traits.GROUP * KP) % 2 == 0, d_q, d_k)
        at = tl.max_contiguous(tl.multiple_of(base + row * traits.K + n, 4 * VECTOR), VECTOR)
        tl.store(at, x, mask=(n < traits.K) & (t + token < last))
