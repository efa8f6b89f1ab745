"""Gather the tensors of all GPUs of a host: each program copies a slice of every GPU's tensor from its memory.

Every rank has a buffer that the others read and write, twice the tensor and then the flags of the programs. Program b
of each rank copies its slice of x to the buffer, sets its flag in the buffers of the others, waits for theirs, and
copies their slices. A call uses the half of the buffer that the call before it did not: when a rank has received the
flags of a call, the others have ended the call before it, and read its slices of that.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class GatherTraits(NamedTuple):
    """Compile-time constants. ELEMENTS: of x. A program copies STEPS blocks of BLOCK elements of it."""

    RANKS: int
    ELEMENTS: int
    BLOCK: int
    STEPS: int


@triton.jit
def _buffer(buffers, rank):
    """Return the address of a rank's buffer."""
    return tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def _flag(buffers, owner, writer, traits: tl.constexpr):
    """Return the address of the flag of this program that `writer` sets in the buffer of `owner`."""
    flags = (_buffer(buffers, owner) + 2 * traits.ELEMENTS).to(tl.pointer_type(tl.int32))
    return flags + tl.program_id(0) * traits.RANKS + writer


@triton.jit
def _load_slice(buffers, rank, half, at, ELEMENTS: tl.constexpr):
    """Load from a rank's buffer, past the L1 cache."""
    return tl.load(_buffer(buffers, rank) + half + at, mask=at < ELEMENTS, cache_modifier=".cg")


@triton.jit(do_not_specialize=["rank"])
def gather_kernel(x, gathered, buffers, calls, rank, traits: tl.constexpr):
    """Gather x [ELEMENTS] of all ranks, float32: gathered [RANKS, ELEMENTS].

    Grid: slices. buffers [RANKS]: addresses. calls [slices] int32: the number of calls so far, which each program
    raises. All ranks must run the same calls in the same order, or the programs wait for ever.
    """
    RANKS: tl.constexpr = traits.RANKS
    ELEMENTS: tl.constexpr = traits.ELEMENTS
    BLOCK: tl.constexpr = traits.BLOCK
    STEPS: tl.constexpr = traits.STEPS
    pid = tl.program_id(0)
    call = tl.load(calls + pid)
    half = call % 2 * ELEMENTS
    first = pid * BLOCK * STEPS + tl.arange(0, BLOCK)
    for step in tl.static_range(STEPS):
        at = first + step * BLOCK
        tl.store(_buffer(buffers, rank) + half + at, tl.load(x + at, mask=at < ELEMENTS), mask=at < ELEMENTS)
    tl.debug_barrier()  # all threads have stored before one of them sets the flags
    for i in tl.static_range(1, RANKS):
        tl.atomic_xchg(_flag(buffers, (rank + i) % RANKS, rank, traits), call + 1, sem="release", scope="sys")
    for i in tl.static_range(1, RANKS):
        flag = _flag(buffers, rank, (rank + i) % RANKS, traits)
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") <= call:
            pass
    tl.debug_barrier()
    for step in tl.static_range(STEPS):
        at = first + step * BLOCK
        slices = (_load_slice(buffers, rank, half, at, ELEMENTS),)
        for i in tl.static_range(1, RANKS):  # all loads before the first store, which waits for its load
            slices = slices + (_load_slice(buffers, (rank + i) % RANKS, half, at, ELEMENTS),)
        for i in tl.static_range(RANKS):
            row = tl.cast((rank + i) % RANKS, tl.int64) * ELEMENTS
            tl.store(gathered + row + at, slices[i], mask=at < ELEMENTS)
    tl.store(calls + pid, call + 1)
