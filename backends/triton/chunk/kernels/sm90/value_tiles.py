"""Copies and sums over value tiles that the gradient kernels share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from deltazoo.backends.triton.chunk.kernels.sm90.common import SMEM_TILE, allocate_tile, copy_pointers, copy_tile_async

LOAD_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def state_pointers(
    tv: gl.constexpr, states, dstates, dq, dk, row, scratch_row, column, HV: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, IN_GRADIENTS: gl.constexpr,
):  # fmt: skip
    """Return the pointers of S^T and dS'^T for 64 keys from `column` on.

    With IN_GRADIENTS they are those of value tile tv, 0 or 1, in the rows of gradients (channel_gradients.py), else
    those of tile 0 in scratch.

    row: the first token's row in a tensor [rows, K]. scratch_row: the chunk's in the scratch [rows, V, K].
    """
    if IN_GRADIENTS:
        S_at = copy_pointers(states + (row * (2 * K) + 2 * column), 2 * HV * K) + 64 * tv
        dS_at = copy_pointers((dq if tv == 0 else dk) + (row * K + column), HV * K)
    else:
        S_at = copy_pointers(states + scratch_row * V * K + column, K)
        dS_at = copy_pointers(dstates + scratch_row * V * K + column, K)
    return S_at, dS_at


@gluon.jit
def copy_value_tile(
    buffers, pointers, tv: gl.constexpr, tokens_left, column, K: gl.constexpr, V: gl.constexpr, DELTA: gl.constexpr,
    STATE_STEP: gl.constexpr,
):  # fmt: skip
    """Issue the copies of value tile tv of do, du and x [64, 64], and of S^T and dS'^T for 64 keys from `column` on.

    STATE_STEP: elements between the value tiles of S^T and of dS'^T.
    """
    do_s, du_s, x_s, S_s, dS_s = buffers
    do_at, du_at, x_at, S_at, dS_at = pointers
    MASK_V: gl.constexpr = V % 64 != 0
    MASK_K: gl.constexpr = K % 64 != 0
    stage: gl.constexpr = tv % len(do_s)
    copy_tile_async(do_s[stage], do_at, tv * 64, tokens_left, V - tv * 64, True, MASK_V)
    if DELTA:
        copy_tile_async(du_s[stage], du_at, tv * 64, tokens_left, V - tv * 64, True, MASK_V)
    copy_tile_async(x_s[stage], x_at, tv * 64, tokens_left, V - tv * 64, not DELTA, MASK_V)
    copy_tile_async(S_s[stage], S_at, tv * STATE_STEP, V - tv * 64, K - column, MASK_V, MASK_K)
    copy_tile_async(dS_s[stage], dS_at, tv * STATE_STEP, V - tv * 64, K - column, MASK_V, MASK_K)
    async_copy.commit_group()


@gluon.jit
def allocate_value_tail(dtype: gl.constexpr, DELTA: gl.constexpr):
    """Allocate do, du and x [64, 16], S^T and dS'^T [16, 64] of a last value tile of at most 16 values."""
    do_s = allocate_tile(dtype, 16)
    du_s = allocate_tile(dtype, 16) if DELTA else do_s
    x_s = allocate_tile(dtype, 16)
    S_s = gl.allocate_shared_memory(dtype, [16, 64], SMEM_TILE)
    dS_s = gl.allocate_shared_memory(dtype, [16, 64], SMEM_TILE)
    return do_s, du_s, x_s, S_s, dS_s


@gluon.jit
def copy_value_tail(
    buffers, rows, tokens_left, column, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, DELTA: gl.constexpr
):
    """Issue the copies of the last value tile, of at most 16 values, as part of the next group.

    rows: pointers to the first token's do, du and x, and to the 64 keys of S^T and dS'^T for the first value.
    """
    do_s, du_s, x_s, S_s, dS_s = buffers
    do, du, x, S, dS = rows
    FIRST: gl.constexpr = V // 64 * 64
    MASK_V: gl.constexpr = V % 16 != 0
    MASK_K: gl.constexpr = K % 64 != 0
    copy_tile_async(do_s, copy_pointers(do, HV * V, J=16), FIRST, tokens_left, V - FIRST, True, MASK_V)
    if DELTA:
        copy_tile_async(du_s, copy_pointers(du, HV * V, J=16), FIRST, tokens_left, V - FIRST, True, MASK_V)
    copy_tile_async(x_s, copy_pointers(x, HV * V, J=16), FIRST, tokens_left, V - FIRST, not DELTA, MASK_V)
    copy_tile_async(S_s, copy_pointers(S, K, R=16), FIRST * K, V - FIRST, K - column, MASK_V, MASK_K)
    copy_tile_async(dS_s, copy_pointers(dS, K, R=16), FIRST * K, V - FIRST, K - column, MASK_V, MASK_K)


@gluon.jit
def store_write_sums(
    dgates, v, value, du, local_value, tile, tokens_left, HV: gl.constexpr, V: gl.constexpr, NK: gl.constexpr
):  # fmt: skip
    """Store v . du of each token to row 2 of dgates; each tile of keys sums a share of the tiles of values."""
    C: gl.constexpr = 64
    i = gl.arange(0, C, gl.SliceLayout(1, LOAD_LAYOUT))
    vs = gl.arange(0, 64, gl.SliceLayout(0, LOAD_LAYOUT))
    dwrite = gl.zeros([C], gl.float32, gl.SliceLayout(1, LOAD_LAYOUT))
    for tw in range(tile, (V + 63) // 64, NK):
        at_v = i[:, None] * (HV * V) + (tw * 64 + vs)[None, :]
        inside = (tw * 64 + vs < V)[None, :]
        v_tile = gl.load(v + value + at_v, mask=(i < tokens_left)[:, None] & inside, other=0.0)
        du_tile = gl.load(du + local_value + at_v, mask=(i < C)[:, None] & inside, other=0.0)
        dwrite += gl.sum(v_tile.to(gl.float32) * du_tile.to(gl.float32), 1)
    gl.store(dgates + 2 * C + i, dwrite)
