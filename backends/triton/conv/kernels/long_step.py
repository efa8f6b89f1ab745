"""One token of a convolution with a filter as long as the sequence, over the history of all tokens.

    u = factor x,    history slot p <- u;    y = gate (sum_(s <= p) filter_(p - s) history_s + bias u)

factor and gate may be missing. p: tokens before this one, per row

B rows, D channels, S slots
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.overlap import start_next, wait_for_previous


class LongStepTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        D: channels. X, FACTOR, GATE: elements from row to row of x, factor and gate; -1: there is no factor, or gate.
        ROWS, BS, BD: rows, slots and channels of a tile, powers of two. STAGES: tiles in flight, and one.
        OVERLAP: see device/overlap.py.
    """

    D: int
    X: int
    FACTOR: int
    GATE: int
    ROWS: int
    BS: int
    BD: int
    STAGES: int
    OVERLAP: bool


@triton.jit(do_not_specialize=["B", "S"])
def long_conv_step_kernel(x, factor, gate, history, seen, filter, bias, y, B, S, traits: tl.constexpr):
    """Convolve the token of ROWS rows.

    Grid: ROWS rows, BD channels. Reads x, factor, gate [B, D] with row strides, history [B, S, D], seen [B] int64, the
    tokens of each row including this one, filter [S, D] float32, bias [D]. Stores u in slot p of history, and writes
    y [B, D]. A tile of the filter is read once for all rows if their positions are equal.
    """
    D: tl.constexpr = traits.D
    ROWS: tl.constexpr = traits.ROWS
    BS: tl.constexpr = traits.BS
    BD: tl.constexpr = traits.BD
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    if traits.OVERLAP:
        start_next()
        wait_for_previous()
    d = tl.program_id(0) % BLOCKS * BD + tl.arange(0, BD)
    row = tl.program_id(0) // BLOCKS * ROWS + tl.arange(0, ROWS)
    in_d = d < D
    mask = (row < B)[:, None] & in_d[None, :]
    row = tl.minimum(row, B - 1).to(tl.int64)  # so that positions of missing rows are those of the last one
    p = (tl.minimum(tl.load(seen + row), S) - 1).to(tl.int32)
    last = tl.max(p, 0)
    token = tl.load(x + row[:, None] * traits.X + d[None, :], mask=mask, other=0.0)
    if traits.FACTOR >= 0:
        scale = tl.load(factor + row[:, None] * traits.FACTOR + d[None, :], mask=mask, other=0.0)
        token = (token.to(tl.float32) * scale.to(tl.float32)).to(token.dtype)
    history += row[:, None] * S * D + d[None, :]
    tl.store(history + p[:, None].to(tl.int64) * D, token.to(history.dtype.element_ty), mask=mask)
    sums = tl.zeros([ROWS, BS, BD], tl.float32)
    history = history[:, None, :]
    filter += d
    if tl.min(p, 0) == last:
        for start in tl.range(0, last, BS, num_stages=traits.STAGES):
            s = start + tl.arange(0, BS)
            within = (s < last)[:, None] & in_d[None, :]
            taps = tl.load(filter[None, :] + (last - s)[:, None] * D, mask=within, other=0.0)
            tile = tl.load(history + s[None, :, None] * D, mask=mask[:, None, :] & within[None, :, :], other=0.0)
            sums += tile.to(tl.float32) * taps[None, :, :]
    else:
        for start in tl.range(0, last, BS, num_stages=traits.STAGES):
            s = (start + tl.arange(0, BS))[None, :]
            within = (s < p[:, None])[:, :, None] & mask[:, None, :]
            at = tl.maximum(p[:, None] - s, 0)[:, :, None] * D
            taps = tl.load(filter[None, None, :] + at, mask=within, other=0.0)
            tile = tl.load(history + s[:, :, None] * D, mask=within, other=0.0)
            sums += tile.to(tl.float32) * taps
    first = tl.load(filter, mask=in_d, other=0.0) + tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32)
    out = tl.sum(sums, 1) + token.to(tl.float32) * first[None, :]
    if traits.GATE >= 0:
        g = tl.load(gate + row[:, None] * traits.GATE + d[None, :], mask=mask, other=0.0)
        out *= g.to(tl.float32)
    tl.store(y + row[:, None] * D + d[None, :], out.to(y.dtype.element_ty), mask=mask)
