"""What the kernels for Hopper GPUs share, in Gluon: layouts, copies, stores, and meetings of warp groups.

Of a product [64, ..] a warp has 16 rows; a tile is [64, 64], of a 16-bit dtype.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
PIECE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
ROWS = gl.constexpr(gl.SliceLayout(1, MMA.value))
COLUMNS = gl.constexpr(gl.SliceLayout(0, MMA.value))
# of a copy by a warp group, as [r, t, j] (of_copy): 64 columns, and 128
COPIES = gl.constexpr(gl.BlockedLayout([4, 1, 8], [1, 4, 8], [1, 4, 1], [2, 1, 0]))
WIDE_COPIES = gl.constexpr(gl.BlockedLayout([8, 1, 8], [1, 2, 16], [1, 4, 1], [2, 1, 0]))
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
LINE = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
SHARED_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
SHARED_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# of a tile [64, 64] of a product: the four threads of a row exchange so much in pairs that each has 4 columns of 16,
# and the four a sector of 32 bytes; the compiler does so by one shuffle a register
OUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]], [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 64],
    )
)  # fmt: skip
WIDE_OUT = gl.constexpr(  # of a tile [64, 128] that two warp groups have side by side
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]], [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [0, 64]], [], [64, 128],
    )
)  # fmt: skip
WALKERS = gl.constexpr(128)  # threads of a warp group

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # before Triton 3.7


@gluon.jit
def find_sequence(place, cu, N, segments, unit, C: gl.constexpr):
    """As in layout.py."""
    lane = gl.arange(0, 32, LANES)
    low = 0
    high = N
    while high - low > 1:
        step = (high - low + 31) // 32
        n = low + lane * step
        inside = n < high
        first = (gl.load(cu + n, mask=inside, other=0) // C + n) // segments + n * unit
        low += (gl.sum(gl.where(inside & (first <= place), 1, 0), 0) - 1) * step
        high = gl.minimum(low + step, high)
    return low


@gluon.jit
def allocate(dtype: gl.constexpr, COUNT: gl.constexpr):
    """Tiles [64, 64], each a buffer of its own: of views of one the compiler takes it that they overlap."""
    first = gl.allocate_shared_memory(dtype, [64, 64], SHARED_TILE)
    tiles = (first,)
    for _ in gl.static_range(COUNT - 1):
        tiles = tiles + (gl.allocate_shared_memory(dtype, [64, 64], SHARED_TILE),)
    return tiles


@gluon.jit
def places_of_copy(R: gl.constexpr, J: gl.constexpr):
    """r, t, j of a tile [R, J] as it is copied: its columns are j, its rows r times how many t there are, and t."""
    layout: gl.constexpr = COPIES if J == 64 else WIDE_COPIES
    TOGETHER: gl.constexpr = 1024 // J
    t = gl.arange(0, TOGETHER, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    j = gl.arange(0, J, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    r = gl.arange(0, R // TOGETHER, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    return r[:, None, None], t[None, :, None], j[None, None, :]


@gluon.jit
def of_copy(base, stride: gl.constexpr, R: gl.constexpr = 64, J: gl.constexpr = 64, zero=0):
    """Where rows and columns of a tile [R, J] are, as [r, t, j]: a thread has all r, which are constants apart."""
    TOGETHER: gl.constexpr = 1024 // J
    r, t, j = places_of_copy(R, J)
    first = base + (t * stride + j + zero * 64)
    return first + r * (TOGETHER * stride)


@gluon.jit
def fetch(tile, at, OFFSET: gl.constexpr, rows, columns, MASK_ROWS: gl.constexpr, MASK_COLUMNS: gl.constexpr):
    """Copy a tile of a row-major matrix to shared memory; zeros from `rows` and `columns` on."""
    R: gl.constexpr = tile.shape[0]
    J: gl.constexpr = tile.shape[1]
    TOGETHER: gl.constexpr = 1024 // J
    r, t, j = places_of_copy(R, J)
    tile = tile.reshape([R // TOGETHER, TOGETHER, J])
    at = at + OFFSET
    in_rows = r * TOGETHER + t < rows
    in_columns = j < columns
    if MASK_ROWS and MASK_COLUMNS:
        async_copy.async_copy_global_to_shared(tile, at, mask=in_rows & in_columns)
    elif MASK_ROWS:
        async_copy.async_copy_global_to_shared(tile, at, mask=in_rows)
    elif MASK_COLUMNS:
        async_copy.async_copy_global_to_shared(tile, at, mask=in_columns)
    else:
        async_copy.async_copy_global_to_shared(tile, at)


@gluon.jit
def widen(x):
    """x as float32: of bfloat16 two from a register, where the compiler takes three instructions."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], gl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def narrow(x, dtype: gl.constexpr):
    """float32 as a 16-bit dtype, two at once: the compiler would round before a select, one by one."""
    if dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, is_pure=True, pack=2)
    else:
        y = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, is_pure=True, pack=2)
    return y


@gluon.jit
def of_warps(x):
    """The sum [4] over the 16 rows of each warp."""
    return gl.sum(gl.reshape(x, [4, 16]), 1)


