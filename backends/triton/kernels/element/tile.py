"""Tiles of the elementwise kernels: which element of the state each thread owns, and where its operands are.

A program owns the states [K, V] of BC channels (value heads) as one tile with the axes

    [RN, VP, RC, W, TN, TC]        key n = tn RN + rn,  value vi,  channel (w TC + tc) RC + rc

Triton distributes a tile from its last axis on: TN TC = 32 are the lanes of a warp, W the warps, and the other axes are
the registers of a thread. So a sum over the keys or the channels is mostly a sum over registers of a thread, and lanes
read adjacent channels. Operands without one of the axes have size 1 there.

If G = HV / H channels share a key head (SHARED) a program owns channels of one key head, and loads q and k once for all
of them; else q and k are loaded per channel.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class ElementTraits(NamedTuple):
    """Compile-time properties of a launch."""

    H: int
    HV: int
    K: int
    V: int
    RN: int  # keys per thread
    TN: int  # lanes along the keys
    VP: int  # V, rounded up to a power of two
    RC: int  # channels per thread
    TC: int  # lanes along the channels
    W: int  # warps
    BC: int  # channels of a program, RC W TC
    BLOCKS: int  # blocks of channels; of all key heads, if a block has one key head
    SHARED: bool  # channels of a program share one key head
    DECAY: str  # none, fixed [HV], fixed_channel [HV, K], head, channel or rate
    READ_EARLY: bool
    PACKED: bool
    EVERY: int  # tokens between checkpoints; 0: none
    SPLIT: int  # tokens per segment; 0: the sequence is one segment
    GROUP: int  # tokens whose operands are loaded at once; the backward keeps their states in registers
    KEYS: int  # keys of a thread that are contiguous and aligned in an operand [.., K]; 1: not known
    CHANNELS: int  # the same of channels in an operand [.., HV], if V is 1
    LOADED_BY_ALL: bool = False  # every warp and lane loads operands without the axes W, TN or TC
    KEY_GRADIENTS: bool = False  # the backward computes d_q and d_k


@triton.jit
def locate_tile(traits: tl.constexpr):
    """Return what a program owns: keys, values, channels and key heads, each with its mask, and the block's number.

    Programs with adjacent channels are adjacent in the grid, so that they read the same keys at about the same time.
    Returns: n [RN, 1, 1, 1, TN, 1]; vi [1, VP, 1, 1, 1, 1]; hv [1, 1, RC, W, 1, TC]; h, a number or like hv; the masks
        of n, vi and hv; the number of the block among those of its key head.
    """
    G: tl.constexpr = traits.HV // traits.H
    rn = tl.arange(0, traits.RN)[:, None, None, None, None, None]
    tn = tl.arange(0, traits.TN)[None, None, None, None, :, None]
    vi = tl.arange(0, traits.VP)[None, :, None, None, None, None]
    rc = tl.arange(0, traits.RC)[None, None, :, None, None, None]
    w = tl.arange(0, traits.W)[None, None, None, :, None, None]
    tc = tl.arange(0, traits.TC)[None, None, None, None, None, :]
    n = tn * traits.RN + rn
    lane = (w * traits.TC + tc) * traits.RC + rc
    block = tl.program_id(0) % traits.BLOCKS
    if traits.SHARED:
        h = block // (traits.BLOCKS // traits.H)
        block = block % (traits.BLOCKS // traits.H)
        in_group = block * traits.BC + lane
        in_channels = in_group < G
        hv = h * G + in_group
    else:
        hv = block * traits.BC + lane
        in_channels = hv < traits.HV
        h = hv // G
    return n, vi, hv, h, n < traits.K, vi < traits.V, in_channels, block


@triton.jit
def locate_tokens(cu, T, N, segments, traits: tl.constexpr):
    """Return the sequence, its segment, the first token of the sequence, the tokens first to last - 1 of the segment,
    whether it is the last segment (the first is the last if the sequence is empty), and the first checkpoint slot.
    """
    index = tl.program_id(0) // traits.BLOCKS
    sequence = index // segments
    segment = index % segments
    if traits.PACKED:
        start = tl.load(cu + sequence)
        stop = tl.load(cu + sequence + 1)
    else:
        start = sequence * T
        stop = start + T
    first = start
    last = stop
    is_last = segment == 0
    if traits.SPLIT > 0:
        first = tl.minimum(start + segment * traits.SPLIT, stop)
        last = tl.minimum(first + traits.SPLIT, stop)
        is_last = (last == stop) & ((first < stop) | (segment == 0))
    slot = 0
    if traits.EVERY > 0:
        slot = sequence * ((T + traits.EVERY - 1) // traits.EVERY)
        if traits.PACKED:
            slot = start // traits.EVERY + sequence
    return sequence, segment, start, first, last, is_last, slot


@triton.jit
def tile_at(base, offsets, AXIS: tl.constexpr, LENGTH: tl.constexpr, SHAPE: tl.constexpr = None):
    """Pointers base + offsets of a tile, broadcast to SHAPE, with hints that its lanes are [TN, TC] and its warps W.

    LENGTH elements along AXIS (0 keys, 1 values, 2 channels) are contiguous and aligned, and a thread accesses them at
    once. Triton orders the axes of a load or store by their contiguity, and would choose another layout; the hints for
    the axes 3 to 5 only order them.
    """
    element: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    # a thread accesses at most 16 bytes at once; Triton would distribute more over lanes
    VECTOR: tl.constexpr = LENGTH if LENGTH * element <= 16 else 1
    size: tl.constexpr = element * VECTOR
    pointers = base + offsets
    if SHAPE is not None:
        pointers = tl.broadcast_to(pointers, SHAPE)
    pointers = tl.multiple_of(pointers, (size, size, size, size, size, size))
    if VECTOR == 1:
        return tl.max_contiguous(pointers, (1, 1, 1, 4, 8, 16))
    elif AXIS == 0:
        return tl.max_contiguous(pointers, (32, 1, 1, 4, 8, 16))
    elif AXIS == 1:
        return tl.max_contiguous(pointers, (1, 32, 1, 4, 8, 16))
    else:
        return tl.max_contiguous(pointers, (1, 1, 32, 4, 8, 16))


@triton.jit
def token_at(
    base, row, i: tl.constexpr, STRIDE: tl.constexpr, offsets, AXIS: tl.constexpr, LENGTH: tl.constexpr,
    SHAPE: tl.constexpr = None,
):  # fmt: skip
    """Pointers of token row + i, with STRIDE elements per token.

    i STRIDE is added last, as a 64-bit constant: it becomes a part of the instruction, and the tokens of a group share
    the pointers of the first.
    """
    return tile_at(base + row * STRIDE + offsets, tl.full([], i * STRIDE, tl.int64), AXIS, LENGTH, SHAPE)


@triton.jit
def load_token(
    base, row, i: tl.constexpr, STRIDE: tl.constexpr, offsets, mask, AXIS: tl.constexpr, LENGTH: tl.constexpr,
    traits: tl.constexpr,
):  # fmt: skip
    """Load a tile of token row + i, which has not all of the axes W, TN and TC.

    With LOADED_BY_ALL all warps and lanes load it: in the backward Triton would choose a layout with fewer elements per
    instruction, or exchange them through shared memory. The forward of wide keys is faster without.
    """
    SHAPE: tl.constexpr = (
        (offsets.shape[0], offsets.shape[1], offsets.shape[2], traits.W, traits.TN, traits.TC)
        if traits.LOADED_BY_ALL
        else offsets.shape
    )
    at = token_at(base, row, i, STRIDE, offsets, AXIS, LENGTH, SHAPE)
    return tl.load(at, mask=tl.broadcast_to(mask, SHAPE), other=0.0)


@triton.jit
def store_row(
    base, row, i: tl.constexpr, STRIDE: tl.constexpr, offsets, x, mask, AXIS: tl.constexpr, LENGTH: tl.constexpr,
    traits: tl.constexpr,
):  # fmt: skip
    """Store a row of channels [1, 1 or VP, RC, W, 1, TC]: of the lanes along the keys, one stores.

    The tile of pointers has all lanes, so that its layout is that of the states. The offset of the other lanes is not
    used; it keeps Triton from reducing the tile to one without this axis.
    """
    TN: tl.constexpr = traits.TN
    tn = tl.arange(0, TN)[None, None, None, None, :, None]
    at = token_at(base, row, i, STRIDE, offsets + tn, AXIS, LENGTH)
    tl.store(at, (x + tl.zeros_like(tn).to(tl.float32)).to(base.dtype.element_ty), mask=mask & (tn == 0))


@triton.jit
def store_folded_rows(
    base, xs, factor, t, STRIDE: tl.constexpr, offsets, mask, AXIS: tl.constexpr, LENGTH: tl.constexpr,
    traits: tl.constexpr,
):  # fmt: skip
    """Store factor times the rows of GROUP tokens, which `fold_lanes` has summed: each lane along the keys its own."""
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
    """Store d_q and d_k of GROUP tokens, summed by `fold_lanes` over the lanes along the channels, for `sum_warps`.

    scratch: [W, groups, 2, GROUP, RN TN]. If there are more lanes than tokens, some lanes have d_q, others d_k.
    """
    KP: tl.constexpr = traits.RN * traits.TN
    TOKENS: tl.constexpr = min(traits.TC, traits.GROUP)
    SIZE: tl.constexpr = 2 * traits.EVERY * KP
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
    """Sum what the warps stored of EVERY tokens from t on, and store a block's share: d_q, d_k [blocks, rows, H, K]."""
    KP: tl.constexpr = traits.RN * traits.TN
    SIZE: tl.constexpr = 2 * traits.EVERY * KP
    CHUNK: tl.constexpr = min(SIZE, 1024)  # what registers hold
    VECTOR: tl.constexpr = 4 if traits.K % 4 == 0 else 1
    for chunk in range(SIZE // CHUNK):
        element = chunk * CHUNK + tl.arange(0, CHUNK)
        n = element % KP
        token = element // (2 * traits.GROUP * KP) * traits.GROUP + element // KP % traits.GROUP
        x = tl.sum(tl.load(scratch + tl.arange(0, traits.W)[:, None] * SIZE + element[None, :]), 0)
        row = (block * tl.cast(rows, tl.int64) + t + token) * traits.H + h
        base = tl.where(element // (traits.GROUP * KP) % 2 == 0, d_q, d_k)
        at = tl.max_contiguous(tl.multiple_of(base + row * traits.K + n, 4 * VECTOR), VECTOR)
        tl.store(at, x, mask=(n < traits.K) & (t + token < last))


@triton.jit
def empty_state(traits: tl.constexpr):
    """Zeros of the shape of a tile."""
    SHAPE: tl.constexpr = (traits.RN, traits.VP, traits.RC, traits.W, traits.TN, traits.TC)
    return tl.zeros(SHAPE, tl.float32)


@triton.jit
def sum_keys(x):
    """Sum over the keys, which are axes 0 and 4."""
    return tl.sum(tl.sum(x, 0, keep_dims=True), 4, keep_dims=True)


@triton.jit
def is_lower_lane(AXIS: tl.constexpr, STEP: tl.constexpr, traits: tl.constexpr):
    """Return whether bit STEP of a lane's index along an axis (4: keys, 5: channels) is 0."""
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
    """Sum NUMBER tiles over the lanes along an axis, FIRST adjacent lanes of which have different tiles already.

    In each step lanes exchange half of their tiles, so that the number of tiles halves. If lanes remain when one tile
    is left, `sum_lanes` adds up the rest.
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
    """Sum a tile over the lanes along an axis, FIRST adjacent lanes of which have different tiles."""
    LANES: tl.constexpr = traits.TN if AXIS == 4 else traits.TC
    for level in tl.static_range(5):
        if (FIRST << level) < LANES:
            x += exchange(x, AXIS, FIRST << level)
    return x


@triton.jit
def sum_thread_channels(xs, NUMBER: tl.constexpr):
    """Sum tiles over the channels of a thread."""
    sums = ()
    for i in tl.static_range(NUMBER):
        sums = sums + (tl.sum(xs[i], 2, keep_dims=True),)
    return sums


@triton.jit
def load_rates(log_decay, rate, hv, n, in_keys, in_channels, traits: tl.constexpr):
    """Load what the decay does not take from the token, times log2 e: the rate [K, HV] or the fixed log
    decay [HV] or [K, HV]."""
    if traits.DECAY == "rate" or traits.DECAY == "fixed_channel":
        rates = rate if traits.DECAY == "rate" else log_decay
        at = tile_at(rates, n * traits.HV + hv, 2, traits.CHANNELS)
        return tl.load(at, mask=in_channels & in_keys, other=0.0) * LOG2_E
    elif traits.DECAY == "fixed":
        return tl.load(tile_at(log_decay, hv, 2, traits.CHANNELS), mask=in_channels, other=0.0) * LOG2_E
    else:
        return 0.0


@triton.jit
def load_decay(log_decay, step, row, i: tl.constexpr, in_time, hv, n, in_keys, in_channels, traits: tl.constexpr):
    """Load what the decay takes from token row + i: its step or log decay. A fixed decay takes whether it exists."""
    mask = in_channels & in_time
    if traits.DECAY == "rate":
        return load_token(step, row, i, traits.HV, hv, mask, 2, traits.CHANNELS, traits)
    elif traits.DECAY == "head":
        return load_token(log_decay, row, i, traits.HV, hv, mask, 2, traits.CHANNELS, traits)
    elif traits.DECAY == "channel":
        at = token_at(log_decay, row, i, traits.HV * traits.K, hv * traits.K + n, 0, traits.KEYS)
        return tl.load(at, mask=in_channels & in_keys & in_time, other=0.0)
    else:
        return tl.where(in_time, 1.0, 0.0)


@triton.jit
def log2_decay(loaded, rates, traits: tl.constexpr):
    """Return the log2 decay of a token; 0 for a token that does not exist."""
    if traits.DECAY == "rate":
        return loaded * rates
    elif traits.DECAY == "fixed" or traits.DECAY == "fixed_channel":
        return tl.where(loaded > 0, rates, 0.0)
    else:
        return loaded * LOG2_E


@triton.jit
def load_key(x, row, i: tl.constexpr, in_time, h, n, in_keys, in_channels, traits: tl.constexpr):
    """Load q or k of token row + i: [RN, 1, 1, 1, TN, 1], or per channel."""
    STRIDE: tl.constexpr = traits.H * traits.K
    if traits.SHARED and traits.TN > 1 and traits.LOADED_BY_ALL:
        return load_token(x, row, i, STRIDE, h * traits.K + n, in_keys & in_time, 0, traits.KEYS, traits)
    elif traits.SHARED:
        return tl.load(x + (row + i) * STRIDE + h * traits.K + n, mask=in_keys & in_time, other=0.0)
    else:
        return tl.load(
            token_at(x, row, i, STRIDE, h * traits.K + n, 0, traits.KEYS),
            mask=in_keys & in_channels & in_time,
            other=0.0,
        )


@triton.jit
def load_value(x, row, i: tl.constexpr, in_time, hv, vi, in_values, in_channels, traits: tl.constexpr):
    """Load v or d_o of token row + i: [1, VP, RC, W, 1, TC]."""
    AXIS: tl.constexpr = 1 if traits.V > 1 else 2
    LENGTH: tl.constexpr = traits.V if traits.V > 1 else traits.CHANNELS
    mask = in_values & in_channels & in_time
    return load_token(x, row, i, traits.HV * traits.V, hv * traits.V + vi, mask, AXIS, LENGTH, traits)


@triton.jit
def state_offset(hv, n, vi, traits: tl.constexpr):
    """Offset of the elements of a state [HV, K, V]."""
    return (hv * traits.K + n) * traits.V + vi


@triton.jit
def slot_offset(hv, n, vi, traits: tl.constexpr):
    """Offset of the elements of a checkpoint [K, V, HV]: lanes store adjacent channels."""
    return (n * traits.V + vi) * traits.HV + hv
