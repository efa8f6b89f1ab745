"""One token of a diagonal recurrence with complex states, from the products of the input up to the output map.

    S <- |a| S + exp(-i p w) b v,    o = exp(i p w) S        a = |a| exp(i w), at position p
    lru     |a| = exp(-exp(nu)), w = exp(theta), b = exp(gamma),                  conj(o)
    s5      a = exp(lambda dt), b = (a - 1) / lambda, dt = exp(log dt),           conj(o)
    hgrn    |a| = g + (1 - g) sigmoid(z), b = 1 - |a|, v <- silu(v),              norm(o * sigmoid(gate)), a layer norm

Angles are in float64, as in `mixers.parts.ssm.complex_states`, whose state this is.

B rows, C channels (one complex state each), D width
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.overlap import prefetch_line, start_next, wait_for_previous
from deltazoo.backends.triton.element.kernels.channels import load_channels, load_pairs, load_raw, store_pairs
from deltazoo.backends.triton.element.kernels.complex_step import cos_and_sin

TURNS: tl.constexpr = tl.constexpr(0.5 / math.pi)  # per radian; a division in float64 is a call


class RotatingTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        KIND: "lru", "s5" or "hgrn". C: channels. BC: C as a power of two.
        D: of the feedthrough, 0: none. BD: D as a power of two. STRIDE: elements from row to row of the products.
        FLOOR: whether there is a floor g. EPS: of the norm.
        POSITIONS: whether the position is not the number of tokens before. OVERLAP: see device/overlap.py.
    """

    KIND: str
    C: int
    BC: int
    D: int
    BD: int
    STRIDE: int
    FLOOR: bool
    EPS: float
    POSITIONS: bool
    OVERLAP: bool


@triton.jit
def rotating_step_kernel(
    values, decays, gates, magnitude, angle, scale, norm_weight, x, feedthrough, position, seen, states, o,
    direct, traits: tl.constexpr,
):  # fmt: skip
    """Decode the token of one row.

    Grid: row. Reads values, gates [B, 2 C] and decays [B, C] with a row stride, position [B] int64, and per channel
    magnitude, angle and scale: nu, theta and gamma (lru); log(-Re lambda), Im lambda and log dt (s5); the logit of g
    and w (hgrn). norm_weight [2 C]; x [B, D], feedthrough [D]. Updates states [B, C, 2]
    float32 and seen [B] int64, the tokens before this one, in place. Writes o [B, 2 C] and direct = feedthrough * x.
    """
    C: tl.constexpr = traits.C
    D: tl.constexpr = traits.D
    KIND: tl.constexpr = traits.KIND
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, traits.BC)
    in_c = c < C
    states += row * (2 * C)
    if traits.OVERLAP:
        start_next()
        line = tl.arange(0, max(1, traits.BC // 16)) * 32  # 16 states fill a cache line
        prefetch_line(states + tl.minimum(line, 2 * C - 1))
        wait_for_previous()
    # these loads come before the first use of one, which waits for the memory
    before = tl.load(seen + row)
    p = before
    if traits.POSITIONS:
        p = tl.load(position + row)
    state = load_pairs(states, c, in_c)
    value = load_pairs(values + row * traits.STRIDE, c, in_c)
    w = load_raw(angle, c, in_c)
    if KIND != "hgrn" or traits.FLOOR:
        raw_magnitude = load_raw(magnitude, c, in_c)
    if KIND == "hgrn":
        z = load_raw(decays + row * traits.STRIDE, c, in_c)
        gate = load_pairs(gates + row * traits.STRIDE, c, in_c)
        weight = load_pairs(norm_weight, c, in_c)
    else:
        raw_scale = load_raw(scale, c, in_c)
    s_re, s_im = tl.split(state)
    v_re, v_im = tl.split(value.to(tl.float32))
    w = w.to(tl.float64)
    if KIND == "lru":
        turn = tl.exp(w) * TURNS
        a = tl.exp(-tl.exp(raw_magnitude.to(tl.float32)))
        b_re = tl.exp(raw_scale.to(tl.float32))
        b_im = tl.zeros_like(b_re)
    elif KIND == "s5":
        dt = tl.exp(raw_scale.to(tl.float64))
        re = -tl.exp(raw_magnitude.to(tl.float64))
        turn = w * dt * TURNS
        wide_a = tl.exp(re * dt)
        cos, sin = cos_and_sin((turn - tl.floor(turn)).to(tl.float32))
        _, half_sin = cos_and_sin((0.5 * turn - tl.floor(0.5 * turn)).to(tl.float32))
        # a - 1 without cancellation: (|a| - 1) cos(w) - 2 sin(w / 2)^2
        a = wide_a.to(tl.float32)
        a_re = (wide_a - 1.0).to(tl.float32) * cos - 2.0 * half_sin * half_sin
        a_im = a * sin
        re = re.to(tl.float32)
        im = w.to(tl.float32)
        square = re * re + im * im
        b_re = (a_re * re + a_im * im) / square
        b_im = (a_im * re - a_re * im) / square
    else:
        turn = w * TURNS
        z = z.to(tl.float32)
        a = tl.sigmoid(z)
        b_re = tl.sigmoid(-z)
        if traits.FLOOR:
            floor = raw_magnitude.to(tl.float32)
            above = tl.sigmoid(-floor)
            a = tl.sigmoid(floor) + above * a
            b_re *= above
        b_im = tl.zeros_like(b_re)
        v_re *= tl.sigmoid(v_re)
        v_im *= tl.sigmoid(v_im)
    turned = p.to(tl.float64) * turn
    cos, sin = cos_and_sin((turned - tl.floor(turned)).to(tl.float32))
    u_re = b_re * v_re - b_im * v_im
    u_im = b_re * v_im + b_im * v_re
    s_re = a * s_re + u_re * cos + u_im * sin
    s_im = a * s_im + u_im * cos - u_re * sin
    store_pairs(states, c, in_c, s_re, s_im)
    o_re = s_re * cos - s_im * sin
    o_im = s_re * sin + s_im * cos
    if KIND == "hgrn":
        g_re, g_im = tl.split(gate.to(tl.float32))
        o_re *= tl.sigmoid(g_re)
        o_im *= tl.sigmoid(g_im)
        mean = tl.sum(tl.where(in_c, o_re + o_im, 0.0), 0) / (2 * C)
        o_re -= mean
        o_im -= mean
        factor = tl.rsqrt(tl.sum(tl.where(in_c, o_re * o_re + o_im * o_im, 0.0), 0) / (2 * C) + traits.EPS)
        weight_re, weight_im = tl.split(weight.to(tl.float32))
        o_re *= factor * weight_re
        o_im *= factor * weight_im
    else:
        o_im = -o_im
    store_pairs(o + row * (2 * C), c, in_c, o_re, o_im)
    if D > 0:
        d = tl.arange(0, traits.BD)
        out = load_channels(x + row * D, d, d < D) * load_channels(feedthrough, d, d < D)
        tl.store(direct + row * D + d, out.to(direct.dtype.element_ty), mask=d < D)
    tl.debug_barrier()  # after every thread has loaded the number
    tl.store(seen + row, before + 1)
