"""States on their way between memory and the registers of scan_hopper.py, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from deltazoo.backends.triton.kernels.hopper.common import MMA, barrier, fetch, of_copy, widen

# of a tile [64, 64] a warp has its 16 rows of a product, and a thread 8 columns: 16 bytes
WHOLE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [4, 0], [8, 0]], [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]], [[16, 0], [32, 0]], [],
        [64, 64],
    )
)  # fmt: skip
# half a tile of a product, [64, 32], in float32 as long as a tile in 16 bits; and how it lies in memory and on the way,
# as it is or transposed: 16 bytes a thread, in shared memory without conflicts
HALF_MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16]))
HALF_ROWS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
HALF_ACROSS = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
SHARED_HALF = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))


@gluon.jit
def put_tile(base, tile, stride: gl.constexpr, rows, columns, MASK_ROWS: gl.constexpr, MASK_COLUMNS: gl.constexpr):
    """Write a tile [64, 64] of shared memory up to `rows` and `columns`, each row whole."""
    out = tile.load(WHOLE)
    i = gl.arange(0, 64, gl.SliceLayout(1, WHOLE))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, WHOLE))[None, :]
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
def load_half(at, K: gl.constexpr, stride: gl.constexpr, rows, OFFSET: gl.constexpr, ACROSS: gl.constexpr):
    """S^T's 32 keys from OFFSET on, as they lie in memory: [values, keys], or [keys, values] if ACROSS."""
    layout: gl.constexpr = HALF_ACROSS if ACROSS else HALF_ROWS
    R: gl.constexpr = 32 if ACROSS else 64
    i = gl.arange(0, R, gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, 96 - R, gl.SliceLayout(0, layout))[None, :]
    if ACROSS:
        return gl.load(at + ((OFFSET + i) * stride + j), mask=(OFFSET + i < K) & (j < rows), other=0.0)
    else:
        return gl.load(at + (i * stride + (OFFSET + j)), mask=(i < rows) & (OFFSET + j < K), other=0.0)


@gluon.jit
def as_product(half, tile, ACROSS: gl.constexpr):
    """What `load_half` loaded, as half a tile of a product."""
    if ACROSS:
        across = tile._reinterpret(gl.float32, [32, 64], SHARED_HALF)
        across.store(half)
        return across.permute((1, 0)).load(HALF_MMA)
    else:
        straight = tile._reinterpret(gl.float32, [64, 32], SHARED_HALF)
        straight.store(half)
        return straight.load(HALF_MMA)


@gluon.jit
def join_halves(low, high):
    return gl.convert_layout(gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1)), [64, 64]), MMA)


@gluon.jit
def load_state(at, tile, K: gl.constexpr, stride: gl.constexpr, rows, NK: gl.constexpr, ACROSS: gl.constexpr):
    """S^T [64 values, keys] from float32 [values, keys], or [keys, values] if ACROSS, `rows` of the values. All loads
    are under way before the first turns through a tile."""
    halves = (load_half(at, K, stride, rows, 0, ACROSS),)
    for half in gl.static_range(2 * NK - 1):
        halves = halves + (load_half(at, K, stride, rows, half * 32 + 32, ACROSS),)
    S = (join_halves(as_product(halves[0], tile, ACROSS), as_product(halves[1], tile, ACROSS)),)
    for tk in gl.static_range(NK - 1):
        low = as_product(halves[2 * tk + 2], tile, ACROSS)
        S = S + (join_halves(low, as_product(halves[2 * tk + 3], tile, ACROSS)),)
    return S


@gluon.jit
def load_checkpoint(at, tile, K: gl.constexpr, rows, NK: gl.constexpr, MASK_V: gl.constexpr):
    """S^T [64 values, keys] from [values, keys] in 16 bits, by way of as many tiles."""
    from_at = of_copy(at, K)
    for tk in gl.static_range(NK):
        fetch(tile[tk], from_at, tk * 64, rows, K - tk * 64, MASK_V, tk * 64 + 64 > K)
    async_copy.commit_group()
    async_copy.wait_group(0)
    barrier()
    S = (widen(tile[0].load(MMA)),)
    for tk in gl.static_range(NK - 1):
        S = S + (widen(tile[tk + 1].load(MMA)),)
    return S


@gluon.jit
def store_final(at, S, tile, K: gl.constexpr, stride: gl.constexpr, rows, NK: gl.constexpr):
    """S^T to float32 [keys, values], `rows` of the values."""
    across = tile._reinterpret(gl.float32, [32, 64], SHARED_HALF)
    i = gl.arange(0, 32, gl.SliceLayout(1, HALF_ACROSS))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, HALF_ACROSS))[None, :]
    for tk in gl.static_range(NK):
        halves = gl.split(gl.permute(gl.reshape(S[tk], [64, 2, 32]), (0, 2, 1)))
        for half in gl.static_range(2):
            key = tk * 64 + half * 32 + i
            across.permute((1, 0)).store(gl.convert_layout(halves[half], HALF_MMA))
            gl.store(at + (key * stride + j), across.load(HALF_ACROSS), mask=(key < K) & (j < rows))
