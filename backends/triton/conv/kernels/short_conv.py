"""Short causal convolution of one part of the channels with SiLU and the L2 norm of heads, forward and backward.

    a_t = sum_j w_j x_(t-j) + bias,    s = silu(a),    y = s / sqrt(sum of s^2 over the head + EPS)

w_j is the weight of lag j = 0 to W - 1. A program owns R strips of STRIP consecutive tokens and BC channels, which are
one head if there is a norm. It iterates over the rows of the strips, row i of all strips at once, and keeps the last
rows in registers, so that each row is loaded once, GROUP rows ahead of its use. Rows that wait for their use are
packed: two 16-bit values in a register.

In a pack with bounds cu [N + 1], sequence_starts [T] and sequence_ids [T], all int32, are the first token and the
number of each token's sequence. Tokens from cu[N] on belong to none: their results and gradients are zero. If the
sequences belong to groups with different weights, ends [G] int32 is the token after the last one of each group, and
a program processes the tokens of one group: for it there are no others.

Shapes: x [B, T, C], y and dy [B, T, CHANNELS], weight [C, W], bias [C], history [N, W - 1, C], N sequences.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.conv.kernels.rows import (
    copies,
    load_gradient,
    load_gradients,
    load_row,
    load_rows,
    load_start,
    load_starts,
    row_mask,
    select_inputs,
    start_pointers,
    unpack,
    unpack_rows,
)
from deltazoo.backends.triton.norm.kernels import add_pairs

NEVER = tl.constexpr(2**30)  # a row beyond every strip


class ConvTraits(NamedTuple):
    """Compile-time properties of a launch."""

    UNIT: int  # x has token_stride UNIT elements from token to token
    C: int  # channels of x, or 0: unknown, for an x without gaps, history and groups
    W: int  # taps
    CHANNELS: int  # channels of the part
    SILU: bool
    HEAD: int  # channels of each head that is normalised; 0: no norm
    EPS: float
    BIAS: bool
    HISTORY: bool
    PACKED: bool
    GROUPED: bool  # weight and bias per group
    BC: int  # channels of a program
    R: int  # strips of a program
    GROUP: int  # tokens of an iteration, which divide a strip, and that are loaded ahead of their use


@triton.jit
def locate_strips(T, cu, ends, N, strips, strips_per_row, strip_tokens, rows, traits: tl.constexpr):
    """Return what a program owns. Programs with adjacent channels are adjacent in the grid.

    Returns: the program's index along groups and time; its group; of each strip [R] the row of the batch (int64), the
        first token, the first row that exists (up to W - 1 before the strip), the end of the rows below `rows` that
        belong to a sequence, the first row and the end of the rows whose results are stored; the channels of the part
        and their mask [1, BC].
    """
    WIDTH: tl.constexpr = traits.HEAD if traits.HEAD > 0 else traits.BC
    HEADS: tl.constexpr = (traits.CHANNELS + WIDTH - 1) // WIDTH
    pid = tl.program_id(0)
    lane = tl.arange(0, traits.BC)[None, :]
    channel = pid % HEADS * WIDTH + lane
    in_channels = lane < WIDTH
    if traits.CHANNELS % WIDTH != 0:
        in_channels &= channel < traits.CHANNELS
    program = pid // HEADS
    group = program // tl.cdiv(strips, traits.R)
    strip = program % tl.cdiv(strips, traits.R) * traits.R + tl.arange(0, traits.R)
    t = strip % strips_per_row * strip_tokens
    low = tl.where(strip < strips, tl.maximum(-t, 1 - traits.W), NEVER)
    store_low = 0
    store_high = tl.where(strip < strips, tl.minimum(T - t, rows), 0)
    if traits.GROUPED:
        first = tl.load(ends + group - 1, mask=group > 0, other=0) - t
        low = tl.maximum(low, first)
        store_low = tl.maximum(first, 0)
        store_high = tl.minimum(store_high, tl.load(ends + group) - t)
    high = store_high
    if traits.PACKED:
        high = tl.minimum(high, tl.load(cu + N) - t)
    row = (strip // strips_per_row).to(tl.int64)
    return program, group, row, t, low, high, store_low, store_high, channel, in_channels


@triton.jit
def load_weights(weight, bias, group, channel, in_channels, traits: tl.constexpr):
    """Load a group's weights by lag, and its bias, each [1, BC]."""
    W: tl.constexpr = traits.W
    BC: tl.constexpr = traits.BC
    if traits.GROUPED:
        channel += group * traits.C
    offset = tl.zeros([1, BC], tl.float32)
    weights = copies(offset, W)
    pointers = weight + channel * W + (W - 1)
    for _ in range(W):
        w_j = tl.load(pointers, mask=in_channels, other=0.0)
        weights = weights[1:] + (w_j.to(tl.float32),)
        pointers -= 1
    if traits.BIAS:
        offset = tl.load(bias + channel, mask=in_channels, other=0.0).to(tl.float32)
    return weights, offset


