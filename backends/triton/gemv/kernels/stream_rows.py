"""Products of 3 to 64 rows on sm_90 by wgmma: weights pass through a ring as in stream.py, x through a second one.

A program computes its outputs of all rows in passes of 128, or of 64 with a gate, and passes over D once for each, so
that x, which comes from the L2 cache, is read as rarely as possible.

M rows, D inputs, N outputs
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from deltazoo.backends.triton.chunk.kernels.sm90.gluon_versions import async_load, barrier
from deltazoo.backends.triton.device.overlap import start_next, wait_for_previous
from deltazoo.backends.triton.gemv.kernels.stream import activate, locate_program

ROWS = gl.constexpr(128)  # of the weights in a tile
BLOCK = gl.constexpr(64)  # inputs of a stage
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
TILE_ROWS = gl.constexpr(gl.SliceLayout(1, TILE.value))
TILE_COLUMNS = gl.constexpr(gl.SliceLayout(0, TILE.value))
SMEM = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
OUT = gl.constexpr(gl.BlockedLayout([2, 1], [32, 1], [1, 8], [0, 1]))


class StreamRowsTraits(NamedTuple):
    """Compile-time properties of a product: those of `StreamTraits`, with x after its norm and its token shift.

    Args: COLUMNS: M rounded up to a power of two, at least 16. INPUT: the matrix of x that each map reads.
    """

    M: int
    D: int
    MAPS: int
    N: tuple[int, ...]
    FIRST: tuple[int, ...]
    COLUMNS: int
    BLOCKS: int
    PROGRAMS: tuple[int, ...]
    STAGES: int
    X_STRIDE: int
    ACTIVATION: str
    GATED: bool
    RESIDUAL: bool
    INPUT: tuple[int, ...]


@gluon.jit
def copy_weights(tile_s, w, output, end, block, traits: gl.constexpr):
    """Issue the copies of a block of the weights of outputs from `output` on; those from `end` on become zero.

    With a gate, rows i and i + 8 of each 16 are the gate and the value of an output: one thread has both sums.
    """
    D: gl.constexpr = traits.D
    i = gl.arange(0, ROWS, TILE_ROWS)
    if traits.GATED:
        row = output + i // 16 * 8 + i % 8
        at = w + (row + i // 8 % 2 * traits.N[0]).to(gl.int64)[:, None] * D
    else:
        row = output + i
        at = w + row.to(gl.int64)[:, None] * D
    d = block * BLOCK + gl.arange(0, BLOCK, TILE_COLUMNS)
    async_load(tile_s, at + d[None, :], mask=(row < end)[:, None] & (d < D)[None, :])


@gluon.jit
def copy_inputs(inputs_s, x, block, traits: gl.constexpr):
    """Issue the copies of a block of x; rows from M on become zero."""
    m = gl.arange(0, traits.COLUMNS, TILE_ROWS)
    d = block * BLOCK + gl.arange(0, BLOCK, TILE_COLUMNS)
    mask = (m < traits.M)[:, None] & (d < traits.D)[None, :]
    async_load(inputs_s, x + (m[:, None] * traits.X_STRIDE + d[None, :]), mask=mask)


@gluon.jit
def locate_outputs(output, end, COUNT: gl.constexpr, layout: gl.constexpr, traits: gl.constexpr):
    """Return the places of COUNT outputs of all rows in y, and which of them exist."""
    MAPS: gl.constexpr = traits.MAPS
    row = output + gl.arange(0, COUNT, gl.SliceLayout(1, layout))
    m = gl.arange(0, traits.COLUMNS, gl.SliceLayout(0, layout))
    return m[None, :] * traits.FIRST[MAPS] + row[:, None], (row < end)[:, None] & (m < traits.M)[None, :]


@gluon.jit(do_not_specialize=["early"])
def stream_rows_kernel(x, residual, weights, y, early, traits: gl.constexpr):
    """Compute the outputs of a program for all rows.

    Grid: PROGRAMS. Reads x [M, D], residual [M, N], weights as gemv_kernel. Writes y [M, N of all maps]. early: as of
    stream_kernel.
    """
    BLOCKS: gl.constexpr = traits.BLOCKS
    STAGES: gl.constexpr = traits.STAGES
    COLUMNS: gl.constexpr = traits.COLUMNS
    ACTIVATION: gl.constexpr = traits.ACTIVATION  # Triton 3.6 cannot pass a str field of a constexpr tuple
    OUTPUTS: gl.constexpr = ROWS // 2 if traits.GATED else ROWS
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, COLUMNS, 16]
    )
    weights_s = gl.allocate_shared_memory(weights[0].dtype.element_ty, [STAGES, ROWS, BLOCK], SMEM)
    inputs_s = gl.allocate_shared_memory(weights[0].dtype.element_ty, [STAGES, COLUMNS, BLOCK], SMEM)
    w, first, end, column, input = locate_program(weights, traits)

    start_next()
    if early == 0:
        wait_for_previous()
    for i in gl.static_range(STAGES - 1):
        copy_weights(weights_s.index(i), w, first + i // BLOCKS * OUTPUTS, end, i % BLOCKS, traits)
        async_copy.commit_group()
    wait_for_previous()
    x += gl.multiple_of(input * (traits.M * traits.X_STRIDE), 8)
    y += column
    for i in gl.static_range(STAGES - 1):
        copy_inputs(inputs_s.index(i), x, i % BLOCKS, traits)
        async_copy.commit_group()

    stage = 0
    next_stage = STAGES - 1  # and the output and the block that are copied into it
    next_output = first + (STAGES - 1) // BLOCKS * OUTPUTS
    next_block = (STAGES - 1) % BLOCKS
    for output in range(first, end, OUTPUTS):
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, acc_layout)
        for _ in range(BLOCKS):
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            barrier()
            copy_weights(weights_s.index(next_stage), w, next_output, end, next_block, traits)
            copy_inputs(inputs_s.index(next_stage), x, next_block, traits)
            async_copy.commit_group()
            next_stage = gl.where(next_stage == STAGES - 1, 0, next_stage + 1)
            next_output += gl.where(next_block == BLOCKS - 1, OUTPUTS, 0)
            next_block = gl.where(next_block == BLOCKS - 1, 0, next_block + 1)
            acc = warpgroup_mma(weights_s.index(stage), inputs_s.index(stage).permute((1, 0)), acc)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        if traits.GATED:
            pairs = gl.permute(gl.reshape(acc, [ROWS // 16, 2, 8, COLUMNS]), (0, 2, 3, 1))
            gate, up = gl.split(pairs)
            out = gl.reshape(activate(gate, ACTIVATION) * up, [OUTPUTS, COLUMNS])
        else:
            out = activate(acc, ACTIVATION)
            if traits.RESIDUAL:
                at, mask = locate_outputs(output, end, OUTPUTS, acc_layout, traits)
                out += gl.load(residual + column + at, mask=mask, other=0.0).to(gl.float32)
        at, mask = locate_outputs(output, end, OUTPUTS, OUT, traits)
        gl.store(y + at, gl.convert_layout(out.to(y.dtype.element_ty), OUT), mask=mask)
