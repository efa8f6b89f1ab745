"""The scan over chunks for Hopper GPUs, in Gluon: equations, parameters and results are those of scan.py.

A program has 128 values, and a processor to itself. Two warp groups, each with 64 of the values and its half of S^T in
registers, share the tiles of a chunk in shared memory and walk out of step; a third copies chunk after chunk into a
ring of buffers. Of each buffer three mbarriers tell that k, q and the gates have come, that v and the squares have, and
that both have done with all of it. What goes to memory is turned in a tile of shared memory that a group has for
itself, with one barrier of the group between. It takes operands and scratch of one 16-bit dtype, chunks of 64, keys up
to 128, k as the erase key, and modes "output" and "replay".
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

from deltazoo.backends.triton.kernels.hopper import (
    COLUMNS,
    LEFT,
    MMA,
    ROWS,
    SHARED_TILE,
    WALKERS,
    allocate,
    barrier,
    barriers,
    fetch,
    fetch_gates,
    fetch_square,
    free,
    narrow,
    of_copy,
    ring,
    ring_of_lines,
    tell,
    times_inverse,
    widen,
)
from deltazoo.backends.triton.kernels.layout import first_slot, segment_of, sequence_and_part, sequence_bounds
from deltazoo.backends.triton.kernels.states_hopper import load_checkpoint, load_state, put_tile, store_final

BUFFERS = gl.constexpr(3)


@gluon.jit
def next_buffer(stage, phase):
    last = stage == BUFFERS - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def copy_chunks(
    q, k, v, gates, squares, k_s, q_s, v_s, T_s, P_s, G_s, before_s, c_s, w_s, came, rest_came, done,
    start, length, slot, first, last, hv, tile,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, NK: gl.constexpr,
    DECAY: gl.constexpr, DELTA: gl.constexpr, WRITE: gl.constexpr, EARLY: gl.constexpr, OUTPUT: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """The copying warp group: the chunks from the first to the last, each once its buffer is free."""
    h = hv // (HV // H)
    column = tile * 128
    MASK_V: gl.constexpr = V % 128 != 0
    stage = 0
    phase = 1
    told = 0
    for c in range(first, last):
        left = length - c * 64
        row = start + c * 64
        place = (slot + c).to(gl.int64) * HV + hv
        key = (row * H + h) * K
        k_at = of_copy(k + key, H * K)
        mbarrier.wait(done.index(stage), phase)
        for tk in gl.static_range(NK):
            fetch(k_s[tk].index(stage), k_at, tk * 64, left, K - tk * 64, True, tk * 64 + 64 > K)
        fetch_gates(
            gates + place * 192, G_s.index(stage), before_s.index(stage), c_s.index(stage), w_s.index(stage),
            DECAY, EARLY, DELTA, WRITE,
        )  # fmt: skip
        if OUTPUT:
            q_at = of_copy(q + key, H * K)
            for tk in gl.static_range(NK):
                fetch(q_s[tk].index(stage), q_at, tk * 64, left, K - tk * 64, True, tk * 64 + 64 > K)
        async_copy.commit_group()
        tell(rest_came.index(told), 1, c > first)
        v_at = of_copy(v + ((row * HV + hv) * V + column), HV * V)
        for half in gl.static_range(2):
            fetch(v_s[half].index(stage), v_at, half * 64, left, V - column - half * 64, True, MASK_V)
        if DELTA:
            square = squares + place * (64 * 72)
            fetch_square(T_s.index(stage), square, True)
            if OUTPUT:
                fetch_square(P_s.index(stage), square.to(gl.pointer_type(dtype), bitcast=True), False)
        async_copy.commit_group()
        tell(came.index(stage), 1, True)
        told = stage
        stage, phase = next_buffer(stage, phase)
    tell(rest_came.index(told), 0, first < last)


@gluon.jit
def walk_chunk(
    S, o, checkpoints, states, xs, scale,
    k_s, q_s, v_s, T_s, P_s, G_s, before_s, c_s, w_s, tile, state_s, came, rest_came, done, stage, phase,
    start, length, c, begins, first_kept, first_place, checkpoint, hv, column,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, NK: gl.constexpr,
    DECAY: gl.constexpr, DELTA: gl.constexpr, WRITE: gl.constexpr, EARLY: gl.constexpr, READ_EARLY: gl.constexpr,
    EVERY: gl.constexpr, OUTPUT: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """One chunk of one of the two warp groups: S^T after it."""
    MASK_V: gl.constexpr = V % 128 != 0
    left_v = V - column
    local = (first_place + c - begins).to(gl.int64)

    low = (narrow(S[0], dtype),)
    left = (gl.convert_layout(low[0], LEFT, assert_trivial=True),)
    for tk in gl.static_range(NK - 1):
        low = low + (narrow(S[tk + 1], dtype),)
        left = left + (gl.convert_layout(low[tk + 1], LEFT, assert_trivial=True),)
    if OUTPUT and EVERY > 0:
        if (c > 0) & (c % EVERY == 0):
            at = checkpoints + (((checkpoint + c // EVERY).to(gl.int64) * HV + hv) * V + column) * K
            for tk in gl.static_range(NK):
                tile.store(low[tk])
                put_tile(at + tk * 64, tile, K, left_v, K - tk * 64, MASK_V, tk * 64 + 64 > K)

    mbarrier.wait(came.index(stage), phase)
    P = gl.zeros([64, 64], gl.float32, MMA)
    y = gl.zeros([64, 64], gl.float32, MMA)
    out = gl.zeros([64, 64], gl.float32, MMA)
    if OUTPUT and not DELTA:
        for tk in gl.static_range(NK):
            q_T = q_s[tk].index(stage).permute((1, 0))
            P = warpgroup_mma(k_s[tk].index(stage), q_T, P, use_acc=tk > 0, is_async=True)
    if DELTA:
        for tk in gl.static_range(NK):
            y = warpgroup_mma(left[tk], k_s[tk].index(stage).permute((1, 0)), y, use_acc=tk > 0, is_async=True)
    if OUTPUT:
        for tk in gl.static_range(NK):
            out = warpgroup_mma(left[tk], q_s[tk].index(stage).permute((1, 0)), out, use_acc=tk > 0, is_async=True)

    if not OUTPUT:
        at = states + ((local * HV + hv) * V + column) * K
        rows = gl.where(c >= first_kept, left_v, 0)
        for tk in gl.static_range(NK):
            state_s[tk].store(low[tk])
        for tk in gl.static_range(NK):
            put_tile(at + tk * 64, state_s[tk], K, rows, K - tk * 64, True, tk * 64 + 64 > K)

    if OUTPUT and not DELTA:
        P = warpgroup_mma_wait(NK, deps=[P])
        i = gl.arange(0, 64, COLUMNS)[None, :]
        j = gl.arange(0, 64, ROWS)[:, None]
        if DECAY != "none":
            # where a token is not seen this may be no number
            G_i = before_s.index(stage).load(COLUMNS) if EARLY else G_s.index(stage).load(COLUMNS)
            P *= gl.exp2(G_i[None, :] - G_s.index(stage).load(ROWS)[:, None])
        P_s.index(0).store(narrow(gl.where(j + (1 if READ_EARLY else 0) <= i, P * scale, 0.0), dtype))
        fence_async_shared()
        barrier()

    # u = w v - c S0^T e,  x = T u
    mbarrier.wait(rest_came.index(stage), phase)
    x = widen(v_s.index(stage).permute((1, 0)).load(MMA))
    if WRITE:
        x *= w_s.index(stage).load(COLUMNS)[None, :]
    if DELTA:
        erase = c_s.index(stage).load(COLUMNS)
        y, _, _ = warpgroup_mma_wait(NK if OUTPUT else 0, deps=[y, left[0], left[NK - 1]])
        x -= y * erase[None, :]
        SCALED: gl.constexpr = T_s.dtype == gl.float16
        x, left_u, up = times_inverse(x, T_s.index(stage).permute((1, 0)), LEFT, SCALED)
    if DECAY != "none":
        G = G_s.index(stage).load(COLUMNS)
        G_end = G_s.index(stage).slice(63, 1).load(COLUMNS)
        end = gl.exp2(G_end)[None, :]
        S0 = (S[0] * end,)
        for tk in gl.static_range(NK - 1):
            S0 = S0 + (S[tk + 1] * end,)
        fade = gl.exp2(G_end - G)
    else:
        S0 = S
    # o = scale e^G'' S0^T q + P x
    if OUTPUT:
        out, _, _ = warpgroup_mma_wait(1 if DELTA else 0, deps=[out, left[0], left[NK - 1]])
        if DECAY != "none":
            G_read = before_s.index(stage).load(COLUMNS) if EARLY else G
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
    S1 = (warpgroup_mma(left_k, k_s[0].index(stage), S0[0], is_async=True),)
    for tk in gl.static_range(NK - 1):
        S1 = S1 + (warpgroup_mma(left_k, k_s[tk + 1].index(stage), S0[tk + 1], is_async=True),)
    if OUTPUT:
        out, left_x = warpgroup_mma_wait(NK, deps=[out, left_x])
        tile.permute((1, 0)).store(narrow(out, dtype))
        at = o + (((start + c * 64) * HV + hv) * V + column)
        put_tile(at, tile, HV * V, length - c * 64, left_v, True, MASK_V)
    elif DELTA:
        tile.permute((1, 0)).store(x_low)
        at = xs + ((local * 64 * HV + hv) * V + column)
        put_tile(at, tile, HV * V, gl.where(c >= first_kept, 64, 0), left_v, True, MASK_V)
    if NK == 2:
        S_a, S_b, left_k = warpgroup_mma_wait(0, deps=[S1[0], S1[1], left_k])
        new = (S_a, S_b)
    else:
        S_a, left_k = warpgroup_mma_wait(0, deps=[S1[0], left_k])
        new = (S_a,)
    free(done.index(stage))
    return new


@gluon.jit
def walk(
    state, o, final, checkpoints, states, xs, starts, scale,
    k_s, q_s, v_s, T_s, P_s, G_s, before_s, c_s, w_s, tile, state_s, came, rest_came, done,
    start, length, begins, first, first_kept, last, first_place, checkpoint, n, part, parts, is_last, hv, pair,
    HALF: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, NK: gl.constexpr,
    DECAY: gl.constexpr, DELTA: gl.constexpr, WRITE: gl.constexpr, STATE: gl.constexpr, EARLY: gl.constexpr,
    READ_EARLY: gl.constexpr, EVERY: gl.constexpr, SPLIT: gl.constexpr, OUTPUT: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """One of the two warp groups that compute, with the values from 128 `pair` + 64 HALF on."""
    column = pair * 128 + HALF * 64
    left_v = V - column
    at_state = (n.to(gl.int64) * HV + hv) * K * V + column
    S = (gl.zeros([64, 64], gl.float32, MMA),)
    for _ in gl.static_range(NK - 1):
        S = S + (gl.zeros([64, 64], gl.float32, MMA),)
    if OUTPUT and SPLIT > 0:
        at = starts + (((n * parts + part).to(gl.int64) * HV + hv) * V + column) * K
        S = load_state(at, tile, K, K, left_v, NK, False)
    elif OUTPUT:
        if STATE:
            S = load_state(state + at_state, tile, K, V, left_v, NK, True)
    elif first > 0:
        at = checkpoints + (((checkpoint + first // EVERY).to(gl.int64) * HV + hv) * V + column) * K
        S = load_checkpoint(at, state_s, K, left_v, NK, V % 128 != 0)
    elif STATE:
        S = load_state(state + at_state, tile, K, V, left_v, NK, True)
    barrier()  # here once: else the compiler has one in the loop, for the sake of its first round
    stage = 0
    phase = 0
    for c in range(first, last):
        S = walk_chunk(
            S, o, checkpoints, states, xs, scale,
            k_s, q_s, v_s[HALF], T_s, P_s, G_s, before_s, c_s, w_s, tile, state_s, came, rest_came, done, stage, phase,
            start, length, c, begins, first_kept, first_place, checkpoint, hv, column,
            HV, K, V, NK, DECAY, DELTA, WRITE, EARLY, READ_EARLY, EVERY, OUTPUT, dtype,
        )  # fmt: skip
        stage, phase = next_buffer(stage, phase)
    if OUTPUT:
        if is_last:
            store_final(final + at_state, S, tile, K, V, left_v, NK)


@gluon.jit(do_not_specialize=["T", "segment", "segments", "parts"])
def hopper_scan_kernel(
    q, k, e, v, gates, fades, squares, state, o, final, checkpoints, states, xs, starts, ends, cu,
    scale, T, segment, segments, parts,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    K0: gl.constexpr, K1: gl.constexpr, BV: gl.constexpr,
    DECAY: gl.constexpr, DELTA: gl.constexpr, OWN: gl.constexpr, WRITE: gl.constexpr, STATE: gl.constexpr,
    READ_EARLY: gl.constexpr, PACKED: gl.constexpr, EVERY: gl.constexpr, UNIT: gl.constexpr,
    SPLIT: gl.constexpr, MODE: gl.constexpr, TERMS: gl.constexpr, PREC: gl.constexpr,
    STAGES: gl.constexpr, TILED: gl.constexpr,
):  # fmt: skip
    """One program a (sequence, part, value head, tile of 128 values), as in scan.py.

    To be launched with 4 warps, which become 12, and 168 registers a thread, which they share out anew."""
    OUTPUT: gl.constexpr = MODE == "output"
    gl.static_assert(OUTPUT or (MODE == "replay" and EVERY > 0))
    gl.static_assert(C == 64 and BV == 128 and (K0 == 64 or K0 == 128) and K1 == 0 and K <= K0 and TERMS == 1)
    gl.static_assert(not OWN and not TILED and K % 8 == 0 and V % 8 == 0)
    gl.static_assert(k.dtype.element_ty.primitive_bitwidth == 16)
    gl.static_assert(EVERY == 0 or checkpoints.dtype == k.dtype)
    gl.static_assert(OUTPUT or states.dtype == k.dtype)
    if STATE:
        gl.static_assert(state.dtype.element_ty == gl.float32)
    NK: gl.constexpr = K0 // 64
    V_TILES: gl.constexpr = (V + 127) // 128
    EARLY: gl.constexpr = OUTPUT and READ_EARLY and DECAY != "none"
    dtype: gl.constexpr = k.dtype.element_ty
    pid = gl.program_id(0)
    pair = pid % V_TILES
    hv = pid // V_TILES % HV
    n, part = sequence_and_part(pid // (V_TILES * HV), parts, V_TILES * HV)
    start, length = sequence_bounds(n, cu, T, PACKED)
    slot = first_slot(n, cu, T, C, PACKED)
    chunks = gl.cdiv(length, C)
    begins, last, first_place = segment_of(n, slot, chunks, segment, segments, UNIT, PACKED)
    first = begins
    if SPLIT > 0:
        first += part * SPLIT
        last = gl.minimum(first + SPLIT, last)
    first_kept = first
    wanted = first < last
    is_last = part == 0
    if OUTPUT:
        if SPLIT > 0:
            is_last = part == gl.maximum(chunks - 1, 0) // SPLIT
        wanted = wanted | is_last
    else:
        first = first // EVERY * EVERY
    checkpoint = 0
    if EVERY > 0:
        # of the first one, before any chunk: the state there is an operand, and is not kept
        checkpoint = (slot // EVERY if PACKED else n * ((chunks - 1) // EVERY)) - 1
    if wanted:
        k_s = ring(dtype, NK, BUFFERS)
        q_s = ring(dtype, NK, BUFFERS) if OUTPUT else k_s
        v_s = ring(dtype, 2, BUFFERS)
        T_s = ring(squares.dtype.element_ty, 1, BUFFERS)[0] if DELTA else k_s[0]
        if OUTPUT and DELTA:
            P_s = ring(dtype, 1, BUFFERS)[0]
            P_a = P_s
            P_b = P_s
        elif OUTPUT:
            P_s = k_s[0]
            P_a = gl.allocate_shared_memory(dtype, [1, 64, 64], SHARED_TILE)
            P_b = gl.allocate_shared_memory(dtype, [1, 64, 64], SHARED_TILE)
        else:
            P_s = k_s[0]
            P_a = P_s
            P_b = P_s
        tiles = allocate(dtype, 2)
        state_a = tiles if OUTPUT else allocate(dtype, NK)
        state_b = tiles if OUTPUT else allocate(dtype, NK)
        G_s = ring_of_lines(BUFFERS)
        before_s = ring_of_lines(BUFFERS) if EARLY else G_s
        c_s = ring_of_lines(BUFFERS) if DELTA else G_s
        w_s = ring_of_lines(BUFFERS) if WRITE else G_s
        came = barriers(BUFFERS, 1)
        rest_came = barriers(BUFFERS, 1)
        done = barriers(BUFFERS, 2 * WALKERS)
        gl.warp_specialize(
            [
                (
                    walk,
                    (
                        state, o, final, checkpoints, states, xs, starts, scale,
                        k_s, q_s, v_s, T_s, P_a, G_s, before_s, c_s, w_s, tiles[0], state_a, came, rest_came, done,
                        start, length, begins, first, first_kept, last, first_place, checkpoint,
                        n, part, parts, is_last, hv, pair, 0,
                        HV, K, V, NK, DECAY, DELTA, WRITE, STATE, EARLY, READ_EARLY, EVERY, SPLIT, OUTPUT, dtype,
                    ),
                ),
                (
                    walk,
                    (
                        state, o, final, checkpoints, states, xs, starts, scale,
                        k_s, q_s, v_s, T_s, P_b, G_s, before_s, c_s, w_s, tiles[1], state_b, came, rest_came, done,
                        start, length, begins, first, first_kept, last, first_place, checkpoint,
                        n, part, parts, is_last, hv, pair, 1,
                        HV, K, V, NK, DECAY, DELTA, WRITE, STATE, EARLY, READ_EARLY, EVERY, SPLIT, OUTPUT, dtype,
                    ),
                ),
                (
                    copy_chunks,
                    (
                        q, k, v, gates, squares,
                        k_s, q_s, v_s, T_s, P_s, G_s, before_s, c_s, w_s, came, rest_came, done,
                        start, length, slot, first, last, hv, pair,
                        H, HV, K, V, NK, DECAY, DELTA, WRITE, EARLY, OUTPUT, dtype,
                    ),
                ),
            ],
            [4, 4],
            [232, 40],
        )  # fmt: skip
