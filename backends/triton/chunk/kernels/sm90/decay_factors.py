"""Factors of a decay per channel for transposed tiles [64 channels, 16 tokens] in the layout ACC_N16 (inline PTX).

portable/channel/decay_levels.py explains the levels. With G the cumulative log2 decay and m the last token of a lower
half, the factor of a token is 2^(G - G_m) in the upper half of its block and 2^(G_m - G) in the lower half. G does not
increase, so both are 2^-|G - G_m|. G is summed token by token in float32: the exponent has an error of about
2^-9 where every token is at the clamp, -96, and 2^-15 for |G| below 64.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltazoo.backends.triton.chunk.kernels.sm90.decay_factors_ptx import boundary_factors_asm, level_factors_asm

FACTOR_OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 8))
FACTOR_OPERANDS_2 = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 16))
BOUNDARY_FACTORS = gl.constexpr(boundary_factors_asm())


@gluon.jit
def level_factors(G, G_before, LEVEL: gl.constexpr, GATES_BEFORE: gl.constexpr):
    """Return the factors of a level below 4; GATES_BEFORE: without the own decay of tokens in upper halves."""
    asm: gl.constexpr = level_factors_asm(LEVEL, GATES_BEFORE)
    if GATES_BEFORE:
        f = gl.inline_asm_elementwise(asm, FACTOR_OPERANDS_2, [G, G_before], gl.float32, is_pure=True, pack=8)
    else:
        f = gl.inline_asm_elementwise(asm, FACTOR_OPERANDS, [G], gl.float32, is_pure=True, pack=8)
    return f


@gluon.jit
def boundary_factors(G, G_boundary):
    """Return 2^-|G - G_m| for the last token m of the tile G_boundary."""
    return gl.inline_asm_elementwise(
        BOUNDARY_FACTORS, FACTOR_OPERANDS_2, [G, G_boundary], gl.float32, is_pure=True, pack=8
    )  # fmt: skip
