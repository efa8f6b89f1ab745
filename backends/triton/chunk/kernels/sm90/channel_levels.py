"""The levels of the gradients of delta rules with a decay per channel, on transposed tiles.

channel_gradients.py defines the symbols and the products of a level.

dq, dy, dk, G, G_before: four blocks [64 channels, 16 tokens] in the layout ACC_N16, of one tile [64 channels,
64 tokens]; dy is the gradient of -y, and G_before is G without the decay of the token. P_s, A_s: the tiles of
`store_pairs`. q_s, e_s, k_s: rows [64 tokens, 64 channels] in shared memory
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.chunk.kernels.sm90.common import (
    ACC,
    ACC_N16,
    SMEM_TILE,
    to_16_bits,
    to_float32,
)
from deltazoo.backends.triton.chunk.kernels.sm90.decay_factors import boundary_factors, level_factors
from deltazoo.backends.triton.chunk.kernels.sm90.ptx import diagonal_blocks, exp2_ftz, select_pairs
from deltazoo.backends.triton.chunk.kernels.sm90.token_masks import OPERANDS, mask_asm
from deltazoo.backends.triton.chunk.kernels.sm90.wy_tiles import SMEM_N16, split_column_blocks, to_a_operand

N16_ROWS = gl.constexpr(gl.SliceLayout(1, ACC_N16.value))
N16_COLUMNS = gl.constexpr(gl.SliceLayout(0, ACC_N16.value))
# two predicated fused multiply-adds; a select beside each would cost one more instruction and register
ADD_HALVES = gl.constexpr(
    "{\n.reg .pred upper;\nsetp.ne.s32 upper, $2, 0;\nmov.b32 $0, $5;\nmov.b32 $1, $6;\n"
    "@upper fma.rn.f32 $0, $3, $4, $0;\n@!upper fma.rn.f32 $1, $3, $4, $1;\n}"
)


@gluon.jit
def load_decays(G_s, G_before_s, ANY_EARLY: gl.constexpr):
    """Load the blocks of G, and with ANY_EARLY those of G_before, else G again."""
    G = split_column_blocks(G_s.load(ACC))
    return G, split_column_blocks(G_before_s.load(ACC)) if ANY_EARLY else G


@gluon.jit
def keep_tokens(x, KIND: gl.constexpr, LEVEL: gl.constexpr):
    """Zero what a mask of token_masks.py does not keep of x [64, 64], of 16 bits in the layout ACC."""
    asm: gl.constexpr = mask_asm(KIND, LEVEL)
    return gl.inline_asm_elementwise(asm, OPERANDS, [x], x.dtype, is_pure=True, pack=32)


@gluon.jit
def join_columns(low, high):
    """Concatenate two tiles along their columns."""
    N: gl.constexpr = 2 * low.shape[1]
    return gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1]), [64, N])


@gluon.jit
def join_blocks(x):
    """Undo split_column_blocks."""
    x = join_columns(join_columns(x[0], x[1]), join_columns(x[2], x[3]))
    return gl.convert_layout(x, ACC, assert_trivial=True)


@gluon.jit
def load_block(tile, B: gl.constexpr):
    """Load block B, tokens 16 B to 16 B + 15, of rows [64 tokens, 64 channels], transposed."""
    return tile.slice(16 * B, 16).permute((1, 0)).load(ACC_N16)


@gluon.jit
def scale_block(rows, factors, dtype: gl.constexpr):
    """Return rows times factors as an A operand."""
    return to_a_operand(to_16_bits(to_float32(rows) * factors, dtype))


@gluon.jit
def allocate_pair_tiles(dtype: gl.constexpr):
    """Allocate the B operands of levels 0 to 4, and two of level 5."""
    tiles = (gl.allocate_shared_memory(dtype, [64, 16], SMEM_N16),)
    for _ in gl.static_range(6):
        tiles = tiles + (gl.allocate_shared_memory(dtype, [64, 16], SMEM_N16),)
    return tiles


@gluon.jit
def store_pairs(x, y, tiles):
    """Store the pairs of each level: those of x, strictly lower, plus those of y^T, strictly upper.

    Tiles 0 to 3 are the blocks on the diagonal with the pairs of levels 0 to 3. Tile 4 has the blocks of level 4. Tiles
    5 and 6 have those of level 5: for the rows of each half the first and the second block of columns of the other.
    """
    dtype: gl.constexpr = tiles[0].dtype
    lower = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
    lower.store(keep_tokens(to_16_bits(y, dtype), "before", 0))
    b0, b1, b2, b3 = split_column_blocks(
        keep_tokens(to_16_bits(x, dtype), "before", 0) + lower.permute((1, 0)).load(ACC)
    )
    tiles[6].store(diagonal_blocks(b3, b3, b1, b1))
    tiles[5].store(diagonal_blocks(b2, b2, b0, b0))
    tiles[4].store(diagonal_blocks(b1, b0, b3, b2))
    block = diagonal_blocks(b0, b1, b2, b3)
    i = gl.arange(0, 64, N16_ROWS)[:, None] % 16
    j = gl.arange(0, 16, N16_COLUMNS)[None, :]
    zeros = gl.zeros([64, 16], dtype, ACC_N16)
    for level in gl.static_range(4):
        tiles[level].store(gl.where((i ^ j) >> level == 1, block, zeros))


@gluon.jit
def multiply_block(a, tile, B: gl.constexpr, z, USE_ACC: gl.constexpr):
    """Issue the wgmma of an A operand with the tokens of block B and their rows of a B operand, added to z."""
    return warpgroup_mma(a, tile.slice(16 * B, 16), z, use_acc=USE_ACC, is_async=True)


@gluon.jit
def add_halves(x, y, upper, factors, z):
    """Return x + factors z in the upper halves, and y + factors z in the lower halves."""
    operands = [gl.where(upper, 1, 0), factors, z, x, y]
    return gl.inline_asm_elementwise(
        ADD_HALVES, "=&r,=&r,r,r,r,r,r", operands, (gl.float32, gl.float32), is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def replace(x, B: gl.constexpr, block):
    """Return the four blocks x with block B replaced."""
    if B == 0:
        x = (block, x[1], x[2], x[3])
    elif B == 1:
        x = (x[0], block, x[2], x[3])
    elif B == 2:
        x = (x[0], x[1], block, x[3])
    else:
        x = (x[0], x[1], x[2], block)
    return x


@gluon.jit
def upper_factors(G, G_before, B: gl.constexpr, M: gl.constexpr, BEFORE: gl.constexpr):
    """Return the factors of block B relative to the last token of block M; BEFORE: without the token's own decay."""
    return boundary_factors(G_before[B] if BEFORE else G[B], G[M])


