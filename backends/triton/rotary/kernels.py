"""Rotation of q and k by angles that accumulate over the tokens, after a bias per head, and its gradients.

    theta_t = theta_(t-1) + dt_t rate_t,    q'_t = R(theta_t) (q_t + c),    k'_t = R(theta_t) (k_t + d)
    u_t = q'_t^T k'_t

rate is shared by the heads, dt is not. R(theta) rotates the pairs of channels i and i + R for i < R. Rotations keep
u_t = (q_t + c)^T (k_t + d).

Angles are counted in units of 2 pi / 2^32 by 32-bit integers, which overflow modulo 2 pi exactly: sums over any number
of tokens are exact. Chunks of C tokens are summed first (`angle_sums_kernel`), then their sums (`chunk_scan_kernel`);
the other kernels sum the angles of a chunk again instead of storing them.

The gradient of an angle is the cross product of vector and gradient, in any frame:

    d theta = q_i d_(i+R) - q_(i+R) d_i, summed over q and k, with d = R(-theta) dq' and R(-theta) dk'

dt and rate get sums of d theta over the later tokens of the sequence: in the chunk by `rotate_backward_kernel`, from
later chunks by `angle_gradients_kernel`.

N sequences, T tokens in a row of the batch, C tokens in a chunk, H key heads, HV value heads, K key width, R pairs of
channels
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.layout import (
    first_chunk_slot,
    load_rows,
    locate_chunk,
    sequence_bounds,
    store_rows,
)

_RADIANS = tl.constexpr(1.4629180792671596e-09)  # 2 pi / 2^32


class RotaryTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        H, HV, K, R, C: sizes. HEADS: value heads of a program, all of one key head.
        BR, REST: powers of two from R and K - 2 R on; REST is 0 if all channels rotate.
        PACKED: whether there are bounds of packed sequences.
    """

    H: int
    HV: int
    K: int
    R: int
    C: int
    HEADS: int
    BR: int
    REST: int
    PACKED: bool


@triton.jit
def angle_units(radians):
    """Round an angle to units of 2 pi / 2^32, modulo 2 pi.

    In float64: the error of a float32 factor would have the same sign at every token.
    """
    return tl.floor(radians.to(tl.float64) * 683565275.5764316 + 0.5).to(tl.int64).to(tl.int32)


@triton.jit
def cos_sin(units):
    """Return cosine and sine, by their series on an eighth of a turn; the error is below 2e-7."""
    quarter = (units + 536870912) >> 30  # the nearest quarter turn
    x = (units - (quarter << 30)).to(tl.float32) * _RADIANS
    y = x * x
    sin = x * (1.0 + y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y * (1 / 362880)))))
    cos = 1.0 + y * (-1 / 2 + y * (1 / 24 + y * (-1 / 720 + y * (1 / 40320))))
    swapped = (quarter & 1) != 0
    rotated_cos = tl.where(swapped, sin, cos)
    rotated_sin = tl.where(swapped, cos, sin)
    return (
        tl.where(((quarter + 1) & 2) != 0, -rotated_cos, rotated_cos),
        tl.where((quarter & 2) != 0, -rotated_sin, rotated_sin),
    )


@triton.jit
def rotation(rate, dt, before):
    """Return cosine and sine of the angles [C, R] of a chunk. dt: [C]; before: units before the chunk [R]."""
    return cos_sin(tl.cumsum(angle_units(rate * dt[:, None]), 0) + before[None, :])


@triton.jit(do_not_specialize=["N", "T"])
def angle_sums_kernel(rate, dt, sums, cu, N, T, traits: tl.constexpr):
    """Sum the angles of each chunk in units.

    Grid: chunk slot, value head.

    Reads rate [B, T, R] and dt [B, T, HV] float32. Writes sums [slots, HV, R] int32.
    """
    HV: tl.constexpr = traits.HV
    R: tl.constexpr = traits.R
    C: tl.constexpr = traits.C
    BR: tl.constexpr = traits.BR
    PACKED: tl.constexpr = traits.PACKED
    pid = tl.program_id(0)
    hv = pid % HV
    slot = pid // HV
    start, length, offset = locate_chunk(slot, cu, N, T, C, PACKED)
    i = tl.arange(0, C)
    r = tl.arange(0, BR)
    in_time = offset + i < length
    tokens = start + offset + i
    rates = load_rows(rate, tokens, r, in_time, r < R, R)
    steps = tl.load(dt + tokens * HV + hv, mask=in_time, other=0.0)
    tl.store(
        sums + (tl.cast(slot, tl.int64) * HV + hv) * R + r, tl.sum(angle_units(rates * steps[:, None]), 0), mask=r < R
    )