@gluon.jit
def put(base, tile, stride: gl.constexpr, rows, columns, MASK_COLUMNS: gl.constexpr):
    """Write a float32 tile of a product, [64, 64] or [64, 128], up to `rows` and `columns`, in base's dtype."""
    layout: gl.constexpr = OUT if tile.shape[1] == 64 else WIDE_OUT
    out = gl.convert_layout(narrow(tile, base.dtype.element_ty), layout)
    t = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))[None, :]
    # what differs within a thread are constants
    at = base + ((t // 16 * 16 + t % 8) * stride + (j // 64 * 64 + j % 16))
    at = at + (t // 8 % 2 * (8 * stride) + j // 16 % 4 * 16)
    inside = t < rows
    if MASK_COLUMNS:
        inside = inside & (j < columns)
    gl.store(at, out, mask=inside)


@gluon.jit
def fetch_square(tile, base, FIRST: gl.constexpr, zero=0):
    """Copy a matrix of wy_tiles.py to shared memory: T if FIRST, else P^T; zeros where the other lies."""
    r, t, j = places_of_copy(64, 64)
    j += zero * 64
    block = j // 8 - (r * 2 + t // 8)
    at = base + (t * 72 + j) + r * (16 * 72)
    if FIRST:
        at += gl.where(block == 0, 64 - j // 8 * 8, 0)
        here = block <= 0
    else:
        here = block >= 0
    async_copy.async_copy_global_to_shared(tile.reshape([4, 16, 64]), at, mask=here)


@gluon.jit
def fetch_gates(
    of_chunk, room, stage, DECAY: gl.constexpr, EARLY: gl.constexpr, DELTA: gl.constexpr, WRITE: gl.constexpr
):
    """Copy a chunk's rows of gates to a buffer of `room_of_gates`: G, G before each token if EARLY, c and w."""
    if DECAY != "none":
        async_copy.async_copy_global_to_shared(room.G_s.index(stage), of_chunk + gl.arange(0, 64, LINE))
        if EARLY:
            i = gl.arange(0, 64, LANES)
            async_copy.async_copy_global_to_shared(room.before_s.index(stage), of_chunk - 1 + i, mask=i > 0)
    if DELTA:
        async_copy.async_copy_global_to_shared(room.c_s.index(stage), of_chunk + 64 + gl.arange(0, 64, LINE))
    if WRITE:
        async_copy.async_copy_global_to_shared(room.w_s.index(stage), of_chunk + 128 + gl.arange(0, 64, LINE))


@gluon.jit
def ring(dtype: gl.constexpr, COUNT: gl.constexpr, BUFFERS: gl.constexpr):
    """Tiles [64, 64], each with several buffers."""
    tiles = (gl.allocate_shared_memory(dtype, [BUFFERS, 64, 64], SHARED_TILE),)
    for _ in gl.static_range(COUNT - 1):
        tiles = tiles + (gl.allocate_shared_memory(dtype, [BUFFERS, 64, 64], SHARED_TILE),)
    return tiles


@gluon.jit
def ring_of_lines(BUFFERS: gl.constexpr):
    return gl.allocate_shared_memory(gl.float32, [BUFFERS, 64], SHARED_LINE)


@gluon.jit
def room_of_gates(BUFFERS: gl.constexpr, EARLY: gl.constexpr, DELTA: gl.constexpr, WRITE: gl.constexpr):
    """G_s, before_s, c_s, w_s of a room; what there is not is G_s."""
    G_s = ring_of_lines(BUFFERS)
    before_s = ring_of_lines(BUFFERS) if EARLY else G_s
    c_s = ring_of_lines(BUFFERS) if DELTA else G_s
    w_s = ring_of_lines(BUFFERS) if WRITE else G_s
    return G_s, before_s, c_s, w_s


@gluon.jit
def barriers(BARRIERS: gl.constexpr, COUNT: gl.constexpr):
    """mbarriers, for COUNT arrivals each."""
    out = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BARRIERS):
        mbarrier.init(out.index(i), count=COUNT)
    return out


@gluon.jit
def free(done):
    """Each thread by itself is done with a buffer: it has no copies under way that this would wait for, and unlike
    mbarrier.arrive nothing has the compiler put a barrier of the warp group before it, and another after it."""
    async_copy.mbarrier_arrive(done, increment_count=False)


@gluon.jit
def tell(came, UNDER_WAY: gl.constexpr, wanted):
    """That all copies but the last `UNDER_WAY` groups have come."""
    async_copy.wait_group(UNDER_WAY)
    fence_async_shared()
    barrier()
    mbarrier.arrive(came, count=1, pred=wanted)


@gluon.jit
def times_inverse(x, T, left: gl.constexpr, SCALED: gl.constexpr):
    """x T under way, its operand in the layout `left`, and what its rows are to be multiplied with.

    SCALED: meanwhile each row is divided by a power of 2."""
    layout: gl.constexpr = x.type.layout
    up = gl.full([x.shape[0]], 1.0, gl.float32, gl.SliceLayout(1, layout))
    if SCALED:
        largest = gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True)
        exponent = gl.minimum(largest & 0x7F800000, 0x7E800000)
        x *= (0x7F000000 - exponent).to(gl.float32, bitcast=True)[:, None]
        up = exponent.to(gl.float32, bitcast=True)
    left_x = gl.convert_layout(narrow(x, T.dtype), left, assert_trivial=True)
    product = gl.zeros([x.shape[0], 64], gl.float32, layout)
    product = warpgroup_mma(left_x, T, product, use_acc=False, is_async=True)
    return product, left_x, up
