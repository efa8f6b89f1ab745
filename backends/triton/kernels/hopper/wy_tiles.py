"""The WY tiles T and P^T on sm_90: the inverse of a unit lower-triangular matrix, and the store of both.

T = (I - L)^-1 with L = -A is computed by blocks of 16 x 16; warp w has row block w. In registers (ptx.py), each warp
computes X_w, the inverse of its diagonal block of I - L, and N_w = X_w L_w for the blocks left of the diagonal. Two
levels then combine blocks of different warps through shared memory, with wgmma on column blocks [64, 16]; the last
column names the variables:

    T_10 = N_10 X_0,   T_32 = N_32 X_2                                             u
    Z_2 = N_2,   Z_3 = N_3 + N_32 N_2,   T_(2:4, 0:2) = Z_(2:4, 0:2) T_(0:2, 0:2)    z0, z1 and T0, T1

These are the level doublings of ../prepare.py, block by block. With two terms one Newton step with a float32 residual
refines T, which is then split into two float16 terms.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.kernels.hopper.common import (
    ACC,
    ACC_COLUMNS,
    ACC_N16,
    ACC_ROWS,
    SMEM_TILE,
    barrier,
    low_term,
    to_16_bits,
)
from deltazoo.backends.triton.kernels.hopper.ptx import (
    invert_diagonal_blocks,
    multiply_warp_blocks,
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
    """Allocate X and R [64, 64] of `refine_inverse`."""
    gl.static_assert(T_dtype == gl.float16)
    X_s = gl.allocate_shared_memory(gl.float16, [64, 64], SMEM_TILE)
    R_s = gl.allocate_shared_memory(gl.float16, [64, 64], SMEM_TILE)
    return X_s, R_s


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
def join_column_blocks(tile, x, u, T0, T1):
    """Store the blocks of T, whose variables the first lines of this file name, in a tile [64, 64]."""
    row = gl.arange(0, 64, gl.SliceLayout(1, ACC_N16))[:, None] // 16
    zeros = gl.zeros([64, 16], gl.float16, ACC_N16)
    tile.slice(0, 16, dim=1).store(gl.where(row == 0, x, gl.where(row == 1, u, T0)))
    tile.slice(16, 16, dim=1).store(gl.where(row == 1, x, gl.where(row > 1, T1, zeros)))
    tile.slice(32, 16, dim=1).store(gl.where(row == 2, x, gl.where(row > 2, u, zeros)))
    tile.slice(48, 16, dim=1).store(gl.where(row == 3, x, zeros))


@gluon.jit
def refine_inverse(L, X_s, R_s):
    """Return T = X + X R [64, 64] with R = I - X + L X, from an approximation X of (I - L)^-1 in X_s.

    One Newton step. L is split into two float16 terms, so R is accurate to about 2^-22 |L| |X|, and the error of T is
    about the square of that of X.
    """
    i = gl.arange(0, 64, ACC_ROWS)[:, None]
    j = gl.arange(0, 64, ACC_COLUMNS)[None, :]
    L = gl.where(i > j, L, 0.0)  # may be inf or NaN above
    L_high = to_16_bits(L, gl.float16)
    a_high = gl.convert_layout(L_high, A_OPERAND_64, assert_trivial=True)
    a_low = gl.convert_layout(low_term(L, L_high), A_OPERAND_64, assert_trivial=True)
    fence_async_shared()
    barrier()
    R = gl.zeros([64, 64], gl.float32, ACC)
    R = warpgroup_mma(a_high, X_s, R, use_acc=False, is_async=True)
    R = warpgroup_mma(a_low, X_s, R, is_async=True)
    X = X_s.load(ACC).to(gl.float32)
    R, a_high, a_low = warpgroup_mma_wait(0, deps=[R, a_high, a_low])
    R_s.store(to_16_bits(gl.where(i == j, 1.0, 0.0) - X + R, gl.float16))
    fence_async_shared()
    barrier()
    T = warpgroup_mma(X_s, R_s, X, is_async=True)
    return warpgroup_mma_wait(0, deps=[T])


@gluon.jit
def store_inverse_term(at, tile_s, T):
    """Store one term of T [64, 64] on and below the diagonal of a tile [64, 72] (../wy_tiles.py), through tile_s."""
    tile_s.store(T)
    r, m, column = block_indices()
    values = tile_s.reshape([64, 8, 8]).load(STORE_BLOCKS)
    gl.store(at + (r * 72 + gl.where(m == r // 8, 8, m) * 8 + column), values, mask=m <= r // 8)


@gluon.jit
def invert_and_store(
    l0, l1, l2, l3, P_s, wy_tiles, chunk, buffers, refinement=None, TERMS: gl.constexpr = 1,
):  # fmt: skip
    """Store P^T [64, 64], which is in shared memory, and T = (I - L)^-1 to the tile [64, 72] of a chunk.

    l0 to l3: column blocks [64, 16] of L in float16; only its blocks on and left of the diagonal are read. refinement:
    with TERMS = 2 L [64, 64], the second term of P^T in shared memory, and the buffers of
    `allocate_refinement_buffers`.
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
        L, P_low_s, refinement_buffers = refinement
        inverse_s, residual_s = refinement_buffers
        gl.store(P_at + 64 * 72, P_low_s.reshape([64, 8, 8]).load(STORE_BLOCKS), mask=in_P)
        T0, T1, z0, z1 = warpgroup_mma_wait(0, deps=[T0, T1, z0, z1])
        join_column_blocks(
            inverse_s, x, to_16_bits(u, gl.float16), to_16_bits(T0, gl.float16), to_16_bits(T1, gl.float16)
        )
        T = refine_inverse(L, inverse_s, residual_s)
        T_high = to_16_bits(T, gl.float16)
        store_inverse_term(wy_at, residual_s, T_high)
        store_inverse_term(wy_at + 64 * 72, inverse_s, low_term(T, T_high))
    else:
        gl.store(X_at, X_values, mask=second >= m)
        index = r * 72 + m * 8 + column
        gl.store(wy_at + index + (r // 16 * 16 - 16), load_n16(U_s).to(T_dtype), mask=(r // 16) % 2 == 1)
        T0, T1, z0, z1 = warpgroup_mma_wait(0, deps=[T0, T1, z0, z1])
        T0_s.store(to_16_bits(T0, T_dtype))
        T1_s.store(to_16_bits(T1, T_dtype))
        gl.store(wy_at + index, load_n16(T0_s), mask=r >= 32)
        gl.store(wy_at + index + 16, load_n16(T1_s), mask=r >= 32)
