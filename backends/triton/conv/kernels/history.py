"""Advance the history of a convolution by the accepted ones of drafted tokens."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def advance_history_kernel(
    history, x, accepted, tokens, C: tl.constexpr, PAST: tl.constexpr, STRIDE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Replace the history by the last PAST inputs up to the accepted tokens.

    Grid: row, BC channels. Reads x [B, tokens, C] with a stride from token to token, and accepted [B] int32. Updates
    history [B, PAST, C] in place.
    """
    TILES: tl.constexpr = (C + BC - 1) // BC
    row = tl.cast(tl.program_id(0) // TILES, tl.int64)
    channel = tl.program_id(0) % TILES * BC + tl.arange(0, BC)
    count = tl.minimum(tl.maximum(tl.load(accepted + row), 0), tokens)
    in_channels = channel < C
    history += row * PAST * C
    x += row * tokens * STRIDE
    inputs = ()
    for i in tl.static_range(PAST):
        at = count + i - PAST  # of x; before its first token the history is read
        past = tl.load(history + (at + PAST) * C + channel, mask=in_channels & (at < 0), other=0.0)
        drafted = tl.load(x + at * STRIDE + channel, mask=in_channels & (at >= 0), other=0.0)
        inputs = inputs + (tl.where(at < 0, past, drafted.to(past.dtype)),)
    tl.debug_barrier()  # several threads may have loaded the same input, and one of them stores it
    for i in tl.static_range(PAST):
        tl.store(history + i * C + channel, inputs[i], mask=in_channels)
