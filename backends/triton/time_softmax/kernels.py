"""Weights that are a softmax over time, with the decays that make them a recurrence, and their gradients.

    e_t = exp(s_t),    E_t = E_(t-1) + e_t,    z_t = log E_t
    w_t = e_t / E_t,    log a_t = z_(t-1) - z_t

s is clamped to +-BOUND, so that float32 holds E for any number of tokens. Chunks of C tokens are summed first
(`score_sums_kernel`), then their sums (`sum_before_kernel`); the other kernels sum e over a chunk again instead of
storing E. A thread holds all tokens of a chunk, for a few channels, and sums them without other threads.

With dz_t the gradient of z_t, which w_t, log a_t and log a_(t+1) depend on:

    dz_t = -w_t dw_t - dlog a_t + dlog a_(t+1)
    ds_t = w_t dw_t + e_t sum_(i >= t) dz_i / E_i

N sequences, T tokens in a row of the batch, C tokens in a chunk, D channels
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.layout import (
    LOG2E,
    first_chunk_slot,
    load_rows,
    locate_chunk,
    sequence_bounds,
    store_rows,
)

_LOG2E_REST = tl.constexpr(1.925963033500e-08)  # log2 e less its value in float32
_LN2 = tl.constexpr(0.6931471805599453)
_LEAST = tl.constexpr(1e-37)  # decays below it are negligible; smaller numbers are not normal


class TimeSoftmaxTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        D, C: sizes. BLOCK: channels of a program. UNIT: raw has token_stride UNIT elements from token to token.
        BOUND: of |s|. INITIAL: z before the first token, without a state.
        PACKED: whether there are bounds of packed sequences.
        SCANNED, ROWS: channels of a program of the kernels that sum over chunks, and chunks that it loads at once.
    """

    D: int
    C: int
    BLOCK: int
    UNIT: int
    BOUND: float
    INITIAL: float
    PACKED: bool
    SCANNED: int
    ROWS: int


@triton.jit
def exponential(x):
    """Return e^x for |x| <= 87 with a relative error of 2e-7: exp2 of a rounded product would have 3e-6."""
    product = x * LOG2E
    rest = tl.fma(x, LOG2E, -product) + x * _LOG2E_REST
    return tl.exp2(product) * (1.0 + rest * _LN2)


@triton.jit
def log_of_rest(w, rest):
    """Return log(1 - w), given rest = 1 - w: below 1/2 from w, whose digits 1 - w would lose."""
    rounded = 1.0 - w
    is_small = w < 0.5
    log = tl.log(tl.where(is_small, rounded, tl.where(rest < _LEAST, _LEAST, rest)))  # NaN stays
    log *= tl.where(is_small, w / tl.where(rounded == 1.0, 1.0, 1.0 - rounded), 1.0)
    return tl.where(rounded == 1.0, -w, log)


@triton.jit
def locate(cu, N, T, traits: tl.constexpr):
    """Return the chunk slot; its first token, as a row of the batch; how many tokens of the sequence there are from it
    on, at most 0 for an unused slot; the channels and their mask [BLOCK]."""
    BLOCK: tl.constexpr = traits.BLOCK
    BLOCKS: tl.constexpr = (traits.D + BLOCK - 1) // BLOCK
    slot = tl.program_id(0) // BLOCKS
    channel = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    start, length, offset = locate_chunk(slot, cu, N, T, traits.C, traits.PACKED)
    return slot, start + offset, length - offset, channel, channel < traits.D


@triton.jit
def load_tokens(x, first, count, channel, in_channels, stride, COUNT: tl.constexpr):
    """Load a tuple of COUNT tokens of x, float32 [BLOCK] each; 0 for those from `count` on."""
    rows = ()
    for t in tl.static_range(COUNT):
        row = tl.load(x + (first + t) * stride + channel, mask=in_channels & (t < count), other=0.0)
        rows = rows + (row.to(tl.float32),)
    return rows


@triton.jit
def exponentials(raw, first, count, channel, in_channels, token_stride, traits: tl.constexpr):
    """Load the tokens of a chunk. Returns: tuples of raw and of e, which is 0 from `count` on."""
    C: tl.constexpr = traits.C
    BOUND: tl.constexpr = traits.BOUND
    xs = load_tokens(raw, first, count, channel, in_channels, token_stride * traits.UNIT, C)
    es = ()
    for t in tl.static_range(C):
        s = tl.where(xs[t] > BOUND, BOUND, tl.where(xs[t] < -BOUND, -BOUND, xs[t]))  # NaN stays
        es = es + (tl.where(t < count, exponential(s), 0.0),)
    return xs, es


