"""RMS norms of rows, forward and backward: after a residual sum, or with a gate for each number.

    h = x + branch                      or h = x
    n = h / sqrt(mean(h^2) + eps)
    y = w n                             or y = w n phi(gate)

    d_n = w dy phi(gate),    d_h = (d_n - n mean(n d_n)) / sqrt(mean(h^2) + eps) + d_sum
    d_w = sum over rows of n dy phi(gate),    d_gate = w n dy phi'(gate)

All arithmetic is in float32. d_sum is the gradient of h where h is a result, too: the gradient of a residual stream.

R rows, D width of a row. Every operand is [R / HEADS, HEADS, D], whose rows of HEADS D numbers may have gaps: from one
to the next there are stride UNIT numbers. Results have no gaps.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.glu.kernels import activate, activate_with_slope


class NormTraits(NamedTuple):
    """Compile-time parameters of both kernels.

    Args:
        D: width of a row. ROWS, BLOCK: tile of a program; BLOCK is the power of two from D on.
        EPS: added to the mean square.
        ACTIVATION: phi: "silu", "sigmoid", or "none": there is no gate.
        HEADS: rows of a token. UNIT: a number by which all strides are divisible, for wide loads.
    """

    D: int
    ROWS: int
    BLOCK: int
    EPS: float
    ACTIVATION: str
    HEADS: int
    UNIT: int


@triton.jit
def load_rows(x, tile, rows, stride, traits: tl.constexpr):
    """Load the tile of an operand [ROWS, BLOCK] in its dtype; zeros outside, and everywhere if x is None."""
    r = tile * traits.ROWS + tl.arange(0, traits.ROWS)[:, None]
    d = tl.arange(0, traits.BLOCK)[None, :]
    values = tl.zeros_like(r + d)
    if x is not None:
        at = (r // traits.HEADS).to(tl.int64) * (stride * traits.UNIT) + r % traits.HEADS * traits.D + d
        values = tl.load(x + at, mask=(r < rows) & (d < traits.D), other=0.0)
    return values


@triton.jit
def store_rows(x, tile, rows, values, traits: tl.constexpr):
    """Store a tile of a result without gaps."""
    r = tile * traits.ROWS + tl.arange(0, traits.ROWS)[:, None]
    d = tl.arange(0, traits.BLOCK)[None, :]
    tl.store(x + r.to(tl.int64) * traits.D + d, values, mask=(r < rows) & (d < traits.D))


@triton.jit
def load_weight(weight, traits: tl.constexpr):
    """Load the weight [1, BLOCK] in float32."""
    d = tl.arange(0, traits.BLOCK)[None, :]
    return tl.load(weight + d, mask=d < traits.D, other=0.0).to(tl.float32)


@triton.jit
def add_pairs(a, b, c, d):
    """Add two pairs of numbers."""
    return a + c, b + d


@triton.jit(do_not_specialize=["rows", "x_stride", "branch_stride", "gate_stride"])
def rms_norm_kernel(
    x, branch, gate, weight, h, y, rows, x_stride, branch_stride, gate_stride, traits: tl.constexpr,
):  # fmt: skip
    """Compute y, and h if there is a branch.

    Grid: one program per tile of ROWS rows.

    Reads x, branch or None, gate or None, weight [D]. Writes y; h, which is None without a branch.
    """
    ACTIVATION: tl.constexpr = traits.ACTIVATION
    tile = tl.program_id(0)
    h_tile = load_rows(x, tile, rows, x_stride, traits).to(tl.float32)
    if branch is not None:
        h_tile += load_rows(branch, tile, rows, branch_stride, traits).to(tl.float32)
        rounded = h_tile.to(h.dtype.element_ty)
        store_rows(h, tile, rows, rounded, traits)
        h_tile = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h_tile * h_tile, 1) / traits.D + traits.EPS)[:, None]
    out = h_tile * scale * load_weight(weight, traits)
    if gate is not None:
        out *= activate(load_rows(gate, tile, rows, gate_stride, traits).to(tl.float32), ACTIVATION)
    store_rows(y, tile, rows, out, traits)


@triton.jit(do_not_specialize=["rows", "h_stride", "gate_stride", "dy_stride", "d_sum_stride"])
def rms_norm_backward_kernel(
    h, gate, dy, d_sum, weight, d_h, d_gate, partial, rows, h_stride, gate_stride, dy_stride, d_sum_stride,
    traits: tl.constexpr,
):  # fmt: skip
    """Compute d_h, d_gate and sums for d_w.

    Grid: any number of programs; program i processes the tiles i, i + programs, ... It loads a tile while it computes
    the one before.

    Reads h and dy, gate or None, weight [D], d_sum or None. Writes d_h; d_gate, which is None without a gate; partial
    [programs, D] float32, the sum for d_w over the rows of each program.
    """
    ROWS: tl.constexpr = traits.ROWS
    BLOCK: tl.constexpr = traits.BLOCK
    ACTIVATION: tl.constexpr = traits.ACTIVATION
    w = load_weight(weight, traits)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    tile = tl.program_id(0)
    next_h = load_rows(h, tile, rows, h_stride, traits)
    next_dy = load_rows(dy, tile, rows, dy_stride, traits)
    next_gate = load_rows(gate, tile, rows, gate_stride, traits)
    next_residual = load_rows(d_sum, tile, rows, d_sum_stride, traits)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        h_tile = next_h.to(tl.float32)
        dy_tile = next_dy.to(tl.float32)
        raw = next_gate.to(tl.float32)
        residual = next_residual.to(tl.float32)
        following = tile + tl.num_programs(0)
        next_h = load_rows(h, following, rows, h_stride, traits)
        next_dy = load_rows(dy, following, rows, dy_stride, traits)
        next_gate = load_rows(gate, following, rows, gate_stride, traits)
        next_residual = load_rows(d_sum, following, rows, d_sum_stride, traits)
        if gate is not None:
            phi, slope = activate_with_slope(raw, ACTIVATION)
            d_phi = dy_tile * slope
            dy_tile *= phi
        d_n = w * dy_tile
        squares, projection = tl.reduce((h_tile * h_tile, h_tile * d_n), 1, add_pairs)
        scale = tl.rsqrt(squares / traits.D + traits.EPS)[:, None]
        n = h_tile * scale
        sums += n * dy_tile
        if gate is not None:
            store_rows(d_gate, tile, rows, w * n * d_phi, traits)
        d_tile = (d_n - n * (scale * projection[:, None] / traits.D)) * scale
        if d_sum is not None:
            d_tile += residual
        store_rows(d_h, tile, rows, d_tile, traits)
    d = tl.arange(0, BLOCK)[None, :]
    tl.store(partial + tl.program_id(0) * traits.D + d, tl.sum(sums, 0)[None, :], mask=d < traits.D)
