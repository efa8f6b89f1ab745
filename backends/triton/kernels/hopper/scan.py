"""The scan over chunks for Hopper GPUs, in Gluon: equations, parameters and results are those of scan.py.

A program has 128 values, and a processor to itself. Two warp groups, each with 64 of the values and its half of S^T in
registers, share the tiles of a chunk in shared memory and walk out of step; a third copies chunk after chunk into a
ring of buffers. Of each buffer three mbarriers tell that k, q and the gates have come, that v and the wy_tiles have, and
that both have done with all of it. What goes to memory is turned in a tile of shared memory that a group has for
itself, with one barrier of the group between. It takes operands and scratch of one 16-bit dtype, chunks of 64, keys up
to 256, k as the erase key, and modes "output" and "replay".
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

from deltazoo.backends.triton.kernels.hopper.common import (
    COLUMNS,
    LEFT,
    MMA,
    ROWS,
    barrier,
    fetch,
    fetch_gates,
    fetch_square,
    free,
    narrow,
    of_copy,
    tell,
    times_inverse,
    widen,
)
from deltazoo.backends.triton.kernels.hopper.scan_traits import Memory, Stand, kind_of, room_of
from deltazoo.backends.triton.kernels.hopper.state_copies import load_checkpoint, load_state, put_tile, store_final
from deltazoo.backends.triton.kernels.layout import chunk_range, sequence_and_segment


@gluon.jit
def next_buffer(stage, phase, kind: gl.constexpr):
    last = stage == kind.BUFFERS - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def copy_chunks(q, k, v, gates, wy_tiles, room, slot, stand, kind: gl.constexpr, BACK: gl.constexpr):
    """The copying warp group: the chunks from the first to the last, if BACK the other way, each once its buffer is
    free."""
    H: gl.constexpr = kind.H
    HV: gl.constexpr = kind.HV
    K: gl.constexpr = kind.K
    V: gl.constexpr = kind.V
    NK: gl.constexpr = kind.NK
    DECAY: gl.constexpr = kind.DECAY
    DELTA: gl.constexpr = kind.DELTA
    WRITE: gl.constexpr = kind.WRITE
    EARLY: gl.constexpr = kind.EARLY
    OUTPUT: gl.constexpr = kind.OUTPUT
    dtype: gl.constexpr = kind.dtype
    # that the rest has come is told when the next chunk is on its way, where a buffer is free for that
    LATE: gl.constexpr = kind.BUFFERS > 2
    h = stand.hv // (HV // H)
    column = stand.pair * 128
    MASK_V: gl.constexpr = V % 128 != 0
    stage = 0
    phase = 1
    told = 0
    for walked in range(stand.first, stand.last):
        c = stand.first + stand.last - 1 - walked if BACK else walked
        left = stand.length - c * 64
        row = stand.start + c * 64
        place = (slot + c).to(gl.int64) * HV + stand.hv
        key = (row * H + h) * K
        k_at = of_copy(k + key, H * K)
        mbarrier.wait(room.done.index(stage), phase)
        for tk in gl.static_range(NK):
            fetch(room.k_s[tk].index(stage), k_at, tk * 64, left, K - tk * 64, True, tk * 64 + 64 > K)
        fetch_gates(gates + place * 192, room, stage, DECAY, EARLY, DELTA, WRITE)
        if OUTPUT:
            q_at = of_copy(q + key, H * K)
            for tk in gl.static_range(NK):
                fetch(room.q_s[tk].index(stage), q_at, tk * 64, left, K - tk * 64, True, tk * 64 + 64 > K)
        async_copy.commit_group()
        if LATE:
            tell(room.rest_came.index(told), 1, walked > stand.first)
        v_at = of_copy(v + ((row * HV + stand.hv) * V + column), HV * V)
        for half in gl.static_range(2):
            fetch(room.v_s[half].index(stage), v_at, half * 64, left, V - column - half * 64, True, MASK_V)
        if DELTA:
            square = wy_tiles + place * (64 * 72)
            fetch_square(room.T_s.index(stage), square, True)
            if OUTPUT:
                fetch_square(room.P_s.index(stage), square.to(gl.pointer_type(dtype), bitcast=True), False)
        async_copy.commit_group()
        tell(room.came.index(stage), 1, True)
        if not LATE:
            tell(room.rest_came.index(stage), 0, True)
        told = stage
        stage, phase = next_buffer(stage, phase, kind)
    if LATE:
        tell(room.rest_came.index(told), 0, stand.first < stand.last)


@gluon.jit
def read_by_tiles(S, room, state_s, stage, kind: gl.constexpr):
    """S^T k^T and S^T q^T, a tile of 64 keys after the other, for registers do not hold S^T in 16 bits beside it. A
    replay leaves the tiles in shared memory."""
    NK: gl.constexpr = kind.NK
    OUTPUT: gl.constexpr = kind.OUTPUT
    y = gl.zeros([64, 64], gl.float32, MMA)
    out = gl.zeros([64, 64], gl.float32, MMA)
    for tk in gl.static_range(NK):
        low = narrow(S[tk], kind.dtype)
        left = gl.convert_layout(low, LEFT, assert_trivial=True)
        if kind.DELTA:
            k_T = room.k_s[tk].index(stage).permute((1, 0))
            y = warpgroup_mma(left, k_T, y, use_acc=tk > 0, is_async=True)
        if OUTPUT:
            q_T = room.q_s[tk].index(stage).permute((1, 0))
            out = warpgroup_mma(left, q_T, out, use_acc=tk > 0, is_async=True)
        else:
            state_s[tk].store(low)
        if kind.DELTA and OUTPUT:
            y, out, left = warpgroup_mma_wait(0, deps=[y, out, left])
        elif kind.DELTA:
            y, left = warpgroup_mma_wait(0, deps=[y, left])
        elif OUTPUT:
            out, left = warpgroup_mma_wait(0, deps=[out, left])
    return y, out


@gluon.jit
def begin_reads(room, stage, kind: gl.constexpr):
    """k q^T of a chunk, under way."""
    NK: gl.constexpr = kind.NK
    P = gl.zeros([64, 64], gl.float32, MMA)
    for tk in gl.static_range(NK):
        q_T = room.q_s[tk].index(stage).permute((1, 0))
        P = warpgroup_mma(room.k_s[tk].index(stage), q_T, P, use_acc=tk > 0, is_async=True)
    return P


@gluon.jit
def put_reads(P, UNDER_WAY: gl.constexpr, P_s, room, stage, scale, kind: gl.constexpr):
    """P^T [written, read] of a chunk, of k q^T, to the warp group's tile; so many products were begun after that."""
    P = warpgroup_mma_wait(UNDER_WAY, deps=[P])
    i = gl.arange(0, 64, COLUMNS)[None, :]
    j = gl.arange(0, 64, ROWS)[:, None]
    if kind.DECAY != "none":
        # where a token is not seen this may be no number
        G_i = room.before_s.index(stage).load(COLUMNS) if kind.EARLY else room.G_s.index(stage).load(COLUMNS)
        P *= gl.exp2(G_i[None, :] - room.G_s.index(stage).load(ROWS)[:, None])
    P_s.index(0).store(narrow(gl.where(j + (1 if kind.READ_EARLY else 0) <= i, P * scale, 0.0), kind.dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def walk_chunk(
    S, memory, scale, room, P_s, tile, state_s, stage, phase, c, column, stand, HALF: gl.constexpr, kind: gl.constexpr
):
    """One chunk of one of the two warp groups: S^T after it."""
    HV: gl.constexpr = kind.HV
    K: gl.constexpr = kind.K
    V: gl.constexpr = kind.V
    NK: gl.constexpr = kind.NK
    DECAY: gl.constexpr = kind.DECAY
    DELTA: gl.constexpr = kind.DELTA
    EARLY: gl.constexpr = kind.EARLY
    OUTPUT: gl.constexpr = kind.OUTPUT
    CHECKPOINT_EVERY: gl.constexpr = kind.CHECKPOINT_EVERY
    dtype: gl.constexpr = kind.dtype
    MASK_V: gl.constexpr = V % 128 != 0
    left_v = V - column
    local = (stand.first_place + c - stand.begins).to(gl.int64)

    WIDE: gl.constexpr = NK > 2  # then S^T is read by tiles
    low = (narrow(S[0], dtype),)
    left = (gl.convert_layout(low[0], LEFT, assert_trivial=True),)
    for tk in gl.static_range(0 if WIDE else NK - 1):
        low = low + (narrow(S[tk + 1], dtype),)
        left = left + (gl.convert_layout(low[tk + 1], LEFT, assert_trivial=True),)
    if OUTPUT and CHECKPOINT_EVERY > 0:
        if (c > 0) & (c % CHECKPOINT_EVERY == 0):
            at = (
                memory.checkpoints
                + (((stand.checkpoint + c // CHECKPOINT_EVERY).to(gl.int64) * HV + stand.hv) * V + column) * K
            )
            for tk in gl.static_range(NK):
                tile.store(narrow(S[tk], dtype) if WIDE else low[tk])
                put_tile(at + tk * 64, tile, K, left_v, K - tk * 64, MASK_V, tk * 64 + 64 > K)

    mbarrier.wait(room.came.index(stage), phase)
    y = gl.zeros([64, 64], gl.float32, MMA)
    out = gl.zeros([64, 64], gl.float32, MMA)
    if OUTPUT and not DELTA:
        P = begin_reads(room, stage, kind)
    if DELTA and not WIDE:
        for tk in gl.static_range(NK):
            y = warpgroup_mma(left[tk], room.k_s[tk].index(stage).permute((1, 0)), y, use_acc=tk > 0, is_async=True)
    if OUTPUT and not WIDE:
        for tk in gl.static_range(NK):
            out = warpgroup_mma(left[tk], room.q_s[tk].index(stage).permute((1, 0)), out, use_acc=tk > 0, is_async=True)

    if OUTPUT and not DELTA:
        put_reads(P, 0 if WIDE else NK, P_s, room, stage, scale, kind)
    if WIDE:
        y, out = read_by_tiles(S, room, state_s, stage, kind)
    if not OUTPUT:
        at = memory.states + ((local * HV + stand.hv) * V + column) * K
        rows = gl.where(c >= stand.first_kept, left_v, 0)
        for tk in gl.static_range(0 if WIDE else NK):
            state_s[tk].store(low[tk])
        for tk in gl.static_range(NK):
            put_tile(at + tk * 64, state_s[tk], K, rows, K - tk * 64, True, tk * 64 + 64 > K)

    # u = w v - c S0^T e,  x = T u
    mbarrier.wait(room.rest_came.index(stage), phase)
    x = widen(room.v_s[HALF].index(stage).permute((1, 0)).load(MMA))
    if kind.WRITE:
        x *= room.w_s.index(stage).load(COLUMNS)[None, :]
    if DELTA:
        erase = room.c_s.index(stage).load(COLUMNS)
        if not WIDE:
            y, _, _ = warpgroup_mma_wait(NK if OUTPUT else 0, deps=[y, left[0], left[NK - 1]])
        x -= y * erase[None, :]
        SCALED: gl.constexpr = room.T_s.dtype == gl.float16
        x, left_u, up = times_inverse(x, room.T_s.index(stage).permute((1, 0)), LEFT, SCALED)
    if DECAY != "none":
        G = room.G_s.index(stage).load(COLUMNS)
        G_end = room.G_s.index(stage).slice(63, 1).load(COLUMNS)
        end = gl.exp2(G_end)[None, :]
        S0 = (S[0] * end,)
        for tk in gl.static_range(NK - 1):
            S0 = S0 + (S[tk + 1] * end,)
        fade = gl.exp2(G_end - G)
    else:
        S0 = S
    # o = scale e^G'' S0^T q + P x
    if OUTPUT:
        if not WIDE:
            out, _, _ = warpgroup_mma_wait(1 if DELTA else 0, deps=[out, left[0], left[NK - 1]])
        if DECAY != "none":
            G_read = room.before_s.index(stage).load(COLUMNS) if EARLY else G
            out *= (gl.exp2(G_read) * scale)[None, :]
        else:
            out *= scale
    if DELTA:
        x, left_u = warpgroup_mma_wait(0, deps=[x, left_u])
        if SCALED:
            x *= up[:, None]
    x_low = narrow(x, dtype)
    left_x = gl.convert_layout(x_low, LEFT, assert_trivial=True)
    if DECAY != "none":
        left_k = gl.convert_layout(narrow(x * fade[None, :], dtype), LEFT, assert_trivial=True)
    else:
        left_k = left_x
    if OUTPUT:
        out = warpgroup_mma(left_x, P_s.index(stage if DELTA else 0), out, is_async=True)
    # S' = e^Gend S0 + (e^(Gend - G) k)^T x
    S1 = (warpgroup_mma(left_k, room.k_s[0].index(stage), S0[0], is_async=True),)
    for tk in gl.static_range(NK - 1):
        S1 = S1 + (warpgroup_mma(left_k, room.k_s[tk + 1].index(stage), S0[tk + 1], is_async=True),)
    if OUTPUT:
        out, left_x = warpgroup_mma_wait(NK, deps=[out, left_x])
        tile.permute((1, 0)).store(narrow(out, dtype))
        at = memory.o + (((stand.start + c * 64) * HV + stand.hv) * V + column)
        put_tile(at, tile, HV * V, stand.length - c * 64, left_v, True, MASK_V)
    elif DELTA:
        tile.permute((1, 0)).store(x_low)
        at = memory.xs + ((local * 64 * HV + stand.hv) * V + column)
        put_tile(at, tile, HV * V, gl.where(c >= stand.first_kept, 64, 0), left_v, True, MASK_V)
    done = warpgroup_mma_wait(0, deps=S1 + (left_k,))
    new = (done[0],)
    for tk in gl.static_range(NK - 1):
        new = new + (done[tk + 1],)
    free(room.done.index(stage))
    return new


@gluon.jit
def walk(memory, scale, room, P_s, tile, state_s, stand, HALF: gl.constexpr, kind: gl.constexpr):
    """One of the two warp groups that compute, with the values from 128 `pair` + 64 HALF on, and a P of its own where
    it makes that itself."""
    HV: gl.constexpr = kind.HV
    K: gl.constexpr = kind.K
    V: gl.constexpr = kind.V
    NK: gl.constexpr = kind.NK
    CHECKPOINT_EVERY: gl.constexpr = kind.CHECKPOINT_EVERY
    STATE: gl.constexpr = kind.STATE
    SPLIT: gl.constexpr = kind.SPLIT
    OUTPUT: gl.constexpr = kind.OUTPUT
    column = stand.pair * 128 + HALF * 64
    left_v = V - column
    at_state = (stand.n.to(gl.int64) * HV + stand.hv) * K * V + column
    S = (gl.zeros([64, 64], gl.float32, MMA),)
    for _ in gl.static_range(NK - 1):
        S = S + (gl.zeros([64, 64], gl.float32, MMA),)
    if OUTPUT and SPLIT > 0:
        at = memory.starts + (((stand.n * stand.parts + stand.part).to(gl.int64) * HV + stand.hv) * V + column) * K
        S = load_state(at, tile, K, K, left_v, NK, False)
    elif OUTPUT:
        if STATE:
            S = load_state(memory.state + at_state, tile, K, V, left_v, NK, True)
    elif stand.first > 0:
        at = (
            memory.checkpoints
            + (((stand.checkpoint + stand.first // CHECKPOINT_EVERY).to(gl.int64) * HV + stand.hv) * V + column) * K
        )
        S = load_checkpoint(at, state_s, K, left_v, NK, V % 128 != 0)
    elif STATE:
        S = load_state(memory.state + at_state, tile, K, V, left_v, NK, True)
    barrier()  # here once: else the compiler has one in the loop, for the sake of its first round
    stage = 0
    phase = 0
    for c in range(stand.first, stand.last):
        S = walk_chunk(S, memory, scale, room, P_s, tile, state_s, stage, phase, c, column, stand, HALF, kind)
        stage, phase = next_buffer(stage, phase, kind)
    if OUTPUT:
        if stand.is_last:
            store_final(memory.final + at_state, S, tile, K, V, left_v, NK)


@gluon.jit(do_not_specialize=["T", "segment", "segments", "parts"])
def hopper_scan_kernel(
    q, k, e, v, gates, decay_bounds, wy_tiles, state, o, final, checkpoints, states, xs, starts, ends, cu,
    scale, T, segment, segments, parts,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    K0: gl.constexpr, K1: gl.constexpr, BV: gl.constexpr,
    DECAY: gl.constexpr, DELTA: gl.constexpr, OWN: gl.constexpr, WRITE: gl.constexpr, STATE: gl.constexpr,
    READ_EARLY: gl.constexpr, PACKED: gl.constexpr, CHECKPOINT_EVERY: gl.constexpr, UNIT: gl.constexpr,
    SPLIT: gl.constexpr, MODE: gl.constexpr, TERMS: gl.constexpr, PREC: gl.constexpr,
    STAGES: gl.constexpr, TILED: gl.constexpr,
):  # fmt: skip
    """One program a (sequence, part, value head, tile of 128 values), as in scan.py.

    To be launched with 4 warps, which become 12, and 168 registers a thread, which they share out anew."""
    OUTPUT: gl.constexpr = MODE == "output"
    gl.static_assert(OUTPUT or (MODE == "replay" and CHECKPOINT_EVERY > 0))
    gl.static_assert(C == 64 and BV == 128 and K <= K0 + K1 and TERMS == 1)
    gl.static_assert(not OWN and not TILED and K % 8 == 0 and V % 8 == 0)
    gl.static_assert(k.dtype.element_ty.primitive_bitwidth == 16)
    gl.static_assert(CHECKPOINT_EVERY == 0 or checkpoints.dtype == k.dtype)
    gl.static_assert(OUTPUT or states.dtype == k.dtype)
    if STATE:
        gl.static_assert(state.dtype.element_ty == gl.float32)
    NK: gl.constexpr = (K0 + K1) // 64
    BUFFERS: gl.constexpr = 3 if NK <= 2 else 2
    V_TILES: gl.constexpr = (V + 127) // 128
    EARLY: gl.constexpr = OUTPUT and READ_EARLY and DECAY != "none"
    dtype: gl.constexpr = k.dtype.element_ty
    pid = gl.program_id(0)
    pair = pid % V_TILES
    hv = pid // V_TILES % HV
    n, part = sequence_and_segment(pid // (V_TILES * HV), parts, V_TILES * HV)
    start, length, slot, begins, first_place, first, last = chunk_range(
        n, part, cu, T, segment, segments, C, UNIT, SPLIT, PACKED
    )
    chunks = gl.cdiv(length, C)
    first_kept = first
    wanted = first < last
    is_last = part == 0
    if OUTPUT:
        if SPLIT > 0:
            is_last = part == gl.maximum(chunks - 1, 0) // SPLIT
        wanted = wanted | is_last
    else:
        first = first // CHECKPOINT_EVERY * CHECKPOINT_EVERY
    checkpoint = 0
    if CHECKPOINT_EVERY > 0:
        # of the first one, before any chunk: the state there is an operand, and is not kept
        checkpoint = (slot // CHECKPOINT_EVERY if PACKED else n * ((chunks - 1) // CHECKPOINT_EVERY)) - 1
    if wanted:
        kind: gl.constexpr = kind_of(
            H,
            HV,
            K,
            V,
            NK,
            BUFFERS,
            DECAY,
            DELTA,
            WRITE,
            STATE,
            EARLY,
            READ_EARLY,
            CHECKPOINT_EVERY,
            SPLIT,
            OUTPUT,
            dtype,
        )
        T_dtype: gl.constexpr = wy_tiles.dtype.element_ty if DELTA else dtype
        room, P_s, tiles, states_s = room_of(kind, T_dtype)
        memory = Memory(state, o, final, checkpoints, states, xs, starts)
        stand = Stand(
            start, length, begins, first, first_kept, last, first_place, checkpoint, n, part, parts, is_last, hv, pair
        )
        gl.warp_specialize(
            [
                (walk, (memory, scale, room, P_s[0], tiles[0], states_s[0], stand, 0, kind)),
                (walk, (memory, scale, room, P_s[1], tiles[1], states_s[1], stand, 1, kind)),
                (copy_chunks, (q, k, v, gates, wy_tiles, room, slot, stand, kind, False)),
            ],
            [4, 4],
            [240, 24] if NK > 3 else [232, 40],
        )
