"""The reverse scan for Hopper GPUs, in Gluon: equations, parameters and results are those of reverse.py.

There all warps of a processor walk in step, and each waits for one chain of products. Here a program is one warp group
with 64 values, so that two have room on a processor and one's products hide the other's waits. The next chunk is copied
into the other of two buffers while this one is worked on; left operands are in registers. It takes operands and scratch
of one 16-bit dtype, chunks of 64, keys up to 128, and k as the erase key.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.kernels.gradients_hopper import LEFT, LINE
from deltazoo.backends.triton.kernels.hopper import (
    COLUMNS,
    J_COPY,
    MMA,
    R_COPY,
    ROWS,
    SHARED_LINE,
    SHARED_TILE,
    T_COPY,
    barrier,
    fetch,
    narrow,
    of_copy,
    widen,
)
from deltazoo.backends.triton.kernels.layout import (
    first_slot,
    held_off,
    segment_of,
    sequence_and_part,
    sequence_bounds,
)

SINGLES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# of a tile [64, 64] of a product a warp keeps its 16 rows, a row's four threads what they hold, and each has 8 columns
STATE_OUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 64],
    )
)  # fmt: skip
# the same once each block of 8 x 8 is transposed: a thread has 8 rows of a column
ACROSS_OUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 16], [0, 32]], [[8, 0], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 64],
    )
)  # fmt: skip


@gluon.jit
def twice(dtype: gl.constexpr, COUNT: gl.constexpr):
    """Tiles [64, 64], each with two buffers."""
    tiles = (gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED_TILE),)
    for _ in gl.static_range(COUNT - 1):
        tiles = tiles + (gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED_TILE),)
    return tiles


@gluon.jit
def lines():
    return gl.allocate_shared_memory(gl.float32, [2, 64], SHARED_LINE)


@gluon.jit
def put_state(base, low, stride: gl.constexpr, rows, columns, MASK_ROWS: gl.constexpr, MASK_COLUMNS: gl.constexpr):
    """Write a narrow tile [64, 64] of a product up to `rows` and `columns`; nothing goes from warp to warp."""
    out = gl.convert_layout(low, STATE_OUT)
    i = gl.arange(0, 64, gl.SliceLayout(1, STATE_OUT))
    j = gl.arange(0, 64, gl.SliceLayout(0, STATE_OUT))
    at = base + (i[:, None] * stride + j[None, :])
    if MASK_ROWS and MASK_COLUMNS:
        gl.store(at, out, mask=(i < rows)[:, None] & (j < columns)[None, :])
    elif MASK_ROWS:
        gl.store(at, out, mask=(i < rows)[:, None])
    elif MASK_COLUMNS:
        gl.store(at, out, mask=(j < columns)[None, :])
    else:
        gl.store(at, out)


@gluon.jit
def put_across(base, tile, stride: gl.constexpr, rows, columns, dtype: gl.constexpr, MASK_COLUMNS: gl.constexpr):
    """Write a float32 tile [64 columns, 64 rows] of a product transposed, up to `rows` and `columns`; nothing goes from
    warp to warp, and a row's 16 columns of a warp are a sector of 32 bytes."""
    low = narrow(tile, dtype)
    # each block of 8 x 8 transposed: of the tile's element [8 a + r, 8 b + c] there is what was [8 a + c, 8 b + r]
    across = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [low], low.dtype, is_pure=True, pack=2
    )
    out = gl.convert_layout(across, ACROSS_OUT)
    x = gl.arange(0, 64, gl.SliceLayout(1, ACROSS_OUT))[:, None]
    y = gl.arange(0, 64, gl.SliceLayout(0, ACROSS_OUT))[None, :]
    row = y // 8 * 8 + x % 8
    column = x // 8 * 8 + y % 8
    inside = row < rows
    if MASK_COLUMNS:
        inside = inside & (column < columns)
    gl.store(base + (row * stride + column), out, mask=inside)


