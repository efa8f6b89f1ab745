"""Products of the gates of a chunk of the neural memory, and their gradients; all are products, never ratios.

M tokens per chunk
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.fast_weights.kernels.tiles import product

PRECISE = tl.constexpr("tf32x3")  # products of coefficients, which all reads of a chunk depend on


class MemoryTraits(NamedTuple):
    """Compile-time parameters of the neural memory.

    Args:
        H, E, F, M: heads, head width, inner width (E with one layer), tokens per chunk.
        BLOCK_E, BLOCK_F, BLOCK_M: tiles, the powers of two from E, F and M on, at least 16.
        DEPTH: layers, 1 or 2.
        HAS_STATE: sequences that are not fresh start from a state.
        SEGMENT: chunks from one checkpoint to the next; 0: none are stored.
        PRECISION: of the products, tl.dot's `input_precision`.
    """

    H: int
    E: int
    F: int
    M: int
    BLOCK_E: int
    BLOCK_F: int
    BLOCK_M: int
    DEPTH: int
    HAS_STATE: bool
    SEGMENT: int
    PRECISION: str


@triton.jit
def load_gate(gate, row, present, h, neutral, H: tl.constexpr):
    """Load a gate [rows, H] of the tokens of a chunk."""
    return tl.load(gate + row * H + h, mask=present, other=neutral)


@triton.jit
def products(gate, BLOCK_M: tl.constexpr):
    """Return g_(s+1) .. g_t for s <= t, else 0: [t, s]."""
    t = tl.arange(0, BLOCK_M)[:, None]
    s = tl.arange(0, BLOCK_M)[None, :]
    return tl.where(t >= s, tl.cumprod(tl.where(t > s, gate[:, None], 1.0), 0), 0.0)


@triton.jit
def earlier_products(gate_before, BLOCK_M: tl.constexpr):
    """Return g_(s+1) .. g_(r-1) for s < r, else 0: [r, s]. gate_before: g_(r-1), 1 at the first place."""
    r = tl.arange(0, BLOCK_M)[:, None]
    s = tl.arange(0, BLOCK_M)[None, :]
    return tl.where(r > s, tl.cumprod(tl.where(r > s + 1, gate_before[:, None], 1.0), 0), 0.0)


@triton.jit
def last(x, BLOCK_M: tl.constexpr):
    """Return the last number of a vector, or the last row of a matrix, along axis 0."""
    t = tl.arange(0, BLOCK_M)
    if len(x.shape) == 1:
        result = tl.sum(tl.where(t == BLOCK_M - 1, x, 0.0), 0)
    else:
        result = tl.sum(tl.where((t == BLOCK_M - 1)[:, None], x, 0.0), 0)
    return result


@triton.jit
def load_coefficients(eta, theta, alpha, row, present, h, H: tl.constexpr, BLOCK_M: tl.constexpr):
    """Load the gates of a chunk and compute the coefficients of its reads and of its end.

    Returns, in the terms of neural_memory_chunks.py: theta_s; E_ts, A_ts, C_ts; E_t, A_t, B_t; E_Ms theta_s and
    C_Ms theta_s; the last E_t, A_t and B_t.
    """
    eta_row = load_gate(eta, row, present, h, 1.0, H)
    theta_row = load_gate(theta, row, present, h, 0.0, H)
    a_row = 1.0 - load_gate(alpha, row, present, h, 0.0, H)
    has_token = present.to(tl.float32)
    E = products(eta_row, BLOCK_M)
    A = products(a_row, BLOCK_M)
    E0 = tl.cumprod(eta_row, 0)
    A0 = tl.cumprod(a_row, 0)
    C = product(A, has_token[:, None] * E, PRECISE)
    B = tl.sum(A * (has_token * E0)[None, :], 1)
    e = last(E, BLOCK_M) * theta_row
    c = last(C, BLOCK_M) * theta_row
    return theta_row, E, A, C, E0, A0, B, e, c, last(E0, BLOCK_M), last(A0, BLOCK_M), last(B, BLOCK_M)


@triton.jit
def products_gradient(gate_before, P, d, d_from_start, BLOCK_M: tl.constexpr):
    """Return the gradient of a gate from those of its products P [t, s] and of g_1 .. g_t [t]."""
    before = earlier_products(gate_before, BLOCK_M)
    from_start = tl.cumprod(gate_before, 0)
    t = tl.arange(0, BLOCK_M)[:, None]
    s = tl.arange(0, BLOCK_M)[None, :]
    d = tl.where(t >= s, d, 0.0)
    outer = product(d, tl.trans(before), PRECISE) + d_from_start[:, None] * from_start[None, :]
    return tl.sum(P * outer, 0)


@triton.jit
def coefficients_gradient(
    dC, dA0, dB, dE_row, dE_end, eta_before, a_before, theta, has_token, E, A, C, E0, BLOCK_M: tl.constexpr
):
    """Return the gradients of eta, theta and a, from those of C_ts theta_s, A_t, B_t, E_Ms theta_s and the last E_t."""
    t = tl.arange(0, BLOCK_M)
    is_last = t == BLOCK_M - 1
    d_theta = tl.sum(dC * C, 0) + dE_row * last(E, BLOCK_M)
    dC = dC * theta[None, :]
    dA = product(dC, tl.trans(has_token[:, None] * E), PRECISE) + dB[:, None] * (has_token * E0)[None, :]
    dE = has_token[:, None] * product(tl.trans(A), dC, PRECISE)
    dE += tl.where(is_last[:, None], (dE_row * theta)[None, :], 0.0)
    dE0 = has_token * tl.sum(A * dB[:, None], 0) + tl.where(is_last, dE_end, 0.0)
    d_eta = products_gradient(eta_before, E, dE, dE0, BLOCK_M)
    return d_eta, d_theta, products_gradient(a_before, A, dA, dA0, BLOCK_M)
