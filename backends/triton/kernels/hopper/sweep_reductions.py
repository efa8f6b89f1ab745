"""Layouts of products of the two warp groups of walk_hopper.py, their sums over halves, and how these go to memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltazoo.backends.triton.kernels.hopper.common import widen

# products: of dS^T [values, keys], and [values, tokens], a warp has 16 values; of [tokens, keys], and [tokens, tokens],
# a warp group has half of the columns, and a warp 16 tokens
STATE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 128, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 64, 16]))
KEYS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 64, 16]))
PAIRS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, VALUES.value, 2))
LEFT_STATE = gl.constexpr(gl.DotOperandLayout(0, STATE.value, 2))
STATE_COLUMNS = gl.constexpr(gl.SliceLayout(0, STATE.value))
TOKENS = gl.constexpr(gl.SliceLayout(0, VALUES.value))  # columns of [values, tokens]
ROWS = gl.constexpr(gl.SliceLayout(1, KEYS.value))
PAIR_ROWS = gl.constexpr(gl.SliceLayout(1, PAIRS.value))
PAIR_COLUMNS = gl.constexpr(gl.SliceLayout(0, PAIRS.value))
# the same tiles as [tokens, halves, columns of a half], whose sums over the last a warp has for itself
OF_KEYS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0], [0, 1, 0]], [], [64, 2, 64],
    )
)  # fmt: skip
OF_PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0], [0, 1, 0]], [], [64, 2, 32],
    )
)  # fmt: skip
PIECE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 16, 16]))
LEFT_PIECE = gl.constexpr(gl.DotOperandLayout(0, PIECE.value, 2))
OF_COPY = gl.constexpr(gl.BlockedLayout([1, 1, 8], [4, 1, 8], [4, 2, 1], [2, 1, 0]))
# of dv^T [values, tokens] once its blocks of 8 x 8 are transposed: as hopper.OUT
ACROSS_OUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 8], [0, 16], [0, 32]], [[8, 0], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [64, 0]], [], [128, 64],
    )
)  # fmt: skip
# what the copying warp group leaves of a chunk, for the others would spill it: its first row of v, its first row of k
# (or of partial), its place, its tokens with all that follow, the chunks still to come, and whether it is walked first
ROW_OF_VALUES = gl.constexpr(0)
ROW_OF_KEYS = gl.constexpr(1)
PLACE = gl.constexpr(2)
LEFT_TOKENS = gl.constexpr(3)
TO_COME = gl.constexpr(4)
IS_FIRST = gl.constexpr(5)
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
SUMS = gl.constexpr(gl.BlockedLayout([2, 8], [1, 32], [1, 8], [1, 0]))
SHARED_SUMS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def number(numbers_s, WHICH: gl.constexpr):
    """One of a chunk's numbers, as the copying warp group left them."""
    return gl.sum(numbers_s.slice(WHICH, 1).load(ONE), 0)


@gluon.jit
def left_by(G_s, layout: gl.constexpr):
    """What is left of each token at the chunk's end: e^(Gend - G) [64]."""
    return gl.exp2(G_s.slice(63, 1).load(layout) - G_s.load(layout))


@gluon.jit
def of_halves(x, layout: gl.constexpr):
    """Sums over each half of the columns of a tile [64 tokens, columns]: [64, 2]."""
    halves = gl.reshape(x, [64, 2, x.shape[1] // 2])
    return gl.sum(gl.convert_layout(halves, layout, assert_trivial=True), 2)


@gluon.jit
def put_halves(base, apart, x, layout: gl.constexpr):
    """Write sums [64, 2] of halves, those of the second `apart` from those of the first."""
    t = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None]
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :]
    gl.store(base + half * apart + t, x)


@gluon.jit
def put_diagonal(base, tile):
    """Write the diagonal of a tile [64 tokens, 64 tokens] of a product."""
    i = gl.arange(0, 64, PAIR_ROWS)[:, None]
    j = gl.arange(0, 64, PAIR_COLUMNS)[None, :]
    halves = of_halves(gl.where(i == j, tile, 0.0), OF_PAIRS)
    t = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, OF_PAIRS)))[:, None]
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, OF_PAIRS)))[None, :]
    gl.store(base + half * 0 + t, halves, mask=t // 32 == half)  # half: pointers as many as values


@gluon.jit
def put_writes(base, apart, v, du, left, HV: gl.constexpr, V: gl.constexpr):
    """Write v . du of each token, of each half of the values, as of each half of the keys."""
    i = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, OF_COPY)))
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, OF_COPY)))
    vs = half[None, :, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, OF_COPY)))[None, None, :]
    v_tile = gl.load(v + (i[:, None, None] * (HV * V) + vs), mask=(i < left)[:, None, None] & (vs < V), other=0.0)
    du_tile = du.reshape([64, 2, 64]).load(OF_COPY)
    sums = gl.sum(v_tile.to(gl.float32) * du_tile.to(gl.float32), 2)
    gl.store(base + half[None, :] * apart + i[:, None], sums)


