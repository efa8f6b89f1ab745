"""Building blocks of the Gluon kernels for sm_90: register and smem layouts, cp.async copies, stores, mbarriers.

Chunks have 64 tokens. A tile is a [64, 64] matrix of a 16-bit dtype in shared memory, unless its shape is given. In the
wgmma accumulator of a [64, N] product each of the four warps of a warp group holds 16 rows.

Names: a suffix `_s` marks a buffer in shared memory, `at` a block of pointers into global memory. G is the cumulative
log2 decay within a chunk, including the token's own decay.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from deltazoo.backends.triton.chunk.kernels.sm90.gluon_versions import async_load
from deltazoo.backends.triton.chunk.kernels.sm90.gluon_versions import barrier as barrier  # exported to the kernels
from deltazoo.backends.triton.device.layout import locate_scratch_chunk_in_sequence, scratch_slots_per_sequence

# accumulators of one warp group, [64, 64] and [64, 16]; the A operand in registers; the row and column vectors of ACC
ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
ACC_N16 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16]))
A_OPERAND = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
ACC_ROWS = gl.constexpr(gl.SliceLayout(1, ACC.value))
ACC_COLUMNS = gl.constexpr(gl.SliceLayout(0, ACC.value))
# cp.async of 16 bytes per thread by one warp group, in the order of copy_indices: tiles of 64 and of 128 columns
COPY_64_COLUMNS = gl.constexpr(gl.BlockedLayout([4, 1, 8], [1, 4, 8], [1, 4, 1], [2, 1, 0]))
COPY_128_COLUMNS = gl.constexpr(gl.BlockedLayout([8, 1, 8], [1, 2, 16], [1, 4, 1], [2, 1, 0]))
COPY_16_COLUMNS = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 16, 2], [1, 4, 1], [2, 1, 0]))
# vectors
ONE_PER_THREAD = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
FOUR_PER_THREAD = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
SMEM_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
SMEM_TILE_N16 = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2))
SMEM_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Global stores of an accumulator [64, 64]. The four threads that share a row of the accumulator exchange elements so
# that each holds 4 adjacent columns of 16, and the four together fill a 32-byte sector. The conversion from ACC takes
# one shuffle per register, no shared memory and no barrier.
STORE_64_COLUMNS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]], [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 64],
    )
)  # fmt: skip
STORE_16_COLUMNS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
)
STORE_128_COLUMNS = gl.constexpr(  # the same for [64, 128], of which each of two warp groups holds 64 columns
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]], [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [0, 64]], [], [64, 128],
    )
)  # fmt: skip
WARP_GROUP_THREADS = gl.constexpr(128)


@gluon.jit
def find_sequence(slot, cu, N, windows, unit, C: gl.constexpr, LANES: gl.constexpr = ONE_PER_THREAD):
    """Gluon version of layout.find_sequence. LANES: a layout of 32 lanes."""
    lane = gl.arange(0, 32, LANES)
    low = 0
    high = N
    while high - low > 1:
        step = (high - low + 31) // 32
        n = low + lane * step
        in_range = n < high
        first = (gl.load(cu + n, mask=in_range, other=0) // C + n) // windows + n * unit
        low += (gl.sum(gl.where(in_range & (first <= slot), 1, 0), 0) - 1) * step
        high = gl.minimum(low + step, high)
    return low


@gluon.jit
def locate_scratch_chunk(
    scratch_slot, cu, N, T, window, windows, C: gl.constexpr, UNIT: gl.constexpr, PACKED: gl.constexpr,
    LANES: gl.constexpr = ONE_PER_THREAD,
):  # fmt: skip
    """Gluon version of layout.locate_scratch_chunk. LANES: a layout of 32 lanes."""
    if PACKED:
        n = find_sequence(scratch_slot, cu, N, windows, gl.where(windows == 1, 0, UNIT), C, LANES)
    else:
        n = scratch_slot // scratch_slots_per_sequence(T, windows, C, UNIT)
    return locate_scratch_chunk_in_sequence(scratch_slot, n, cu, T, window, windows, C, UNIT, PACKED)


@gluon.jit
def allocate_tile(dtype: gl.constexpr, COLUMNS: gl.constexpr = 64, NUM_STAGES: gl.constexpr = 0):
    """Allocate a tile [64, COLUMNS], of 16 or 64 columns, or with NUM_STAGES a ring buffer of NUM_STAGES tiles."""
    layout: gl.constexpr = SMEM_TILE_N16 if COLUMNS == 16 else SMEM_TILE
    if NUM_STAGES > 0:
        tile = gl.allocate_shared_memory(dtype, [NUM_STAGES, 64, COLUMNS], layout)
    else:
        tile = gl.allocate_shared_memory(dtype, [64, COLUMNS], layout)
    return tile


@gluon.jit
def allocate_tiles(dtype: gl.constexpr, COUNT: gl.constexpr, NUM_STAGES: gl.constexpr = 0, LAST: gl.constexpr = 64):
    """Allocate COUNT tiles or ring buffers, the last with LAST columns.

    Each is a separate buffer: the compiler assumes that views of one buffer overlap.
    """
    tiles = ()
    for i in gl.static_range(COUNT):
        tiles = tiles + (allocate_tile(dtype, LAST if i == COUNT - 1 else 64, NUM_STAGES),)
    return tiles


@gluon.jit
def copy_indices(R: gl.constexpr, J: gl.constexpr):
    """Return indices (r, t, j) of the elements of a tile [R, J]: row r * (1024 / J) + t, column j.

    One pass over t and j, 2 KiB of a 16-bit dtype, is one 16-byte cp.async per thread.
    """
    layout: gl.constexpr = COPY_16_COLUMNS if J == 16 else COPY_64_COLUMNS if J == 64 else COPY_128_COLUMNS
    ROWS_PER_PASS: gl.constexpr = 1024 // J
    t = gl.arange(0, ROWS_PER_PASS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    j = gl.arange(0, J, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    r = gl.arange(0, R // ROWS_PER_PASS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    return r[:, None, None], t[None, :, None], j[None, None, :]


@gluon.jit
def copy_pointers(base, stride: gl.constexpr, R: gl.constexpr = 64, J: gl.constexpr = 64, zero=0):
    """Return the pointers [r, t, j] to a row-major tile [R, J].

    A thread holds all r for one t and one j, so that its addresses differ by constants. zero: an opaque zero
    (layout.py), which keeps the address arithmetic inside the caller's loop.
    """
    ROWS_PER_PASS: gl.constexpr = 1024 // J
    r, t, j = copy_indices(R, J)
    first = base + (t * stride + j + zero * 64)
    return first + r * (ROWS_PER_PASS * stride)


@gluon.jit
def copy_tile_async(tile, at, OFFSET: gl.constexpr, rows, columns, MASK_ROWS: gl.constexpr, MASK_COLUMNS: gl.constexpr):
    """Issue the cp.async of a tile from pointers `at` + OFFSET; zero-fill from row `rows` and column `columns` on."""
    R: gl.constexpr = tile.shape[0]
    J: gl.constexpr = tile.shape[1]
    ROWS_PER_PASS: gl.constexpr = 1024 // J
    r, t, j = copy_indices(R, J)
    tile = tile.reshape([R // ROWS_PER_PASS, ROWS_PER_PASS, J])
    at = at + OFFSET
    in_rows = r * ROWS_PER_PASS + t < rows
    in_columns = j < columns
    if MASK_ROWS and MASK_COLUMNS:
        async_load(tile, at, mask=in_rows & in_columns)
    elif MASK_ROWS:
        async_load(tile, at, mask=in_rows)
    elif MASK_COLUMNS:
        async_load(tile, at, mask=in_columns)
    else:
        async_load(tile, at)


@gluon.jit
def to_float32(x):
    """Convert x to float32. A pair of bfloat16 takes two instructions here, three as the compiler emits it."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], gl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def to_16_bits(x, dtype: gl.constexpr):
    """Convert float32 to a 16-bit dtype, two elements per instruction.

    The compiler would move the conversion before a select and emit one instruction per element.
    """
    if dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, is_pure=True, pack=2)
    else:
        y = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, is_pure=True, pack=2)
    return y