@triton.jit
def weighted_sum(values, weights, offset, W: tl.constexpr):
    """Return sum_j weights_j values_j + offset for values [R, BC] by lag."""
    total = values[0] * weights[0] + offset
    for j in tl.static_range(1, W):
        total += values[j] * weights[j]
    return total


@triton.jit
def sigmoid(a):
    """Return 1 / (1 + e^-a) as the square of an rsqrt, because a division takes several instructions."""
    root = tl.rsqrt(1.0 + tl.exp2(a * -1.4426950408889634))
    return root * root


@triton.jit(do_not_specialize=["T", "N", "strips", "strips_per_row", "strip_tokens", "token_stride"])
def short_conv_kernel(
    x, weight, bias, history, cu, ends, sequence_starts, sequence_ids, y,
    T, N, strips, strips_per_row, strip_tokens, token_stride, traits: tl.constexpr,
):  # fmt: skip
    """Compute y [B, T, CHANNELS] of one part.

    Grid: groups, R strips along time, BC channels or one head. strips: of the batch; strips_per_row: of one row of it.
    strip_tokens: tokens of a strip.
    """
    W: tl.constexpr = traits.W
    GROUP: tl.constexpr = traits.GROUP
    _, group, b, t, low, high, store_low, store_high, channel, in_channels = locate_strips(
        T, cu, ends, N, strips, strips_per_row, strip_tokens, strip_tokens, traits
    )
    if traits.GROUPED:
        if tl.max(store_high - store_low, 0) <= 0:
            return
    weights, offset = load_weights(weight, bias, group, channel, in_channels, traits)
    token = (b * T + t)[:, None]
    stride = token_stride * traits.UNIT
    x_offset = token * stride + channel
    y_offset = token * traits.CHANNELS + channel
    # row W - 1 of the history, where token 0 would be: of the row of the batch, or in a pack of sequence 0
    history_offset = (b * 0 if traits.PACKED else b * (W - 1))[:, None] * traits.C + (W - 1) * traits.C + channel
    # tuples of rows and starts are ordered from the latest row backwards
    recent = load_rows(x, x_offset, stride, history, history_offset, t, low, high, -1, in_channels, W - 1, traits)
    recent = unpack_rows(recent, x.dtype.element_ty)
    ahead = load_rows(x, x_offset, stride, history, history_offset, t, low, high, GROUP - 1, in_channels, GROUP, traits)
    next_starts = load_starts(sequence_starts, t, high, GROUP - 1, GROUP, traits)
    y_rows = row_pointers(y + y_offset, -traits.CHANNELS, GROUP)
    start_rows = row_pointers(start_pointers(sequence_starts, t, GROUP, traits), -1, GROUP)
    for g in range(0, strip_tokens, GROUP):
        for k in tl.static_range(GROUP):
            i = g + k
            later_i = i + GROUP
            rows = (unpack(ahead[GROUP - 1], x.dtype.element_ty),) + recent
            start = next_starts[GROUP - 1]
            # pointers to x carried by the loop would need more registers
            x_row = x + x_offset + later_i * stride
            latest = load_row(x_row, history, history_offset, t, low, high, later_i, in_channels, traits)
            ahead = (latest,) + ahead[: GROUP - 1]
            next_starts = (load_start(start_rows[k], t, high, later_i, traits),) + next_starts[: GROUP - 1]
            inputs = select_inputs(rows, start, history, history_offset, sequence_ids, t, high, i, in_channels, traits)
            a = weighted_sum(inputs, weights, offset, W)
            if traits.SILU:
                a *= sigmoid(a)
            if traits.HEAD > 0:
                a *= tl.rsqrt(tl.sum(a * a, 1) + traits.EPS)[:, None]
            if traits.PACKED:
                a = tl.where((i < high)[:, None], a, 0.0)
            stored = row_mask(i, store_low, store_high, in_channels)
            tl.store(y_rows[k], a.to(y.dtype.element_ty), mask=stored)
            recent = rows[: W - 1]
        y_rows = advance(y_rows, GROUP * traits.CHANNELS)
        start_rows = advance(start_rows, GROUP)


