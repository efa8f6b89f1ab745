"""Sums of the log forget gates over each sequence, the gradients of the gates from those of the sums, norms of keys.

B batch, T time, N sequences, H heads, R = B T rows
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.attention.kernels.tiles import LOG2E, head_rows, load_rows
from deltazoo.backends.triton.device.layout import locate_chunk, sequence_bounds


@triton.jit(do_not_specialize=["T", "R"])
def forget_sums_kernel(
    log_f, sums, cu, T, R, H: tl.constexpr, ROWS: tl.constexpr, SUM_BLOCK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Write g_t = log2 f_1 + ... + log2 f_t of each sequence as two float32 terms, summed in float64.

    Grid: N x H. Reads log_f [B, T, H]. Writes sums [3, H, R]: high and low terms, and g_t minus g of the last token in
    the block of SUM_BLOCK tokens; SUM_BLOCK divides ROWS.
    """
    n = tl.program_id(0) // H
    h = tl.program_id(0) % H
    start, length = sequence_bounds(n, cu, T, PACKED)
    log_f += start * H + h
    sums += tl.cast(h, tl.int64) * R + start
    low = H * tl.cast(R, tl.int64)
    before = tl.full([], 0.0, tl.float64)
    for first in range(0, length, ROWS):
        t = first + tl.arange(0, ROWS)
        x = tl.load(log_f + t.to(tl.int64) * H, mask=t < length, other=0.0).to(tl.float64)
        total = before + tl.cumsum(x, 0)
        before += tl.sum(x, 0)
        scaled = total * LOG2E
        high = scaled.to(tl.float32)
        tl.store(sums + t, high, mask=t < length)
        tl.store(sums + low + t, (scaled - high.to(tl.float64)).to(tl.float32), mask=t < length)
        blocks = tl.reshape(x, [ROWS // SUM_BLOCK, SUM_BLOCK])
        later = tl.reshape(tl.cumsum(blocks, 1, reverse=True) - blocks, [ROWS])
        tl.store(sums + 2 * low + t, (later * -LOG2E).to(tl.float32), mask=t < length)


@triton.jit(do_not_specialize=["T", "R"])
def forget_gradients_kernel(d_sums, d_log_f, cu, T, R, H: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr):
    """Write d log f_t, the sum over r >= t in the sequence of the gradients of log f_1 + ... + log f_r.

    Grid: N x H. Reads d_sums [H, R] float32. Writes d_log_f [B, T, H].
    """
    n = tl.program_id(0) // H
    h = tl.program_id(0) % H
    start, length = sequence_bounds(n, cu, T, PACKED)
    d_log_f += start * H + h
    d_sums += tl.cast(h, tl.int64) * R + start
    after = tl.full([], 0.0, tl.float64)
    for done in range(0, length, ROWS):
        t = length - 1 - done - tl.arange(0, ROWS)
        x = tl.load(d_sums + t, mask=t >= 0, other=0.0).to(tl.float64)
        total = after + tl.cumsum(x, 0)
        after += tl.sum(x, 0)
        tl.store(d_log_f + t.to(tl.int64) * H, total, mask=t >= 0)


@triton.jit(do_not_specialize=["T", "N", "slots", "k_stride"])
def key_norms_kernel(k, norms, cu, T, N, slots, k_stride, traits: tl.constexpr):
    """Write the largest |k|^2 of each block of SUM_BLOCK keys. Grid: G x slots. Writes norms [G, slots]."""
    head = tl.program_id(0) // slots
    slot = tl.program_id(0) % slots
    start, length, first = locate_chunk(slot, cu, N, T, traits.SUM_BLOCK, traits.PACKED)
    if first < length:
        k = head_rows(k, start, k_stride, head, traits.KEY, traits)
        tile = load_rows(k, first, length, k_stride, traits.SUM_BLOCK, True, traits).to(tl.float32)
        squares = tl.sum(tile * tile, 1)
        largest = tl.max(squares, 0)
        tl.store(norms + tl.program_id(0), tl.where(tl.sum(squares, 0) < float("inf"), largest, float("inf")))