@gluon.jit
def add_level_5(
    dq, dy, dk, G, G_before, P_s, A_s, q_s, e_s, k_s,
    ERASE_PREVIOUS: gl.constexpr, READ_BEFORE: gl.constexpr,
):  # fmt: skip
    """Add the pairs of tokens 32 to 63 with tokens 0 to 31 to dq, dy and dk."""
    dtype: gl.constexpr = q_s.dtype
    zeros = gl.zeros([64, 16], gl.float32, ACC_N16)
    f0 = boundary_factors(G[0], G[1])
    f1 = boundary_factors(G[1], G[1])
    k0 = scale_block(load_block(k_s, 0), f0, dtype)
    k1 = scale_block(load_block(k_s, 1), f1, dtype)
    z2 = multiply_block(k1, P_s[5], 1, multiply_block(k0, P_s[5], 0, zeros, False), True)
    z3 = multiply_block(k1, P_s[6], 1, multiply_block(k0, P_s[6], 0, zeros, False), True)
    y2 = multiply_block(k1, A_s[5], 1, multiply_block(k0, A_s[5], 0, zeros, False), True)
    y3 = multiply_block(k1, A_s[6], 1, multiply_block(k0, A_s[6], 0, zeros, False), True)
    f2 = upper_factors(G, G_before, 2, 1, READ_BEFORE)
    f3 = upper_factors(G, G_before, 3, 1, READ_BEFORE)
    q2 = scale_block(load_block(q_s, 2), f2, dtype)
    q3 = scale_block(load_block(q_s, 3), f3, dtype)
    z0 = multiply_block(q3, P_s[5], 3, multiply_block(q2, P_s[5], 2, zeros, False), True)
    z1 = multiply_block(q3, P_s[6], 3, multiply_block(q2, P_s[6], 2, zeros, False), True)
    h2 = f2 if READ_BEFORE == ERASE_PREVIOUS else upper_factors(G, G_before, 2, 1, ERASE_PREVIOUS)
    h3 = f3 if READ_BEFORE == ERASE_PREVIOUS else upper_factors(G, G_before, 3, 1, ERASE_PREVIOUS)
    e2 = scale_block(load_block(e_s, 2), h2, dtype)
    e3 = scale_block(load_block(e_s, 3), h3, dtype)
    z0 = multiply_block(e3, A_s[5], 3, multiply_block(e2, A_s[5], 2, z0, True), True)
    z1 = multiply_block(e3, A_s[6], 3, multiply_block(e2, A_s[6], 2, z1, True), True)
    z0, z1, z2, z3, y2, y3, k0, k1, q2, q3, e2, e3 = warpgroup_mma_wait(
        0, deps=[z0, z1, z2, z3, y2, y3, k0, k1, q2, q3, e2, e3]
    )
    dy = (dy[0], dy[1], dy[2] + h2 * y2, dy[3] + h3 * y3)
    dq = (dq[0], dq[1], dq[2] + f2 * z2, dq[3] + f3 * z3)
    dk = (dk[0] + f0 * z0, dk[1] + f1 * z1, dk[2], dk[3])
    return dq, dy, dk


