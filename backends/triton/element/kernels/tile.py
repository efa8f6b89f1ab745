"""Tiles of the elementwise kernels: which element of the state each thread owns, and where its operands are.

A program owns the states [K, V] of BC channels (value heads) as one tile with the axes

    [RN, VP, RC, W, TN, TC]        key n = tn RN + rn,  value vi,  channel (w TC + tc) RC + rc

Triton distributes a tile from its last axis on: TN TC = 32 are the lanes of a warp, W the warps, and the other axes are
the registers of a thread. So a sum over the keys or the channels is mostly a sum over registers of a thread, and lanes
read adjacent channels. Operands without one of the axes have size 1 there.

If many channels share a key head (SHARED), a program owns channels of one key head, and loads q and k once for all of
them; else q and k are loaded per channel.
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
    BLOCKS: int  # blocks of channels, of all key heads together
    SHARED: bool  # the channels of a program share one key head
    DECAY: str  # none, fixed [HV], fixed_channel [HV, K], head, channel or rate
    READ_BEFORE: bool
    PACKED: bool
    CHECKPOINT_TOKENS: int  # tokens between checkpoints; 0: none
    SEGMENT_TOKENS: int  # tokens per segment; 0: the sequence is one segment
    GROUP: int  # tokens whose operands are loaded together; the backward keeps their decayed states in registers
    KEYS: int  # keys of a thread that are contiguous and aligned in an operand [.., K]; 1: no guarantee
    CHANNELS: int  # the same for channels in an operand [.., HV] with V = 1
    LOADED_BY_ALL: bool = False  # all warps and lanes load operands that lack the axes W, TN or TC (`load_token`)
    PREFETCH: bool = False  # prefetch operands of later tokens into L1 (an NVIDIA instruction)
    KEY_GRADIENTS: bool = False  # the backward computes d_q and d_k


@triton.jit
def locate_block(traits: tl.constexpr):
    """Return the number of a program's block of channels, and its key head.

    With SHARED the block is numbered among those of the key head; else the head is 0.
    """
    block = tl.program_id(0) % traits.BLOCKS
    if traits.SHARED:
        return block % (traits.BLOCKS // traits.H), block // (traits.BLOCKS // traits.H)
    else:
        return block, 0


@triton.jit
def locate_tile(traits: tl.constexpr):
    """Return the keys, values, channels and key heads of a program, their masks, and the number of its block.

    Programs with adjacent channels are adjacent in the grid, so that they read the same keys at about the same time.

    Returns: n [RN, 1, 1, 1, TN, 1]; vi [1, VP, 1, 1, 1, 1]; hv [1, 1, RC, W, 1, TC]; h, a number if SHARED, else as hv;
        the masks of n, vi and hv; the number of the block, with SHARED among those of its key head.
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
    block, h = locate_block(traits)
    if traits.SHARED:
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
    """Return the tokens of a program.

    Returns: the sequence; the segment in it; the first token of the sequence; the first token of the segment and the
        one after its last; whether the segment is the last of the sequence (of an empty sequence the first); the first
        checkpoint slot of the sequence.
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
    if traits.SEGMENT_TOKENS > 0:
        first = tl.minimum(start + segment * traits.SEGMENT_TOKENS, stop)
        last = tl.minimum(first + traits.SEGMENT_TOKENS, stop)
        is_last = (last == stop) & ((first < stop) | (segment == 0))
    slot = 0
    if traits.CHECKPOINT_TOKENS > 0:
        slot = sequence * ((T + traits.CHECKPOINT_TOKENS - 1) // traits.CHECKPOINT_TOKENS)
        if traits.PACKED:
            slot = start // traits.CHECKPOINT_TOKENS + sequence
    return sequence, segment, start, first, last, is_last, slot


@triton.jit
def tile_at(base, offsets, AXIS: tl.constexpr, LENGTH: tl.constexpr, SHAPE: tl.constexpr = None):
    """Return the pointers base + offsets of a tile, broadcast to SHAPE, with hints for the layout of the state.

    LENGTH elements along AXIS (0 keys, 1 values, 2 channels) are contiguous and aligned, and a thread accesses them in
    one instruction. Triton orders the axes of a load or store by the contiguity of the pointers. The hints for axes 3
    to 5 do not state contiguity: they only make Triton choose the order of the state, warps W and lanes [TN, TC].
    """
    element: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    # an instruction accesses at most 16 bytes per thread; Triton would distribute more over lanes
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
    """Return the pointers of a tile of token row + i, with STRIDE elements per token.

    i STRIDE is added last, as a 64-bit constant: it becomes the immediate offset of the instruction, and the tokens of
    a group share the address registers of the first.
    """
    return tile_at(base + row * STRIDE + offsets, tl.full([], i * STRIDE, tl.int64), AXIS, LENGTH, SHAPE)


@triton.jit
def load_token(
    base, row, i: tl.constexpr, STRIDE: tl.constexpr, offsets, mask, AXIS: tl.constexpr, LENGTH: tl.constexpr,
    traits: tl.constexpr,
):  # fmt: skip
    """Load a tile of token row + i that lacks one of the axes W, TN and TC.

    With LOADED_BY_ALL all warps and lanes load it. Without, Triton would choose a layout with fewer elements per
    instruction in the backward, or exchange them through shared memory; the forward of wide keys is faster so.
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
    """Store a row of channels [1, 1 or VP, RC, W, 1, TC] by the first of the lanes along the keys.

    The tile of pointers has the axis TN, so that its layout is that of the state. The offset tn is masked for all lanes
    but the first, where it is 0; it keeps Triton from removing the axis.
    """
    TN: tl.constexpr = traits.TN
    tn = tl.arange(0, TN)[None, None, None, None, :, None]
    at = token_at(base, row, i, STRIDE, offsets + tn, AXIS, LENGTH)
    tl.store(at, (x + tl.zeros_like(tn).to(tl.float32)).to(base.dtype.element_ty), mask=mask & (tn == 0))


