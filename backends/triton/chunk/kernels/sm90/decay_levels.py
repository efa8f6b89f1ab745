"""Dyadic sums and products of a tile with a decay per channel, within the 16 rows of each warp (inline PTX).

portable/channel/decay_levels.py explains the levels. A tile [4 warps, 16 rows, 32 channels] has the layout TILE: lane 4
g + c of a warp holds rows g and g + 8, channels 8 c to 8 c + 7. Row g + 8 r is token 2 g + r of the warp's 16, so a
thread
holds pairs of adjacent tokens, and the other bits of a token's number are those of its lane. At level s = 1, 2, 4, 8
the factor of a token is, with products over the decays 2^a,

    pre_s,  the product from the first token of its half up to itself, in the upper half of a block of 2 s tokens;
    suf_s,  the product over the tokens after it in its half, in the lower half.

With t_s, the sum of the log2 decays over the other half of the block, which a lane reads by one shuffle from the lane
at distance 2 s,

    pre_2s = pre_s 2^t_s in upper halves,  suf_2s = suf_s 2^t_s in lower halves,  unchanged otherwise.

So a factor is a product of at most five powers of two, one per level, of sums of terms of one sign. All are at most 1:
a product underflows only where its result does. The rows of q and e are multiplied by pre_s and those of k by suf_s,
from one level to the next. Rows of the other half keep theirs, which no product of the level reads.

In mma.sync m16n8k8 and m16n8k16 the A operand of a row and the B operand of a column are held by the same lanes, for
any common order of the channels, so operands stay in registers. The products of a level are added to those of other
levels where i is in the upper and j in the lower half of one block. Elsewhere they may be inf or NaN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltazoo.backends.triton.chunk.kernels.sm90.common import ACC_N16
from deltazoo.backends.triton.chunk.kernels.sm90.decay_levels_ptx import (
    choose_by_warp_asm,
    level_products_asm,
    level_products_operands,
)

TILE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0]], [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]], [], [4, 16, 32],
    )
)  # fmt: skip
CHOOSE_OPERANDS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 32))


@gluon.jit
def level_products(
    a, k, q, e, blocks, DELTA: gl.constexpr, OWN: gl.constexpr, ERASE_PREVIOUS: gl.constexpr, READ_BEFORE: gl.constexpr
):
    """Add a tile's products of levels 8, 4, 2 and 1, of e and k and of q and k, to the blocks of A and P.

    a: log2 decays; k, q, e: scaled rows; all float32. OWN: e is not k. ERASE_PREVIOUS, READ_BEFORE: e and q have the
    decays before their token.

    Returns: k suf_16, q pre_16 and e pre_16 within a warp's 16 tokens, the sum of the 16 log2 decays, and the blocks.
        pre_16 is without the token's own decay where the operand is early.
    """
    asm: gl.constexpr = level_products_asm(DELTA, OWN, ERASE_PREVIOUS, READ_BEFORE)
    operands: gl.constexpr = level_products_operands(DELTA, OWN)
    inputs = [a, k, q, e, blocks] if OWN else [a, k, q, blocks]
    if DELTA:
        k, q, e, total, blocks = gl.inline_asm_elementwise(
            asm, operands, inputs, (gl.float32, gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=16
        )
    else:
        k, q, total, blocks = gl.inline_asm_elementwise(
            asm, operands, inputs, (gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=16
        )
    return k, q, e, total, blocks


@gluon.jit
def choose_by_warp(BIT: gl.constexpr, x, y):
    """Return x in the warps whose number has BIT set, y in the others."""
    asm: gl.constexpr = choose_by_warp_asm(BIT)
    return gl.inline_asm_elementwise(asm, CHOOSE_OPERANDS, [x, y], gl.float32, is_pure=True, pack=16)


@gluon.jit
def split_blocks(blocks):
    """Return each warp's 16 x 16 blocks of A and P on the diagonal, zero unless j < i: two [64, 16]."""
    # [rows, c, A or P, h, p] -> [rows, h, c, p, A or P]
    blocks = gl.permute(gl.reshape(blocks, [64, 4, 2, 2, 2]), [0, 3, 1, 4, 2])
    A, P = gl.split(gl.reshape(blocks, [64, 16, 2]))
    return gl.convert_layout(A, ACC_N16, assert_trivial=True), gl.convert_layout(P, ACC_N16, assert_trivial=True)
