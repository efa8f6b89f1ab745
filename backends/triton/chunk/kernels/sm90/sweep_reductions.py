"""Accumulator layouts, reductions and stores of the consumers of the backward sweep."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltazoo.backends.triton.chunk.kernels.sm90.common import to_float32

# Accumulators of the two consumer warp groups together, 8 warps: V [128 values], K [128 keys], T [64 tokens]. In ACC_VK
# and ACC_VT each warp has 16 values; in ACC_TK and ACC_TT each warp group has half of the columns and each warp 16
# tokens. A_*: the same shape as A operand in registers.
ACC_VK = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 128, 16]))
ACC_VT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 64, 16]))
ACC_TK = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 64, 16]))
ACC_TT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16]))
A_VT = gl.constexpr(gl.DotOperandLayout(0, ACC_VT.value, 2))
A_VK = gl.constexpr(gl.DotOperandLayout(0, ACC_VK.value, 2))
ACC_VK_COLUMNS = gl.constexpr(gl.SliceLayout(0, ACC_VK.value))
ACC_VT_COLUMNS = gl.constexpr(gl.SliceLayout(0, ACC_VT.value))
ACC_TK_ROWS = gl.constexpr(gl.SliceLayout(1, ACC_TK.value))
ACC_TT_ROWS = gl.constexpr(gl.SliceLayout(1, ACC_TT.value))
ACC_TT_COLUMNS = gl.constexpr(gl.SliceLayout(0, ACC_TT.value))
# ACC_TK and ACC_TT as [tokens, halves, columns of a half]: sums over the last axis stay within a warp
ACC_TK_HALVES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0], [0, 1, 0]], [], [64, 2, 64],
    )
)  # fmt: skip
ACC_TT_HALVES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0], [0, 1, 0]], [], [64, 2, 32],
    )
)  # fmt: skip
ACC_N16 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 16, 16]))
A_N16 = gl.constexpr(gl.DotOperandLayout(0, ACC_N16.value, 2))
# the sums of both halves of the columns, each thread those of its rows of ACC_TK
BOTH_HALVES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [0, 0]], [], [64, 2]
    )
)
LOAD_HALVES = gl.constexpr(gl.BlockedLayout([1, 1, 8], [4, 1, 8], [4, 2, 1], [2, 1, 0]))
# global stores of dv^T [values, tokens] after its blocks of 8 x 8 were transposed, as common.STORE_64_COLUMNS
STORE_TRANSPOSED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 8], [0, 16], [0, 32]], [[8, 0], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [64, 0]], [], [128, 64],
    )
)  # fmt: skip
# Fields of chunk_info, which the producer stores in shared memory because the consumers would spill them: the chunk's
# first row of v, its first row of k (or of partial), its row of gates, the number of tokens from its first to the end
# of the sequence, the number of chunks that remain after it, and whether it is the first chunk processed.
V_ROW = gl.constexpr(0)
K_ROW = gl.constexpr(1)
GATE_ROW = gl.constexpr(2)
TOKENS_LEFT = gl.constexpr(3)
CHUNKS_LEFT = gl.constexpr(4)
IS_FIRST = gl.constexpr(5)
ONE_PER_THREAD_8_WARPS = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
SUMS = gl.constexpr(gl.BlockedLayout([2, 8], [1, 32], [1, 8], [1, 0]))
SMEM_SUMS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def read_chunk_info(chunk_info_s, FIELD: gl.constexpr):
    """Return one field of the chunk_info that the producer stored for a chunk."""
    return gl.sum(chunk_info_s.slice(FIELD, 1).load(ONE_PER_THREAD_8_WARPS), 0)


@gluon.jit
def decay_to_chunk_end(G_s, layout: gl.constexpr):
    """Return the decay of each token up to the end of the chunk: 2^(Gend - G) [64]."""
    return gl.exp2(G_s.slice(63, 1).load(layout) - G_s.load(layout))


@gluon.jit
def sum_halves(x, layout: gl.constexpr):
    """Sum each half of the columns of an accumulator [64 tokens, columns]: [64, 2]."""
    halves = gl.reshape(x, [64, 2, x.shape[1] // 2])
    return gl.sum(gl.convert_layout(halves, layout, assert_trivial=True), 2)


@gluon.jit
def store_half_sums(base, half_stride, x, layout: gl.constexpr):
    """Store sums [64, 2] of halves; those of the second half go half_stride elements after those of the first."""
    t = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None]
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :]
    gl.store(base + half * half_stride + t, x)


@gluon.jit
def sum_diagonal(tile):
    """Return the diagonal of an accumulator [64 tokens, 64 tokens] as its sums over halves [64, 2], zero but in one."""
    i = gl.arange(0, 64, ACC_TT_ROWS)[:, None]
    j = gl.arange(0, 64, ACC_TT_COLUMNS)[None, :]
    return sum_halves(gl.where(i == j, tile, 0.0), ACC_TT_HALVES)


@gluon.jit
def store_diagonal(base, halves):
    """Store the diagonal that sum_diagonal returned."""
    t = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, ACC_TT_HALVES)))[:, None]
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, ACC_TT_HALVES)))[None, :]
    gl.store(base + half * 0 + t, halves, mask=t // 32 == half)  # half * 0 broadcasts the pointers


@gluon.jit
def load_step_gradient(steps_s):
    """Return the sums of both halves [2, 64] in shared memory, for the rows of ACC_TK."""
    steps = steps_s.permute((1, 0)).load(BOTH_HALVES).to(gl.float32)
    return gl.convert_layout(gl.sum(steps, 1), ACC_TK_ROWS, assert_trivial=True)


@gluon.jit
def load_slopes(slopes, gate_row):
    """Load row 0 of a chunk's slopes (../step_size.py) for the rows of sum_diagonal."""
    return gl.load(slopes + gate_row * 128 + gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, ACC_TT_HALVES))))