@gluon.jit
def low_term(x, high):
    """Return the second of the two 16-bit terms (hi + lo) of float32 x, whose first is `high`."""
    return to_16_bits(x - to_float32(high), high.dtype)


@gluon.jit
def sum_by_warp(x):
    """Sum x [64] over the 16 rows of each warp: [4]."""
    return gl.sum(gl.reshape(x, [4, 16]), 1)


@gluon.jit
def store_accumulator(base, tile, stride: gl.constexpr, rows, columns, MASK_COLUMNS: gl.constexpr):
    """Store an accumulator [64, 16], [64, 64] or [64, 128] in the dtype of `base`, up to `rows` and `columns`."""
    WIDTH: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = STORE_16_COLUMNS if WIDTH == 16 else STORE_64_COLUMNS if WIDTH == 64 else STORE_128_COLUMNS
    out = gl.convert_layout(to_16_bits(tile, base.dtype.element_ty), layout)
    t = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    # split so that the addresses of one thread differ by constants
    at = base + ((t // 16 * 16 + t % 8) * stride + (j // 64 * 64 + j % 16))
    at = at + (t // 8 % 2 * (8 * stride) + j // 16 % 4 * 16)
    inside = t < rows
    if MASK_COLUMNS:
        inside = inside & (j < columns)
    gl.store(at, out, mask=inside)


@gluon.jit
def copy_wy_tile_async(tile, base, IS_T: gl.constexpr, zero=0):
    """Issue the cp.async of T, or of P^T, from the [64, 72] tile that holds both (wy_tiles.py); zero-fill the other."""
    r, t, j = copy_indices(64, 64)
    j += zero * 64
    block = j // 8 - (r * 2 + t // 8)
    at = base + (t * 72 + j) + r * (16 * 72)
    if IS_T:
        at += gl.where(block == 0, 64 - j // 8 * 8, 0)
        belongs = block <= 0
    else:
        belongs = block >= 0
    # blocks of 8 columns, 16 bytes, are contiguous and masked as one; Triton 3.8 does not see it through the select
    at = gl.multiple_of(gl.max_contiguous(at, [1, 1, 8]), [1, 1, 16])
    async_load(tile.reshape([4, 16, 64]), at, mask=belongs)


@gluon.jit
def copy_gates_async(
    gates, smem, stage, DECAY: gl.constexpr, GATES_BEFORE: gl.constexpr, DELTA: gl.constexpr, WRITE: gl.constexpr
):
    """Issue the cp.async of a chunk's gates [3, 64]: G, with GATES_BEFORE also G before each token, c and w."""
    if DECAY != "none":
        async_load(smem.G.index(stage), gates + gl.arange(0, 64, FOUR_PER_THREAD))
        if GATES_BEFORE:
            i = gl.arange(0, 64, ONE_PER_THREAD)
            async_load(smem.G_prev.index(stage), gates - 1 + i, mask=i > 0)
    if DELTA:
        async_load(smem.erase.index(stage), gates + 64 + gl.arange(0, 64, FOUR_PER_THREAD))
    if WRITE:
        async_load(smem.w.index(stage), gates + 128 + gl.arange(0, 64, FOUR_PER_THREAD))


@gluon.jit
def copy_channel_gates_async(gates, smem, stage, K: gl.constexpr, NK: gl.constexpr, WRITE: gl.constexpr):
    """Issue the cp.async of a chunk's gates for a decay per channel [K + 64]: 2^Gend, and with WRITE w."""
    k = gl.arange(0, 64 * NK, FOUR_PER_THREAD)
    async_load(smem.G.index(stage), gates + k, mask=k < K)
    if WRITE:
        async_load(smem.w.index(stage), gates + K + gl.arange(0, 64, FOUR_PER_THREAD))


@gluon.jit
def allocate_vector_ring(NUM_STAGES: gl.constexpr, SIZE: gl.constexpr = 64):
    return gl.allocate_shared_memory(gl.float32, [NUM_STAGES, SIZE], SMEM_VECTOR)


@gluon.jit
def allocate_gate_rings(NUM_STAGES: gl.constexpr, GATES_BEFORE: gl.constexpr, DELTA: gl.constexpr, WRITE: gl.constexpr):
    """Allocate the rings of G, G before each token, c and w; those not used alias G."""
    G_s = allocate_vector_ring(NUM_STAGES)
    G_prev_s = allocate_vector_ring(NUM_STAGES) if GATES_BEFORE else G_s
    erase_s = allocate_vector_ring(NUM_STAGES) if DELTA else G_s
    w_s = allocate_vector_ring(NUM_STAGES) if WRITE else G_s
    return G_s, G_prev_s, erase_s, w_s


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate and initialise COUNT mbarriers; a phase of each completes after ARRIVALS arrivals."""
    out = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(out.index(i), count=ARRIVALS)
    return out


@gluon.jit
def consumer_release(empty):
    """Arrive on an empty barrier, once per thread.

    cp.async.mbarrier.arrive.noinc by a thread without pending copies is a plain arrive. mbarrier.arrive would make the
    compiler emit a barrier of the warp group before and after it.
    """
    async_copy.mbarrier_arrive(empty, increment_count=False)


@gluon.jit
def producer_arrive(full, PENDING: gl.constexpr, pred):
    """Arrive on a full barrier, if pred, once all but the last PENDING cp.async groups have completed.

    The proxy fence makes what the copies wrote visible to wgmma. The barrier covers all threads, so one arrives.
    """
    async_copy.wait_group(PENDING)
    fence_async_shared()
    barrier()
    mbarrier.arrive(full, count=1, pred=pred)


@gluon.jit
def matmul_inverse_async(x, T, T_low, A_LAYOUT: gl.constexpr, SCALED: gl.constexpr, TERMS: gl.constexpr):
    """Issue the wgmma x T, T in shared memory; with TERMS = 2 x (T + T_low).

    SCALED: each row of x is divided by a power of two before it is rounded, so that it fits the range of float16.

    Returns: the product, under way; its A operand, which the caller passes to warpgroup_mma_wait; the scales [rows]
    that the product's rows are to be multiplied with.
    """
    layout: gl.constexpr = x.type.layout
    scales = gl.full([x.shape[0]], 1.0, gl.float32, gl.SliceLayout(1, layout))
    if SCALED:
        largest = gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True)
        exponent = gl.minimum(largest & 0x7F800000, 0x7E800000)
        x *= (0x7F000000 - exponent).to(gl.float32, bitcast=True)[:, None]
        scales = exponent.to(gl.float32, bitcast=True)
    a_x = gl.convert_layout(to_16_bits(x, T.dtype), A_LAYOUT, assert_trivial=True)
    product = gl.zeros([x.shape[0], 64], gl.float32, layout)
    product = warpgroup_mma(a_x, T, product, use_acc=False, is_async=True)
    if TERMS == 2:
        product = warpgroup_mma(a_x, T_low, product, is_async=True)
    return product, a_x, scales