@triton.jit
def activation_backward(a, d, traits: tl.constexpr):
    """Return the gradient of the convolution's result a [R, BC] from d, the gradient of y."""
    s = a
    if traits.SILU:
        gate = sigmoid(a)
        s = a * gate
    if traits.HEAD > 0:
        squares, projection = tl.reduce((s * s, s * d), 1, add_pairs)
        scale = tl.rsqrt(squares + traits.EPS)
        along = scale * scale * projection
        d = scale[:, None] * (d - along[:, None] * s)
    if traits.SILU:
        d *= gate + gate * (a - s)
    return d


@triton.jit
def store_history_gradients(dhistory, offset, later, weights, mask, C: tl.constexpr, W: tl.constexpr):
    """Store the gradients of the W - 1 inputs before a sequence, from `later`, those of its first results."""
    for m in tl.static_range(1, W):
        d = weights[m] * later[0]
        for j in tl.static_range(m + 1, W):
            d += weights[j] * later[j - m]
        tl.store(dhistory + offset - m * C, d.to(dhistory.dtype.element_ty), mask=mask)


@triton.jit
def row_pointers(first, stride, COUNT: tl.constexpr):
    """Return pointers to a row and the COUNT - 1 rows before it (stride < 0: after it), which a loop advances."""
    rows = ()
    for u in tl.static_range(COUNT):
        rows = rows + (first - u * stride,)
    return rows


@triton.jit
def advance(pointers, step):
    """Add a step to each pointer."""
    moved = ()
    for u in tl.static_range(len(pointers)):
        moved = moved + (pointers[u] + step,)
    return moved


@triton.jit
def push_row(later, d, W: tl.constexpr):
    """Return `later`, the gradients of the W - 1 results after a row, for the row before."""
    return ((d,) + later)[: W - 1]


@triton.jit
def clear_at_start(later, is_first, W: tl.constexpr):
    """Zero `later` where its row is the first of a sequence: the row before belongs to another one."""
    cleared = ()
    for j in tl.static_range(W - 1):
        cleared = cleared + (tl.where(is_first, 0.0, later[j]),)
    return cleared


