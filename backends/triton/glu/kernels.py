"""Gated activation of an MLP, h = phi(gate) * up, and its gradient.

R rows (tokens), F hidden width
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.layout import LOG2E

_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_GELU_CUBIC = tl.constexpr(0.044715)


class GluTraits(NamedTuple):
    """Compile-time parameters of both kernels.

    Args:
        F: hidden width; a row of `hidden` has F gates, then F factors.
        ROWS, COLUMNS: tile of a program.
        ACTIVATION: phi: "silu", "gelu" (tanh approximation) or "relu2".
    """

    F: int
    ROWS: int
    COLUMNS: int
    ACTIVATION: str


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); 0 and 1 at the infinities."""
    return 1 / (1 + tl.exp2(-x * LOG2E))


@triton.jit
def gelu_tanh(gate):
    """tanh of the approximation of GELU, and the derivative of its argument."""
    square = gate * gate
    argument = _SQRT_2_OVER_PI * gate * (1 + _GELU_CUBIC * square)
    return 2 * sigmoid(2 * argument) - 1, _SQRT_2_OVER_PI * (1 + 3 * _GELU_CUBIC * square)


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """phi(gate)."""
    if ACTIVATION == "silu":
        return gate * sigmoid(gate)
    elif ACTIVATION == "sigmoid":
        return sigmoid(gate)
    elif ACTIVATION == "gelu":
        tanh, _ = gelu_tanh(gate)
        return 0.5 * gate * (1 + tanh)
    else:
        positive = tl.where(gate < 0, 0.0, gate)  # NaN propagates
        return positive * positive


@triton.jit
def activate_with_slope(gate, ACTIVATION: tl.constexpr):
    """phi(gate) and its derivative."""
    if ACTIVATION == "silu":
        s = sigmoid(gate)
        return gate * s, s * (1 + gate * (1 - s))
    elif ACTIVATION == "sigmoid":
        s = sigmoid(gate)
        return s, s * (1 - s)
    elif ACTIVATION == "gelu":
        tanh, d_argument = gelu_tanh(gate)
        return 0.5 * gate * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * gate * (1 - tanh * tanh) * d_argument
    else:
        positive = tl.where(gate < 0, 0.0, gate)
        return positive * positive, 2 * positive


@triton.jit
def tile_offsets(rows, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of the program's tile of h [R, F] and of its gates in hidden [R, 2 F], and the mask of the tile."""
    TILES: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    r = tl.program_id(0) // TILES * ROWS + tl.arange(0, ROWS)[:, None]
    f = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)[None]
    mask = (r < rows) & (f < F)
    row = r.to(tl.int64)
    return row * F + f, row * (2 * F) + f, mask


@triton.jit(do_not_specialize=["rows"])
def glu_kernel(
    hidden, h, rows,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute h = phi(gate) * up in float32, rounded once.

    Grid: one program per tile of ROWS x COLUMNS.

    Reads hidden [R, 2 F]: gate, up. Writes h [R, F].
    """
    at_h, at_gate, mask = tile_offsets(rows, F, ROWS, COLUMNS)
    gate = tl.load(hidden + at_gate, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(hidden + at_gate + F, mask=mask, other=0.0).to(tl.float32)
    tl.store(h + at_h, activate(gate, ACTIVATION) * up, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def glu_backward_kernel(
    hidden, d_h, d_hidden, h, rows,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of hidden, d_gate = phi'(gate) up d_h and d_up = phi(gate) d_h, and h again.

    Grid: one program per tile of ROWS x COLUMNS.

    Reads hidden [R, 2 F], d_h [R, F]. Writes d_hidden [R, 2 F], h [R, F].
    """
    at_h, at_gate, mask = tile_offsets(rows, F, ROWS, COLUMNS)
    gate = tl.load(hidden + at_gate, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(hidden + at_gate + F, mask=mask, other=0.0).to(tl.float32)
    gradient = tl.load(d_h + at_h, mask=mask, other=0.0).to(tl.float32)
    phi, slope = activate_with_slope(gate, ACTIVATION)
    tl.store(h + at_h, phi * up, mask=mask)
    tl.store(d_hidden + at_gate, slope * up * gradient, mask=mask)
    tl.store(d_hidden + at_gate + F, phi * gradient, mask=mask)
