"""One part of a short convolution with its SiLU and the L2 norm of its heads, forward and backward.

A program takes R strips of STRIP consecutive tokens and BC channels: a head, where there is a norm. It walks the strips
token by token, row i of every strip at a time, and keeps the last rows in registers, so that each is loaded once, GROUP
rows ahead of its use. W taps, of lag j = 0 to W - 1; in a pack `first` [T] is the first token of each token's sequence
and `which` [T] the number of the sequence, both int32
"""

import triton
import triton.language as tl

NOWHERE = tl.constexpr(2**30)


@triton.jit
def place(
    T, strips, per_row,
    UNIT: tl.constexpr, CHANNELS: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, STRIP: tl.constexpr,
    ROWS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Where a program stands: its number along time; of its strips [R] the row of the batch (int64), the first token,
    the first row there is (W - 1 may stand before the strip) and the end of those below ROWS; its channels of the part,
    and which there are [1, BC]. Neighbours in channels run side by side."""
    WIDTH: tl.constexpr = UNIT if UNIT > 0 else BC
    HEADS: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    pid = tl.program_id(0)
    lane = tl.arange(0, BC)[None, :]
    channel = pid % HEADS * WIDTH + lane
    in_channels = (lane < WIDTH) & (channel < CHANNELS)
    strip = pid // HEADS * R + tl.arange(0, R)
    t = strip % per_row * STRIP
    low = tl.where(strip < strips, tl.maximum(-t, 1 - W), NOWHERE)
    high = tl.where(strip < strips, tl.minimum(T - t, ROWS), 0)
    return pid // HEADS, (strip // per_row).to(tl.int64), t, low, high, channel, in_channels


@triton.jit
def load_taps(weight, bias, channel, in_channels, W: tl.constexpr, BIAS: tl.constexpr):
    """The weight of every lag, and the bias, [1, BC]."""
    taps = ()
    for j in tl.static_range(W):
        taps = taps + (tl.load(weight + channel * W + (W - 1 - j), mask=in_channels, other=0.0).to(tl.float32),)
    offset = tl.zeros_like(taps[0])
    if BIAS:
        offset = tl.load(bias + channel, mask=in_channels, other=0.0).to(tl.float32)
    return taps, offset


@triton.jit
def load_rows(
    x, at, history, past, t, low, high, i, in_channels, COUNT: tl.constexpr,
    STRIDE: tl.constexpr, C: tl.constexpr, W: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Rows i, i - 1, ... of x [R, BC]. Without a pack, what is before token 0 is the history."""
    rows = ()
    for u in tl.static_range(COUNT):
        row = i - u
        value = tl.load(x + at + row * STRIDE, mask=((row >= low) & (row < high))[:, None] & in_channels, other=0.0)
        value = value.to(tl.float32)
        if HISTORY and not PACKED:
            before = (t + row < 0)[:, None]
            there = before & ((t + row > -W) & (high > 0))[:, None] & in_channels
            kept = tl.load(history + past + (t + row)[:, None] * C, mask=there, other=0.0)
            value = tl.where(before, kept.to(tl.float32), value)
        rows = rows + (value,)
    return rows


@triton.jit
def load_gradients(dy, of, high, i, in_channels, COUNT: tl.constexpr, CHANNELS: tl.constexpr):
    """Rows i, i - 1, ... of dy [R, BC]."""
    rows = ()
    for u in tl.static_range(COUNT):
        here = ((i - u >= 0) & (i - u < high))[:, None] & in_channels
        rows = rows + (tl.load(dy + of + (i - u) * CHANNELS, mask=here, other=0.0).to(tl.float32),)
    return rows


@triton.jit
def load_begins(first, t, high, i, COUNT: tl.constexpr, PACKED: tl.constexpr):
    """The row at which the sequence of row i, i - 1, ... begins [R]; nothing that is read without a pack."""
    begins = ()
    for u in tl.static_range(COUNT):
        begin = t
        if PACKED:
            begin = tl.load(first + t + i - u, mask=(i - u >= 0) & (i - u < high), other=0) - t
        begins = begins + (begin,)
    return begins


@triton.jit
def seen(
    rows, begins, history, past, which, t, high, i, in_channels,
    C: tl.constexpr, W: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """What row i sees at each lag, of the rows i to i - W + 1: in a pack its own sequence alone, or the history."""
    taps = ()
    for j in tl.static_range(W):
        tap = rows[j]
        if PACKED and j > 0:
            reach = i - j - begins
            other = tl.zeros_like(tap)
            if HISTORY:
                beyond = (reach < 0) & (i < high)
                n = tl.load(which + t + i, mask=beyond, other=0).to(tl.int64)
                at = past + ((n * (W - 1) + reach) * C)[:, None]
                other = tl.load(history + at, mask=beyond[:, None] & in_channels, other=0.0).to(tl.float32)
            tap = tl.where((reach < 0)[:, None], other, tap)
        taps = taps + (tap,)
    return taps


@triton.jit
def weighted(values, taps, offset, W: tl.constexpr):
    """The sum of values [R, BC] by lag, each times its tap."""
    total = values[0] * taps[0] + offset
    for j in tl.static_range(1, W):
        total += values[j] * taps[j]
    return total


@triton.jit
def sigmoid(a):
    """By a root, for a division takes several instructions."""
    root = tl.rsqrt(1.0 + tl.exp2(a * -1.4426950408889634))
    return root * root


@triton.jit(do_not_specialize=["T", "strips", "per_row"])
def short_conv_kernel(
    x, weight, bias, history, first, which, y, T, strips, per_row,
    STRIDE: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BEGIN: tl.constexpr, CHANNELS: tl.constexpr,
    SILU: tl.constexpr, UNIT: tl.constexpr, EPS: tl.constexpr, BIAS: tl.constexpr, HISTORY: tl.constexpr,
    PACKED: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, STRIP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y [B, T, CHANNELS], of the channels of x [B, T, C] from BEGIN on; x has STRIDE numbers from token to token.

    weight [C, W]; bias [C]; history [N, W - 1, C]; per_row: strips of a row of the batch.
    """
    _, b, t, low, high, channel, in_channels = place(T, strips, per_row, UNIT, CHANNELS, BC, R, STRIP, STRIP, W)
    taps, offset = load_taps(weight, bias, BEGIN + channel, in_channels, W, BIAS)
    token = (b * T + t)[:, None]
    at = token * STRIDE + BEGIN + channel
    to = token * CHANNELS + channel
    # where token 0 would be in the history of a row of the batch, or of sequence 0
    past = (b * 0 if PACKED else b * (W - 1))[:, None] * C + (W - 1) * C + BEGIN + channel
    # rows and beginnings go from the latest backwards
    recent = load_rows(x, at, history, past, t, low, high, -1, in_channels, W - 1, STRIDE, C, W, HISTORY, PACKED)
    i = GROUP - 1
    ahead = load_rows(x, at, history, past, t, low, high, i, in_channels, GROUP, STRIDE, C, W, HISTORY, PACKED)
    next_begins = load_begins(first, t, high, i, GROUP, PACKED)
    for g in range(0, STRIP, GROUP):
        rows = ahead + recent
        begins = next_begins
        i = g + 2 * GROUP - 1
        ahead = load_rows(x, at, history, past, t, low, high, i, in_channels, GROUP, STRIDE, C, W, HISTORY, PACKED)
        next_begins = load_begins(first, t, high, i, GROUP, PACKED)
        for k in tl.static_range(GROUP):
            i = g + k
            window = rows[GROUP - 1 - k : GROUP - 1 - k + W]
            begin = begins[GROUP - 1 - k]
            values = seen(window, begin, history, past, which, t, high, i, in_channels, C, W, HISTORY, PACKED)
            a = weighted(values, taps, offset, W)
            if SILU:
                a *= sigmoid(a)
            if UNIT > 0:
                a *= tl.rsqrt(tl.sum(a * a, 1) + EPS)[:, None]
            tl.store(y + to + i * CHANNELS, a.to(y.dtype.element_ty), mask=(i < high)[:, None] & in_channels)
        recent = rows[: W - 1]


@triton.jit
def gradient_before(a, d, SILU: tl.constexpr, UNIT: tl.constexpr, EPS: tl.constexpr):
    """The gradient of the convolution's result a [R, BC], from d, that of what follows from it."""
    s = a
    if SILU:
        gate = sigmoid(a)
        s = a * gate
    if UNIT > 0:
        scale = tl.rsqrt(tl.sum(s * s, 1) + EPS)
        along = scale * scale * tl.sum(s * d, 1)
        d = scale[:, None] * (d - along[:, None] * s)
    if SILU:
        d *= gate + s - s * gate
    return d


@triton.jit
def store_past(dhistory, at, later, taps, there, C: tl.constexpr, W: tl.constexpr):
    """The gradients of the W - 1 inputs before a sequence, from those of its first results, `later`."""
    for m in tl.static_range(1, W):
        d = taps[m] * later[0]
        for j in tl.static_range(m + 1, W):
            d += taps[j] * later[j - m]
        tl.store(dhistory + at - m * C, d.to(dhistory.dtype.element_ty), mask=there)


@triton.jit
def pushed(later, d, W: tl.constexpr):
    """`later` for the row before."""
    return ((d,) + later)[: W - 1]


@triton.jit
def cut(later, is_first, W: tl.constexpr):
    """`later` for the row before, which is of another sequence where this one is the first of its own."""
    kept = ()
    for j in tl.static_range(W - 1):
        kept = kept + (tl.where(is_first, 0.0, later[j]),)
    return kept


@triton.jit
def after_strip(
    x, at, history, past, first, which, dy, of, t, low, high, in_channels, taps, offset, nothing,
    STRIDE: tl.constexpr, C: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr, SILU: tl.constexpr,
    UNIT: tl.constexpr, EPS: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """From the W - 1 rows after a strip: those before its last, from it on, and the gradients after its last."""
    later = ()
    for _ in tl.static_range(W - 1):
        later = later + (nothing,)
    last = STRIP + W - 2
    rows = load_rows(x, at, history, past, t, low, high, last, in_channels, 2 * W - 2, STRIDE, C, W, HISTORY, PACKED)
    ds = load_gradients(dy, of, high, last, in_channels, W - 1, CHANNELS)
    begins = load_begins(first, t, high, last, W - 1, PACKED)
    for u in tl.static_range(W - 1):
        i = last - u
        values = seen(rows[u : u + W], begins[u], history, past, which, t, high, i, in_channels, C, W, HISTORY, PACKED)
        d = gradient_before(weighted(values, taps, offset, W), ds[u], SILU, UNIT, EPS)
        later = pushed(later, d, W)
        if PACKED:
            later = cut(later, ((begins[u] == i) & (i < high))[:, None], W)
    return rows[W - 1 :], later


@triton.jit(do_not_specialize=["T", "strips", "per_row"])
def short_conv_backward_kernel(
    x, weight, bias, history, first, which, dy, dx, dhistory, partial, T, strips, per_row,
    STRIDE: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BEGIN: tl.constexpr, CHANNELS: tl.constexpr,
    SILU: tl.constexpr, UNIT: tl.constexpr, EPS: tl.constexpr, BIAS: tl.constexpr, HISTORY: tl.constexpr,
    PACKED: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, STRIP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The part of dx [B, T, C] and of dhistory, like history, from dy [B, T, CHANNELS]; walks backwards.

    With a_t = sum_j w_j x_(t-j) and d_t the gradient of a_t: dx_t = sum_j w_j d_(t+j), dw_j = sum_t d_t x_(t-j).
    partial [programs along time, W + BIAS, CHANNELS] float32: the sums dw_j, by lag, and that of d, of their tokens.
    The W - 1 rows after a strip are computed again.
    """
    tile, b, t, low, high, channel, in_channels = place(
        T, strips, per_row, UNIT, CHANNELS, BC, R, STRIP, STRIP + W - 1, W
    )
    taps, offset = load_taps(weight, bias, BEGIN + channel, in_channels, W, BIAS)
    token = (b * T + t)[:, None]
    at = token * STRIDE + BEGIN + channel
    of = token * CHANNELS + channel
    to = token * C + BEGIN + channel
    past = (b * 0 if PACKED else b * (W - 1))[:, None] * C + (W - 1) * C + BEGIN + channel
    nothing = tl.zeros([R, BC], tl.float32)
    recent, later = after_strip(
        x, at, history, past, first, which, dy, of, t, low, high, in_channels, taps, offset, nothing,
        STRIDE, C, W, CHANNELS, SILU, UNIT, EPS, HISTORY, PACKED, STRIP,
    )  # fmt: skip
    sums = ()
    for _ in tl.static_range(W + 1):
        sums = sums + (nothing,)
    i = STRIP - 1
    ahead = load_rows(x, at, history, past, t, low, high, i - W + 1, in_channels, GROUP, STRIDE, C, W, HISTORY, PACKED)
    next_ds = load_gradients(dy, of, high, i, in_channels, GROUP, CHANNELS)
    next_begins = load_begins(first, t, high, i, GROUP, PACKED)
    for g in range(0, STRIP, GROUP):
        rows = recent + ahead
        ds = next_ds
        begins = next_begins
        i = STRIP - 1 - g - GROUP
        ahead = load_rows(
            x, at, history, past, t, low, high, i - W + 1, in_channels, GROUP, STRIDE, C, W, HISTORY, PACKED
        )
        next_ds = load_gradients(dy, of, high, i, in_channels, GROUP, CHANNELS)
        next_begins = load_begins(first, t, high, i, GROUP, PACKED)
        for u in tl.static_range(GROUP):
            i = STRIP - 1 - g - u
            seen_by = rows[u : u + W]
            values = seen(seen_by, begins[u], history, past, which, t, high, i, in_channels, C, W, HISTORY, PACKED)
            d = gradient_before(weighted(values, taps, offset, W), ds[u], SILU, UNIT, EPS)
            grown = ()
            for j in tl.static_range(W):
                grown = grown + (sums[j] + d * values[j],)
            sums = grown + (sums[W] + d,)
            dxi = weighted(((d,) + later), taps, 0.0, W)
            tl.store(dx + to + i * C, dxi.to(dx.dtype.element_ty), mask=(i < high)[:, None] & in_channels)
            later = pushed(later, d, W)
            if PACKED:
                is_first = ((begins[u] == i) & (i < high))[:, None]
                if HISTORY:
                    n = tl.load(which + t + i, mask=i < high, other=0).to(tl.int64)
                    store_past(dhistory, past + n[:, None] * (W - 1) * C, later, taps, is_first & in_channels, C, W)
                later = cut(later, is_first, W)
        recent = rows[GROUP:]
    if HISTORY and not PACKED:
        store_past(dhistory, past, later, taps, ((t == 0) & (high > 0))[:, None] & in_channels, C, W)
    out = partial + tl.cast(tile, tl.int64) * (W + BIAS) * CHANNELS + channel
    for j in tl.static_range(W + BIAS):
        tl.store(out + j * CHANNELS, tl.sum(sums[j], 0)[None, :], mask=in_channels)
