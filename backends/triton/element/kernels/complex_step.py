"""Decode step of a diagonal recurrence with complex states, kept in a frame that rotates with the position p.

    S = |a| S + exp(-i p angle(a)) b x,    y = Re(sum over the states of C exp(i p angle(a)) S)

B rows, D channels, N states per channel
"""

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


@triton.jit(do_not_specialize=["rows"])
def complex_step_kernel(
    x, turns, log_magnitude, b, c, position, states, y, rows,
    D: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, X_STRIDE: tl.constexpr,
):  # fmt: skip
    """Update BD channels of ROWS rows.

    Grid: blocks of ROWS rows, blocks of BD channels. Reads x [B, D] with a stride from row to row; turns [D, N]
    float64, the angle of a in turns; log_magnitude [D, N]; b, c [D, N, 2]; position [B] int64. Updates states [B, D,
    2 N] float32 in place, real parts first. Writes y [B, D] float32. N is rounded up to NP. The rotation is computed
    again only where the position differs from that of the row before.
    """
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    first = tl.program_id(0) // BLOCKS * ROWS
    d = tl.program_id(0) % BLOCKS * BD + tl.arange(0, BD)
    n = tl.arange(0, NP)[None, :]
    mask = (d < D)[:, None] & (n < N)
    at = d[:, None] * N + n
    turn = tl.load(turns + at, mask=mask, other=0.0)
    magnitude = tl.exp(tl.load(log_magnitude + at, mask=mask, other=0.0))
    b_re = tl.load(b + 2 * at, mask=mask, other=0.0)
    b_im = tl.load(b + 2 * at + 1, mask=mask, other=0.0)
    c_re = tl.load(c + 2 * at, mask=mask, other=0.0).to(tl.float32)
    c_im = tl.load(c + 2 * at + 1, mask=mask, other=0.0).to(tl.float32)
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
        value = tl.load(x + row * X_STRIDE + d, mask=(d < D) & in_rows, other=0.0).to(tl.float32)[:, None]
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
        out = tl.sum(q_re * re - q_im * im, 1)
        tl.store(state, re, mask=in_state)
        tl.store(state + N, im, mask=in_state)
        state = later
        tl.store(y + row * D + d, out, mask=(d < D) & in_rows)
