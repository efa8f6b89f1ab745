"""Decode step of a diagonal recurrence with complex states, kept in a frame that rotates with the position p.

    v = factor x,    S = |a| S + exp(-i p angle(a)) b v
    y = Re(sum over the states of C exp(i p angle(a)) S) + skip v,    o = gate gelu(y)

factor, gate and GELU (that of the error function) may be missing.

B rows, D channels, N states per channel
"""

from typing import NamedTuple

import triton
import triton.language as tl


@triton.jit
def cos_and_sin(turn):
    """Return cosine and sine of 2 pi turn for 0 <= turn <= 1, with an error of 3e-8.

    Taylor polynomials within an eighth of a turn around the nearest quarter. Triton's functions reduce any angle.
    """
    quarter = tl.floor(4.0 * turn + 0.5)
    x = (4.0 * turn - quarter) * 1.5707963267948966
    x2 = x * x
    s = x * (1.0 + x2 * (-1 / 6 + x2 * (1 / 120 + x2 * (-1 / 5040 + x2 * (1 / 362880)))))
    c = 1.0 + x2 * (-0.5 + x2 * (1 / 24 + x2 * (-1 / 720 + x2 * (1 / 40320))))
    is_odd = (quarter == 1.0) | (quarter == 3.0)
    cos = tl.where(is_odd, s, c)
    sin = tl.where(is_odd, c, s)
    cos = tl.where((quarter == 1.0) | (quarter == 2.0), -cos, cos)
    sin = tl.where((quarter == 2.0) | (quarter == 3.0), -sin, sin)
    return cos, sin


class ComplexTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        D, N: sizes. NP: N as a power of two. BD: channels, and ROWS: rows of a program.
        X, FACTOR, GATE: elements from row to row of x, factor and gate; -1: there is no factor, or gate.
        GELU: whether the output passes a GELU.
    """

    D: int
    N: int
    NP: int
    BD: int
    ROWS: int
    X: int
    FACTOR: int
    GATE: int
    GELU: bool


@triton.jit(do_not_specialize=["rows"])
def complex_step_kernel(
    x, factor, gate, turns, log_magnitude, b_re, b_im, c, skip, position, states, o, rows, traits: tl.constexpr
):  # fmt: skip
    """Update BD channels of ROWS rows.

    Grid: blocks of ROWS rows, blocks of BD channels. Reads x, factor, gate [B, D] with row strides; turns [D, N]
    float64, the angle of a in turns; log_magnitude, b_re, b_im [D, N]; c [D, N, 2]; skip [D]; position [B] int64.
    Updates states [B, D, 2 N] float32 in place, real parts first. Writes o [B, D]. The rotation is computed again only
    where the position differs from that of the row before.
    """
    D: tl.constexpr = traits.D
    N: tl.constexpr = traits.N
    NP: tl.constexpr = traits.NP
    BD: tl.constexpr = traits.BD
    ROWS: tl.constexpr = traits.ROWS
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    first = tl.program_id(0) // BLOCKS * ROWS
    d = tl.program_id(0) % BLOCKS * BD + tl.arange(0, BD)
    n = tl.arange(0, NP)[None, :]
    mask = (d < D)[:, None] & (n < N)
    at = d[:, None] * N + n
    turn = tl.load(turns + at, mask=mask, other=0.0)
    magnitude = tl.exp(tl.load(log_magnitude + at, mask=mask, other=0.0))
    b_re = tl.load(b_re + at, mask=mask, other=0.0)
    b_im = tl.load(b_im + at, mask=mask, other=0.0)
    c_re = tl.load(c + 2 * at, mask=mask, other=0.0).to(tl.float32)
    c_im = tl.load(c + 2 * at + 1, mask=mask, other=0.0).to(tl.float32)
    bypass = tl.load(skip + d, mask=d < D, other=0.0).to(tl.float32)
    state = states + (tl.cast(first, tl.int64) * D + d[:, None]) * (2 * N) + n
    next_re = tl.load(state, mask=mask, other=0.0)
    next_im = tl.load(state + N, mask=mask, other=0.0)
    last = tl.cast(-1, tl.int64)
    k_re = b_re
    k_im = b_im
    q_re = c_re
    q_im = c_im
    for i in range(ROWS):
        row = tl.cast(first + i, tl.int64)
        in_rows = row < rows
        in_state = mask & in_rows
        re, im = next_re, next_im
        later = state + 2 * N * D  # the loads of the next row are issued before this row is stored
        in_later = mask & ((row + 1 < rows) & (i + 1 < ROWS))
        next_re = tl.load(later, mask=in_later, other=0.0)
        next_im = tl.load(later + N, mask=in_later, other=0.0)
        in_row = (d < D) & in_rows
        channel = tl.load(x + row * traits.X + d, mask=in_row, other=0.0).to(tl.float32)
        if traits.FACTOR >= 0:
            channel *= tl.load(factor + row * traits.FACTOR + d, mask=in_row, other=0.0).to(tl.float32)
        if traits.GATE >= 0:
            g = tl.load(gate + row * traits.GATE + d, mask=in_row, other=0.0).to(tl.float32)
        value = channel[:, None]
        p = tl.load(position + row, mask=in_rows, other=0)
        if p != last:
            turned = p.to(tl.float64) * turn
            cos, sin = cos_and_sin((turned - tl.floor(turned)).to(tl.float32))
            k_re = b_re * cos + b_im * sin
            k_im = b_im * cos - b_re * sin
            q_re = c_re * cos - c_im * sin
            q_im = c_im * cos + c_re * sin
            last = p
        re = magnitude * re + k_re * value
        im = magnitude * im + k_im * value
        out = tl.sum(q_re * re - q_im * im, 1) + bypass * channel
        if traits.GELU:
            out *= 0.5 * (1.0 + tl.erf(0.7071067811865476 * out))
        if traits.GATE >= 0:
            out *= g
        tl.store(state, re, mask=in_state)
        tl.store(state + N, im, mask=in_state)
        state = later
        tl.store(o + row * D + d, out.to(o.dtype.element_ty), mask=in_row)