@triton.jit
def sum_of(values):
    """Return the sum of a tuple."""
    total = values[0]
    for t in tl.static_range(1, len(values)):
        total += values[t]
    return total


@triton.jit(do_not_specialize=["N", "T", "token_stride"])
def score_sums_kernel(raw, sums, cu, N, T, token_stride, traits: tl.constexpr):
    """Sum e over each chunk. Grid: chunk slot, block of channels. Reads raw [B, T, D]. Writes sums [slots, D]."""
    slot, first, count, channel, in_channels = locate(cu, N, T, traits)
    _, es = exponentials(raw, first, count, channel, in_channels, token_stride, traits)
    tl.store(sums + tl.cast(slot, tl.int64) * traits.D + channel, sum_of(es), mask=in_channels)


@triton.jit
def scan_chunks(sums, results, total, n, cu, T, channel, in_channels, REVERSE: tl.constexpr, traits: tl.constexpr):
    """Store for each chunk of a sequence `total` and the sum of the chunks before it (REVERSE: after it).

    Returns: the sum of all chunks and `total` [BLOCK].
    """
    ROWS: tl.constexpr = traits.ROWS
    D: tl.constexpr = traits.D
    PREVIOUS: tl.constexpr = 1 if REVERSE else -1
    _, length = sequence_bounds(n, cu, T, traits.PACKED)
    slot = first_chunk_slot(n, cu, T, traits.C, traits.PACKED)
    chunks = tl.cdiv(length, traits.C)
    for first in range(0, chunks, ROWS):
        c = first + tl.arange(0, ROWS)
        rows = tl.cast(slot + (chunks - 1 - c if REVERSE else c), tl.int64)
        values = load_rows(sums, rows, channel, c < chunks, in_channels, D)
        # not cumsum(values) - values, which would lose the digits of small sums before large ones
        previous = load_rows(sums, rows + PREVIOUS, channel, (c < chunks) & (c > first), in_channels, D)
        store_rows(results, tl.cumsum(previous, 0) + total[None, :], rows, channel, c < chunks, in_channels, D)
        total += tl.sum(values, 0)
    return total


@triton.jit
def locate_sequence(traits: tl.constexpr):
    """Return the sequence of a program, its channels and their mask [SCANNED]."""
    BLOCK: tl.constexpr = traits.SCANNED
    BLOCKS: tl.constexpr = (traits.D + BLOCK - 1) // BLOCK
    channel = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(0) // BLOCKS, channel, channel < traits.D


@triton.jit(do_not_specialize=["T"])
def sum_before_kernel(sums, state, before, final, cu, T, traits: tl.constexpr):
    """Compute E before each chunk, and z after each sequence.

    Grid: sequence, block of channels. Reads sums [slots, D], and state [N, D], z before the sequences, or None:
    INITIAL. Writes before [slots, D] and final [N, D].
    """
    BLOCK: tl.constexpr = traits.SCANNED
    n, channel, in_channels = locate_sequence(traits)
    at = tl.cast(n, tl.int64) * traits.D + channel
    z = tl.full([BLOCK], traits.INITIAL, tl.float32)
    if state is not None:
        z = tl.load(state + at, mask=in_channels, other=0.0)
    total = scan_chunks(sums, before, exponential(z), n, cu, T, channel, in_channels, False, traits)
    _, length = sequence_bounds(n, cu, T, traits.PACKED)
    tl.store(final + at, tl.where(length > 0, tl.log(total), z), mask=in_channels)


@triton.jit(do_not_specialize=["N", "T", "token_stride"])
def time_softmax_kernel(raw, before, log_decay, w, cu, N, T, token_stride, traits: tl.constexpr):
    """Compute w and log a. Grid: chunk slot, block of channels.

    Reads raw [B, T, D] and before [slots, D], E before each chunk. Writes log_decay [B, T, D] float32 and w [B, T, D].
    """
    D: tl.constexpr = traits.D
    C: tl.constexpr = traits.C
    slot, first, count, channel, in_channels = locate(cu, N, T, traits)
    earlier = tl.load(before + tl.cast(slot, tl.int64) * D + channel, mask=in_channels, other=1.0)
    _, es = exponentials(raw, first, count, channel, in_channels, token_stride, traits)
    for t in tl.static_range(C):
        total = earlier + es[t]
        share = es[t] / total
        at, mask = (first + t) * D + channel, in_channels & (t < count)
        tl.store(w + at, share.to(w.dtype.element_ty), mask=mask)
        tl.store(log_decay + at, log_of_rest(share, earlier / total), mask=mask)
        earlier = total


