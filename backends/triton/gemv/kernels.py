"""Products of few rows x [M, D] with weights [N, D]: each weight is read once, with the operations around the product.

    y = W x                                          of up to four maps, as consecutive columns of y
    y = W (norm_weight * x / sqrt(mean(x^2) + eps))  with NORM
    y = phi(y),  or y = phi(W_gate x) * (W_up x)     with ACTIVATION, and GATED
    y = residual + W x                               with RESIDUAL
    y = W ((1 - mu) x + mu p)                        with SHIFT: a token shift with the input p before, mu by map

A program computes ROWS outputs of all rows of x. Its threads split D; sums are in float32, in an order that depends on
D and the dtype alone, so that a row's result does not depend on M. The factor of the norm is applied to the sums.

M rows, D inputs, N outputs
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.overlap import LINE, prefetch_line, start_next, wait_for_previous


class GemvTraits(NamedTuple):
    """Compile-time properties of a product.

    Args:
        M, D: rows and width of x. N: outputs of each map; 0: no such map. ROWS: outputs of a program.
        BLOCK: inputs that a program reads at a time, UNIT of them, 16 bytes, by one thread. STEPS: ceil(D / BLOCK).
        AHEAD: blocks that are loaded before the first is used. LINES: a power of two >= cache lines of D weights.
        X_STRIDE: elements from row to row of x. SHIFT: with it, MIX is the row of mix of each map.
        OVERLAP: see device/overlap.py.
    """

    M: int
    D: int
    N: tuple[int, ...]
    ROWS: int
    BLOCK: int
    UNIT: int
    STEPS: int
    AHEAD: int
    LINES: int
    X_STRIDE: int
    NORM: bool
    EPS: float
    ACTIVATION: str
    GATED: bool
    RESIDUAL: bool
    SHIFT: bool
    MIX: tuple[int, ...]
    OVERLAP: bool


@triton.jit
def load_weights(w, row, step: tl.constexpr, size, traits: tl.constexpr):
    """Load a block of the weights of ROWS outputs, [ROWS, BLOCK / UNIT, UNIT]."""
    unit = step * (traits.BLOCK // traits.UNIT) + tl.arange(0, traits.BLOCK // traits.UNIT)
    within = (row < size)[:, None, None] & (unit < tl.cdiv(traits.D, traits.UNIT))[None, :, None]
    d = unit[None, :, None] * traits.UNIT + tl.arange(0, traits.UNIT)[None, None, :]
    if traits.D % traits.UNIT != 0:
        within = within & (d < traits.D)
    at = row.to(tl.int64)[:, None, None] * traits.D + d
    return tl.load(w + at, mask=within, other=0.0, eviction_policy="evict_first")


@triton.jit
def prefetch_weights(w, row, size, traits: tl.constexpr):
    """Request the weights of ROWS outputs, all of which the program reads, from memory into the L2 cache."""
    ELEMENTS: tl.constexpr = LINE * traits.UNIT // 16
    d = tl.minimum(tl.arange(0, traits.LINES) * ELEMENTS, traits.D - 1)
    prefetch_line(w + tl.minimum(row, size - 1).to(tl.int64)[:, None] * traits.D + d[None, :])


@triton.jit
def load_inputs(x, step: tl.constexpr, traits: tl.constexpr):
    """Load a block of a row of x or of the norm's weights, [1, BLOCK / UNIT, UNIT] in float32."""
    unit = step * (traits.BLOCK // traits.UNIT) + tl.arange(0, traits.BLOCK // traits.UNIT)
    within = (unit < tl.cdiv(traits.D, traits.UNIT))[None, :, None]
    d = unit[None, :, None] * traits.UNIT + tl.arange(0, traits.UNIT)[None, None, :]
    if traits.D % traits.UNIT != 0:
        within = within & (d < traits.D)
    return tl.load(x + d, mask=within, other=0.0).to(tl.float32)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply silu, gelu (tanh approximation) or relu2."""
    if ACTIVATION == "silu":
        x *= tl.sigmoid(x)
    if ACTIVATION == "gelu":
        x *= tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    if ACTIVATION == "relu2":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        x *= x
    return x


@triton.jit
def locate_map(w0, w1, w2, w3, traits: tl.constexpr):
    """Return the weights of a program's map, its ROWS outputs, their number in the map, and the map's column of y."""
    ROWS: tl.constexpr = traits.ROWS
    N0: tl.constexpr = traits.N[0]
    N1: tl.constexpr = traits.N[1]
    N2: tl.constexpr = traits.N[2]
    N3: tl.constexpr = traits.N[3]
    tile = tl.program_id(0)
    w = w0
    size = N0
    first = 0
    before = 0
    if N1 > 0:
        if tile >= tl.cdiv(N0, ROWS):
            w = w1
            size = N1
            first = N0
            before = tl.cdiv(N0, ROWS)
    if N2 > 0:
        if tile >= tl.cdiv(N0, ROWS) + tl.cdiv(N1, ROWS):
            w = w2
            size = N2
            first = N0 + N1
            before = tl.cdiv(N0, ROWS) + tl.cdiv(N1, ROWS)
    if N3 > 0:
        if tile >= tl.cdiv(N0, ROWS) + tl.cdiv(N1, ROWS) + tl.cdiv(N2, ROWS):
            w = w3
            size = N3
            first = N0 + N1 + N2
            before = tl.cdiv(N0, ROWS) + tl.cdiv(N1, ROWS) + tl.cdiv(N2, ROWS)
    row = (tile - before) * ROWS + tl.arange(0, ROWS)
    return tl.multiple_of(w, 16), row, size, first


@triton.jit
def locate_mix(mix, traits: tl.constexpr):
    """Return the row of mix [.., D] of a program's map."""
    ROWS: tl.constexpr = traits.ROWS
    N0: tl.constexpr = traits.N[0]
    N1: tl.constexpr = traits.N[1]
    N2: tl.constexpr = traits.N[2]
    END_0: tl.constexpr = (N0 + ROWS - 1) // ROWS
    END_1: tl.constexpr = END_0 + (N1 + ROWS - 1) // ROWS
    END_2: tl.constexpr = END_1 + (N2 + ROWS - 1) // ROWS
    tile = tl.program_id(0)
    of_last = tl.where(tile < END_2, traits.MIX[2], traits.MIX[3])
    row = tl.where(tile < END_0, traits.MIX[0], tl.where(tile < END_1, traits.MIX[1], of_last))
    return mix + row * traits.D


@triton.jit
def gemv_kernel(x, norm_weight, residual, previous, mix, w0, w1, w2, w3, y, traits: tl.constexpr):
    """Compute ROWS outputs of one map for all rows.

    Grid: the tiles of ROWS outputs of all maps. Reads x, previous [M, D], norm_weight [D], residual [M, N], mix
    [.., D], w [N, D], with GATED [2 N, D], of which the gate is the first half. Writes y [M, N of all maps].
    """
    M: tl.constexpr = traits.M
    ROWS: tl.constexpr = traits.ROWS
    STEPS: tl.constexpr = traits.STEPS
    AHEAD: tl.constexpr = traits.AHEAD
    ACTIVATION: tl.constexpr = traits.ACTIVATION  # Triton 3.6 cannot pass a str field of a constexpr tuple
    N0: tl.constexpr = traits.N[0]
    N1: tl.constexpr = traits.N[1]
    N2: tl.constexpr = traits.N[2]
    N3: tl.constexpr = traits.N[3]
    if traits.OVERLAP:
        start_next()
    w, row, size, first = locate_map(w0, w1, w2, w3, traits)
    if traits.OVERLAP:
        prefetch_weights(w, row, size, traits)
        if traits.GATED:
            prefetch_weights(w + N0 * traits.D, row, size, traits)
        wait_for_previous()
    ahead = ()
    ahead_up = ()
    for step in tl.static_range(AHEAD):
        ahead = ahead + (load_weights(w, row, step, size, traits),)
        if traits.GATED:
            ahead_up = ahead_up + (load_weights(w + N0 * traits.D, row, step, size, traits),)
    sums = ()
    ups = ()
    shifts = ()
    squares = ()
    for _ in tl.static_range(M):
        shifts = shifts + (tl.zeros([ROWS, traits.BLOCK // traits.UNIT], tl.float32),)
        sums = sums + (tl.zeros([ROWS, traits.BLOCK // traits.UNIT], tl.float32),)
        ups = ups + (tl.zeros([ROWS, traits.BLOCK // traits.UNIT], tl.float32),)
        squares = squares + (tl.zeros([1, traits.BLOCK // traits.UNIT], tl.float32),)
    for step in tl.static_range(STEPS):
        weight = tl.cast(ahead[step], tl.float32)
        if traits.GATED:
            weight_up = tl.cast(ahead_up[step], tl.float32)
        if step + AHEAD < STEPS:
            ahead = ahead + (load_weights(w, row, step + AHEAD, size, traits),)
            if traits.GATED:
                ahead_up = ahead_up + (load_weights(w + N0 * traits.D, row, step + AHEAD, size, traits),)
        if traits.NORM:
            scale = load_inputs(norm_weight, step, traits)
        if traits.SHIFT:
            share = load_inputs(locate_mix(mix, traits), step, traits)
        new_sums = ()
        new_ups = ()
        new_shifts = ()
        new_squares = ()
        for m in tl.static_range(M):
            inputs = load_inputs(x + m * traits.X_STRIDE, step, traits)
            if traits.NORM:
                new_squares = new_squares + (squares[m] + tl.sum(inputs * inputs, 2),)
                inputs *= scale
            if traits.SHIFT:
                shifted = share * load_inputs(previous + m * traits.D, step, traits)
                new_shifts = new_shifts + (shifts[m] + tl.sum(weight * shifted, 2),)
                inputs *= 1.0 - share
            new_sums = new_sums + (sums[m] + tl.sum(weight * inputs, 2),)
            if traits.GATED:
                new_ups = new_ups + (ups[m] + tl.sum(weight_up * inputs, 2),)
        sums = new_sums
        if traits.GATED:
            ups = new_ups
        if traits.SHIFT:
            shifts = new_shifts
        if traits.NORM:
            squares = new_squares

    for m in tl.static_range(M):
        out = tl.sum(sums[m], 1)
        factor = 1.0
        if traits.NORM:
            factor = tl.rsqrt(tl.sum(tl.sum(squares[m], 1), 0) / traits.D + traits.EPS)
            out *= factor
        if traits.SHIFT:
            out += tl.sum(shifts[m], 1)
        if ACTIVATION != "":
            out = activate(out, ACTIVATION)
        if traits.GATED:
            out *= tl.sum(ups[m], 1) * factor
        at = m * (N0 + N1 + N2 + N3) + first + row
        if traits.RESIDUAL:
            out += tl.load(residual + at, mask=row < size, other=0.0).to(tl.float32)
        tl.store(y + at, out.to(y.dtype.element_ty), mask=row < size)
