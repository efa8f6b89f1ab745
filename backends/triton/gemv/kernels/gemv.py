"""Products of few rows x [M, D] with weights [N, D]: each weight is read once, with the operations around the product.

    y = W x, or W x + b with BIASES                  of up to eight maps, as consecutive columns of y
    y = W (norm_weight * x / sqrt(mean(x^2) + eps))  with NORM
    y = phi(y),  or y = phi(W_gate x) * (W_up x)     with ACTIVATION, and GATED
    y = residual + W x                               with RESIDUAL
    y = W ((1 - mu) x + mu p)                        with SHIFT: a token shift with the input p before, mu by map
    y = conv(W x), or silu(conv(W x))                of the first map with TAPS: the short convolution of a token

A program computes ROWS outputs of all rows of x. It loads their weights first, which do not depend on the kernel before
it: on sm_90 they are loaded while that kernel ends, so that memory is not idle between two products. The threads split
D; sums are in float32, in an order that depends on D and the dtype alone, so that a row's result does not depend on M.
The factor of the norm is applied to the sums.

M rows, D inputs, N outputs
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.overlap import prefetch_line, start_next, wait_for_previous
from deltazoo.backends.triton.device.taps import load_past, load_tap_weights, push_token, weigh_taps


class Weights(NamedTuple):
    """Weights [N, D], or biases [N], of up to eight maps; None: the map has none, or there is no such map."""

    w0: Any
    w1: Any = None
    w2: Any = None
    w3: Any = None
    w4: Any = None
    w5: Any = None
    w6: Any = None
    w7: Any = None


class GemvTraits(NamedTuple):
    """Compile-time properties of a product.

    Args:
        M, D: rows and width of x. MAPS: number of maps. N: outputs of each. FIRST, TILES: outputs, and tiles of ROWS
            outputs, of the maps before each one, and of all maps. ROWS: outputs of a program.
        BLOCK: inputs that a program reads at a time, UNIT of them, 16 bytes, by one thread. STEPS: ceil(D / BLOCK).
        X_STRIDE: elements from row to row of x. PLACE: with SHIFT the row of mix of each map, else its first
            column of x.
        BIASES: for each map whether it has a bias. BIASED: whether one of them has.
        TAPS: of the convolution of the first map; 0: none. TAP_BIAS, TAP_SILU: whether it has a bias and a SiLU.
        OVERLAP: see device/overlap.py.
    """

    M: int
    D: int
    MAPS: int
    N: tuple[int, ...]
    FIRST: tuple[int, ...]
    TILES: tuple[int, ...]
    ROWS: int
    BLOCK: int
    UNIT: int
    STEPS: int
    X_STRIDE: int
    NORM: bool
    EPS: float
    ACTIVATION: str
    GATED: bool
    RESIDUAL: bool
    SHIFT: bool
    PLACE: tuple[int, ...]
    BIASES: tuple[bool, ...]
    BIASED: bool
    TAPS: int
    TAP_BIAS: bool
    TAP_SILU: bool
    OVERLAP: bool


@triton.jit
def load_weights(w, row, step: tl.constexpr, size, traits: tl.constexpr):
    """Load a block of the weights of ROWS outputs, [BLOCK / UNIT, ROWS, UNIT]."""
    unit = step * (traits.BLOCK // traits.UNIT) + tl.arange(0, traits.BLOCK // traits.UNIT)
    within = (unit < tl.cdiv(traits.D, traits.UNIT))[:, None, None] & (row < size)[None, :, None]
    d = unit[:, None, None] * traits.UNIT + tl.arange(0, traits.UNIT)[None, None, :]
    if traits.D % traits.UNIT != 0:
        within = within & (d < traits.D)
    at = row.to(tl.int64)[None, :, None] * traits.D + d
    return tl.load(w + at, mask=within, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_inputs(x, step: tl.constexpr, traits: tl.constexpr):
    """Load a block of a vector [D], as [BLOCK / UNIT, 1, UNIT] in float32."""
    unit = step * (traits.BLOCK // traits.UNIT) + tl.arange(0, traits.BLOCK // traits.UNIT)
    within = (unit < tl.cdiv(traits.D, traits.UNIT))[:, None, None]
    d = unit[:, None, None] * traits.UNIT + tl.arange(0, traits.UNIT)[None, None, :]
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
def locate_map(tile, weights, traits: tl.constexpr):
    """Return the weights of a tile's map, the tile's number in it, its outputs, its column of y, and its PLACE."""
    MAPS: tl.constexpr = traits.MAPS
    w = weights[0]
    size = tile * 0 + traits.N[0]
    first = tile * 0
    before = tile * 0
    place = tile * 0 + traits.PLACE[0]
    for i in tl.static_range(1, MAPS):
        is_after = tile >= traits.TILES[i]
        w = tl.where(is_after, weights[i], w)
        size = tl.where(is_after, traits.N[i], size)
        first = tl.where(is_after, traits.FIRST[i], first)
        before = tl.where(is_after, traits.TILES[i], before)
        place = tl.where(is_after, traits.PLACE[i], place)
    return tl.multiple_of(w, 16), tile - before, size, first, place


@triton.jit
def load_biases(column, biases, traits: tl.constexpr):
    """Load the biases of columns of y in float32; 0 for maps without one."""
    MAPS: tl.constexpr = traits.MAPS
    bias = (column * 0).to(tl.float32)
    for i in tl.static_range(MAPS):
        if traits.BIASES[i]:
            within = (column >= traits.FIRST[i]) & (column < traits.FIRST[i + 1])
            bias += tl.load(biases[i] + (column - traits.FIRST[i]), mask=within, other=0.0).to(tl.float32)
    return bias


@triton.jit
def convolve_product(token, past, tap_weights, traits: tl.constexpr):
    """Return channels of a token after the convolution of the first map and its SiLU, in float32."""
    y = weigh_taps(past + (token,), tap_weights, traits.TAPS, traits.TAP_BIAS)
    return y * tl.sigmoid(y) if traits.TAP_SILU else y


@triton.jit(do_not_specialize=["early"])
def gemv_kernel(
    x, norm_weight, residual, previous, mix, weights, biases, history, taps, tap_bias, y, early, traits: tl.constexpr
):  # fmt: skip
    """Compute ROWS outputs of one map for all rows.

    Grid: the tiles of ROWS outputs of all maps. Reads x, previous [M, D], norm_weight [D], residual [M, N], mix
    [.., D], w [N, D], with GATED [2 N, D], of which the gate is the first half; biases [N] of the maps; taps [N, TAPS]
    and tap_bias [N] of the first map. Writes y [M, N of all maps]. Appends the products of the first map to history
    [M, TAPS - 1, N]. early: 1 if the weights may be loaded before the preceding kernel has ended; 0 if that kernel may
    have written them.
    """
    M: tl.constexpr = traits.M
    D: tl.constexpr = traits.D
    STEPS: tl.constexpr = traits.STEPS
    ACTIVATION: tl.constexpr = traits.ACTIVATION  # Triton 3.6 cannot pass a str field of a constexpr tuple
    N0: tl.constexpr = traits.N[0]
    MAPS: tl.constexpr = traits.MAPS
    TOTAL: tl.constexpr = traits.FIRST[MAPS]
    if traits.OVERLAP:
        start_next()
        if early == 0:
            wait_for_previous()
    w, number, size, first, place = locate_map(tl.program_id(0), weights, traits)
    row = number * traits.ROWS + tl.arange(0, traits.ROWS)
    loaded = ()
    for step in tl.static_range(STEPS):
        weight = load_weights(w, row, step, size, traits)
        loaded = loaded + (weight,)
        if traits.GATED:
            loaded = loaded + (load_weights(w + N0 * D, row, step, size, traits),)
    if traits.OVERLAP:
        if traits.TAPS > 0:  # loaded after the sums, when registers are free
            channel = tl.minimum(number * traits.ROWS, N0 - 1)
            prefetch_line(taps + channel * traits.TAPS)
            if traits.TAP_BIAS:
                prefetch_line(tap_bias + channel)
            for past in tl.static_range(M * (traits.TAPS - 1)):
                prefetch_line(history + past * N0 + channel)
        wait_for_previous()
    if traits.BIASED:
        bias = load_biases(first + row, biases, traits)
    share = mix
    if traits.SHIFT:
        share += place * D
    else:
        x += place
    for m in tl.static_range(M):
        inputs = ()  # every load is issued before the first is used
        scales = ()
        shares = ()
        befores = ()
        for step in tl.static_range(STEPS):
            block = load_inputs(x + m * traits.X_STRIDE, step, traits)
            inputs = inputs + (block,)
            if traits.NORM:
                scales = scales + (load_inputs(norm_weight, step, traits),)
            if traits.SHIFT:
                shares = shares + (load_inputs(share, step, traits),)
                befores = befores + (load_inputs(previous + m * D, step, traits),)
        at = m * TOTAL + first + row
        if traits.RESIDUAL:
            before = tl.load(residual + at, mask=row < size, other=0.0).to(tl.float32)
        squares = 0.0  # tensors of zeros would have another layout than the sums, through shared memory
        sums = 0.0
        ups = 0.0
        shifts = 0.0
        for step in tl.static_range(STEPS):
            block = inputs[step]
            weight = loaded[2 * step if traits.GATED else step].to(tl.float32)
            square = tl.sum(block * block, 2)
            if traits.NORM:
                block *= scales[step]
            if traits.SHIFT:
                shift = tl.sum(weight * (shares[step] * befores[step]), 2)
                block *= 1.0 - shares[step]
            product = tl.sum(weight * block, 2)
            up = tl.sum(loaded[2 * step + 1].to(tl.float32) * block, 2) if traits.GATED else product
            squares += square
            sums += product
            ups += up
            if traits.SHIFT:
                shifts += shift
        factor = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / D + traits.EPS) if traits.NORM else 1.0
        out = tl.sum(sums, 0) * factor
        if traits.SHIFT:
            out += tl.sum(shifts, 0)
        if traits.BIASED:
            out += bias
        if ACTIVATION != "":
            out = activate(out, ACTIVATION)
        if traits.GATED:
            out *= tl.sum(ups, 0) * factor
        if traits.RESIDUAL:
            out += before
        if traits.TAPS > 0:
            in_conv = (row < N0) & (tl.program_id(0) < traits.TILES[1])
            past_inputs = history + m * ((traits.TAPS - 1) * N0)
            past = load_past(past_inputs, row, in_conv, N0, traits.TAPS)
            tap_weights = load_tap_weights(taps, tap_bias, row, in_conv, traits.TAPS, traits.TAP_BIAS)
            token = out.to(y.dtype.element_ty)
            out = tl.where(in_conv, convolve_product(token, past, tap_weights, traits), out)
            tl.debug_barrier()  # several threads may have loaded an input, and one of them stores it elsewhere
            push_token(past + (token,), past_inputs, row, in_conv, N0, traits.TAPS)
        tl.store(y + at, out.to(y.dtype.element_ty), mask=row < size)
