"""Zero the rows of outputs and gradients that belong to no sequence of a pack."""

import triton
import triton.language as tl

from deltazoo.backends.triton.chunk.kernels.signature import takes


@triton.jit
def zero_rows(x, first, last, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Zero rows `first` to `last` - 1 of x [.., WIDTH]; each program zeroes a share of them."""
    end = last * WIDTH
    for block in range(first * WIDTH + tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        offset = block + tl.arange(0, BLOCK)
        tl.store(x + offset, tl.zeros([BLOCK], x.dtype.element_ty), mask=offset < end)


@takes(
    pointers="v q k e log_decay b w cu",
    traits="HK HV V DECAYS BLOCK",
)
@triton.jit(do_not_specialize=["N", "T"])
def zero_tail_kernel(gmem, N, T, traits: tl.constexpr):
    """Zero the rows from cu[N] on of v [T, HV, V], of q, k, e [T, H, K], b, w [T, HV] and log_decay
    [T, DECAYS]; None: skipped.

    No kernel of the scan visits these rows, and their number is known on the device only. Usually there are none; then
    every program reads one bound and exits. Grid: any number of programs. HK = H K.
    """
    HV: tl.constexpr = traits.HV
    BLOCK: tl.constexpr = traits.BLOCK
    first = tl.load(gmem.cu + N).to(tl.int64)
    last = tl.cast(T, tl.int64)
    if first < last:
        if gmem.v is not None:
            zero_rows(gmem.v, first, last, HV * traits.V, BLOCK)
        if gmem.q is not None:
            zero_rows(gmem.q, first, last, traits.HK, BLOCK)
        if gmem.k is not None:
            zero_rows(gmem.k, first, last, traits.HK, BLOCK)
        if gmem.e is not None:
            zero_rows(gmem.e, first, last, traits.HK, BLOCK)
        if gmem.log_decay is not None:
            zero_rows(gmem.log_decay, first, last, traits.DECAYS, BLOCK)
        if gmem.b is not None:
            zero_rows(gmem.b, first, last, HV, BLOCK)
        if gmem.w is not None:
            zero_rows(gmem.w, first, last, HV, BLOCK)
