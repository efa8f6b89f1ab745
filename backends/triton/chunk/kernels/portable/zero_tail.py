"""Zero the rows of outputs and gradients that belong to no sequence of a pack."""

import triton
import triton.language as tl


@triton.jit
def zero_rows(x, first, last, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Zero rows `first` to `last` - 1 of x [.., WIDTH]; each program zeroes a share of them."""
    end = last * WIDTH
    for block in range(first * WIDTH + tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        offset = block + tl.arange(0, BLOCK)
        tl.store(x + offset, tl.zeros([BLOCK], x.dtype.element_ty), mask=offset < end)


@triton.jit(do_not_specialize=["N", "T"])
def zero_tail_kernel(
    v, q, k, e, log_decay, b, w, cu, N, T,
    HK: tl.constexpr, HV: tl.constexpr, V: tl.constexpr, DECAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zero the rows from cu[N] on of v [T, HV, V], of q, k, e [T, H, K], b, w [T, HV] and log_decay
    [T, DECAYS]; None: skipped.

    No kernel of the scan visits these rows, and their number is known on the device only. Usually there are none; then
    every program reads one bound and exits. Grid: any number of programs. HK = H K.
    """
    first = tl.load(cu + N).to(tl.int64)
    last = tl.cast(T, tl.int64)
    if first < last:
        if v is not None:
            zero_rows(v, first, last, HV * V, BLOCK)
        if q is not None:
            zero_rows(q, first, last, HK, BLOCK)
        if k is not None:
            zero_rows(k, first, last, HK, BLOCK)
        if e is not None:
            zero_rows(e, first, last, HK, BLOCK)
        if log_decay is not None:
            zero_rows(log_decay, first, last, DECAYS, BLOCK)
        if b is not None:
            zero_rows(b, first, last, HV, BLOCK)
        if w is not None:
            zero_rows(w, first, last, HV, BLOCK)