@gluon.jit
def put_across(base, tile, zero, stride: gl.constexpr, rows, columns, MASK_COLUMNS: gl.constexpr):
    """Write a narrow tile [128 columns, 64 rows] of a product transposed, up to `rows` and `columns`."""
    # each block of 8 x 8 transposed: of the tile's element [8 a + r, 8 b + c] there is what was [8 a + c, 8 b + r]
    across = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [tile], tile.dtype, is_pure=True, pack=2
    )
    out = gl.convert_layout(across, ACROSS_OUT)
    x = gl.arange(0, 128, gl.SliceLayout(1, ACROSS_OUT))[:, None]
    y = gl.arange(0, 64, gl.SliceLayout(0, ACROSS_OUT))[None, :]
    column = x // 8 * 8 + y % 8
    at = base + (x % 8 * stride + column + zero * 64)
    at = at + y // 8 * (8 * stride)
    inside = x % 8 < rows - y // 8 * 8
    if MASK_COLUMNS:
        inside = inside & (column < columns)
    gl.store(at, out, mask=inside)


def _of_rows_asm(dtype):
    """Of each warp's 16 rows of x and of y, 16 numbers each, the products of every row of x with every row of y."""
    product = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
    x = "{$8, $9, $10, $11}"
    first = f"{product} {{$0, $1, $2, $3}}, {x}, {{$12, $14}}, {{$16, $17, $18, $19}};"
    return first + f"\n{product} {{$4, $5, $6, $7}}, {x}, {{$13, $15}}, {{$20, $21, $22, $23}};"


OF_ROWS_BF16 = gl.constexpr(_of_rows_asm("bf16"))
OF_ROWS_FP16 = gl.constexpr(_of_rows_asm("f16"))
OF_ROWS_OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 16))


@gluon.jit
def keep_faded(G_s, S_s, dS_s, sums_s):
    """e^Gend <dS', S>, as the sums of each warp: on the diagonal of its rows of dS' times its rows of S.

    With `keep_stored` this is <dS', S'>, but not by S' as it was rounded for the next chunk: what a token wrote is in
    its turn, too, and has to cancel there."""
    kept = gl.zeros([128, 16], gl.float32, LEFT_PIECE)
    of_rows: gl.constexpr = OF_ROWS_BF16 if S_s.dtype == gl.bfloat16 else OF_ROWS_FP16
    for piece in gl.static_range(8):
        S_p = S_s.slice(piece * 16, 16, dim=1).load(LEFT_PIECE)
        dS_p = dS_s.slice(piece * 16, 16, dim=1).load(LEFT_PIECE)
        kept = gl.inline_asm_elementwise(
            of_rows, OF_ROWS_OPERANDS, [dS_p, S_p, kept], gl.float32, is_pure=True, pack=8
        )  # fmt: skip
    kept = gl.convert_layout(kept, PIECE, assert_trivial=True)
    i = gl.arange(0, 128, gl.SliceLayout(1, PIECE))[:, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, PIECE))[None, :]
    rows = gl.sum(gl.where(i % 16 == j, kept, 0.0), 1) * gl.exp2(G_s.slice(63, 1).load(gl.SliceLayout(1, PIECE)))
    sums_s.slice(0, 4, dim=1).store(gl.sum(gl.reshape(rows, [2, 4, 16]), 2))


@gluon.jit
def keep_stored(dk_stored, k_s, sums_s):
    """<dS', (e^(Gend - G) k)^T x>, as the sums of each warp."""
    stored = of_halves(widen(k_s.load(KEYS)) * dk_stored, OF_KEYS)
    sums_s.slice(4, 4, dim=1).store(gl.permute(gl.sum(gl.reshape(stored, [4, 16, 2]), 1), (1, 0)))


@gluon.jit
def put_kept(at_kept, apart, sums_s, wanted):
    """Write the sums of each half of the warps."""
    half = gl.arange(0, 2, gl.SliceLayout(1, SUMS))
    gl.store(at_kept + half * apart, gl.sum(sums_s.load(SUMS), 1), mask=(half < 2) & wanted)
