"""The reverse scan for Hopper GPUs, one program of 128 values a processor, in Gluon: equations, parameters and
results are those of reverse.py.

Two warp groups, each with 64 of the values and its half of dS^T in registers, share the tiles of a chunk in shared
memory and walk out of step; a third copies chunk after chunk into a ring of buffers. Of each buffer three mbarriers
tell that k, do, P^T and the gates have come, that q and T have, and that both have done with all of it. It takes
operands and scratch of one 16-bit dtype, chunks of 64, keys up to 128, k as the erase key, and a DELTA kind.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltazoo.backends.triton.kernels.gradients_hopper import LEFT, LINE
from deltazoo.backends.triton.kernels.hopper import (
    COLUMNS,
    MMA,
    ROWS,
    SHARED_LINE,
    SHARED_TILE,
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
from deltazoo.backends.triton.kernels.reverse_hopper import SINGLES, fetch_square, of_end, put_across, put_state

BUFFERS = gl.constexpr(3)
COPIERS = gl.constexpr(128)  # threads of the warp group that copies
WALKERS = gl.constexpr(128)  # threads of each of the two that compute
# who has the products see what was copied: the copying warp group, which tells of a half chunk once the next half is
# under way, or else those that compute, which are told by the copies themselves
COPIER_FENCES = gl.constexpr(True)


@gluon.jit
def ring(dtype: gl.constexpr, COUNT: gl.constexpr):
    """Tiles [64, 64], each with all buffers."""
    tiles = (gl.allocate_shared_memory(dtype, [BUFFERS, 64, 64], SHARED_TILE),)
    for _ in gl.static_range(COUNT - 1):
        tiles = tiles + (gl.allocate_shared_memory(dtype, [BUFFERS, 64, 64], SHARED_TILE),)
    return tiles


@gluon.jit
def ring_of_lines():
    return gl.allocate_shared_memory(gl.float32, [BUFFERS, 64], SHARED_LINE)


@gluon.jit
def ring_of_barriers(COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


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
def next_buffer(stage, phase):
    last = stage == BUFFERS - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def copy_chunks(
    q, k, do, gates, squares, k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, came, rest_came, done,
    start, length, slot, first, last, hv, column,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, TILES: gl.constexpr,
    DECAY: gl.constexpr, WRITE: gl.constexpr, READ_EARLY: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The copying warp group: the chunks from the last to the first, each once its buffer is free."""
    h = hv // (HV // H)
    MASK_V: gl.constexpr = V % 128 != 0
    stage = 0
    phase = 1
    told = 0
    for back in range(0, last - first):
        c = last - 1 - back
        left = length - c * 64
        row = start + c * 64
        place = (slot + c).to(gl.int64) * HV + hv
        key = (row * H + h) * K
        k_at = of_copy(k + key, H * K)
        mbarrier.wait(done.index(stage), phase)
        for tk in gl.static_range(TILES):
            fetch(k_s[tk].index(stage), k_at, tk * 64, left, K - tk * 64, True, tk * 64 + 64 > K)
        do_at = of_copy(do + ((row * HV + hv) * V + column), HV * V)
        for half in gl.static_range(2):
            fetch(do_s[half].index(stage), do_at, half * 64, left, V - column - half * 64, True, MASK_V)
        square = squares + place * (64 * 72)
        fetch_square(P_s.index(stage), square.to(gl.pointer_type(dtype), bitcast=True), False)
        of_chunk = gates + place * 192
        if DECAY != "none":
            async_copy.async_copy_global_to_shared(G_s.index(stage), of_chunk + gl.arange(0, 64, LINE))
            if READ_EARLY:
                i = gl.arange(0, 64, SINGLES)
                async_copy.async_copy_global_to_shared(before_s.index(stage), of_chunk - 1 + i, mask=i > 0)
        async_copy.async_copy_global_to_shared(c_s.index(stage), of_chunk + 64 + gl.arange(0, 64, LINE))
        if WRITE:
            async_copy.async_copy_global_to_shared(w_s.index(stage), of_chunk + 128 + gl.arange(0, 64, LINE))
        if COPIER_FENCES:
            async_copy.commit_group()
            tell(rest_came.index(told), 1, back > 0)
        else:
            async_copy.mbarrier_arrive(came.index(stage), increment_count=False)
        q_at = of_copy(q + key, H * K)
        for tk in gl.static_range(TILES):
            fetch(q_s[tk].index(stage), q_at, tk * 64, left, K - tk * 64, True, tk * 64 + 64 > K)
        fetch_square(T_s.index(stage), square, True)
        if COPIER_FENCES:
            async_copy.commit_group()
            tell(came.index(stage), 1, True)
        else:
            async_copy.mbarrier_arrive(rest_came.index(stage), increment_count=False)
        told = stage
        stage, phase = next_buffer(stage, phase)
    if COPIER_FENCES:
        tell(rest_came.index(told), 0, True)


