"""The WY tiles T and P^T on sm_90: the inverse of a unit lower-triangular matrix, and the store of both.

T = (I - L)^-1 with L = -A is computed by blocks of 16 x 16; warp w has row block w. In registers (ptx.py), each warp
computes X_w, the inverse of its diagonal block of I - L, and N_w = X_w L_w for the blocks left of the diagonal. Two
levels then combine blocks of different warps through shared memory, with wgmma on column blocks [64, 16]; the last
column names the variables:

    T_10 = N_10 X_0,   T_32 = N_32 X_2                                             u
    Z_2 = N_2,   Z_3 = N_3 + N_32 N_2,   T_(2:4, 0:2) = Z_(2:4, 0:2) T_(0:2, 0:2)    z0, z1 and T0, T1

These are the level doublings of portable/prepare.py, block by block. With two terms one Newton step with a float32
residual computes a correction of T, which is its second float16 term.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.chunk.kernels.sm90.common import (
    ACC,
    ACC_N16,
    allocate_tiles,
    barrier,
    to_16_bits,
)
from deltazoo.backends.triton.chunk.kernels.sm90.ptx import (
    invert_diagonal_blocks,
    join_blocks,
    multiply_warp_blocks,
    round_causal,
    zero_except_warp_1,
    zero_except_warp_3,
)

A_OPERAND = gl.constexpr(gl.DotOperandLayout(0, ACC_N16.value, 2))
A_OPERAND_64 = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
SMEM_N16 = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2))
# global stores, 16 bytes per thread, each warp the 16 rows it has in an accumulator: [64 rows, 8 or 2 blocks, 8
# columns]
STORE_BLOCKS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [4, 0, 0], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0]], [[16, 0, 0], [32, 0, 0]], [], [64, 8, 8],
    )
)  # fmt: skip
STORE_BLOCKS_N16 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4]], [[0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0], [8, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 2, 8],
    )
)  # fmt: skip


@gluon.jit
def split_column_blocks(x):
    """Split an accumulator [64, 64] into its four column blocks [64, 16], without data movement."""
    pairs = gl.permute(gl.reshape(x, [64, 2, 2, 16]), [0, 3, 2, 1])
    low, high = gl.split(pairs)
    x0, x1 = gl.split(low)
    x2, x3 = gl.split(high)
    return (
        gl.convert_layout(x0, ACC_N16, assert_trivial=True), gl.convert_layout(x1, ACC_N16, assert_trivial=True),
        gl.convert_layout(x2, ACC_N16, assert_trivial=True), gl.convert_layout(x3, ACC_N16, assert_trivial=True),
    )  # fmt: skip


@gluon.jit
def to_a_operand(x):
    return gl.convert_layout(x, A_OPERAND, assert_trivial=True)


@gluon.jit
def load_n16(tile):
    """Load a tile [64, 16] in the layout of global stores."""
    return tile.reshape([64, 2, 8]).load(STORE_BLOCKS_N16)


@gluon.jit
def allocate_inverse_buffers(T_dtype: gl.constexpr):
    """Allocate X, U, N0, N1, T0 and T1 [64, 16] of `invert_and_store`."""
    X_s = gl.allocate_shared_memory(gl.float16, [64, 16], SMEM_N16)
    U_s = gl.allocate_shared_memory(gl.float16, [64, 16], SMEM_N16)
    N0_s = gl.allocate_shared_memory(gl.float16, [64, 16], SMEM_N16)
    N1_s = gl.allocate_shared_memory(gl.float16, [64, 16], SMEM_N16)
    T0_s = gl.allocate_shared_memory(T_dtype, [64, 16], SMEM_N16)
    T1_s = gl.allocate_shared_memory(T_dtype, [64, 16], SMEM_N16)
    return X_s, U_s, N0_s, N1_s, T0_s, T1_s


@gluon.jit
def allocate_refinement_buffers(T_dtype: gl.constexpr):
    """Allocate the two terms of L - I [64, 64]."""
    gl.static_assert(T_dtype == gl.float16)
    return allocate_tiles(gl.float16, 2)


@gluon.jit
def block_indices():
    """Return row, block and column within the block of a tile [64, 8, 8] in the layout of global stores."""
    r = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, STORE_BLOCKS)))[:, None, None]
    m = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, STORE_BLOCKS)))[None, :, None]
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, STORE_BLOCKS)))[None, None, :]
    return r, m, column


@gluon.jit
def store_p_alone(P_s, wy_at):
    """Store P^T [64, 64], and T = 0."""
    dtype: gl.constexpr = P_s.dtype
    r, m, column = block_indices()
    P = P_s.reshape([64, 8, 8]).load(STORE_BLOCKS)
    at = wy_at.to(gl.pointer_type(dtype), bitcast=True) + (r * 72 + m * 8 + column)
    gl.store(at, gl.where(m >= r // 8, P, gl.zeros([64, 8, 8], dtype, STORE_BLOCKS)))
    r = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, STORE_BLOCKS_N16)))[:, None, None]
    m = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, STORE_BLOCKS_N16)))[None, :, None]
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, STORE_BLOCKS_N16)))[None, None, :]
    zeros = gl.zeros([64, 2, 8], wy_at.dtype.element_ty, STORE_BLOCKS_N16)
    gl.store(wy_at + (r * 72 + 64 + column + m * 0), zeros, mask=m == 0)


@gluon.jit
def join_column_blocks(x0, x1, x2, x3):
    """Join column blocks [64, 16] to an accumulator [64, 64], without data movement."""
    pairs = gl.join(gl.join(x0, x1), gl.join(x2, x3))
    return gl.convert_layout(gl.reshape(gl.permute(pairs, [0, 3, 2, 1]), [64, 64]), ACC, assert_trivial=True)


@gluon.jit
def store_inverse_term(at, tile_s):
    """Store one term of T [64, 64] on and below the diagonal of a tile [64, 72] (portable/wy_tiles.py), from tile_s."""
    r, m, column = block_indices()
    values = tile_s.reshape([64, 8, 8]).load(STORE_BLOCKS)
    gl.store(at + (r * 72 + gl.where(m == r // 8, 8, m) * 8 + column), values, mask=m <= r // 8)


@gluon.jit
def fill_sectors(at):
    """Store zeros beside the blocks of a term of T in a tile [64, 72], so that no 32 bytes are written in part.

    Rows have an odd number of blocks of 16 bytes: block m of row r shares 32 bytes with block m + 1 if r + m is even,
    otherwise with block m - 1. Only the second term has nothing else there. On the diagonal, block r // 8, a row has
    nothing (portable/wy_tiles.py), and in odd rows block 7 shares with the last.
    """
    r = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, STORE_BLOCKS_N16)))[:, None, None]
    n = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, STORE_BLOCKS_N16)))[None, :, None]
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, STORE_BLOCKS_N16)))[None, None, :]
    block = gl.where(n == 0, r // 8, 7)
    is_odd = gl.where(n == 0, r + block, r) % 2 == 1
    zeros = gl.zeros([64, 2, 8], at.dtype.element_ty, STORE_BLOCKS_N16)
    gl.store(at + (r * 72 + block * 8 + column), zeros, mask=is_odd)


@gluon.jit
def refine_inverse(X, L_high_s, L_low_s, at):
    """Store T = X + X R [64, 64] with R = I - X + L X, from an approximation X of (I - L)^-1, as the terms X and X R.

    One Newton step. L_high_s, L_low_s: two terms of L - I (ptx.split_operand) in shared memory, with which R is
    accurate to about 2^-22 |L| |X|, and the error of T is about the square of that of X. R is zero on the diagonal,
    since X and I - L have ones there.
    """
    # allocated here, where the memory of earlier buffers is free
    X_s, R_s, T_low_s = allocate_tiles(gl.float16, 3)
    X_s.store(X)
    fence_async_shared()
    barrier()
    R = gl.zeros([64, 64], gl.float32, ACC)
    R = warpgroup_mma(L_high_s, X_s, R, use_acc=False, is_async=True)
    R = warpgroup_mma(L_low_s, X_s, R, is_async=True)
    store_inverse_term(at, X_s)
    R = warpgroup_mma_wait(0, deps=[R])
    R_s.store(round_causal(R, gl.float16, True))
    a_X = gl.convert_layout(X, A_OPERAND_64, assert_trivial=True)
    fence_async_shared()
    barrier()
    T_low = gl.zeros([64, 64], gl.float32, ACC)
    T_low = warpgroup_mma(a_X, R_s, T_low, use_acc=False, is_async=True)
    fill_sectors(at + 64 * 72)
    T_low, a_X = warpgroup_mma_wait(0, deps=[T_low, a_X])
    T_low_s.store(to_16_bits(T_low, gl.float16))
    store_inverse_term(at + 64 * 72, T_low_s)


@gluon.jit
def invert_and_store(
    l0, l1, l2, l3, P_s, wy_tiles, chunk, buffers, refinement=None, TERMS: gl.constexpr = 1,
):  # fmt: skip
    """Store P^T [64, 64], which is in shared memory, and T = (I - L)^-1 to the tile [64, 72] of a chunk.

    l0 to l3: column blocks [64, 16] of L in float16; only its blocks on and left of the diagonal are read, and of the
    diagonal blocks what is below the diagonal. refinement: with TERMS = 2 the buffers of `allocate_refinement_buffers`,
    with the two terms of L - I (ptx.split_operand).
    """
    dtype: gl.constexpr = P_s.dtype
    T_dtype: gl.constexpr = wy_tiles.dtype.element_ty
    X_s, U_s, N0_s, N1_s, T0_s, T1_s = buffers
    x = invert_diagonal_blocks(l0, l1, l2, l3)
    X_s.store(x)
    z0, z1, n2 = multiply_warp_blocks(x, l0, l1, l2)
    n0 = to_16_bits(z0, gl.float16)
    n2 = to_16_bits(n2, gl.float16)
    N0_s.store(n0)
    N1_s.store(to_16_bits(z1, gl.float16))
    n0 = to_a_operand(zero_except_warp_1(n0))
    n2 = to_a_operand(zero_except_warp_3(n2))
    fence_async_shared()
    barrier()
    u = gl.zeros([64, 16], gl.float32, ACC_N16)
    u = warpgroup_mma(n0, X_s.slice(0, 16), u, is_async=True)
    u = warpgroup_mma(n2, X_s.slice(32, 16), u, is_async=True)
    z0 = warpgroup_mma(n2, N0_s.slice(32, 16), z0, is_async=True)
    z1 = warpgroup_mma(n2, N1_s.slice(32, 16), z1, is_async=True)
    wy_at = wy_tiles + chunk * (TERMS * 64 * 72)
    P_base = wy_at.to(gl.pointer_type(dtype), bitcast=True)
    r, m, column = block_indices()
    P_values = P_s.reshape([64, 8, 8]).load(STORE_BLOCKS)
    P_at = P_base + (r * 72 + m * 8 + column)
    in_P = m >= r // 8
    r = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, STORE_BLOCKS_N16)))[:, None, None]
    m = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, STORE_BLOCKS_N16)))[None, :, None]
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, STORE_BLOCKS_N16)))[None, None, :]
    second = (r // 8) % 2
    X_at = wy_at + (r * 72 + gl.where(second == m, 8, r // 16 * 2) * 8 + column)
    X_values = load_n16(X_s).to(T_dtype)
    u, z0, z1, n0, n2 = warpgroup_mma_wait(0, deps=[u, z0, z1, n0, n2])
    U_s.store(to_16_bits(u, gl.float16))
    z0 = to_a_operand(to_16_bits(z0, gl.float16))
    z1 = to_a_operand(to_16_bits(z1, gl.float16))
    fence_async_shared()
    barrier()
    T0 = gl.zeros([64, 16], gl.float32, ACC_N16)
    T1 = gl.zeros([64, 16], gl.float32, ACC_N16)
    T0 = warpgroup_mma(z0, X_s.slice(0, 16), T0, is_async=True)
    T0 = warpgroup_mma(z1, U_s.slice(16, 16), T0, is_async=True)
    T1 = warpgroup_mma(z1, X_s.slice(16, 16), T1, is_async=True)
    gl.store(P_at, P_values, mask=in_P)
    if TERMS == 2:
        T0, T1, z0, z1 = warpgroup_mma_wait(0, deps=[T0, T1, z0, z1])
        x0, x1, x2, x3 = join_blocks(
            x, to_16_bits(u, gl.float16), to_16_bits(T0, gl.float16), to_16_bits(T1, gl.float16)
        )
        refine_inverse(join_column_blocks(x0, x1, x2, x3), refinement[0], refinement[1], wy_at)
    else:
        gl.store(X_at, X_values, mask=second >= m)
        index = r * 72 + m * 8 + column
        gl.store(wy_at + index + (r // 16 * 16 - 16), load_n16(U_s).to(T_dtype), mask=(r // 16) % 2 == 1)
        T0, T1, z0, z1 = warpgroup_mma_wait(0, deps=[T0, T1, z0, z1])
        T0_s.store(to_16_bits(T0, T_dtype))
        T1_s.store(to_16_bits(T1, T_dtype))
        gl.store(wy_at + index, load_n16(T0_s), mask=r >= 32)
        gl.store(wy_at + index + 16, load_n16(T1_s), mask=r >= 32)
