"""Products of the gates of the chunks of the neural memory, and their gradients; all are products, never ratios.

They depend on no state, so that programs compute those of all chunks in parallel, before the kernel that processes the
chunks in order, and their gradients after it.

N sequences, H heads, M tokens per chunk; rows: of tokens, B T
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.fast_weights.kernels.tiles import chunk_rows, count_chunks, load_span, product

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
def compute_coefficients(eta_row, a_row, has_token, BLOCK_M: tl.constexpr):
    """Return E_ts, A_ts, C_ts; E_t, A_t, B_t, in the terms of neural_memory_chunks.py."""
    E = products(eta_row, BLOCK_M)
    A = products(a_row, BLOCK_M)
    E0 = tl.cumprod(eta_row, 0)
    A0 = tl.cumprod(a_row, 0)
    C = product(A, has_token[:, None] * E, PRECISE)
    B = tl.sum(A * (has_token * E0)[None, :], 1)
    return E, A, C, E0, A0, B


@triton.jit
def coefficients_at(base, start, n, i, h, slots, traits: tl.constexpr):
    """Return the address of the coefficients of chunk i, or of their gradients [M + 5, M]."""
    BLOCK_M: tl.constexpr = traits.BLOCK_M
    slot = tl.minimum(tl.maximum(start // traits.M + 2 * n + i, 0), slots - 1)
    return base + (slot * traits.H + h) * (BLOCK_M * (BLOCK_M + 5))


@triton.jit
def load_coefficients(coefficients, start, n, i, h, slots, traits: tl.constexpr):
    """Load the coefficients of the reads of chunk i and of its end.

    Returns: C_ts theta_s; A_t, B_t; E_Ms theta_s and C_Ms theta_s; the last E_t, A_t and B_t.
    """
    BLOCK_M: tl.constexpr = traits.BLOCK_M
    m = tl.arange(0, BLOCK_M)
    at = coefficients_at(coefficients, start, n, i, h, slots, traits)
    weights = tl.load(at + m[:, None] * BLOCK_M + m[None, :])
    at += BLOCK_M * BLOCK_M + m
    e = tl.load(at + 2 * BLOCK_M)
    c = tl.load(at + 3 * BLOCK_M)
    last_at = coefficients_at(coefficients, start, n, i, h, slots, traits) + BLOCK_M * (BLOCK_M + 1) - 1
    eta_end = tl.load(last_at + 4 * BLOCK_M)
    return weights, tl.load(at), tl.load(at + BLOCK_M), e, c, eta_end, tl.load(last_at), tl.load(last_at + BLOCK_M)


@triton.jit
def store_gradients(
    gradients, start, n, i, h, slots, dC, dA0, dB, dC_row, dE_row, dA_end, dB_end, dE_end, traits: tl.constexpr
):
    """Store the gradients of what `load_coefficients` returns: of its matrix, vectors and numbers, in this order."""
    BLOCK_M: tl.constexpr = traits.BLOCK_M
    m = tl.arange(0, BLOCK_M)
    at = coefficients_at(gradients, start, n, i, h, slots, traits)
    tl.store(at + m[:, None] * BLOCK_M + m[None, :], dC)
    at += BLOCK_M * BLOCK_M
    tl.store(at + m, dA0)
    tl.store(at + BLOCK_M + m, dB)
    tl.store(at + 2 * BLOCK_M + m, dE_row)
    tl.store(at + 3 * BLOCK_M + m, dC_row)
    tl.store(at + 4 * BLOCK_M, dE_end)
    tl.store(at + 4 * BLOCK_M + 1, dA_end)
    tl.store(at + 4 * BLOCK_M + 2, dB_end)


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


@triton.jit(do_not_specialize=["rows", "slots", "parts"])
def memory_gates_kernel(eta, theta, alpha, spans, coefficients, rows, slots, parts, traits: tl.constexpr):
    """Compute the coefficients of all chunks.

    Grid: N H parts; a program computes chunks i, i + parts, ... of a sequence and head. Reads eta, theta, alpha
    [rows, H]. Writes coefficients [slots, H, M + 5, M] per chunk: C_ts theta_s, then A_t, B_t, E_Ms theta_s,
    C_Ms theta_s and E_t.
    """
    BLOCK_M: tl.constexpr = traits.BLOCK_M
    index = tl.program_id(0) // parts
    n = index // traits.H
    h = index % traits.H
    start, tokens, place, fresh = load_span(spans, n)
    count = count_chunks(tokens, place, traits.M)
    m = tl.arange(0, BLOCK_M)
    for i in range(tl.program_id(0) % parts, count, parts):
        row, present = chunk_rows(start, tokens, place, i, rows, traits.M, BLOCK_M)
        eta_row = load_gate(eta, row, present, h, 1.0, traits.H)
        theta_row = load_gate(theta, row, present, h, 0.0, traits.H)
        a_row = 1.0 - load_gate(alpha, row, present, h, 0.0, traits.H)
        E, A, C, E0, A0, B = compute_coefficients(eta_row, a_row, present.to(tl.float32), BLOCK_M)
        at = coefficients_at(coefficients, start, n, i, h, slots, traits)
        tl.store(at + m[:, None] * BLOCK_M + m[None, :], C * theta_row[None, :])
        at += BLOCK_M * BLOCK_M + m
        tl.store(at, A0)
        tl.store(at + BLOCK_M, B)
        tl.store(at + 2 * BLOCK_M, last(E, BLOCK_M) * theta_row)
        tl.store(at + 3 * BLOCK_M, last(C, BLOCK_M) * theta_row)
        tl.store(at + 4 * BLOCK_M, E0)


@triton.jit(do_not_specialize=["rows", "slots", "parts"])
def memory_gates_backward_kernel(
    eta, theta, alpha, spans, d_coefficients, d_eta, d_theta, d_alpha, rows, slots, parts, traits: tl.constexpr
):
    """Compute the gradients of the gates from those of the coefficients of all chunks (`store_gradients`).

    Grid: N H parts, as `memory_gates_kernel`. Reads and writes gates [rows, H].
    """
    BLOCK_M: tl.constexpr = traits.BLOCK_M
    H: tl.constexpr = traits.H
    index = tl.program_id(0) // parts
    n = index // H
    h = index % H
    start, tokens, place, fresh = load_span(spans, n)
    count = count_chunks(tokens, place, traits.M)
    m = tl.arange(0, BLOCK_M)
    is_end = m == BLOCK_M - 1
    for i in range(tl.program_id(0) % parts, count, parts):
        row, present = chunk_rows(start, tokens, place, i, rows, traits.M, BLOCK_M)
        eta_row = load_gate(eta, row, present, h, 1.0, H)
        theta_row = load_gate(theta, row, present, h, 0.0, H)
        a_row = 1.0 - load_gate(alpha, row, present, h, 0.0, H)
        has_token = present.to(tl.float32)
        E, A, C, E0, A0, B = compute_coefficients(eta_row, a_row, has_token, BLOCK_M)
        at = coefficients_at(d_coefficients, start, n, i, h, slots, traits)
        dC = tl.load(at + m[:, None] * BLOCK_M + m[None, :])
        at += BLOCK_M * BLOCK_M
        dA0 = tl.load(at + m) + tl.where(is_end, tl.load(at + 4 * BLOCK_M + 1), 0.0)
        dB = tl.load(at + BLOCK_M + m) + tl.where(is_end, tl.load(at + 4 * BLOCK_M + 2), 0.0)
        dE_row = tl.load(at + 2 * BLOCK_M + m)
        dC += tl.where(is_end[:, None], tl.load(at + 3 * BLOCK_M + m)[None, :], 0.0)
        dE_end = tl.load(at + 4 * BLOCK_M)
        row_before, present_before = chunk_rows(start, tokens, place + 1, i, rows, traits.M, BLOCK_M)
        present_before = present_before & (m > 0)
        eta_before = load_gate(eta, row_before, present_before, h, 1.0, H)
        a_before = 1.0 - load_gate(alpha, row_before, present_before, h, 0.0, H)
        deta, dtheta, da = coefficients_gradient(
            dC, dA0, dB, dE_row, dE_end, eta_before, a_before, theta_row, has_token, E, A, C, E0, BLOCK_M
        )
        tl.store(d_eta + row * H + h, deta, mask=present)
        tl.store(d_theta + row * H + h, dtheta, mask=present)
        tl.store(d_alpha + row * H + h, -da, mask=present)