@triton.jit
def empty_state(traits: tl.constexpr):
    """Return a state of zeros."""
    SHAPE: tl.constexpr = (traits.RN, traits.VP, traits.RC, traits.W, traits.TN, traits.TC)
    return tl.zeros(SHAPE, tl.float32)


@triton.jit
def sum_keys(x):
    """Sum over the keys, which are axes 0 and 4."""
    return tl.sum(tl.sum(x, 0, keep_dims=True), 4, keep_dims=True)


@triton.jit
def load_rates(log_decay, rate, hv, n, in_keys, in_channels, traits: tl.constexpr):
    """Load the part of the decay that all tokens share, times log2 e: the rate [K, HV] or the fixed log decay.

    The fixed log decay is [HV] or [K, HV]. Other decays have no such part: 0.
    """
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
    """Load the part of the decay that token row + i has: its step or log decay; else 1 if the token exists, or 0."""
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
    """Return the log2 decay of a token from `load_decay` and `load_rates`; 0 for a token that does not exist."""
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
def state_at(base, sequence, hv, n, vi, traits: tl.constexpr):
    """Return the pointers of a tile of states [N, HV, K, V]."""
    SIZE: tl.constexpr = traits.HV * traits.K * traits.V
    return tile_at(base + tl.cast(sequence, tl.int64) * SIZE, (hv * traits.K + n) * traits.V + vi, 0, 1)


@triton.jit
def slot_offset(hv, n, vi, traits: tl.constexpr):
    """Return the offsets of a tile in a checkpoint [K, V, HV], where adjacent lanes store adjacent channels."""
    return (n * traits.V + vi) * traits.HV + hv


@triton.jit
def slot_at(base, slot, offsets, traits: tl.constexpr):
    """Return the pointers of a tile of checkpoints or segments [slots, K, V, HV]. offsets: `slot_offset`."""
    SIZE: tl.constexpr = traits.HV * traits.K * traits.V
    return tile_at(base + tl.cast(slot, tl.int64) * SIZE, offsets, 2, traits.CHANNELS)
