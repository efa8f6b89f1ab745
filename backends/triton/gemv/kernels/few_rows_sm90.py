"""few_rows_kernel on sm_90: weights pass through a ring in shared memory that is filled before x is ready.

The copies of the first weights are issued before the kernel waits for the one before it, so that memory is not idle
between two products. The blocks of x follow in a second ring, from the L2 cache.

M rows, D inputs, N outputs
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from deltazoo.backends.triton.chunk.kernels.sm90.gluon_versions import async_load, barrier
from deltazoo.backends.triton.device.overlap import prefetch_line, start_next, wait_for_previous
from deltazoo.backends.triton.device.taps import load_past, load_tap_weights, push_token
from deltazoo.backends.triton.gemv.kernels.gemv import activate, convolve_product, load_biases, locate_map

SMEM = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # of copies: 16 bytes per thread
TILE_ROWS = gl.constexpr(gl.SliceLayout(1, TILE.value))
TILE_COLUMNS = gl.constexpr(gl.SliceLayout(0, TILE.value))
OUT = gl.constexpr(gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1]))  # of stores: outputs are adjacent
OUT_ROWS = gl.constexpr(gl.SliceLayout(1, OUT.value))
OUT_COLUMNS = gl.constexpr(gl.SliceLayout(0, OUT.value))


@gluon.jit
def locate_rows(number, i, traits: gl.constexpr):
    """Return the outputs and the rows of the weights of rows i of a tile.

    With a gate, rows i and i + 8 of each 16 are the gate and the value of an output: one thread has both sums.
    """
    output = number * traits.ROWS + i
    row = output
    if traits.GATED:
        output = number * (traits.ROWS // 2) + i // 16 * 8 + i % 8
        row = output + i // 8 % 2 * traits.N[0]
    return output, row


@gluon.jit
def copy_weights(tile_s, w, at_row, in_n, start, traits: gl.constexpr):
    """Issue the copies of a block of the weights; rows outside the mask become zero."""
    d = start + gl.arange(0, traits.BLOCK, TILE_COLUMNS)
    async_load(tile_s, w + at_row[:, None] + d[None, :], mask=in_n[:, None] & (d < traits.D)[None, :])


@gluon.jit
def copy_inputs(inputs_s, x, start, M, traits: gl.constexpr):
    """Issue the copies of a block of x; rows from M on become zero."""
    m = gl.arange(0, traits.COLUMNS, TILE_ROWS)
    d = start + gl.arange(0, traits.BLOCK, TILE_COLUMNS)
    mask = (m < M)[:, None] & (d < traits.D)[None, :]
    async_load(inputs_s, x + (m[:, None] * traits.X_STRIDE + d[None, :]), mask=mask)


@gluon.jit(do_not_specialize=["M", "early"])
def few_rows_sm90_kernel(x, residual, weights, biases, history, taps, tap_bias, y, M, early, traits: gl.constexpr):
    """Compute what few_rows_kernel computes, for rows of a multiple of 16 bytes.

    early: 1 if the weights may be loaded before the preceding kernel has ended; 0 if that kernel may have written them.
    """
    ROWS: gl.constexpr = traits.ROWS
    BLOCK: gl.constexpr = traits.BLOCK
    COLUMNS: gl.constexpr = traits.COLUMNS
    SPLITS: gl.constexpr = traits.SPLITS
    STAGES: gl.constexpr = traits.STAGES
    BLOCKS: gl.constexpr = traits.SPAN // BLOCK
    ACTIVATION: gl.constexpr = traits.ACTIVATION  # Triton 3.6 cannot pass a str field of a constexpr tuple
    UNIT: gl.constexpr = traits.UNIT
    MAPS: gl.constexpr = traits.MAPS
    TOTAL: gl.constexpr = traits.FIRST[MAPS]
    N0: gl.constexpr = traits.N[0]
    TAPS: gl.constexpr = traits.TAPS
    OUTPUTS: gl.constexpr = ROWS // 2 if traits.GATED else ROWS
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    weights_s = gl.allocate_shared_memory(weights[0].dtype.element_ty, [STAGES, ROWS, BLOCK], SMEM)
    inputs_s = gl.allocate_shared_memory(weights[0].dtype.element_ty, [STAGES, COLUMNS, BLOCK], SMEM)
    start_next()
    if early == 0:
        wait_for_previous()
    tile = gl.program_id(0) // SPLITS
    w, number, size, first, place = locate_map(tile, weights, traits)
    split = gl.program_id(0) % SPLITS
    start = split * traits.SPAN
    output, row = locate_rows(number, gl.arange(0, ROWS, TILE_ROWS), traits)
    in_n = output < size
    at_row = row.to(gl.int64) * traits.D
    for block in gl.static_range(STAGES - 1):
        if block < BLOCKS:
            copy_weights(weights_s.index(block), w, at_row, in_n, start + block * BLOCK, traits)
        async_copy.commit_group()
    if TAPS > 0 and SPLITS == 1:
        if tile < traits.TILES[1]:
            m = gl.minimum(gl.arange(0, COLUMNS, TILE_ROWS), M - 1)
            for tap in gl.static_range(TAPS - 1):
                line = history + (m * (TAPS - 1) + tap) * N0 + number * ROWS
                prefetch_line(line)
                prefetch_line(line + gl.minimum(ROWS - 1, N0 - 1 - number * ROWS))
    wait_for_previous()
    if TAPS > 0 and SPLITS == 1:
        m = gl.arange(0, COLUMNS, OUT_COLUMNS)
        channel = (number * ROWS + gl.arange(0, ROWS, OUT_ROWS))[:, None]
        in_conv = channel < gl.where(tile < traits.TILES[1], N0, 0)
        history += (m * ((TAPS - 1) * N0))[None, :]
        past = load_past(history, channel, in_conv & (m < M)[None, :], N0, TAPS)
        tap_weights = load_tap_weights(taps, tap_bias, channel, in_conv, TAPS, traits.TAP_BIAS)
    if traits.BIASED and SPLITS == 1:
        bias = load_biases((first + number * OUTPUTS + gl.arange(0, OUTPUTS, OUT_ROWS))[:, None], biases, traits)
    x = gl.multiple_of(x + place, UNIT)
    for block in gl.static_range(STAGES - 1):
        if block < BLOCKS:
            copy_inputs(inputs_s.index(block), x, start + block * BLOCK, M, traits)
        async_copy.commit_group()

    stage = 0
    next_stage = STAGES - 1
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, acc_layout)
    for block in range(BLOCKS):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        barrier()
        if BLOCKS >= STAGES:  # else Triton 3.6 compiles copies with a mask that it knows to be false, and fails
            if block + STAGES - 1 < BLOCKS:
                next_start = start + (block + STAGES - 1) * BLOCK
                copy_weights(weights_s.index(next_stage), w, at_row, in_n, next_start, traits)
                copy_inputs(inputs_s.index(next_stage), x, next_start, M, traits)
        async_copy.commit_group()
        next_stage = gl.where(next_stage == STAGES - 1, 0, next_stage + 1)
        acc = warpgroup_mma(weights_s.index(stage), inputs_s.index(stage).permute((1, 0)), acc)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)

    m = gl.arange(0, COLUMNS, OUT_COLUMNS)
    if SPLITS > 1:
        output, row = locate_rows(number, gl.arange(0, ROWS, OUT_ROWS), traits)
        at = (split * M + m)[None, :] * (TOTAL * (ROWS // OUTPUTS)) + first + row[:, None]
        gl.store(y + at, gl.convert_layout(acc, OUT), mask=(output < size)[:, None] & (m < M)[None, :])
    else:
        if traits.GATED:
            gate, up = gl.split(gl.permute(gl.reshape(acc, [ROWS // 16, 2, 8, COLUMNS]), (0, 2, 3, 1)))
            out = gl.convert_layout(gl.reshape(activate(gate, ACTIVATION) * up, [OUTPUTS, COLUMNS]), OUT)
        else:
            if traits.BIASED:
                acc = gl.convert_layout(acc, OUT) + bias
            out = gl.convert_layout(activate(acc, ACTIVATION), OUT)
        output = number * OUTPUTS + gl.arange(0, OUTPUTS, OUT_ROWS)
        at = m[None, :] * TOTAL + first + output[:, None]
        mask = (output < size)[:, None] & (m < M)[None, :]
        if TAPS > 0:
            token = out.to(y.dtype.element_ty)
            in_both = in_conv & (m < M)[None, :]
            out = gl.where(in_both, convolve_product(token, past, tap_weights, traits), out)
            push_token(past + (token,), history, channel, in_both, N0, TAPS)
        if traits.RESIDUAL:
            out += gl.load(residual + at, mask=mask, other=0.0).to(gl.float32)
        gl.store(y + at, out.to(y.dtype.element_ty), mask=mask)
