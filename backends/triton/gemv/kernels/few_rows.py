"""Products of up to 64 rows x [M, D] with weights [N, D] by tensor cores, with the operations that gemv.py lists.

A program computes ROWS outputs of all rows of x, and passes over D once; sums are in float32. The norm's weights are
applied to x before it is rounded to its dtype again, and the norm's factor to the sums.

M rows, D inputs, N outputs
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.overlap import LINE, prefetch_line, start_next, wait_for_previous
from deltazoo.backends.triton.gemv.kernels.gemv import activate, locate_map, locate_mix


class FewRowsTraits(NamedTuple):
    """Compile-time properties of a product.

    Args:
        M, D: rows and width of x. MAPS, N, FIRST, TILES: as in `GemvTraits`. ROWS: outputs of a program.
        COLUMNS: M rounded up to a power of two. BLOCK: inputs that a program reads at a time. STAGES: blocks in flight.
        LINES: cache lines of a row of the weights that are requested before the kernel's operands are ready.
        X_STRIDE: elements from row to row of x. SHIFT, MIX, OVERLAP: as in `GemvTraits`.
    """

    M: int
    D: int
    MAPS: int
    N: tuple[int, ...]
    FIRST: tuple[int, ...]
    TILES: tuple[int, ...]
    ROWS: int
    COLUMNS: int
    BLOCK: int
    STAGES: int
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
def prefetch_rows(w, row, size, traits: tl.constexpr):
    """Prefetch the first cache lines of the weights of ROWS outputs into the L2 cache."""
    d = tl.minimum(tl.arange(0, traits.LINES) * (LINE // 2), traits.D - 1)
    prefetch_line(w + tl.minimum(row, size - 1).to(tl.int64)[:, None] * traits.D + d[None, :])


@triton.jit
def few_rows_kernel(x, norm_weight, residual, previous, mix, weights, y, traits: tl.constexpr):
    """Compute ROWS outputs of one map for all rows.

    Grid: the tiles of ROWS outputs of all maps. Reads x, previous [M, D], norm_weight [D], residual [M, N], mix
    [.., D], w [N, D], with GATED [2 N, D], of which the gate is the first half. Writes y [M, N of all maps].
    """
    M: tl.constexpr = traits.M
    D: tl.constexpr = traits.D
    ROWS: tl.constexpr = traits.ROWS
    BLOCK: tl.constexpr = traits.BLOCK
    COLUMNS: tl.constexpr = traits.COLUMNS
    ACTIVATION: tl.constexpr = traits.ACTIVATION  # Triton 3.6 cannot pass a str field of a constexpr tuple
    N0: tl.constexpr = traits.N[0]
    MAPS: tl.constexpr = traits.MAPS
    TOTAL: tl.constexpr = traits.FIRST[MAPS]
    if traits.OVERLAP:
        start_next()
    w, row, size, first = locate_map(tl.program_id(0), weights, traits)
    if traits.OVERLAP:
        if traits.LINES > 0:
            prefetch_rows(w, row, size, traits)
            if traits.GATED:
                prefetch_rows(w + N0 * D, row, size, traits)
        wait_for_previous()
    ms = tl.arange(0, COLUMNS)
    in_m = ms < M
    in_n = row < size
    at_row = row.to(tl.int64)[:, None] * D
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    ups = tl.zeros([ROWS, COLUMNS], tl.float32)
    shifts = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([COLUMNS], tl.float32)
    shares = locate_mix(tl.program_id(0), mix, traits) if traits.SHIFT else mix
    for start in tl.range(0, D, BLOCK, num_stages=traits.STAGES):
        d = start + tl.arange(0, BLOCK)
        in_d = d < D
        mask = in_n[:, None] & in_d[None, :]
        weight = tl.load(w + at_row + d[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        inputs = tl.load(x + ms[:, None] * traits.X_STRIDE + d[None, :], mask=in_m[:, None] & in_d[None, :], other=0.0)
        if traits.NORM:
            wide = inputs.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            scale = tl.load(norm_weight + d, mask=in_d, other=0.0).to(tl.float32)
            wide *= scale[None, :]
            if traits.SHIFT:
                share = tl.load(shares + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
                before = tl.load(previous + ms[:, None] * D + d[None, :], mask=in_m[:, None] & in_d[None, :], other=0.0)
                wide *= 1.0 - share
                shifted = (before.to(tl.float32) * share).to(inputs.dtype)
                shifts = tl.dot(weight, tl.trans(shifted), shifts)
            inputs = wide.to(inputs.dtype)
        sums = tl.dot(weight, tl.trans(inputs), sums)
        if traits.GATED:
            weight_up = tl.load(w + N0 * D + at_row + d[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            ups = tl.dot(weight_up, tl.trans(inputs), ups)

    if traits.NORM:
        factor = tl.rsqrt(squares / D + traits.EPS)
        sums *= factor[None, :]
        ups *= factor[None, :]
    if traits.SHIFT:
        sums += shifts
    if ACTIVATION != "":
        sums = activate(sums, ACTIVATION)
    if traits.GATED:
        sums *= ups
    at = ms[None, :].to(tl.int64) * TOTAL + first + row[:, None]
    mask = in_n[:, None] & in_m[None, :]
    if traits.RESIDUAL:
        sums += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, sums.to(y.dtype.element_ty), mask=mask)
