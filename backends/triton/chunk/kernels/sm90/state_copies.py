"""Copies of states and tiles between global memory and the accumulators of a consumer warp group."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from deltazoo.backends.triton.chunk.kernels.sm90.common import (
    ACC,
    ACC_N16,
    barrier,
    copy_pointers,
    copy_tile_async,
    to_float32,
)
from deltazoo.backends.triton.chunk.kernels.sm90.gluon_versions import reinterpret

# global stores of a tile [64, 64] from shared memory: 16 bytes per thread, each warp the 16 rows it has in an
# accumulator
STORE_ROWS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [4, 0], [8, 0]], [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]], [[16, 0], [32, 0]], [],
        [64, 64],
    )
)  # fmt: skip
STORE_ROWS_N16 = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))  # of a tile [64, 16]
# Half an accumulator tile, [64, 32] in float32, takes as much shared memory as a 16-bit tile. HALF_ROWS and
# HALF_TRANSPOSED are its layouts in global memory, 16 bytes per thread; SMEM_HALF has no bank conflicts with either.
ACC_HALF = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16]))
HALF_ROWS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
HALF_TRANSPOSED = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
SMEM_HALF = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))


@gluon.jit
def store_tile(base, tile, stride: gl.constexpr, rows, columns, MASK_ROWS: gl.constexpr, MASK_COLUMNS: gl.constexpr):
    """Store a tile [64, 64] or [64, 16] of shared memory to global memory, up to `rows` and `columns`."""
    layout: gl.constexpr = STORE_ROWS if tile.shape[1] == 64 else STORE_ROWS_N16
    out = tile.load(layout)
    i = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))[None, :]
    at = base + (i * stride + j)
    if MASK_ROWS and MASK_COLUMNS:
        gl.store(at, out, mask=(i < rows) & (j < columns))
    elif MASK_ROWS:
        gl.store(at, out, mask=i < rows)
    elif MASK_COLUMNS:
        gl.store(at, out, mask=j < columns)
    else:
        gl.store(at, out)


@gluon.jit
def load_half(at, K: gl.constexpr, stride: gl.constexpr, rows, OFFSET: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Load keys OFFSET to OFFSET + 31 of a state: [64 values, 32 keys], or [32 keys, 64 values] if TRANSPOSED."""
    layout: gl.constexpr = HALF_TRANSPOSED if TRANSPOSED else HALF_ROWS
    R: gl.constexpr = 32 if TRANSPOSED else 64
    i = gl.arange(0, R, gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, 96 - R, gl.SliceLayout(0, layout))[None, :]
    if TRANSPOSED:
        return gl.load(at + ((OFFSET + i) * stride + j), mask=(OFFSET + i < K) & (j < rows), other=0.0)
    else:
        return gl.load(at + (i * stride + (OFFSET + j)), mask=(i < rows) & (OFFSET + j < K), other=0.0)


@gluon.jit
def half_to_accumulator(half, staging, TRANSPOSED: gl.constexpr):
    """Convert what load_half loaded to half an accumulator tile [64 values, 32 keys], through the tile `staging`."""
    if TRANSPOSED:
        smem_half = reinterpret(staging, gl.float32, [32, 64], SMEM_HALF)
        smem_half.store(half)
        return smem_half.permute((1, 0)).load(ACC_HALF)
    else:
        smem_half = reinterpret(staging, gl.float32, [64, 32], SMEM_HALF)
        smem_half.store(half)
        return smem_half.load(ACC_HALF)


@gluon.jit
def join_halves(low, high):
    return gl.convert_layout(gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1)), [64, 64]), ACC)


@gluon.jit
def zero_state(traits: gl.constexpr):
    """Return the accumulators of an empty S^T [64 values, keys]: tiles [64, 64], and [64, 16] if that is the tail."""
    NK: gl.constexpr = traits.NK
    TAIL_16: gl.constexpr = traits.TAIL == 16
    S = ()
    for tk in gl.static_range(NK):
        if tk == NK - 1 and TAIL_16:
            S = S + (gl.zeros([64, 16], gl.float32, ACC_N16),)
        else:
            S = S + (gl.zeros([64, 64], gl.float32, ACC),)
    return S


@gluon.jit
def load_state(at, staging, stride: gl.constexpr, rows, TRANSPOSED: gl.constexpr, traits: gl.constexpr):
    """Load accumulators of S^T [64 values, keys] from a float32 state [values, keys], or [keys, values] if TRANSPOSED.

    Values from `rows` on are zero. All global loads are issued before the first conversion through shared memory.
    """
    K: gl.constexpr = traits.K
    NK: gl.constexpr = traits.NK
    TAIL_16: gl.constexpr = traits.TAIL == 16
    halves = ()
    for half in gl.static_range(2 * NK - 1 if TAIL_16 else 2 * NK):
        halves = halves + (load_half(at, K, stride, rows, half * 32, TRANSPOSED),)
    S = ()
    for tk in gl.static_range(NK):
        low = half_to_accumulator(halves[2 * tk], staging, TRANSPOSED)
        if tk == NK - 1 and TAIL_16:
            first_16, _ = gl.split(gl.permute(gl.reshape(low, [64, 2, 16]), (0, 2, 1)))
            S = S + (gl.convert_layout(first_16, ACC_N16),)
        else:
            S = S + (join_halves(low, half_to_accumulator(halves[2 * tk + 1], staging, TRANSPOSED)),)
    return S


@gluon.jit
def load_checkpoint(at, staging, K: gl.constexpr, rows, NK: gl.constexpr, MASK_V: gl.constexpr):
    """Load accumulators of S^T [64 values, keys] from a 16-bit state [values, keys], through NK staging tiles."""
    for tk in gl.static_range(NK):
        copy_at = copy_pointers(at, K, 64, staging[tk].shape[1])
        copy_tile_async(staging[tk], copy_at, tk * 64, rows, K - tk * 64, MASK_V, tk * 64 + staging[tk].shape[1] > K)
    async_copy.commit_group()
    async_copy.wait_group(0)
    barrier()
    S = ()
    for tk in gl.static_range(NK):
        S = S + (to_float32(staging[tk].load(ACC_N16 if staging[tk].shape[1] == 16 else ACC)),)
    return S


@gluon.jit
def store_state(at, S, staging, K: gl.constexpr, stride: gl.constexpr, rows, NK: gl.constexpr):
    """Store accumulators of S^T [64 values, keys] as a float32 state [keys, values], up to value `rows`."""
    smem_half = reinterpret(staging, gl.float32, [32, 64], SMEM_HALF)
    i = gl.arange(0, 32, gl.SliceLayout(1, HALF_TRANSPOSED))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, HALF_TRANSPOSED))[None, :]
    for tk in gl.static_range(NK):
        if S[tk].shape[1] == 16:
            halves = (gl.reshape(gl.permute(gl.join(S[tk], gl.zeros_like(S[tk])), (0, 2, 1)), [64, 32]),)
        else:
            halves = gl.split(gl.permute(gl.reshape(S[tk], [64, 2, 32]), (0, 2, 1)))
        for half in gl.static_range(len(halves)):
            key = tk * 64 + half * 32 + i
            smem_half.permute((1, 0)).store(gl.convert_layout(halves[half], ACC_HALF))
            gl.store(at + (key * stride + j), smem_half.load(HALF_TRANSPOSED), mask=(key < K) & (j < rows))