@gluon.jit
def store_write_gradient(base, half_stride, v, du, tokens_left, HV: gl.constexpr, V: gl.constexpr):
    """Store v . du of each token for each half of the values; the halves are stored where two K tiles store sums."""
    i = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, LOAD_HALVES)))
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, LOAD_HALVES)))
    vs = half[None, :, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, LOAD_HALVES)))[None, None, :]
    v_tile = gl.load(
        v + (i[:, None, None] * (HV * V) + vs), mask=(i < tokens_left)[:, None, None] & (vs < V), other=0.0
    )
    du_tile = du.reshape([64, 2, 64]).load(LOAD_HALVES)
    sums = gl.sum(v_tile.to(gl.float32) * du_tile.to(gl.float32), 2)
    gl.store(base + half[None, :] * half_stride + i[:, None], sums)


@gluon.jit
def store_transposed(base, tile, zero, stride: gl.constexpr, rows, columns, MASK_COLUMNS: gl.constexpr):
    """Store a 16-bit accumulator [128 columns, 64 rows] transposed, up to `rows` and `columns`."""
    # transposes each block of 8 x 8: element [8 a + r, 8 b + c] receives [8 a + c, 8 b + r]
    transposed = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [tile], tile.dtype, is_pure=True, pack=2
    )
    out = gl.convert_layout(transposed, STORE_TRANSPOSED)
    x = gl.arange(0, 128, gl.SliceLayout(1, STORE_TRANSPOSED))[:, None]
    y = gl.arange(0, 64, gl.SliceLayout(0, STORE_TRANSPOSED))[None, :]
    column = x // 8 * 8 + y % 8
    at = base + (x % 8 * stride + column + zero * 64)
    at = at + y // 8 * (8 * stride)
    inside = x % 8 < rows - y // 8 * 8
    if MASK_COLUMNS:
        inside = inside & (column < columns)
    gl.store(at, out, mask=inside)


def _row_dots_asm(dtype):
    """For 16 rows of x and of y per warp, 16 columns each: the dot products of every row of x with every row of y."""
    product = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
    x = "{$8, $9, $10, $11}"
    first = f"{product} {{$0, $1, $2, $3}}, {x}, {{$12, $14}}, {{$16, $17, $18, $19}};"
    return first + f"\n{product} {{$4, $5, $6, $7}}, {x}, {{$13, $15}}, {{$20, $21, $22, $23}};"


ROW_DOTS_BF16 = gl.constexpr(_row_dots_asm("bf16"))
ROW_DOTS_FP16 = gl.constexpr(_row_dots_asm("f16"))
ROW_DOTS_OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 16))


@gluon.jit
def reduce_state_dot(G_s, S_s, dS_s, sums_s):
    """Leave 2^Gend <dS', S> in sums_s, one partial sum per warp.

    The dot products of rows are the diagonal of (16 rows of dS') (16 rows of S)^T, which takes a sixth of the
    instructions of loads and multiplications. With reduce_write_dot the sum is <dS', S'>. It is not computed from S' as
    rounded for the next chunk: the contributions of the tokens' writes also appear in k . dk and must cancel there with
    the same rounding.
    """
    dots = gl.zeros([128, 16], gl.float32, A_N16)
    row_dots: gl.constexpr = ROW_DOTS_BF16 if S_s.dtype == gl.bfloat16 else ROW_DOTS_FP16
    for block in gl.static_range(8):
        S_block = S_s.slice(block * 16, 16, dim=1).load(A_N16)
        dS_block = dS_s.slice(block * 16, 16, dim=1).load(A_N16)
        dots = gl.inline_asm_elementwise(
            row_dots, ROW_DOTS_OPERANDS, [dS_block, S_block, dots], gl.float32, is_pure=True, pack=8
        )  # fmt: skip
    dots = gl.convert_layout(dots, ACC_N16, assert_trivial=True)
    i = gl.arange(0, 128, gl.SliceLayout(1, ACC_N16))[:, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, ACC_N16))[None, :]
    row_sums = gl.sum(gl.where(i % 16 == j, dots, 0.0), 1) * gl.exp2(G_s.slice(63, 1).load(gl.SliceLayout(1, ACC_N16)))
    sums_s.slice(0, 4, dim=1).store(gl.sum(gl.reshape(row_sums, [2, 4, 16]), 2))


@gluon.jit
def reduce_write_dot(dk_state, k_s, sums_s):
    """Leave <dS', (2^(Gend - G) k)^T x> in sums_s, one partial sum per warp."""
    dots = sum_halves(to_float32(k_s.load(ACC_TK)) * dk_state, ACC_TK_HALVES)
    sums_s.slice(4, 4, dim=1).store(gl.permute(gl.sum(gl.reshape(dots, [4, 16, 2]), 1), (1, 0)))


@gluon.jit
def store_state_products(at, half_stride, sums_s, pred):
    """Store the sum of sums_s for each of the two warp groups, if pred."""
    half = gl.arange(0, 2, gl.SliceLayout(1, SUMS))
    gl.store(at + half * half_stride, gl.sum(sums_s.load(SUMS), 1), mask=(half < 2) & pred)
