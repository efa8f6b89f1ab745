"""Overlap of a kernel with the one launched before it, on sm_90 (programmatic dependent launch).

A kernel with `Options.overlap` starts when every program of the kernel before it has called `start_next` or ended. It
may then compute addresses, load what no kernel of the last launches writes, and prefetch into the L2 cache, where
memory is coherent. Every program calls `wait_for_previous` before its other loads and its first store: only then has
the kernel before it ended, and with it, because each of them waits, every earlier kernel. If a kernel calls
`start_next` after `wait_for_previous`, the next one may load what kernels before it have written, past the L1 cache
(".cg").

Threads that load a number before the wait may get different ones. No branch on it may contain a barrier, a reduction or
a change of layout: threads that do not enter it would never arrive, and the kernel would hang.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE: tl.constexpr = tl.constexpr(128)  # bytes of a cache line


@triton.jit
def start_next():
    """Let the kernel that is launched after this one start."""
    gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Wait until the kernel that was launched before this one has ended and its results are visible."""
    gdc_wait()


@triton.jit
def prefetch_line(pointers):
    """Request the cache lines of these addresses from memory into the L2 cache. The addresses must be valid."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_state(states, SIZE: tl.constexpr, MOST: tl.constexpr, LINES: tl.constexpr):
    """Request the first MOST numbers of a contiguous state of SIZE float32 numbers, LINES cache lines at a time."""
    for start in tl.static_range(0, min(SIZE, MOST), 32 * LINES):  # 32 numbers fill a cache line
        prefetch_line(states + tl.minimum(start + tl.arange(0, LINES) * 32, SIZE - 1))