@triton.jit(do_not_specialize=["T"])
def chunk_scan_kernel(sums, initial, final, cu, T, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
                      REVERSE: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Replace the sum of each chunk by the sum over the chunks before it, or with REVERSE after it, of its sequence.

    Grid: sequence, block of columns.

    Updates sums [slots, WIDTH] in place. Reads initial [N, WIDTH] float32, or None: 0; writes final [N, WIDTH] float32,
    the sum over all chunks and the initial value. Without REVERSE sums are angles in units, initial and final are
    radians, the latter in [0, 2 pi).
    """
    ROWS: tl.constexpr = 16
    blocks = tl.cdiv(WIDTH, BLOCK)
    pid = tl.program_id(0)
    column = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    n = pid // blocks
    in_width = column < WIDTH
    _, length = sequence_bounds(n, cu, T, PACKED)
    slot = first_chunk_slot(n, cu, T, C, PACKED)
    chunks = tl.cdiv(length, C)
    at_sequence = tl.cast(n, tl.int64) * WIDTH + column
    total = tl.zeros([BLOCK], sums.dtype.element_ty)
    if initial is not None:
        value = tl.load(initial + at_sequence, mask=in_width, other=0.0)
        total += value if REVERSE else angle_units(value)
    for block in range(tl.cdiv(chunks, ROWS)):
        c = block * ROWS + tl.arange(0, ROWS)
        mask = (c < chunks)[:, None] & in_width[None, :]
        at = tl.cast(slot + (chunks - 1 - c if REVERSE else c), tl.int64)[:, None] * WIDTH + column[None, :]
        values = tl.load(sums + at, mask=mask, other=0)
        through = tl.cumsum(values, 0)
        tl.store(sums + at, through - values + total[None, :], mask=mask)
        total += tl.sum(values, 0)
    if REVERSE:
        tl.store(final + at_sequence, total, mask=in_width)
    else:
        angle = total.to(tl.float32) * _RADIANS
        tl.store(final + at_sequence, tl.where(total < 0, angle + 6.283185307179586, angle), mask=in_width)


@triton.jit
def load_parts(base, rows, in_rows, stride, traits: tl.constexpr):
    """Load rows of K channels as the tiles of the channels i < R, R <= i < 2 R, and the rest, in float32."""
    R: tl.constexpr = traits.R
    K: tl.constexpr = traits.K
    BR: tl.constexpr = traits.BR
    REST: tl.constexpr = traits.REST
    r = tl.arange(0, BR)
    left = load_rows(base, rows, r, in_rows, r < R, stride).to(tl.float32)
    right = load_rows(base + R, rows, r, in_rows, r < R, stride).to(tl.float32)
    rest = left
    if REST > 0:
        j = tl.arange(0, REST)
        rest = load_rows(base + 2 * R, rows, j, in_rows, j < K - 2 * R, stride).to(tl.float32)
    return left, right, rest


@triton.jit
def load_vector(base, traits: tl.constexpr):
    """Load K numbers as the three parts of `load_parts`, [1, ..] each."""
    zero = tl.arange(0, 1)
    return load_parts(base, zero, zero == 0, 0, traits)


@triton.jit
def store_parts(base, left, right, rest, rows, in_rows, stride, traits: tl.constexpr):
    """Store the three parts of rows."""
    R: tl.constexpr = traits.R
    K: tl.constexpr = traits.K
    BR: tl.constexpr = traits.BR
    REST: tl.constexpr = traits.REST
    r = tl.arange(0, BR)
    store_rows(base, left, rows, r, in_rows, r < R, stride)
    store_rows(base + R, right, rows, r, in_rows, r < R, stride)
    if REST > 0:
        j = tl.arange(0, REST)
        store_rows(base + 2 * R, rest, rows, j, in_rows, j < K - 2 * R, stride)


@triton.jit
def store_sums(base, left, right, rest, traits: tl.constexpr):
    """Store the sums over the rows of three parts."""
    zero = tl.arange(0, 1)
    left, right, rest = tl.sum(left, 0), tl.sum(right, 0), tl.sum(rest, 0)
    store_parts(base, left[None, :], right[None, :], rest[None, :], zero, zero == 0, 0, traits)


@triton.jit(do_not_specialize=["N", "T"])
def rotate_kernel(
    q, k, q_bias, k_bias, rate, dt, sums, q_out, k_out, overlap, cu, N, T, traits: tl.constexpr,
):  # fmt: skip
    """Compute q', k' and u.

    Grid: chunk slot, group of HEADS value heads.

    Reads q, k [B, T, H, K], biases [HV, K], rate, dt, and sums, the angles before each chunk. Writes q_out and
    k_out [B, T, HV, K], overlap [B, T, HV] float32.
    """
    H: tl.constexpr = traits.H
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    R: tl.constexpr = traits.R
    C: tl.constexpr = traits.C
    BR: tl.constexpr = traits.BR
    REST: tl.constexpr = traits.REST
    HEADS: tl.constexpr = traits.HEADS
    PACKED: tl.constexpr = traits.PACKED
    pid = tl.program_id(0)
    slot = pid // (HV // HEADS)
    first_head = pid % (HV // HEADS) * HEADS
    h = first_head // (HV // H)
    start, length, offset = locate_chunk(slot, cu, N, T, C, PACKED)
    i = tl.arange(0, C)
    r = tl.arange(0, BR)
    in_time = offset + i < length
    tokens = start + offset + i
    rates = load_rows(rate, tokens, r, in_time, r < R, R)
    q0, q1, q2 = load_parts(q + h * K, tokens, in_time, H * K, traits)
    k0, k1, k2 = load_parts(k + h * K, tokens, in_time, H * K, traits)
    for head in range(HEADS):
        hv = first_head + head
        c0, c1, c2 = load_vector(q_bias + hv * K, traits)
        d0, d1, d2 = load_vector(k_bias + hv * K, traits)
        c0 += q0
        c1 += q1
        d0 += k0
        d1 += k1
        u = tl.sum(c0 * d0 + c1 * d1, 1)
        if REST > 0:
            c2 += q2
            d2 += k2
            u += tl.sum(c2 * d2, 1)
        steps = tl.load(dt + tokens * HV + hv, mask=in_time, other=0.0)
        before = tl.load(sums + (tl.cast(slot, tl.int64) * HV + hv) * R + r, mask=r < R, other=0)
        cos, sin = rotation(rates, steps, before)
        store_parts(q_out + hv * K, c0 * cos - c1 * sin, c1 * cos + c0 * sin, c2, tokens, in_time, HV * K, traits)
        store_parts(k_out + hv * K, d0 * cos - d1 * sin, d1 * cos + d0 * sin, d2, tokens, in_time, HV * K, traits)
        tl.store(overlap + tokens * HV + hv, u, mask=in_time)


@triton.jit(do_not_specialize=["N", "T"])
def rotate_backward_kernel(
    q, k, q_bias, k_bias, rate, dt, sums, dq_out, dk_out, d_overlap, dq, dk, dq_bias, dk_bias, d_rate, d_dt,
    later, cu, N, T, traits: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of q, k and the biases, and of rate and dt without the angles of later chunks.

    Grid: chunk slot, group of HEADS value heads.

    Reads what `rotate_kernel` reads, and the gradients of what it writes. Writes, in float32, sums over the heads of a
    group dq, dk [groups, B, T, K] and d_rate [groups, B, T, R]; sums over the tokens of a chunk dq_bias,
    dk_bias [slots, HV, K] and d theta later [slots, HV, R]; d_dt [B, T, HV].
    """
    H: tl.constexpr = traits.H
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    R: tl.constexpr = traits.R
    C: tl.constexpr = traits.C
    BR: tl.constexpr = traits.BR
    REST: tl.constexpr = traits.REST
    HEADS: tl.constexpr = traits.HEADS
    PACKED: tl.constexpr = traits.PACKED
    pid = tl.program_id(0)
    group = pid % (HV // HEADS)
    slot = pid // (HV // HEADS)
    h = group * HEADS // (HV // H)
    start, length, offset = locate_chunk(slot, cu, N, T, C, PACKED)
    rows_in_all = T if PACKED else N * T
    i = tl.arange(0, C)
    r = tl.arange(0, BR)
    in_time = offset + i < length
    tokens = start + offset + i
    rates = load_rows(rate, tokens, r, in_time, r < R, R)
    q0, q1, q2 = load_parts(q + h * K, tokens, in_time, H * K, traits)
    k0, k1, k2 = load_parts(k + h * K, tokens, in_time, H * K, traits)
    dq0 = tl.zeros([C, BR], tl.float32)
    dq1 = tl.zeros([C, BR], tl.float32)
    dk0 = tl.zeros([C, BR], tl.float32)
    dk1 = tl.zeros([C, BR], tl.float32)
    dq2 = tl.zeros_like(q2)
    dk2 = tl.zeros_like(k2)
    d_rates = tl.zeros([C, BR], tl.float32)
    for head in range(HEADS):
        hv = group * HEADS + head
        at_chunk = tl.cast(slot, tl.int64) * HV + hv
        c0, c1, c2 = load_vector(q_bias + hv * K, traits)
        d0, d1, d2 = load_vector(k_bias + hv * K, traits)
        c0 += q0
        c1 += q1
        d0 += k0
        d1 += k1
        a0, a1, a2 = load_parts(dq_out + hv * K, tokens, in_time, HV * K, traits)
        b0, b1, b2 = load_parts(dk_out + hv * K, tokens, in_time, HV * K, traits)
        steps = tl.load(dt + tokens * HV + hv, mask=in_time, other=0.0)
        before = tl.load(sums + at_chunk * R + r, mask=r < R, other=0)
        cos, sin = rotation(rates, steps, before)
        rotated = a0
        a0 = a0 * cos + a1 * sin
        a1 = a1 * cos - rotated * sin
        rotated = b0
        b0 = b0 * cos + b1 * sin
        b1 = b1 * cos - rotated * sin
        d_angle = c0 * a1 - c1 * a0 + d0 * b1 - d1 * b0
        from_here = tl.cumsum(d_angle, 0, reverse=True)
        tl.store(later + at_chunk * R + r, tl.sum(d_angle, 0), mask=r < R)
        d_rates += steps[:, None] * from_here
        tl.store(d_dt + tokens * HV + hv, tl.sum(rates * from_here, 1), mask=in_time)
        d_u = tl.load(d_overlap + tokens * HV + hv, mask=in_time, other=0.0).to(tl.float32)[:, None]
        a0 += d_u * d0
        a1 += d_u * d1
        b0 += d_u * c0
        b1 += d_u * c1
        if REST > 0:
            c2 += q2
            d2 += k2
            a2 += d_u * d2
            b2 += d_u * c2
        store_sums(dq_bias + at_chunk * K, a0, a1, a2, traits)
        store_sums(dk_bias + at_chunk * K, b0, b1, b2, traits)
        dq0 += a0
        dq1 += a1
        dq2 += a2
        dk0 += b0
        dk1 += b1
        dk2 += b2
    rows = tl.cast(group, tl.int64) * rows_in_all + tokens
    store_parts(dq, dq0, dq1, dq2, rows, in_time, K, traits)
    store_parts(dk, dk0, dk1, dk2, rows, in_time, K, traits)
    store_rows(d_rate, d_rates, rows, r, in_time, r < R, R)


@triton.jit(do_not_specialize=["N", "T"])
def angle_gradients_kernel(
    rate, dt, later, d_rate_groups, d_dt_chunk, d_rate, d_dt, cu, N, T, traits: tl.constexpr,
):  # fmt: skip
    """Add the gradients through the angles of later chunks, and the groups of heads.

    Grid: chunk slot.

    Reads rate, dt; later [slots, HV, R], sums of d theta over the later chunks; what `rotate_backward_kernel` writes.
    Writes d_rate [B, T, R] and d_dt [B, T, HV].
    """
    HV: tl.constexpr = traits.HV
    R: tl.constexpr = traits.R
    C: tl.constexpr = traits.C
    BR: tl.constexpr = traits.BR
    HEADS: tl.constexpr = traits.HEADS
    PACKED: tl.constexpr = traits.PACKED
    slot = tl.program_id(0)
    start, length, offset = locate_chunk(slot, cu, N, T, C, PACKED)
    rows_in_all = T if PACKED else N * T
    i = tl.arange(0, C)
    r = tl.arange(0, BR)
    in_time = offset + i < length
    tokens = start + offset + i
    rates = load_rows(rate, tokens, r, in_time, r < R, R)
    total = tl.zeros([C, BR], tl.float32)
    for group in range(HV // HEADS):
        total += load_rows(d_rate_groups, tl.cast(group, tl.int64) * rows_in_all + tokens, r, in_time, r < R, R)
    for hv in range(HV):
        after = tl.load(later + (tl.cast(slot, tl.int64) * HV + hv) * R + r, mask=r < R, other=0.0)[None, :]
        steps = tl.load(dt + tokens * HV + hv, mask=in_time, other=0.0)
        total += steps[:, None] * after
        in_chunk = tl.load(d_dt_chunk + tokens * HV + hv, mask=in_time, other=0.0)
        tl.store(d_dt + tokens * HV + hv, in_chunk + tl.sum(rates * after, 1), mask=in_time)
    store_rows(d_rate, total, tokens, r, in_time, r < R, R)