@gluon.jit
def add_level_4(
    dq, dy, dk, G, G_before, P_s, A_s, q_s, e_s, k_s, LOWER: gl.constexpr,
    ERASE_PREVIOUS: gl.constexpr, READ_BEFORE: gl.constexpr,
):  # fmt: skip
    """Add the pairs of tokens of block LOWER + 1 with those of block LOWER to dq, dy and dk."""
    dtype: gl.constexpr = q_s.dtype
    UPPER: gl.constexpr = LOWER + 1
    zeros = gl.zeros([64, 16], gl.float32, ACC_N16)
    f = boundary_factors(G[LOWER], G[LOWER])
    a_k = scale_block(load_block(k_s, LOWER), f, dtype)
    z_upper = multiply_block(a_k, P_s[4], LOWER, zeros, False)
    y_upper = multiply_block(a_k, A_s[4], LOWER, zeros, False)
    f_read = upper_factors(G, G_before, UPPER, LOWER, READ_BEFORE)
    a_q = scale_block(load_block(q_s, UPPER), f_read, dtype)
    z_lower = multiply_block(a_q, P_s[4], UPPER, zeros, False)
    f_erase = f_read if READ_BEFORE == ERASE_PREVIOUS else upper_factors(G, G_before, UPPER, LOWER, ERASE_PREVIOUS)
    a_e = scale_block(load_block(e_s, UPPER), f_erase, dtype)
    z_lower = multiply_block(a_e, A_s[4], UPPER, z_lower, True)
    z_upper, y_upper, z_lower, a_k, a_q, a_e = warpgroup_mma_wait(0, deps=[z_upper, y_upper, z_lower, a_k, a_q, a_e])
    dy = replace(dy, UPPER, dy[UPPER] + f_erase * y_upper)
    dq = replace(dq, UPPER, dq[UPPER] + f_read * z_upper)
    dk = replace(dk, LOWER, dk[LOWER] + f * z_lower)
    return dq, dy, dk