@gluon.jit
def walk_chunk(
    dS, G_end, gates, squares, dstates, du, dv, scale,
    k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, came, rest_came, done, stage, phase,
    start, length, slot, c, first_chunk, first, first_place, hv, column,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, TILES: gl.constexpr,
    DECAY: gl.constexpr, WRITE: gl.constexpr, READ_EARLY: gl.constexpr,
    SHARED: gl.constexpr, LEAST: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """One chunk of one of the two warp groups: dS^T before it, and G at the end of the one to follow."""
    left = length - c * 64
    value = ((start + c * 64) * HV + hv) * V + column
    local = (first_place + c - first_chunk).to(gl.int64)
    MASK_V: gl.constexpr = V % 128 != 0

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
    mbarrier.wait(came.index(stage), phase)
    if not COPIER_FENCES:
        fence_async_shared()
    dx = gl.zeros([64, 64], gl.float32, MMA)
    for tk in gl.static_range(TILES):
        left_S = gl.convert_layout(low[tk], LEFT, assert_trivial=True)
        dx = warpgroup_mma(left_S, k_s[tk].index(stage).permute((1, 0)), dx, use_acc=tk > 0, is_async=True)
    do_T = do_s.index(stage).permute((1, 0))
    left_do = do_T.load(LEFT)
    of_reads = gl.zeros([64, 64], gl.float32, MMA)
    of_reads = warpgroup_mma(do_T, P_s.index(stage).permute((1, 0)), of_reads, use_acc=False, is_async=True)

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
    mbarrier.wait(rest_came.index(stage), phase)
    if not COPIER_FENCES:
        fence_async_shared()
    # e^Gend dS' + scale (e^G'' q)^T do
    dS1 = (warpgroup_mma(left_doq, q_s[0].index(stage), dS0[0], is_async=True),)
    for tk in gl.static_range(TILES - 1):
        dS1 = dS1 + (warpgroup_mma(left_doq, q_s[tk + 1].index(stage), dS0[tk + 1], is_async=True),)

    at = dstates + ((local * HV + hv) * V + column) * K
    for tk in gl.static_range(TILES):
        put_state(at + tk * 64, low[tk], K, V - column, K - tk * 64, MASK_V, tk * 64 + 64 > K)

    if DECAY != "none":
        fade = gl.exp2(G_end - G_s.index(stage).load(COLUMNS))
    dx, of_reads, _ = warpgroup_mma_wait(TILES, deps=[dx, of_reads, low[0]])
    if DECAY != "none":
        dx = dx * fade[None, :] + of_reads
    else:
        dx += of_reads
    # du = T^T dx
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
    dx, left_x = warpgroup_mma_wait(0, deps=[dx, left_x])
    if squares.dtype.element_ty == gl.float16 and dtype != gl.float16:
        dx *= up
    # - (c e)^T du
    left_e = gl.convert_layout(narrow(dx * -erase[None, :], dtype), LEFT, assert_trivial=True)
    dS2 = (warpgroup_mma(left_e, k_s[0].index(stage), dS1[0], is_async=True),)
    for tk in gl.static_range(TILES - 1):
        dS2 = dS2 + (warpgroup_mma(left_e, k_s[tk + 1].index(stage), dS1[tk + 1], is_async=True),)
    if not SHARED:
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
    free(done.index(stage))
    return out, G_end_next


@gluon.jit
def walk_back(
    gates, squares, carry, dstates, du, dv, begins, scale,
    k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, came, rest_came, done,
    start, length, slot, first_chunk, first, last, first_place, n, part, parts, hv, first_column, HALF: gl.constexpr,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, TILES: gl.constexpr, DECAY: gl.constexpr,
    WRITE: gl.constexpr, READ_EARLY: gl.constexpr, SHARED: gl.constexpr, SPLIT: gl.constexpr,
    LEAST: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """One of the two warp groups that compute, with the values from `first_column` + 64 HALF on."""
    column = first_column + HALF * 64
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
    G_end = 0.0
    if DECAY != "none":
        G_end = of_end(gates, (slot + last - 1).to(gl.int64) * HV + hv, True)
    stage = 0
    phase = 0
    for back in range(0, last - first):
        dS, G_end = walk_chunk(
            dS, G_end, gates, squares, dstates, du, dv, scale,
            k_s, q_s, do_s[HALF], T_s, P_s, G_s, before_s, c_s, w_s, came, rest_came, done, stage, phase,
            start, length, slot, last - 1 - back, first_chunk, first, first_place, hv, column,
            HV, K, V, TILES, DECAY, WRITE, READ_EARLY, SHARED, LEAST, dtype,
        )  # fmt: skip
        stage, phase = next_buffer(stage, phase)
    if part == 0:
        for tk in gl.static_range(TILES):
            at = at_carry + (i * K + j) + tk * 64
            gl.store(at, dS[tk], mask=(i < V - column) & (j < K - tk * 64))


@gluon.jit(do_not_specialize=["T", "segment", "segments", "parts"])
def pair_reverse_kernel(
    q, k, e, do, gates, fades, squares, carry, dstates, du, dv, begins, ends, cu, scale, T,
    segment, segments, parts,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    K0: gl.constexpr, K1: gl.constexpr, BV: gl.constexpr,
    DECAY: gl.constexpr, DELTA: gl.constexpr, OWN: gl.constexpr, WRITE: gl.constexpr, READ_EARLY: gl.constexpr,
    PACKED: gl.constexpr, SHARED: gl.constexpr, UNIT: gl.constexpr, SPLIT: gl.constexpr,
    LEAST: gl.constexpr, ENDS: gl.constexpr,
    TERMS: gl.constexpr, PREC: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program a (sequence, part, value head, tile of 128 values), as in reverse.py.

    To be launched with 4 warps, which become 12, and 168 registers a thread, which they share out anew."""
    gl.static_assert(DELTA and C == 64 and BV == 128 and (K0 == 64 or K0 == 128) and K1 == 0 and TERMS == 1)
    gl.static_assert(not OWN and not ENDS)
    gl.static_assert(dstates.dtype == k.dtype and k.dtype.element_ty.primitive_bitwidth == 16)
    TILES: gl.constexpr = K0 // 64
    V_TILES: gl.constexpr = (V + 127) // 128
    dtype: gl.constexpr = k.dtype.element_ty
    pid = gl.program_id(0)
    hv = pid // V_TILES % HV
    column = pid % V_TILES * 128
    n, part = sequence_and_part(pid // (V_TILES * HV), parts, V_TILES * HV)
    start, length = sequence_bounds(n, cu, T, PACKED)
    slot = first_slot(n, cu, T, C, PACKED)
    first_chunk, last, first_place = segment_of(n, slot, gl.cdiv(length, C), segment, segments, UNIT, PACKED)
    first = first_chunk
    if SPLIT > 0:
        first += part * SPLIT
        last = gl.minimum(first + SPLIT, last)
    if first < last:
        k_s = ring(dtype, TILES)
        q_s = ring(dtype, TILES)
        do_s = ring(dtype, 2)
        P_s = ring(dtype, 1)[0]
        T_s = ring(squares.dtype.element_ty, 1)[0]
        G_s = ring_of_lines()
        before_s = ring_of_lines() if READ_EARLY else G_s
        c_s = ring_of_lines()
        w_s = ring_of_lines() if WRITE else G_s
        came = ring_of_barriers(1 if COPIER_FENCES else COPIERS)
        rest_came = ring_of_barriers(1 if COPIER_FENCES else COPIERS)
        done = ring_of_barriers(2 * WALKERS)
        gl.warp_specialize(
            [
                (
                    walk_back,
                    (
                        gates, squares, carry, dstates, du, dv, begins, scale,
                        k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, came, rest_came, done,
                        start, length, slot, first_chunk, first, last, first_place, n, part, parts, hv, column, 0,
                        HV, K, V, TILES, DECAY, WRITE, READ_EARLY, SHARED, SPLIT, LEAST, dtype,
                    ),
                ),
                (
                    walk_back,
                    (
                        gates, squares, carry, dstates, du, dv, begins, scale,
                        k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, came, rest_came, done,
                        start, length, slot, first_chunk, first, last, first_place, n, part, parts, hv, column, 1,
                        HV, K, V, TILES, DECAY, WRITE, READ_EARLY, SHARED, SPLIT, LEAST, dtype,
                    ),
                ),
                (
                    copy_chunks,
                    (
                        q, k, do, gates, squares,
                        k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, came, rest_came, done,
                        start, length, slot, first, last, hv, column,
                        H, HV, K, V, TILES, DECAY, WRITE, READ_EARLY, dtype,
                    ),
                ),
            ],
            [4, 4],
            [232, 40],
        )  # fmt: skip
