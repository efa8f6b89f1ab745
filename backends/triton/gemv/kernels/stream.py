"""The products of gemv.py on sm_90: weights pass through shared memory, whose ring is filled before the kernel's turn.

With programmatic dependent launch a kernel starts while the one before it runs. The weights of its first tiles do not
depend on that kernel, so that their copies are issued first; two kernels share an SM, of which one waits with a full
ring. Memory then delivers weights also while kernels end and begin.

There is one program per SM. Each computes outputs of one map, and all compute nearly as many. Its 8 warps take one row
of the weights each, twice: two outputs, or the gate and the value of one. Sums are in float32.

M rows, D inputs, N outputs
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from deltazoo.backends.triton.chunk.kernels.sm90.gluon_versions import async_load
from deltazoo.backends.triton.device.overlap import start_next, wait_for_previous

ROWS = gl.constexpr(8)  # of a half of a tile: one for each warp
BLOCK = gl.constexpr(512)  # inputs of a stage
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
TILE_ROWS = gl.constexpr(gl.SliceLayout(1, TILE.value))
TILE_COLUMNS = gl.constexpr(gl.SliceLayout(0, TILE.value))
INPUT_BLOCK = gl.constexpr(gl.BlockedLayout([2], [32], [8], [0]))
SMEM_TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
SMEM_INPUTS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class StreamTraits(NamedTuple):
    """Compile-time properties of a product: those of `GemvTraits`, with STAGES of the ring, 16 KB each.

    Args:
        BLOCKS: ceil(D / BLOCK). PROGRAMS: programs of the maps before each, and of all. INPUT: row of mix of each map.
    """

    M: int
    D: int
    MAPS: int
    N: tuple[int, ...]
    FIRST: tuple[int, ...]
    BLOCKS: int
    PROGRAMS: tuple[int, ...]
    STAGES: int
    X_STRIDE: int
    NORM: bool
    EPS: float
    ACTIVATION: str
    GATED: bool
    RESIDUAL: bool
    SHIFT: bool
    INPUT: tuple[int, ...]


@gluon.jit
def locate_program(weights, traits: gl.constexpr):
    """Return the weights of the program's map, its first output, the end of its outputs, the map's column of y, and its
    INPUT.
    """
    MAPS: gl.constexpr = traits.MAPS
    i = gl.program_id(0)
    w = weights[0]
    size = i * 0 + traits.N[0]
    column = i * 0
    before = i * 0
    count = i * 0 + traits.PROGRAMS[1]
    number = i * 0 + traits.INPUT[0]
    for m in gl.static_range(1, MAPS):
        is_after = i >= traits.PROGRAMS[m]
        w = gl.where(is_after, weights[m], w)
        size = gl.where(is_after, traits.N[m], size)
        column = gl.where(is_after, traits.FIRST[m], column)
        before = gl.where(is_after, traits.PROGRAMS[m], before)
        count = gl.where(is_after, traits.PROGRAMS[m + 1] - traits.PROGRAMS[m], count)
        number = gl.where(is_after, traits.INPUT[m], number)
    return gl.multiple_of(w, 16), (i - before) * size // count, (i - before + 1) * size // count, column, number


@gluon.jit
def copy_tile(low_s, high_s, w, row, end, block, traits: gl.constexpr):
    """Issue the copies of a block of BLOCK inputs of a tile from output `row` on; rows of outputs from `end` on become
    zero.
    """
    D: gl.constexpr = traits.D
    rows = row + gl.arange(0, ROWS, TILE_ROWS)
    d = block * BLOCK + gl.arange(0, BLOCK, TILE_COLUMNS)
    in_d = (d < D)[None, :]
    at = w + (rows.to(gl.int64)[:, None] * D + d[None, :])
    in_low = (rows < end)[:, None] & in_d
    async_load(low_s, at, mask=in_low)
    if traits.GATED:
        async_load(high_s, at + traits.N[0] * D, mask=in_low)
    else:
        async_load(high_s, at + ROWS * D, mask=(rows + ROWS < end)[:, None] & in_d)
    async_copy.commit_group()


@gluon.jit
def activate(x, ACTIVATION: gl.constexpr):
    """Apply silu, gelu (tanh approximation) or relu2, as gemv.py."""
    if ACTIVATION == "silu":
        x *= 1.0 / (1.0 + gl.exp2(x * -1.4426950408889634))
    if ACTIVATION == "gelu":
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        x *= 1.0 / (1.0 + gl.exp2(inner * -1.4426950408889634))
    if ACTIVATION == "relu2":
        x = gl.where(x < 0.0, 0.0, x * x)
    return x


@gluon.jit
def load_row(x, block: gl.constexpr, D: gl.constexpr):
    """Load a block of a row in float32."""
    d = block * BLOCK + gl.arange(0, BLOCK, INPUT_BLOCK)
    return gl.load(x + d, mask=d < D, other=0.0).to(gl.float32)


@gluon.jit
def store_inputs(inputs_s, x, norm_weight, previous, share, traits: gl.constexpr):
    """Store what the weights are multiplied with to shared memory: blocks of each row.

    All loads are issued before the first value is used. share: the map's row of mix.
    """
    M: gl.constexpr = traits.M
    D: gl.constexpr = traits.D
    BLOCKS: gl.constexpr = traits.BLOCKS
    scales = ()
    shares = ()
    for b in gl.static_range(BLOCKS):
        if traits.NORM:
            scales = scales + (load_row(norm_weight, b, D),)
        if traits.SHIFT:
            shares = shares + (load_row(share, b, D),)
    for m in gl.static_range(M):
        values = ()
        befores = ()
        for b in gl.static_range(BLOCKS):
            values = values + (load_row(x + m * traits.X_STRIDE, b, D),)
            if traits.SHIFT:
                befores = befores + (load_row(previous + m * D, b, D),)
        factor = 1.0
        if traits.NORM:
            squares = gl.zeros([BLOCK], gl.float32, INPUT_BLOCK)
            for b in gl.static_range(BLOCKS):
                squares += values[b] * values[b]
            factor = gl.rsqrt(gl.sum(squares, 0) / D + traits.EPS)
        for b in gl.static_range(BLOCKS):
            value = values[b]
            if traits.NORM:
                value = value * scales[b] * factor
            if traits.SHIFT:
                value += (befores[b] - value) * shares[b]
            inputs_s.index(m * BLOCKS + b).store(value)


@gluon.jit(do_not_specialize=["early"])
def stream_kernel(x, norm_weight, residual, previous, mix, weights, y, early, traits: gl.constexpr):
    """Compute the outputs of a program for all rows.

    Grid: PROGRAMS. Reads and writes what gemv_kernel does. early: whether the weights may be read before the kernel
    before this one has ended; 0 if that may have written them.
    """
    M: gl.constexpr = traits.M
    BLOCKS: gl.constexpr = traits.BLOCKS
    STAGES: gl.constexpr = traits.STAGES
    ACTIVATION: gl.constexpr = traits.ACTIVATION  # Triton 3.6 cannot pass a str field of a constexpr tuple
    MAPS: gl.constexpr = traits.MAPS
    COLUMNS: gl.constexpr = traits.FIRST[MAPS]
    dtype: gl.constexpr = weights[0].dtype.element_ty
    low_s = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK], SMEM_TILE)
    high_s = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK], SMEM_TILE)
    inputs_s = gl.allocate_shared_memory(gl.float32, [M * BLOCKS, BLOCK], SMEM_INPUTS)
    OUTPUTS: gl.constexpr = ROWS if traits.GATED else 2 * ROWS
    w, first, end, column, share = locate_program(weights, traits)

    start_next()
    if early == 0:
        wait_for_previous()
    for i in gl.static_range(STAGES - 1):
        copy_tile(low_s.index(i), high_s.index(i), w, first + i // BLOCKS * OUTPUTS, end, i % BLOCKS, traits)
    wait_for_previous()
    store_inputs(inputs_s, x, norm_weight, previous, mix + share * traits.D if traits.SHIFT else mix, traits)

    stage = 0
    next_stage = STAGES - 1  # and the output and the block that are copied into it
    next_row = first + (STAGES - 1) // BLOCKS * OUTPUTS
    next_block = (STAGES - 1) % BLOCKS
    for row in range(first, end, OUTPUTS):
        low_rows = row + gl.arange(0, ROWS, TILE_ROWS)
        high_rows = low_rows + ROWS
        befores = ()
        sums = ()
        for m in gl.static_range(M):
            if traits.RESIDUAL:
                at = residual + m * COLUMNS + column
                befores = befores + (gl.load(at + low_rows, mask=low_rows < end, other=0.0).to(gl.float32),)
                befores = befores + (gl.load(at + high_rows, mask=high_rows < end, other=0.0).to(gl.float32),)
            sums = sums + (gl.zeros([ROWS, BLOCK], gl.float32, TILE),)
            sums = sums + (gl.zeros([ROWS, BLOCK], gl.float32, TILE),)
        for block in range(BLOCKS):
            async_copy.wait_group(STAGES - 2)
            copy_tile(low_s.index(next_stage), high_s.index(next_stage), w, next_row, end, next_block, traits)
            next_stage = gl.where(next_stage == STAGES - 1, 0, next_stage + 1)
            next_row += gl.where(next_block == BLOCKS - 1, OUTPUTS, 0)
            next_block = gl.where(next_block == BLOCKS - 1, 0, next_block + 1)
            low = low_s.index(stage).load(TILE).to(gl.float32)
            high = high_s.index(stage).load(TILE).to(gl.float32)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            new_sums = ()
            for m in gl.static_range(M):
                value = inputs_s.index(m * BLOCKS + block).load(TILE_COLUMNS)[None, :]
                new_sums = new_sums + (sums[2 * m] + low * value, sums[2 * m + 1] + high * value)
            sums = new_sums
        for m in gl.static_range(M):
            low_out = activate(gl.sum(sums[2 * m], 1), ACTIVATION)
            high_out = gl.sum(sums[2 * m + 1], 1)
            at = y + m * COLUMNS + column
            if traits.GATED:
                low_out *= high_out
            else:
                high_out = activate(high_out, ACTIVATION)
                if traits.RESIDUAL:
                    high_out += befores[2 * m + 1]
                gl.store(at + high_rows, high_out.to(y.dtype.element_ty), mask=high_rows < end)
            if traits.RESIDUAL:
                low_out += befores[2 * m]
            gl.store(at + low_rows, low_out.to(y.dtype.element_ty), mask=low_rows < end)