@triton.jit
def sum_gradients(
    raw, before, d_log_decay, d_w, slot, first, count, channel, in_channels, token_stride, traits: tl.constexpr
):
    """Return tuples of the tokens of a chunk: raw, e, w dw, and dz / E, the gradient of E at each token."""
    D: tl.constexpr = traits.D
    C: tl.constexpr = traits.C
    total = tl.load(before + tl.cast(slot, tl.int64) * D + channel, mask=in_channels, other=1.0)
    xs, es = exponentials(raw, first, count, channel, in_channels, token_stride, traits)
    d_decays = load_tokens(d_log_decay, first, count, channel, in_channels, D, C + 1)
    d_ws = load_tokens(d_w, first, count, channel, in_channels, D, C)
    through_ws = ()
    d_sums = ()
    for t in tl.static_range(C):
        total += es[t]
        through_w = es[t] / total * d_ws[t]
        through_ws = through_ws + (through_w,)
        d_sums = d_sums + ((d_decays[t + 1] - d_decays[t] - through_w) / total,)
    return xs, es, through_ws, d_sums


@triton.jit(do_not_specialize=["N", "T", "token_stride"])
def sum_gradients_kernel(raw, before, d_log_decay, d_w, sums, cu, N, T, token_stride, traits: tl.constexpr):
    """Sum dz / E over each chunk. Grid: chunk slot, block of channels.

    Reads raw, before, and the gradients of log_decay and w, [B, T, D]. Writes sums [slots, D].
    """
    slot, first, count, channel, in_channels = locate(cu, N, T, traits)
    _, _, _, d_sums = sum_gradients(
        raw, before, d_log_decay, d_w, slot, first, count, channel, in_channels, token_stride, traits
    )
    tl.store(sums + tl.cast(slot, tl.int64) * traits.D + channel, sum_of(d_sums), mask=in_channels)


@triton.jit(do_not_specialize=["T"])
def sum_after_kernel(sums, state, final, d_final, d_log_decay, after, d_state, cu, T, traits: tl.constexpr):
    """Compute the gradient of E after each chunk, and that of the state.

    Grid: sequence, block of channels. Reads sums [slots, D], final and its gradient d_final [N, D], or None: 0;
    state [N, D] or None; the first token of each sequence of d_log_decay [B, T, D]. Writes after [slots, D] and
    d_state [N, D].
    """
    BLOCK: tl.constexpr = traits.SCANNED
    n, channel, in_channels = locate_sequence(traits)
    at = tl.cast(n, tl.int64) * traits.D + channel
    total = tl.zeros([BLOCK], tl.float32)
    d_last = total
    if d_final is not None:
        d_last = tl.load(d_final + at, mask=in_channels, other=0.0)
        total += d_last * exponential(-tl.load(final + at, mask=in_channels, other=0.0))
    total = scan_chunks(sums, after, total, n, cu, T, channel, in_channels, True, traits)
    if state is not None:
        start, length = sequence_bounds(n, cu, T, traits.PACKED)
        first = tl.load(d_log_decay + start * traits.D + channel, mask=in_channels & (length > 0), other=0.0)
        z = tl.load(state + at, mask=in_channels, other=0.0)
        tl.store(d_state + at, tl.where(length > 0, total * exponential(z) + first, d_last), mask=in_channels)


@triton.jit(do_not_specialize=["N", "T", "token_stride"])
def time_softmax_backward_kernel(
    raw, before, d_log_decay, d_w, after, d_raw, cu, N, T, token_stride, traits: tl.constexpr
):  # fmt: skip
    """Compute the gradient of raw. Grid: chunk slot, block of channels.

    Reads what `sum_gradients_kernel` reads, and after [slots, D], the gradient of E after each chunk. Writes
    d_raw [B, T, D].
    """
    C: tl.constexpr = traits.C
    slot, first, count, channel, in_channels = locate(cu, N, T, traits)
    xs, es, through_ws, d_sums = sum_gradients(
        raw, before, d_log_decay, d_w, slot, first, count, channel, in_channels, token_stride, traits
    )
    d_e = tl.load(after + tl.cast(slot, tl.int64) * traits.D + channel, mask=in_channels, other=0.0)
    for t in tl.static_range(C - 1, -1, -1):
        d_e += d_sums[t]
        inside = (xs[t] <= traits.BOUND) & (xs[t] >= -traits.BOUND)
        d_x = tl.where(inside, through_ws[t] + es[t] * d_e, 0.0)
        at, mask = (first + t) * traits.D + channel, in_channels & (t < count)
        tl.store(d_raw + at, d_x.to(d_raw.dtype.element_ty), mask=mask)