@gluon.jit
def issue_block(
    G, G_before, P_s, A_s, q_s, e_s, k_s, upper, B: gl.constexpr, LEVEL: gl.constexpr,
    ERASE_KEY: gl.constexpr, ERASE_PREVIOUS: gl.constexpr, READ_BEFORE: gl.constexpr,
):  # fmt: skip
    """Issue the products of the pairs of a level below 4 in block B.

    Returns: the products of P and A, pending; their factors; their A operands, which must stay until they are complete.
    """
    dtype: gl.constexpr = q_s.dtype
    zeros = gl.zeros([64, 16], gl.float32, ACC_N16)
    f_read = level_factors(G[B], G_before[B], LEVEL, READ_BEFORE)
    k = load_block(k_s, B)
    a_q = scale_block(select_pairs(upper, load_block(q_s, B), k, LEVEL), f_read, dtype)
    z = multiply_block(a_q, P_s[LEVEL], B, zeros, False)
    f_erase = f_read
    if READ_BEFORE != ERASE_PREVIOUS:
        f_erase = level_factors(G[B], G_before[B], LEVEL, ERASE_PREVIOUS)
    e = select_pairs(upper, load_block(e_s, B), k, LEVEL) if ERASE_KEY else k
    a_e = scale_block(e, f_erase, dtype)
    y = multiply_block(a_e, A_s[LEVEL], B, zeros, False)
    return z, y, f_read, f_erase, a_q, a_e


@gluon.jit
def add_level(
    dq, dy, dk, G, G_before, P_s, A_s, q_s, e_s, k_s, FIRST: gl.constexpr, LEVEL: gl.constexpr,
    ERASE_KEY: gl.constexpr, ERASE_PREVIOUS: gl.constexpr, READ_BEFORE: gl.constexpr,
):  # fmt: skip
    """Add the pairs of a level below 4 in blocks FIRST and FIRST + 1 to dq, dy and dk."""
    SECOND: gl.constexpr = FIRST + 1
    upper = (((gl.arange(0, 16, N16_COLUMNS) >> LEVEL) & 1) != 0)[None, :] & (gl.arange(0, 64, N16_ROWS) >= 0)[:, None]
    z0, y0, f0, h0, q0, e0 = issue_block(
        G, G_before, P_s, A_s, q_s, e_s, k_s, upper, FIRST, LEVEL, ERASE_KEY, ERASE_PREVIOUS, READ_BEFORE
    )  # fmt: skip
    z1, y1, f1, h1, q1, e1 = issue_block(
        G, G_before, P_s, A_s, q_s, e_s, k_s, upper, SECOND, LEVEL, ERASE_KEY, ERASE_PREVIOUS, READ_BEFORE
    )  # fmt: skip
    z0, y0, z1, y1, q0, e0, q1, e1 = warpgroup_mma_wait(0, deps=[z0, y0, z1, y1, q0, e0, q1, e1])
    dq0, dk0 = add_halves(dq[FIRST], dk[FIRST], upper, f0, z0)
    dq1, dk1 = add_halves(dq[SECOND], dk[SECOND], upper, f1, z1)
    dy0, dk0 = add_halves(dy[FIRST], dk0, upper, h0, y0)
    dy1, dk1 = add_halves(dy[SECOND], dk1, upper, h1, y1)
    dy = replace(replace(dy, FIRST, dy0), SECOND, dy1)
    dq = replace(replace(dq, FIRST, dq0), SECOND, dq1)
    dk = replace(replace(dk, FIRST, dk0), SECOND, dk1)
    return dq, dy, dk


@gluon.jit
def last_token(x):
    """Return the last column of x [64, 16]."""
    j = gl.arange(0, 16, N16_COLUMNS)[None, :]
    return gl.sum(gl.where(j == 15, x, 0.0), 1)


@gluon.jit
def scale_read(x, G, scale):
    """Return the blocks x 2^G scale."""
    return (
        x[0] * (exp2_ftz(G[0]) * scale), x[1] * (exp2_ftz(G[1]) * scale), x[2] * (exp2_ftz(G[2]) * scale),
        x[3] * (exp2_ftz(G[3]) * scale),
    )  # fmt: skip


@gluon.jit
def scale_write(x, G):
    """Return the blocks x 2^(Gend - G)."""
    return (
        x[0] * boundary_factors(G[0], G[3]), x[1] * boundary_factors(G[1], G[3]), x[2] * boundary_factors(G[2], G[3]),
        x[3] * boundary_factors(G[3], G[3]),
    )  # fmt: skip