@gluon.jit
def fetch_square(tile, base, FIRST: gl.constexpr):
    """Copy a matrix of squares.py to shared memory: T if FIRST, else P^T; zeros where the other lies."""
    r = gl.arange(0, 4, R_COPY)[:, None, None]
    t = gl.arange(0, 16, T_COPY)[None, :, None]
    j = gl.arange(0, 64, J_COPY)[None, None, :]
    block = j // 8 - (r * 2 + t // 8)
    at = base + (t * 72 + j) + r * (16 * 72)
    if FIRST:
        at += gl.where(block == 0, 64 - j // 8 * 8, 0)
        here = block <= 0
    else:
        here = block >= 0
    async_copy.async_copy_global_to_shared(tile.reshape([4, 16, 64]), at, mask=here)


@gluon.jit
def fetch_chunk(
    q, k, gates, squares, k_s, q_s, T_s, P_s, G_s, before_s, c_s, w_s, stage, row, h, place, left,
    H: gl.constexpr, K: gl.constexpr, DECAY: gl.constexpr, DELTA: gl.constexpr, WRITE: gl.constexpr,
    READ_EARLY: gl.constexpr, TILES: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Copy to shared memory what a chunk takes, but for do."""
    key = (row * H + h) * K
    k_at = of_copy(k + key, H * K)
    q_at = of_copy(q + key, H * K)
    for tk in gl.static_range(TILES):
        fetch(k_s[tk].index(stage), k_at, tk * 64, left, K - tk * 64, True, tk * 64 + 64 > K)
    of_chunk = gates + place * 192
    if DECAY != "none":
        async_copy.async_copy_global_to_shared(G_s.index(stage), of_chunk + gl.arange(0, 64, LINE))
        if READ_EARLY:
            i = gl.arange(0, 64, SINGLES)
            async_copy.async_copy_global_to_shared(before_s.index(stage), of_chunk - 1 + i, mask=i > 0)
    if DELTA:
        square = squares + place * (64 * 72)
        fetch_square(P_s.index(stage), square.to(gl.pointer_type(dtype), bitcast=True), False)
        async_copy.async_copy_global_to_shared(c_s.index(stage), of_chunk + 64 + gl.arange(0, 64, LINE))
    if WRITE:
        async_copy.async_copy_global_to_shared(w_s.index(stage), of_chunk + 128 + gl.arange(0, 64, LINE))
    for tk in gl.static_range(TILES):
        fetch(q_s[tk].index(stage), q_at, tk * 64, left, K - tk * 64, True, tk * 64 + 64 > K)
    if DELTA:
        fetch_square(T_s.index(stage), square, True)


@gluon.jit
def of_end(gates, place, wanted):
    """G at the end of a chunk."""
    return gl.load(gates + place * 192 + 63, mask=wanted, other=0.0)


@gluon.jit
def walk_chunk(
    dS, G_end, q, k, do, gates, squares, dstates, du, dv, scale,
    k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, stage,
    start, length, slot, c, first_chunk, first, first_place, hv, column,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, TILES: gl.constexpr,
    DECAY: gl.constexpr, DELTA: gl.constexpr, WRITE: gl.constexpr, READ_EARLY: gl.constexpr,
    SHARED: gl.constexpr, LEAST: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """One chunk: dS^T before it, and G at the end of the one to follow, whose tiles are on their way then."""
    h = hv // (HV // H)
    left = length - c * 64
    value = ((start + c * 64) * HV + hv) * V + column
    local = (first_place + c - first_chunk).to(gl.int64)
    MASK_V: gl.constexpr = V % 64 != 0

    async_copy.wait_group(0)
    fence_async_shared()
    # dx = scale P'^T do + (e^(Gend - G) k) dS'
    low = (narrow(dS[0], dtype),)
    for tk in gl.static_range(TILES - 1):
        low = low + (narrow(dS[tk + 1], dtype),)
    # here, where no product is under way: else the compiler waits for those that are
    if DECAY != "none":
        end = gl.exp2(G_end)
        dS0 = (dS[0] * end,)
        for tk in gl.static_range(TILES - 1):
            dS0 = dS0 + (dS[tk + 1] * end,)
    else:
        dS0 = dS
    dx = gl.zeros([64, 64], gl.float32, MMA)
    for tk in gl.static_range(TILES):
        left_S = gl.convert_layout(low[tk], LEFT, assert_trivial=True)
        dx = warpgroup_mma(left_S, k_s[tk].index(stage).permute((1, 0)), dx, use_acc=tk > 0, is_async=True)
    do_T = do_s.permute((1, 0))
    left_do = do_T.load(LEFT)
    of_reads = gl.zeros([64, 64], gl.float32, MMA)
    if DELTA:
        of_reads = warpgroup_mma(do_T, P_s.index(stage).permute((1, 0)), of_reads, use_acc=False, is_async=True)
    else:
        P = gl.zeros([64, 64], gl.float32, MMA)
        for tk in gl.static_range(TILES):
            k_T = k_s[tk].index(stage).permute((1, 0))
            P = warpgroup_mma(q_s[tk].index(stage), k_T, P, use_acc=tk > 0, is_async=True)

    G_end_next = G_end
    if DECAY != "none":
        G_end_next = of_end(gates, (slot + c - 1).to(gl.int64) * HV + hv, c > first)
        G = G_s.index(stage).load(COLUMNS)
        G_read = before_s.index(stage).load(COLUMNS) if READ_EARLY else G

    do_tile = widen(gl.convert_layout(left_do, MMA, assert_trivial=True))
    if DECAY != "none":
        do_tile *= (gl.exp2(G_read) * scale)[None, :]
    else:
        do_tile *= scale
    left_doq = gl.convert_layout(narrow(do_tile, dtype), LEFT, assert_trivial=True)
    if not DELTA:
        P = warpgroup_mma_wait(0, deps=[P])
        i = gl.arange(0, 64, ROWS)[:, None]
        j = gl.arange(0, 64, COLUMNS)[None, :]
        if DECAY != "none":
            G_i = before_s.index(stage).load(ROWS) if READ_EARLY else G_s.index(stage).load(ROWS)
            # where a token is not seen this may be no number
            P *= gl.exp2(G_i[:, None] - G[None, :])
        P_s.index(0).store(narrow(gl.where(i >= j + (1 if READ_EARLY else 0), P * scale, 0.0), dtype))
        fence_async_shared()
        barrier()
        of_reads = warpgroup_mma(do_T, P_s.index(0), of_reads, use_acc=False, is_async=True)
    # e^Gend dS' + scale (e^G'' q)^T do
    dS1 = (warpgroup_mma(left_doq, q_s[0].index(stage), dS0[0], is_async=True),)
    for tk in gl.static_range(TILES - 1):
        dS1 = dS1 + (warpgroup_mma(left_doq, q_s[tk + 1].index(stage), dS0[tk + 1], is_async=True),)

    row = start + (c - 1) * 64
    if c > first:
        fetch_chunk(
            q, k, gates, squares, k_s, q_s, T_s, P_s, G_s, before_s, c_s, w_s, 1 - stage,
            row, h, (slot + c - 1).to(gl.int64) * HV + hv, length - (c - 1) * 64,
            H, K, DECAY, DELTA, WRITE, READ_EARLY, TILES, dtype,
        )  # fmt: skip
    at = dstates + ((local * HV + hv) * V + column) * K
    for tk in gl.static_range(TILES):
        put_state(at + tk * 64, low[tk], K, V - column, K - tk * 64, MASK_V, tk * 64 + 64 > K)

    if DECAY != "none":
        fade = gl.exp2(G_end - G_s.index(stage).load(COLUMNS))
    dx, of_reads, _, _ = warpgroup_mma_wait(TILES, deps=[dx, of_reads, do_s, low[0]])
    barrier()  # all are done with do
    if c > first:
        fetch(
            do_s, of_copy(do + ((row * HV + hv) * V + column), HV * V), 0, length - (c - 1) * 64, V - column, True,
            MASK_V,
        )  # fmt: skip
    async_copy.commit_group()
    if DECAY != "none":
        dx = dx * fade[None, :] + of_reads
    else:
        dx += of_reads
    # du = T^T dx
    if DELTA:
        if squares.dtype.element_ty == gl.float16 and dtype != gl.float16:
            largest = gl.max(gl.abs(dx), 1).to(gl.int32, bitcast=True)
            exponent = gl.minimum(largest & 0x7F800000, 0x7E800000)
            dx *= (0x7F000000 - exponent).to(gl.float32, bitcast=True)[:, None]
            up = exponent.to(gl.float32, bitcast=True)[:, None]
        left_x = gl.convert_layout(narrow(dx, squares.dtype.element_ty), LEFT, assert_trivial=True)
        dx = gl.zeros([64, 64], gl.float32, MMA)
        dx = warpgroup_mma(left_x, T_s.index(stage), dx, use_acc=False, is_async=True)
        erase = c_s.index(stage).load(COLUMNS)
    if WRITE:
        write = w_s.index(stage).load(COLUMNS)
        if SHARED:
            write = held_off(write, LEAST)
    if DELTA:
        dx, left_x = warpgroup_mma_wait(0, deps=[dx, left_x])
        if squares.dtype.element_ty == gl.float16 and dtype != gl.float16:
            dx *= up
        # - (c e)^T du
        left_e = gl.convert_layout(narrow(dx * -erase[None, :], dtype), LEFT, assert_trivial=True)
        dS2 = (warpgroup_mma(left_e, k_s[0].index(stage), dS1[0], is_async=True),)
        for tk in gl.static_range(TILES - 1):
            dS2 = dS2 + (warpgroup_mma(left_e, k_s[tk + 1].index(stage), dS1[tk + 1], is_async=True),)
    else:
        dS2 = dS1
    if (DELTA or WRITE) and not SHARED:
        put_across(du + ((local * 64 * HV + hv) * V + column), dx, HV * V, 64, V - column, dtype, MASK_V)
    if WRITE:
        put_across(dv + value, dx * write[None, :], HV * V, left, V - column, dtype, MASK_V)
    else:
        put_across(dv + value, dx, HV * V, left, V - column, dtype, MASK_V)
    if TILES == 2:
        dS_a, dS_b, left_doq = warpgroup_mma_wait(0, deps=[dS2[0], dS2[1], left_doq])
        out = (dS_a, dS_b)
    else:
        dS_a, left_doq = warpgroup_mma_wait(0, deps=[dS2[0], left_doq])
        out = (dS_a,)
    return out, G_end_next


@gluon.jit(do_not_specialize=["T", "segment", "segments", "parts"])
def hopper_reverse_kernel(
    q, k, e, do, gates, fades, squares, carry, dstates, du, dv, begins, ends, cu, scale, T,
    segment, segments, parts,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    K0: gl.constexpr, K1: gl.constexpr, BV: gl.constexpr,
    DECAY: gl.constexpr, DELTA: gl.constexpr, OWN: gl.constexpr, WRITE: gl.constexpr, READ_EARLY: gl.constexpr,
    PACKED: gl.constexpr, SHARED: gl.constexpr, UNIT: gl.constexpr, SPLIT: gl.constexpr,
    LEAST: gl.constexpr, ENDS: gl.constexpr,
    TERMS: gl.constexpr, PREC: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program a (sequence, part, value head, tile of 64 values), as in reverse.py."""
    gl.static_assert(C == 64 and BV == 64 and (K0 == 64 or K0 == 128) and K1 == 0 and TERMS == 1)
    gl.static_assert(not OWN and not ENDS)
    gl.static_assert(dstates.dtype == k.dtype and k.dtype.element_ty.primitive_bitwidth == 16)
    TILES: gl.constexpr = K0 // 64
    V_TILES: gl.constexpr = (V + 63) // 64
    dtype: gl.constexpr = k.dtype.element_ty
    pid = gl.program_id(0)
    hv = pid // V_TILES % HV
    column = pid % V_TILES * 64
    n, part = sequence_and_part(pid // (V_TILES * HV), parts, V_TILES * HV)
    start, length = sequence_bounds(n, cu, T, PACKED)
    slot = first_slot(n, cu, T, C, PACKED)
    first_chunk, last, first_place = segment_of(n, slot, gl.cdiv(length, C), segment, segments, UNIT, PACKED)
    first = first_chunk
    if SPLIT > 0:
        first += part * SPLIT
        last = gl.minimum(first + SPLIT, last)
    if first < last:
        k_s = twice(dtype, TILES)
        q_s = twice(dtype, TILES)
        do_s = gl.allocate_shared_memory(dtype, [64, 64], SHARED_TILE)
        if DELTA:
            P_s = twice(dtype, 1)[0]
            T_s = twice(squares.dtype.element_ty, 1)[0]
        else:
            P_s = gl.allocate_shared_memory(dtype, [1, 64, 64], SHARED_TILE)
            T_s = P_s
        G_s = lines()
        before_s = lines() if READ_EARLY else G_s
        c_s = lines() if DELTA else G_s
        w_s = lines() if WRITE else G_s

        c = last - 1
        row = start + c * 64
        place = (slot + c).to(gl.int64) * HV + hv
        fetch(
            do_s, of_copy(do + ((row * HV + hv) * V + column), HV * V), 0, length - c * 64, V - column, True,
            V % 64 != 0,
        )  # fmt: skip
        fetch_chunk(
            q, k, gates, squares, k_s, q_s, T_s, P_s, G_s, before_s, c_s, w_s, 0,
            row, hv // (HV // H), place, length - c * 64,
            H, K, DECAY, DELTA, WRITE, READ_EARLY, TILES, dtype,
        )  # fmt: skip
        async_copy.commit_group()
        G_end = 0.0
        if DECAY != "none":
            G_end = of_end(gates, place, True)

        at_carry = carry + ((n.to(gl.int64) * HV + hv) * V + column) * K
        if SPLIT > 0:
            at_begin = begins + (((n * parts + part).to(gl.int64) * HV + hv) * V + column) * K
        else:
            at_begin = at_carry
        i = gl.arange(0, 64, ROWS)[:, None]
        j = gl.arange(0, 64, COLUMNS)[None, :]
        dS = (gl.load(at_begin + (i * K + j), mask=(i < V - column) & (j < K), other=0.0),)
        for tk in gl.static_range(TILES - 1):
            at = at_begin + (i * K + j) + (tk + 1) * 64
            dS = dS + (gl.load(at, mask=(i < V - column) & (j < K - (tk + 1) * 64), other=0.0),)
        for back in range(0, last - first):
            dS, G_end = walk_chunk(
                dS, G_end, q, k, do, gates, squares, dstates, du, dv, scale,
                k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, back % 2,
                start, length, slot, last - 1 - back, first_chunk, first, first_place, hv, column,
                H, HV, K, V, TILES, DECAY, DELTA, WRITE, READ_EARLY, SHARED, LEAST, dtype,
            )  # fmt: skip
        if part == 0:
            for tk in gl.static_range(TILES):
                at = at_carry + (i * K + j) + tk * 64
                gl.store(at, dS[tk], mask=(i < V - column) & (j < K - tk * 64))
