"""Products of 2 to 64 rows x [M, D] with weights [N, D] by tensor cores, with the operations that gemv.py lists.

    normalize_rows_kernel   the norm and the token shift, so that x is a plain operand
    few_rows_kernel         products; a program computes ROWS rows of the weights times all rows of x; on sm_90, with
                            rows of a multiple of 16 bytes, few_rows_sm90_kernel (few_rows_sm90.py)
    finish_rows_kernel      the sum over splits of D, where there are any, and what follows the product

Maps of few outputs are split over D: otherwise their programs are too few to read memory at full speed. Sums are in
float32, in an order that does not depend on M.

M rows, D inputs, N outputs
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.overlap import start_next, wait_for_previous
from deltazoo.backends.triton.device.taps import load_past, load_tap_weights, push_token
from deltazoo.backends.triton.gemv.kernels.gemv import activate, convolve_product, load_biases, locate_map


class FewRowsTraits(NamedTuple):
    """Compile-time properties of a product.

    Args:
        D: width of x. MAPS, N, FIRST: as in `GemvTraits`. TILES: tiles of the maps before each, and of all.
        ROWS: rows of the weights of a program; with a gate, half of them are gates. COLUMNS: the power of two from M
            on, at least 16. BLOCK: inputs that a program reads at a time. STAGES: blocks in flight.
        SPLITS: programs of a tile; with more than one, y is their sums. SPAN: inputs of a program, a multiple of BLOCK.
        X_STRIDE: elements from row to row of x. PLACE: the first number of x that each map reads, a multiple of UNIT
            bytes. BIASES, BIASED, TAPS, TAP_BIAS, TAP_SILU: as in `GemvTraits`. OVERLAP: see device/overlap.py.
    """

    D: int
    MAPS: int
    N: tuple[int, ...]
    FIRST: tuple[int, ...]
    TILES: tuple[int, ...]
    ROWS: int
    COLUMNS: int
    BLOCK: int
    STAGES: int
    SPLITS: int
    SPAN: int
    X_STRIDE: int
    PLACE: tuple[int, ...]
    UNIT: int
    ACTIVATION: str
    GATED: bool
    RESIDUAL: bool
    BIASES: tuple[bool, ...]
    BIASED: bool
    TAPS: int
    TAP_BIAS: bool
    TAP_SILU: bool
    OVERLAP: bool


@triton.jit(do_not_specialize=["M"])
def few_rows_kernel(x, residual, weights, biases, history, taps, tap_bias, y, M, traits: tl.constexpr):
    """Compute ROWS rows of the product of one map for all rows of x, or their sums over a part of D.

    Grid: tiles of ROWS rows of the weights of all maps, SPLITS. Reads x [M, D] of each map, residual [M, N], w [N, D],
    with GATED [2 N, D], of which the gate is the first half, biases [N]. Writes y [M, N of all maps], or with
    SPLITS > 1 the sums [SPLITS, M, rows of all weights] in float32. With TAPS it reads and writes what gemv_kernel
    does.
    """
    D: tl.constexpr = traits.D
    ROWS: tl.constexpr = traits.ROWS
    BLOCK: tl.constexpr = traits.BLOCK
    COLUMNS: tl.constexpr = traits.COLUMNS
    SPLITS: tl.constexpr = traits.SPLITS
    ACTIVATION: tl.constexpr = traits.ACTIVATION  # Triton 3.6 cannot pass a str field of a constexpr tuple
    N0: tl.constexpr = traits.N[0]
    MAPS: tl.constexpr = traits.MAPS
    TOTAL: tl.constexpr = traits.FIRST[MAPS]
    UNIT: tl.constexpr = traits.UNIT
    OUTPUTS: tl.constexpr = ROWS // 2 if traits.GATED else ROWS
    if traits.OVERLAP:
        start_next()
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    w, number, size, first, place = locate_map(tile, weights, traits)
    i = tl.arange(0, ROWS)
    output = number * OUTPUTS + i % OUTPUTS
    row = output + i // OUTPUTS * N0 if traits.GATED else output
    in_n = output < size
    start = split * traits.SPAN
    at_row = row.to(tl.int64)[:, None] * D
    if traits.OVERLAP:
        wait_for_previous()
    ms = tl.arange(0, COLUMNS)
    in_m = ms < M
    x = tl.multiple_of(x + place, UNIT)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for d_0 in tl.range(0, traits.SPAN, BLOCK, num_stages=traits.STAGES):
        d = start + d_0 + tl.arange(0, BLOCK)
        in_d = d < D
        weight = tl.load(
            w + at_row + d[None, :], mask=in_n[:, None] & in_d[None, :], other=0.0, eviction_policy="evict_first"
        )
        inputs = tl.load(x + ms[:, None] * traits.X_STRIDE + d[None, :], mask=in_m[:, None] & in_d[None, :], other=0.0)
        sums = tl.dot(weight, tl.trans(inputs), sums)

    if SPLITS > 1:
        LONG: tl.constexpr = TOTAL * (ROWS // OUTPUTS)
        at = (split * M + ms)[None, :].to(tl.int64) * LONG + first + row[:, None]
        tl.store(y + at, sums, mask=in_n[:, None] & in_m[None, :])
    else:
        if traits.GATED:
            gate, up = tl.split(tl.permute(tl.reshape(sums, [2, OUTPUTS, COLUMNS]), [1, 2, 0]))
            sums = activate(gate, ACTIVATION) * up
            output = number * OUTPUTS + tl.arange(0, OUTPUTS)
        else:
            if traits.BIASED:
                sums += load_biases((first + output)[:, None], biases, traits)
            sums = activate(sums, ACTIVATION)
        at = ms[None, :].to(tl.int64) * TOTAL + first + output[:, None]
        mask = (output < size)[:, None] & in_m[None, :]
        if traits.TAPS > 0:
            channel = output[:, None]
            in_conv = ((output < N0) & (tile < traits.TILES[1]))[:, None]
            inputs = history + (ms * ((traits.TAPS - 1) * N0))[None, :]
            past = load_past(inputs, channel, in_conv & in_m[None, :], N0, traits.TAPS)
            token = sums.to(y.dtype.element_ty)
            tap_weights = load_tap_weights(taps, tap_bias, channel, in_conv, traits.TAPS, traits.TAP_BIAS)
            sums = tl.where(in_conv, convolve_product(token, past, tap_weights, traits), sums)
            push_token(past + (token,), inputs, channel, in_conv & in_m[None, :], N0, traits.TAPS)
        if traits.RESIDUAL:
            sums += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + at, sums.to(y.dtype.element_ty), mask=mask)


class RowsTraits(NamedTuple):
    """Compile-time properties of the kernels before and after a product.

    Args:
        D: width of x or y. BLOCK: columns of a program, a power of two; of `normalize_rows_kernel` at least D.
        STRIDE: elements from row to row of x. NORM, EPS: whether there is a norm, and its epsilon. INPUTS: rows of mix,
            the shares of the token shifts; 0: no shift.
        SPLITS: sums of each number. MAPS, FIRST, BIASES, BIASED, ACTIVATION, GATED, RESIDUAL, TAPS, TAP_BIAS, TAP_SILU:
            as of the product. CHANNELS: of the convolution.
    """

    D: int
    BLOCK: int
    OVERLAP: bool
    STRIDE: int = 0
    NORM: bool = False
    EPS: float = 0.0
    INPUTS: int = 0
    SPLITS: int = 0
    MAPS: int = 0
    FIRST: tuple[int, ...] = ()
    BIASES: tuple[bool, ...] = ()
    BIASED: bool = False
    ACTIVATION: str = ""
    GATED: bool = False
    RESIDUAL: bool = False
    CHANNELS: int = 0
    TAPS: int = 0
    TAP_BIAS: bool = False
    TAP_SILU: bool = False


@triton.jit
def normalize_rows_kernel(x, norm_weight, previous, mix, normed, traits: tl.constexpr):
    """Normalize a row of x with NORM, and with INPUTS shift it.

    Grid: rows, INPUTS or 1. Reads x, previous [M, D], norm_weight [D], mix [INPUTS, D]. Writes normed [M, D] or
    [M, INPUTS, D].
    """
    INPUTS: tl.constexpr = traits.INPUTS if traits.INPUTS > 0 else 1
    D: tl.constexpr = traits.D
    if traits.OVERLAP:
        start_next()
        wait_for_previous()
    m = tl.program_id(0) // INPUTS
    input = tl.program_id(0) % INPUTS
    d = tl.arange(0, traits.BLOCK)
    in_d = d < D
    row = tl.load(x + m * traits.STRIDE + d, mask=in_d, other=0.0).to(tl.float32)
    if traits.NORM:
        scale = tl.load(norm_weight + d, mask=in_d, other=0.0).to(tl.float32)
    if traits.INPUTS > 0:
        share = tl.load(mix + input * D + d, mask=in_d, other=0.0).to(tl.float32)
        before = tl.load(previous + m * D + d, mask=in_d, other=0.0).to(tl.float32)
    if traits.NORM:
        row *= tl.rsqrt(tl.sum(row * row, 0) / D + traits.EPS) * scale
    if traits.INPUTS > 0:
        row += (before - row) * share
    tl.store(normed + (m * INPUTS + input) * D + d, row.to(normed.dtype.element_ty), mask=in_d)


@triton.jit(do_not_specialize=["M"])
def finish_rows_kernel(sums, residual, biases, history, taps, tap_bias, y, M, traits: tl.constexpr):
    """Add the sums of all splits, and compute what follows the product.

    Grid: rows, blocks of BLOCK outputs. Reads sums [SPLITS, M, D], or with GATED [SPLITS, M, 2 D], residual [M, D],
    biases of each map. Writes y [M, D]. With TAPS it reads and writes what gemv_kernel does.
    """
    D: tl.constexpr = traits.D
    BLOCK: tl.constexpr = traits.BLOCK
    SPLITS: tl.constexpr = traits.SPLITS
    WIDTH: tl.constexpr = 2 * D if traits.GATED else D
    BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    ACTIVATION: tl.constexpr = traits.ACTIVATION
    if traits.OVERLAP:
        start_next()
        wait_for_previous()
    m = tl.program_id(0) // BLOCKS
    d = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    in_d = d < D
    if traits.TAPS > 0:
        in_conv = d < traits.CHANNELS
        inputs = history + m * ((traits.TAPS - 1) * traits.CHANNELS)
        past = load_past(inputs, d, in_conv, traits.CHANNELS, traits.TAPS)
        tap_weights = load_tap_weights(taps, tap_bias, d, in_conv, traits.TAPS, traits.TAP_BIAS)
    out = tl.zeros([BLOCK], tl.float32)
    if traits.BIASED:
        out += load_biases(d, biases, traits)
    up = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        at = sums + (split * M + m) * WIDTH + d
        out += tl.load(at, mask=in_d, other=0.0)
        if traits.GATED:
            up += tl.load(at + D, mask=in_d, other=0.0)
    out = activate(out, ACTIVATION)
    if traits.GATED:
        out *= up
    if traits.RESIDUAL:
        out += tl.load(residual + m * D + d, mask=in_d, other=0.0).to(tl.float32)
    if traits.TAPS > 0:
        token = out.to(y.dtype.element_ty)
        out = tl.where(in_conv, convolve_product(token, past, tap_weights, traits), out)
        tl.debug_barrier()  # several threads may have loaded an input, and one of them stores it elsewhere
        push_token(past + (token,), inputs, d, in_conv, traits.CHANNELS, traits.TAPS)
    tl.store(y + m * D + d, out.to(y.dtype.element_ty), mask=in_d)
