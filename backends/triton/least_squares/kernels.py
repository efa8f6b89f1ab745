"""Conjugate gradients for x_t = (H_t + Diag(lambda))^-1 b_t with H_t = a_t H_(t-1) + beta_t k_t k_t^T, for every token.

In a chunk that starts from the state H, with G the cumulative log2 decay, the product for the directions P [C, K] of
its tokens is

    A P = 2^G (P H) + ((P K^T) * M) K + P Diag(lambda),    M_ts = beta_s 2^(G_t - G_s) for s <= t, else 0

`covariance_kernel` stores H of every chunk. One program of `solve_kernel` then runs all steps of a chunk, with H, K and
P in shared memory, and x and r in registers.

A direction is stored divided by the norm rho of the residual, and H divided by a power of two from its trace on, which
bounds all entries of a positive semidefinite matrix. 16-bit operands of products can therefore be float16, which is
more precise than bfloat16. With d = p / rho a step is

    a = rho / d^T A d,    x += a d,    r -= a A d,    d <- r / rho' + (rho' / rho) d

A chunk stops early if all its residuals are below the rounding of the products.

N sequences, T tokens in a row of the batch, C tokens in a chunk, H heads, K key width, BK power of two from K on
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.layout import (
    LOG2E,
    clamp_log2_decay,
    first_chunk_slot,
    load_log2_decays,
    load_rows,
    locate_chunk,
    sequence_bounds,
    store_rows,
)


class SolveTraits(NamedTuple):
    """Compile-time parameters of all kernels.

    Args:
        H, K, BK, C: sizes. TILE: columns of H per program of `covariance_kernel`.
        OPERAND: the dtype of the operands of products, tl.float16 or tl.float32. PREC: of float32 products.
        TOLERANCE: the square of the relative residual at which a chunk stops.
        HAS_STATE, PACKED: whether there are initial states, and bounds of packed sequences.
    """

    H: int
    K: int
    BK: int
    C: int
    TILE: int
    OPERAND: tl.dtype
    PREC: str
    TOLERANCE: float
    HAS_STATE: bool
    PACKED: bool


@triton.jit
def power_of_two_above(x):
    """Return a power of two that is at least x, and at least 2^-100."""
    return tl.exp2(tl.ceil(tl.log2(tl.maximum(x, 7.888609052210118e-31))))


@triton.jit(do_not_specialize=["T"])
def covariance_kernel(k, log_decay, beta, state, states, scales, cu, T, traits: tl.constexpr):
    """Compute H at the start of every chunk.

    Grid: sequence, head, tile of TILE columns. The tile stays in registers.

    Reads k [B, T, H, K], log_decay and beta [B, T, H], state [N, H, K, K] float32. Writes H / scale to
    states [slots, H, K, K], and scales [slots, H] float32.
    """
    H: tl.constexpr = traits.H
    K: tl.constexpr = traits.K
    C: tl.constexpr = traits.C
    OPERAND: tl.constexpr = traits.OPERAND
    PREC: tl.constexpr = traits.PREC
    BK: tl.constexpr = traits.BK
    TILE: tl.constexpr = traits.TILE
    PACKED: tl.constexpr = traits.PACKED
    HAS_STATE: tl.constexpr = traits.HAS_STATE
    TILES: tl.constexpr = BK // TILE
    pid = tl.program_id(0)
    tile = pid % TILES
    h = pid // TILES % H
    n = pid // (TILES * H)
    start, length = sequence_bounds(n, cu, T, PACKED)
    slot = first_chunk_slot(n, cu, T, C, PACKED)
    i = tl.arange(0, C)
    rows = tl.arange(0, BK)
    columns = tile * TILE + tl.arange(0, TILE)
    in_rows = rows < K
    in_columns = columns < K
    matrix = tl.zeros([BK, TILE], tl.float32)
    trace = 0.0
    if HAS_STATE:
        initial = state + (tl.cast(n, tl.int64) * H + h) * K * K
        matrix += load_rows(initial, rows, columns, in_rows, in_columns, K)
        trace += tl.sum(tl.abs(tl.load(initial + rows * (K + 1), mask=in_rows, other=0.0)), 0)
    for c in range(tl.cdiv(length, C)):
        t = c * C + i
        in_time = t < length
        at = (start + t) * H + h
        G = tl.cumsum(load_log2_decays(log_decay, start + t, h, in_time, H, "head"), 0)
        G_end = tl.sum(tl.where(i == C - 1, G, 0.0), 0)
        weight = tl.exp2(G_end - G) * tl.load(beta + at, mask=in_time, other=0.0).to(tl.float32)
        k_T = tl.load(k + at[None, :] * K + rows[:, None], mask=in_rows[:, None] & in_time[None, :], other=0.0)
        k_columns = load_rows(k, at, columns, in_time, in_columns, K)
        chunk = tl.cast(slot + c, tl.int64) * H + h
        scale = power_of_two_above(trace) if OPERAND.primitive_bitwidth == 16 else 1.0
        store_rows(states + chunk * K * K, matrix * (1.0 / scale), rows, columns, in_rows, in_columns, K)
        tl.store(scales + chunk, scale, mask=tile == 0)
        k_T = k_T.to(tl.float32)
        trace = trace * tl.exp2(G_end) + tl.sum(tl.abs(weight) * tl.sum(k_T * k_T, 0), 0)
        write = (k_T * weight[None, :]).to(OPERAND)
        matrix = tl.dot(write, k_columns.to(OPERAND), matrix * tl.exp2(G_end), input_precision=PREC)


@triton.jit(do_not_specialize=["N", "T", "steps"])
def solve_kernel(
    b, k, log_decay, beta, shift, states, scales, x, cu, N, T, steps, traits: tl.constexpr,
):  # fmt: skip
    """Solve the systems of a chunk.

    Grid: chunk slot, head.

    Reads b [B, T, H, K], shift [H, K] float32, and what `covariance_kernel` reads and writes. Writes x [B, T, H, K].
    """
    H: tl.constexpr = traits.H
    K: tl.constexpr = traits.K
    C: tl.constexpr = traits.C
    OPERAND: tl.constexpr = traits.OPERAND
    PREC: tl.constexpr = traits.PREC
    TOLERANCE: tl.constexpr = traits.TOLERANCE
    BK: tl.constexpr = traits.BK
    PACKED: tl.constexpr = traits.PACKED
    pid = tl.program_id(0)
    h = pid % H
    slot = pid // H
    start, length, offset = locate_chunk(slot, cu, N, T, C, PACKED)
    i = tl.arange(0, C)
    columns = tl.arange(0, BK)
    in_columns = columns < K
    in_time = offset + i < length
    tokens = start + offset + i
    at = tokens * H + h
    G = tl.cumsum(load_log2_decays(log_decay, tokens, h, in_time, H, "head"), 0)
    strength = tl.load(beta + at, mask=in_time, other=0.0).to(tl.float32)
    # of s > t the exponent may be large
    decay = tl.exp2(tl.where(i[:, None] >= i[None, :], G[:, None] - G[None, :], -1000.0))
    weights = (decay * strength[None, :]).to(OPERAND)
    chunk = tl.cast(slot, tl.int64) * H + h
    before = (tl.exp2(G) * tl.load(scales + chunk))[:, None]
    matrix = load_rows(states + chunk * K * K, columns, columns, in_columns, in_columns, K)
    keys = load_rows(k, at, columns, in_time, in_columns, K).to(OPERAND)
    residual = load_rows(b, at, columns, in_time, in_columns, K).to(tl.float32)
    # the squares of small gradients would vanish
    size = tl.max(tl.abs(residual), 1)
    residual *= tl.where(size > 0.0, 1.0 / size, size)[:, None]
    first = tl.sum(residual * residual, 1)
    rho = tl.sqrt(first)
    direction = (residual * tl.where(rho > 0.0, 1.0 / rho, 0.0)[:, None]).to(OPERAND)
    solution = tl.zeros([C, BK], tl.float32)
    step = 0
    is_active = tl.max(first, 0) > 0.0
    while (step < steps) & is_active:
        scores = tl.dot(direction, tl.trans(keys), input_precision=PREC)
        scores = (scores * weights).to(OPERAND)
        product = tl.dot(direction, matrix, input_precision=PREC) * before
        product = tl.dot(scores, keys, product, input_precision=PREC)
        wide = direction.to(tl.float32)
        product += wide * tl.load(shift + h * K + columns, mask=in_columns, other=0.0)[None, :]
        curvature = tl.sum(wide * product, 1)
        length_of_step = tl.where(curvature > 0.0, rho / curvature, 0.0)[:, None]
        solution += length_of_step * wide
        residual -= length_of_step * product
        square = tl.sum(residual * residual, 1)
        new_rho = tl.sqrt(square)
        inverse = tl.where(new_rho > 0.0, 1.0 / new_rho, 0.0)[:, None]
        ratio = tl.where(rho > 0.0, new_rho / rho, 0.0)[:, None]
        direction = (residual * inverse + wide * ratio).to(OPERAND)
        rho = new_rho
        step += 1
        is_active = tl.max(tl.where(square > TOLERANCE * first, 1, 0), 0) > 0
    store_rows(x, solution * size[:, None], at, columns, in_time, in_columns, K)


@triton.jit(do_not_specialize=["steps"])
def solve_step_kernel(b, k, log_decay, beta, shift, states, x, steps, traits: tl.constexpr):
    """Add one token per row to H in place, and solve its system.

    Grid: row, head. H stays in registers; it is symmetric, so that columns are read as rows.

    Reads b and k [B, 1, H, K], log_decay and beta [B, 1, H], shift [H, K] float32, states [B, H, K, K] float32. Writes
    states and x [B, 1, H, K].
    """
    H: tl.constexpr = traits.H
    K: tl.constexpr = traits.K
    TOLERANCE: tl.constexpr = traits.TOLERANCE
    BK: tl.constexpr = traits.BK
    pid = tl.program_id(0)
    h = pid % H
    row = tl.cast(pid, tl.int64)
    columns = tl.arange(0, BK)
    in_columns = columns < K
    base = states + row * K * K
    key = tl.load(k + row * K + columns, mask=in_columns, other=0.0).to(tl.float32)
    decay = tl.exp2(clamp_log2_decay(tl.load(log_decay + row).to(tl.float32) * LOG2E))
    write = tl.load(beta + row).to(tl.float32) * key
    matrix = load_rows(base, columns, columns, in_columns, in_columns, K) * decay + write[:, None] * key[None, :]
    store_rows(base, matrix, columns, columns, in_columns, in_columns, K)
    ridge = tl.load(shift + h * K + columns, mask=in_columns, other=0.0)
    residual = tl.load(b + row * K + columns, mask=in_columns, other=0.0).to(tl.float32)
    size = tl.max(tl.abs(residual), 0)
    residual *= tl.where(size > 0.0, 1.0 / size, size)
    direction = residual
    square = tl.sum(residual * residual, 0)
    first = square
    solution = tl.zeros([BK], tl.float32)
    step = 0
    while (step < steps) & (square > TOLERANCE * first):
        product = tl.sum(matrix * direction[:, None], 0) + ridge * direction
        curvature = tl.sum(direction * product, 0)
        length_of_step = tl.where(curvature > 0.0, square / curvature, 0.0)
        solution += length_of_step * direction
        residual -= length_of_step * product
        new_square = tl.sum(residual * residual, 0)
        direction = residual + new_square / square * direction
        square = new_square
        step += 1
    tl.store(x + row * K + columns, solution * size, mask=in_columns)
