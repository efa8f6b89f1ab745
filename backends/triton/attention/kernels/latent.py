"""One token of multi-head latent attention: all heads attend to one cached vector per token.

    x_s = scale q_h . z_s,    o_h = sum_s softmax_s(x_s) c_s        with z_s = [c_s, r_s], C and R channels

Programs for parts of the slots, each of which reads a slot once for ROWS heads; then `combine_parts_kernel`, see
decode.py. The products with c and r are separate, because C and R are powers of two where C + R is none. Slots and
latent channels are the rows of the products, heads their columns: tensor cores of sm_90 multiply 64 rows at once.

B batch, S slots, H heads, C latent width, R rotary width, P parts
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.attention.kernels.decode import bounds_of
from deltazoo.backends.triton.attention.kernels.tiles import LOG2E
from deltazoo.backends.triton.device.overlap import LINE, prefetch_line, start_next, wait_for_previous


class LatentTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        H, V, R: heads, C and R. BV, BR: the powers of two from C and R on, at least 16.
        ROWS: heads of a program. BN: slots of a tile. PARTS: P, a power of two.
        SCALE: factor of q . z. PREC: input precision of float32 products. OVERLAP: see device/overlap.py.
        PREFETCHED: tiles that a program requests before the preceding kernel has ended.
    """

    H: int
    V: int
    R: int
    BV: int
    BR: int
    ROWS: int
    BN: int
    PARTS: int
    SCALE: float
    PREC: str
    OVERLAP: bool
    PREFETCHED: int


@triton.jit
def prefetch_slots(latent, n, end, traits: tl.constexpr):
    """Prefetch PREFETCHED tiles from slot n on, but no slot from `end` on, into the L2 cache."""
    E: tl.constexpr = traits.V + traits.R
    NUMBERS: tl.constexpr = LINE // (latent.dtype.element_ty.primitive_bitwidth // 8)  # of a line
    AT_ONCE: tl.constexpr = 128 * NUMBERS
    last = tl.maximum(end * E - 1, 0)
    line = tl.arange(0, 128) * NUMBERS
    for first in range(0, tl.cdiv(traits.PREFETCHED * traits.BN * E, AT_ONCE)):
        prefetch_line(latent + tl.minimum(n * E + first * AT_ONCE + line, last))


@triton.jit(do_not_specialize=["S"])
def latent_attention_kernel(q, latent, ends, partial, lse, S, traits: tl.constexpr):
    """Attend from ROWS heads to one part of the slots of a sequence.

    Grid: B x H / ROWS x P. Reads q [B, H, C + R], latent [B, S, C + R], ends [B] int64, the number of filled slots.
    Writes partial [B, H, P, C] and lse [B, H, P], float32.
    """
    H: tl.constexpr = traits.H
    C: tl.constexpr = traits.V
    R: tl.constexpr = traits.R
    ROWS: tl.constexpr = traits.ROWS
    BN: tl.constexpr = traits.BN
    BV: tl.constexpr = traits.BV
    GROUPS: tl.constexpr = (H + ROWS - 1) // ROWS
    if traits.OVERLAP:
        start_next()
    part = tl.program_id(0) % traits.PARTS
    group = tl.program_id(0) // traits.PARTS % GROUPS
    b = tl.cast(tl.program_id(0) // (traits.PARTS * GROUPS), tl.int64)
    latent += b * S * (C + R)
    if traits.OVERLAP:
        if traits.PREFETCHED > 0:
            # The preceding kernel may yet write the number: it is a guess, and any slots may be prefetched.
            guess = tl.load(ends + b, cache_modifier=".cg")
            begin, stop = bounds_of(part, tl.maximum(tl.minimum(guess, S), 0).to(tl.int32), traits)
            prefetch_slots(latent, begin, stop, traits)
        wait_for_previous()
    end = tl.minimum(tl.load(ends + b), S).to(tl.int32)
    begin, stop = bounds_of(part, end, traits)
    head = group * ROWS + tl.arange(0, ROWS)
    in_h = (head < H)[None, :]
    c = tl.arange(0, BV)[:, None]
    r = tl.arange(0, traits.BR)[:, None]
    row = b * H + head
    q_c = tl.load(q + row[None, :] * (C + R) + c, mask=in_h & (c < C), other=0.0)
    if R > 0:
        q_r = tl.load(q + row[None, :] * (C + R) + C + r, mask=in_h & (r < R), other=0.0)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([BN, ROWS], tl.float32)
    o_tile = tl.zeros([BV, ROWS], tl.float32)
    for n in range(begin, stop, BN):
        s = n + tl.arange(0, BN)
        filled = (s < stop)[:, None]
        at = latent + s[:, None] * (C + R)
        c_tile = tl.load(at + tl.trans(c), mask=filled & tl.trans(c < C), other=0.0)
        x = tl.dot(c_tile, q_c, input_precision=traits.PREC)
        if R > 0:
            r_tile = tl.load(at + C + tl.trans(r), mask=filled & tl.trans(r < R), other=0.0)
            x = tl.dot(r_tile, q_r, x, input_precision=traits.PREC)
        x = tl.where(filled, x * (traits.SCALE * LOG2E), float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 0))
        p = tl.exp2(x - m_new[None, :])
        decay = tl.exp2(m - m_new)[None, :]
        l = l * decay + p
        m = m_new
        o_tile = tl.dot(tl.trans(c_tile), p.to(c_tile.dtype), o_tile * decay, input_precision=traits.PREC)
    total = tl.sum(l, 0)
    o_tile *= tl.where(total == 0.0, 0.0, 1.0 / total)[None, :]
    at_part = row * traits.PARTS + part
    tl.store(partial + at_part[None, :] * C + c, o_tile, mask=in_h & (c < C))
    tl.store(lse + at_part, m + tl.log2(total), mask=head < H)