@triton.jit(do_not_specialize=["T", "N", "strips", "strips_per_row", "strip_tokens", "token_stride"])
def short_conv_backward_kernel(
    x, weight, bias, history, cu, ends, sequence_starts, sequence_ids, dy, dx, dhistory, partial,
    T, N, strips, strips_per_row, strip_tokens, token_stride, traits: tl.constexpr,
):  # fmt: skip
    """Compute the part's channels of dx [B, T, C] and dhistory [N, W - 1, C] from dy [B, T, CHANNELS].

    With d_t the gradient of a_t: dx_t = sum_j w_j d_(t+j), dw_j = sum_t d_t x_(t-j). Rows are processed from the last
    to the first, and the W - 1 results after a strip are recomputed.

    Grid: groups, R strips along time, BC channels or one head.
    Writes partial [groups, programs along time, W + BIAS, CHANNELS] float32: each program's sums of dw_j, by lag, and
    of d. Programs without a token of the group write nothing.
    """
    W: tl.constexpr = traits.W
    GROUP: tl.constexpr = traits.GROUP
    BIAS: tl.constexpr = traits.BIAS
    R: tl.constexpr = traits.R
    BC: tl.constexpr = traits.BC
    AFTER: tl.constexpr = (W + GROUP - 2) // GROUP * GROUP  # rows after a strip that are processed
    program, group, b, t, low, high, store_low, store_high, channel, in_channels = locate_strips(
        T, cu, ends, N, strips, strips_per_row, strip_tokens, strip_tokens + W - 1, traits
    )
    if traits.GROUPED:
        if tl.max(store_high - store_low, 0) <= 0:
            return
    store_end = tl.minimum(store_high, strip_tokens)
    weights, offset = load_weights(weight, bias, group, channel, in_channels, traits)
    token = (b * T + t)[:, None]
    stride = token_stride * traits.UNIT
    x_offset = token * stride + channel
    dy_offset = token * traits.CHANNELS + channel
    dx_stride = traits.C if traits.C > 0 else stride
    dx_offset = token * dx_stride + channel
    history_offset = (b * 0 if traits.PACKED else b * (W - 1))[:, None] * traits.C + (W - 1) * traits.C + channel
    zero = tl.zeros([R, BC], tl.float32)
    end = strip_tokens + AFTER
    i = end - 1
    recent = load_rows(x, x_offset, stride, history, history_offset, t, low, high, i, in_channels, W - 1, traits)
    recent = unpack_rows(recent, x.dtype.element_ty)
    i -= W - 1
    ahead = load_rows(x, x_offset, stride, history, history_offset, t, low, high, i, in_channels, GROUP, traits)
    next_ds = load_gradients(dy, dy_offset, store_low, high, end - 1, in_channels, GROUP, traits)
    next_starts = load_starts(sequence_starts, t, high, end - 1, GROUP, traits)
    i = end - 1 - GROUP
    x_rows = row_pointers(x + x_offset + (i - W + 1) * stride, stride, GROUP)
    dy_rows = row_pointers(dy + dy_offset + i * traits.CHANNELS, traits.CHANNELS, GROUP)
    dx_rows = row_pointers(dx + dx_offset + (end - 1) * dx_stride, dx_stride, GROUP)
    start_rows = row_pointers(start_pointers(sequence_starts, t, i, traits), 1, GROUP)
    later = copies(zero, W - 1)
    sums = copies(zero, W + 1)
    for g in range(0, end, GROUP):
        if AFTER > 0 and g == AFTER:
            # The barrier and values that are no constants keep the branch: compilers would make selects of it.
            tl.debug_barrier()
            sums = copies(zero + (g - AFTER), W + 1)
        for u in tl.static_range(GROUP):
            i = end - 1 - g - u
            rows = recent + (unpack(ahead[0], x.dtype.element_ty),)
            d = unpack(next_ds[0], dy.dtype.element_ty)
            start = next_starts[0]
            later_i = i - GROUP
            ahead = ahead[1:] + (
                load_row(x_rows[u], history, history_offset, t, low, high, later_i - W + 1, in_channels, traits),
            )
            next_ds = next_ds[1:] + (load_gradient(dy_rows[u], store_low, high, later_i, in_channels),)
            next_starts = next_starts[1:] + (load_start(start_rows[u], t, high, later_i, traits),)
            inputs = select_inputs(rows, start, history, history_offset, sequence_ids, t, high, i, in_channels, traits)
            d = activation_backward(weighted_sum(inputs, weights, offset, W), d, traits)
            new_sums = ()
            for j in tl.static_range(W):
                new_sums = new_sums + (sums[j] + d * inputs[j],)
            sums = new_sums + (sums[W] + d,)
            dx_i = weighted_sum(((d,) + later), weights, 0.0, W)
            stored = row_mask(i, store_low, store_end, in_channels)
            tl.store(dx_rows[u], dx_i.to(dx.dtype.element_ty), mask=stored)
            later = push_row(later, d, W)
            if traits.PACKED:
                is_first = ((start == i) & (i >= store_low) & (i < high))[:, None]
                if traits.HISTORY:
                    in_strip = is_first & (i < strip_tokens)
                    n = tl.load(sequence_ids + t + i, mask=i < high, other=0).to(tl.int64)
                    at = history_offset + n[:, None] * (W - 1) * traits.C
                    store_history_gradients(dhistory, at, later, weights, in_strip & in_channels, traits.C, W)
                later = clear_at_start(later, is_first, W)
            recent = rows[1:]
        x_rows = advance(x_rows, -GROUP * stride)
        dy_rows = advance(dy_rows, -GROUP * traits.CHANNELS)
        dx_rows = advance(dx_rows, -GROUP * dx_stride)
        start_rows = advance(start_rows, -GROUP)
    if traits.HISTORY and not traits.PACKED:
        at_start = ((t == 0) & (high > 0))[:, None]
        store_history_gradients(dhistory, history_offset, later, weights, at_start & in_channels, traits.C, W)
    out = partial + tl.cast(program, tl.int64) * (W + BIAS) * traits.CHANNELS + channel
    of_lags = sums[:W]
    for _ in range(W):
        tl.store(out, tl.sum(of_lags[0], 0)[None, :], mask=in_channels)
        of_lags = of_lags[1:] + of_lags[:1]
        out += traits.CHANNELS
    if BIAS:
        tl.store(out, tl.sum(sums[W], 0)[None, :], mask=in_channels)
