"""Draft the tokens of a pass by prompt lookup, and append its accepted tokens to the history: a program per row."""

import triton
import triton.language as tl

_REJECTED = tl.constexpr(-2)  # as in `backends.ops.prompt_lookup`


@triton.jit(do_not_specialize=["C"])
def lookup_kernel(read, last, history, C, T: tl.constexpr, BC: tl.constexpr):
    """Write read [B, T]: last [B, 1], and what followed the longest and then latest match of up to three last tokens.

    Grid: row. Reads history [B, C].
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    history += row * C
    read += row * T
    end_0 = tl.load(history + C - 1)
    end_1 = tl.load(history + C - 2)
    end_2 = tl.load(history + C - 3)
    best = tl.full((BC,), -1, tl.int32)
    for start in range(0, C, BC):
        at = start + tl.arange(0, BC)
        is_earlier = (at >= 3) & (at < C - 1)
        same_0 = tl.load(history + at, mask=is_earlier, other=0) == end_0
        same_1 = tl.load(history + at - 1, mask=is_earlier, other=0) == end_1
        same_2 = tl.load(history + at - 2, mask=is_earlier, other=0) == end_2
        matched = tl.where(same_0, 1 + tl.where(same_1, 1 + same_2.to(tl.int32), 0), 0)
        best = tl.maximum(best, tl.where(is_earlier, matched * C + at, -1))
    found = tl.max(best, 0)
    first = tl.where(found < 0, C - 1, found % C + 1)
    tl.store(read, tl.load(last + row))
    for t in tl.static_range(1, T):
        tl.store(read + t, tl.load(history + first + (t - 1) % (C - first)))


@triton.jit(do_not_specialize=["C"])
def append_kernel(
    chosen, checked, read, kept, last, accepted, history, drawn, left, C,
    T: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Append the accepted tokens of a pass to history [B, C], in place, and write their number.

    Grid: row. Reads chosen, checked and read [B, T]. Writes kept [B, T], last [B, 1] and accepted [B] int32. Updates
    drawn and left [B] in place.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    history += row * C
    chosen += row * T
    t = tl.arange(0, BT)
    token = tl.load(checked + row * T + t, mask=t < T, other=0)
    draft = tl.load(read + row * T + t + 1, mask=t + 1 < T, other=0)
    is_wrong = (t + 1 < T) & (token != draft)
    remaining = tl.load(left + row)
    count = tl.minimum(1 + tl.min(tl.where(is_wrong, t, T - 1), 0), remaining.to(tl.int32))
    newest = tl.load(chosen + count - 1, mask=count > 0, other=0)
    newest = tl.where(count > 0, newest, tl.load(history + C - 1))
    before = tl.load(drawn + row)
    tl.store(kept + row * T + t, tl.where(t < count, token, _REJECTED), mask=t < T)
    for start in range(0, C, BC):
        to = start + tl.arange(0, BC)
        at = to + count
        past = tl.load(history + at, mask=at < C, other=0)
        new = tl.load(chosen + at - C, mask=(to < C) & (at >= C), other=0)
        tl.debug_barrier()  # the tokens of other threads are read before they are overwritten
        tl.store(history + to, tl.where(at < C, past, new), mask=to < C)
    tl.store(last + row, newest)
    tl.store(accepted + row, count)
    tl.store(drawn + row, before + count)
    tl.store(left + row, remaining - count)
