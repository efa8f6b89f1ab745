"""One chunk of walk_hopper.py: a step of the reverse scan, and the gradients that start from it, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltazoo.backends.triton.kernels.hopper.common import SHARED_TILE, barrier, free, narrow, put, times_inverse, widen
from deltazoo.backends.triton.kernels.hopper.sweep_reductions import (
    IS_FIRST,
    KEYS,
    LEFT,
    LEFT_STATE,
    LEFT_TOKENS,
    OF_KEYS,
    PAIR_COLUMNS,
    PAIR_ROWS,
    PAIRS,
    PLACE,
    ROW_OF_KEYS,
    ROW_OF_VALUES,
    ROWS,
    STATE_COLUMNS,
    TO_COME,
    TOKENS,
    VALUES,
    keep_faded,
    keep_stored,
    left_by,
    number,
    of_halves,
    put_across,
    put_diagonal,
    put_halves,
    put_kept,
    put_writes,
)
from deltazoo.backends.triton.kernels.layout import clamp_away_from_zero, opaque_zero


@gluon.jit
def stores_first(number):
    """Have the assembler not wait for products before what is stored above: it would move the wait up."""
    text: gl.constexpr = "bar.warp.sync 0xffffffff;\nmov.b32 $0, $1;"
    gl.inline_asm_elementwise(text, "=r,r", [number], gl.int32, is_pure=False, pack=1)


@gluon.jit
def reverse_chunk(dS, to, scale, room, z, stage, phase, odd, slots, kind: gl.constexpr):
    """A step of the reverse scan: dS^T before the chunk. odd: 1 where an odd number of chunks was walked before it.

    In shared memory then lie dS', du with an erase, and without one P and dP. do x^T and do S^T are still under way."""
    HV: gl.constexpr = kind.HV
    V: gl.constexpr = kind.V
    DECAY: gl.constexpr = kind.DECAY
    DELTA: gl.constexpr = kind.DELTA
    WRITE: gl.constexpr = kind.WRITE
    READ_EARLY: gl.constexpr = kind.READ_EARLY
    DU_IS_DV: gl.constexpr = kind.DU_IS_DV
    MIN_BETA: gl.constexpr = kind.MIN_BETA
    dtype: gl.constexpr = kind.dtype
    low = narrow(dS, dtype)
    mbarrier.wait(room.came.index(stage), phase)
    # here, where no product is under way: else the compiler waits for those that are
    if DECAY != "none":
        end = room.G_s.index(stage).slice(63, 1).load(STATE_COLUMNS)
        dS0 = dS * gl.exp2(end)[None, :]
    else:
        dS0 = dS
    # dx = scale P'^T do + (e^(Gend - G) k) dS'
    dx = gl.zeros([128, 64], gl.float32, VALUES)
    left_S = gl.convert_layout(low, LEFT, assert_trivial=True)
    dx = warpgroup_mma(left_S, room.k_s.index(stage).permute((1, 0)), dx, use_acc=False, is_async=True)
    do_T = room.do_s.index(stage).permute((1, 0))
    left_do = do_T.load(LEFT)
    of_reads = gl.zeros([128, 64], gl.float32, VALUES)
    inter_q = gl.zeros([64, 128], gl.float32, KEYS)
    if DELTA:
        of_reads = warpgroup_mma(do_T, room.P_s.index(stage).permute((1, 0)), of_reads, use_acc=False, is_async=True)
    if DECAY != "none":
        G = room.G_s.index(stage).load(TOKENS)
        G_read = room.before_s.index(stage).load(TOKENS) if READ_EARLY else G
    do_tile = widen(gl.convert_layout(left_do, VALUES, assert_trivial=True))
    if DECAY != "none":
        do_tile *= (gl.exp2(G_read) * scale)[None, :]
    else:
        do_tile *= scale
    left_doq = gl.convert_layout(narrow(do_tile, dtype), LEFT_STATE, assert_trivial=True)
    # all have done with the chunk after this one; here, where the compiler wants a barrier between the two waits
    barrier()
    mbarrier.wait(room.rest_came.index(stage), phase)
    if not DELTA:
        # dP and P
        mbarrier.wait(room.states_came, odd)
        d_square = gl.zeros([64, 64], gl.float32, PAIRS)
        d_square = warpgroup_mma(
            room.do_s.index(stage), room.x_s.index(z).permute((1, 0)), d_square, use_acc=False, is_async=True
        )
        square = gl.zeros([64, 64], gl.float32, PAIRS)
        square = warpgroup_mma(
            room.q_s.index(stage), room.k_s.index(stage).permute((1, 0)), square, use_acc=False, is_async=True
        )
    # e^Gend dS' + scale (e^G'' q)^T do
    dS = warpgroup_mma(left_doq, room.q_s.index(stage), dS0, is_async=True)
    if DECAY != "none":
        # of the chunk after this one
        wanted = number(room.numbers_s.index(stage), IS_FIRST) == 0
        put_kept(
            to.state_products + number(room.numbers_s.index(stage), PLACE) + HV,
            slots.to(gl.int64) * HV,
            room.sums_s,
            wanted,
        )
    room.dS_s.index(z).store(low)
    if DELTA:
        if DECAY != "none":
            fade = left_by(room.G_s.index(stage), TOKENS)
        if WRITE:
            write = room.w_s.index(stage).load(TOKENS)
            if DU_IS_DV:
                write = clamp_away_from_zero(write, MIN_BETA)
        dx, of_reads, _ = warpgroup_mma_wait(1, deps=[dx, of_reads, low])
        if DECAY != "none":
            dx = dx * fade[None, :] + of_reads
        else:
            dx += of_reads
        # du = T^T dx
        SCALED: gl.constexpr = room.T_s.dtype == gl.float16 and dtype != gl.float16
        dx, left_x, up = times_inverse(dx, room.T_s.index(stage), LEFT, SCALED)
        erase = room.c_s.index(stage).load(TOKENS)
        mbarrier.wait(room.states_came, odd)
        intra_q = gl.zeros([64, 64], gl.float32, PAIRS)
        intra_q = warpgroup_mma(
            room.do_s.index(stage), room.x_s.index(z).permute((1, 0)), intra_q, use_acc=False, is_async=True
        )
        dx, left_x, left_doq = warpgroup_mma_wait(1, deps=[dx, left_x, left_doq])
        if SCALED:
            dx *= up[:, None]
        # - (c e)^T du
        left_e = gl.convert_layout(narrow(dx * -erase[None, :], dtype), LEFT_STATE, assert_trivial=True)
        dS = warpgroup_mma(left_e, room.k_s.index(stage), dS, is_async=True)
        inter_q = warpgroup_mma(room.do_s.index(stage), room.S_s.index(z), inter_q, use_acc=False, is_async=True)
    else:
        dx, d_square, square, _ = warpgroup_mma_wait(1, deps=[dx, d_square, square, low])
        i = gl.arange(0, 64, PAIR_ROWS)[:, None]
        j = gl.arange(0, 64, PAIR_COLUMNS)[None, :]
        if DECAY != "none":
            G_i = room.before_s.index(stage).load(PAIR_ROWS) if READ_EARLY else room.G_s.index(stage).load(PAIR_ROWS)
            # where a token is not seen this may be no number
            faded = gl.exp2(G_i[:, None] - room.G_s.index(stage).load(PAIR_COLUMNS)[None, :]) * scale
            square *= faded
            d_square *= faded
        else:
            square *= scale
            d_square *= scale
        if WRITE:
            d_square *= clamp_away_from_zero(room.w_s.index(stage).load(PAIR_COLUMNS), MIN_BETA)[None, :]
        seen = i >= j + (1 if READ_EARLY else 0)
        room.P_s.index(stage).store(narrow(gl.where(seen, square, 0.0), dtype))
        room.low_s.index(stage).store(narrow(gl.where(seen, d_square, 0.0), dtype))
        fence_async_shared()
        barrier()
        of_reads = warpgroup_mma(do_T, room.P_s.index(stage), of_reads, use_acc=False, is_async=True)
        of_reads, dS, left_doq = warpgroup_mma_wait(0, deps=[of_reads, dS, left_doq])
        if WRITE:
            write = clamp_away_from_zero(room.w_s.index(stage).load(TOKENS), MIN_BETA)
        if DECAY != "none":
            fade = left_by(room.G_s.index(stage), TOKENS)
        inter_q = warpgroup_mma(room.do_s.index(stage), room.S_s.index(z), inter_q, use_acc=False, is_async=True)
        if DECAY != "none":
            dx = dx * fade[None, :] + of_reads
        else:
            dx += of_reads
        intra_q = d_square
    if DELTA and not DU_IS_DV:
        room.du_s.index(z).store(narrow(dx, dtype))
    if WRITE:
        dx *= write[None, :]
    dvalue = narrow(dx, dtype)
    if DELTA and DU_IS_DV:
        room.du_s.index(z).store(dvalue)
    numbers = room.numbers_s.index(stage)
    left = number(numbers, LEFT_TOKENS).to(gl.int32)
    put_across(to.dv + number(numbers, ROW_OF_VALUES) * V, dvalue, z, HV * V, left, V, V % 128 != 0)
    if DELTA:
        stores_first(left)
        dS, left_e = warpgroup_mma_wait(1, deps=[dS, left_e])
        if DECAY != "none":
            keep_faded(room.G_s.index(stage), room.S_s.index(z), room.dS_s.index(z), room.sums_s)
        fence_async_shared()
        barrier()
    elif DECAY != "none":
        keep_faded(room.G_s.index(stage), room.S_s.index(z), room.dS_s.index(z), room.sums_s)
    return dS, intra_q, inter_q


@gluon.jit
def chunk_gradients(dS, intra_q, inter_q, v, b, to, scale, room, z, stage, segments, slots, held, kind: gl.constexpr):
    """The gradients of a chunk."""
    H: gl.constexpr = kind.H
    HV: gl.constexpr = kind.HV
    K: gl.constexpr = kind.K
    V: gl.constexpr = kind.V
    DECAY: gl.constexpr = kind.DECAY
    DELTA: gl.constexpr = kind.DELTA
    ERASE: gl.constexpr = kind.ERASE
    WRITE: gl.constexpr = kind.WRITE
    ERASE_EARLY: gl.constexpr = kind.ERASE_EARLY
    READ_EARLY: gl.constexpr = kind.READ_EARLY
    DU_IS_DV: gl.constexpr = kind.DU_IS_DV
    MIN_BETA: gl.constexpr = kind.MIN_BETA
    dtype: gl.constexpr = kind.dtype
    EARLY: gl.constexpr = ERASE_EARLY or READ_EARLY
    GATE_ROWS: gl.constexpr = 4 if EARLY else 3
    FIRST: gl.constexpr = 1 if READ_EARLY else 0
    NARROW_K: gl.constexpr = K % 128 != 0
    apart = slots.to(gl.int64) * HV  # from what a gate has of the first half of the keys to what it has of the second
    of_gate = apart * (GATE_ROWS * 64)
    numbers = room.numbers_s.index(stage)
    place = number(numbers, PLACE)
    left = number(numbers, LEFT_TOKENS).to(gl.int32)
    at_gate = to.dgates + place * (GATE_ROWS * 64)
    k_t = room.k_s.index(stage)
    q_t = room.q_s.index(stage)
    if DELTA:
        du_T = room.du_s.index(z).permute((1, 0))
        intra_e = gl.zeros([64, 64], gl.float32, PAIRS)
        intra_e = warpgroup_mma(du_T, room.x_s.index(z).permute((1, 0)), intra_e, use_acc=False, is_async=True)
    dk_stored = gl.zeros([64, 128], gl.float32, KEYS)
    dk_stored = warpgroup_mma(room.x_s.index(z), room.dS_s.index(z), dk_stored, use_acc=False, is_async=True)
    if DECAY != "none":
        G = room.G_s.index(stage).load(ROWS)
        G_early = room.before_s.index(stage).load(ROWS) if EARLY else G
        G_q = G_early if READ_EARLY else G
        G_e = G_early if ERASE_EARLY else G
        read = gl.exp2(G_q) * scale
        fade_k = gl.exp2(room.G_s.index(stage).slice(63, 1).load(ROWS) - G)
    if DELTA and ERASE and not (DU_IS_DV and WRITE):
        t = gl.arange(0, 64, ROWS)
        erase = gl.load(b + number(numbers, ROW_OF_VALUES) + t * HV, mask=t < left, other=0.0).to(gl.float32)
        strength = -clamp_away_from_zero(erase, MIN_BETA)
    else:
        # -1, which the compiler must not know: it changes signs between products then
        strength = gl.full([64], gl.where(segments > 0, -1.0, 0.0), gl.float32, ROWS)
    if DELTA:
        i = gl.arange(0, 64, PAIR_ROWS)[:, None]
        j = gl.arange(0, 64, PAIR_COLUMNS)[None, :]
        of_pairs = gl.convert_layout(strength, PAIR_ROWS, assert_trivial=True)[:, None]
        low_q_s = room.P_s.index(stage)
        low_e_s = room.T_s.index(stage)._reinterpret(dtype, [64, 64], SHARED_TILE)
        if DECAY != "none":
            # where a token is not seen this may be no number
            G_j = room.G_s.index(stage).load(PAIR_COLUMNS)
            faded_q = gl.exp2(gl.convert_layout(G_q, PAIR_ROWS, assert_trivial=True)[:, None] - G_j[None, :])
            if READ_EARLY == ERASE_EARLY:
                faded_e = faded_q
            else:
                faded_e = gl.exp2(gl.convert_layout(G_e, PAIR_ROWS, assert_trivial=True)[:, None] - G_j[None, :])
        intra_q, intra_e = warpgroup_mma_wait(1, deps=[intra_q, intra_e])
        if DU_IS_DV and WRITE:
            put_diagonal(at_gate + 128, intra_e)
        if DECAY != "none":
            intra_e *= faded_e * of_pairs
            intra_q *= faded_q * scale
        else:
            intra_e *= of_pairs
            intra_q *= scale
        low_e_s.store(narrow(gl.where(i > j, intra_e, 0.0), dtype))
        low_q_s.store(narrow(gl.where(i >= j + FIRST, intra_q, 0.0), dtype))
        fence_async_shared()  # not right before a wait: there ptxas 12.8 forgot that what came next was not there yet
        inter_e = gl.zeros([64, 128], gl.float32, KEYS)
        inter_e = warpgroup_mma(du_T, room.S_s.index(z), inter_e, use_acc=False, is_async=True)
        inter_q, dk_stored = warpgroup_mma_wait(1, deps=[inter_q, dk_stored])
    else:
        low_q_s = room.low_s.index(stage)
        inter_q, dk_stored = warpgroup_mma_wait(0, deps=[inter_q, dk_stored])
    if DECAY != "none":
        inter_q *= read[:, None]
    else:
        inter_q *= scale
    SUMS_OF_K: gl.constexpr = DECAY != "none" or (WRITE and not DELTA)
    if WRITE and not DELTA:
        write = clamp_away_from_zero(room.w_s.index(stage).load(ROWS), MIN_BETA)
        fade_k = fade_k * write if DECAY != "none" else write
    if SUMS_OF_K:
        dk_stored *= fade_k[:, None]
    if DELTA:
        barrier()
    dq_tile = warpgroup_mma(low_q_s, k_t, inter_q, is_async=True)
    if DELTA:
        inter_e = warpgroup_mma_wait(1, deps=[inter_e])
        free(room.walked)
        if DECAY != "none":
            inter_e *= (gl.exp2(G_e) * strength)[:, None]
        else:
            inter_e *= strength[:, None]
        de_tile = warpgroup_mma(low_e_s, k_t, inter_e, is_async=True)
    if DECAY != "none":
        keep_stored(dk_stored, k_t, room.sums_s)
    dk_tile = warpgroup_mma(low_q_s.permute((1, 0)), q_t, dk_stored, is_async=True)
    if DELTA:
        dk_tile = warpgroup_mma(low_e_s.permute((1, 0)), k_t, dk_tile, is_async=True)
    if DELTA and WRITE and not DU_IS_DV:
        put_writes(at_gate + 128, of_gate, v + number(numbers, ROW_OF_VALUES) * V, du_T, left, HV, V)
    if not DELTA:
        free(room.walked)
    dq_tile = warpgroup_mma_wait(3 if DELTA else 1, deps=[dq_tile])
    if DECAY != "none":
        turn = of_halves(widen(q_t.load(KEYS)) * dq_tile, OF_KEYS)
    STRIDE: gl.constexpr = kind.SHARES * K if kind.SHARES > H else H * K
    out = number(numbers, ROW_OF_KEYS) * K
    if kind.SHARES > H:
        dq_at = to.partial + out
        dk_at = to.partial + held.to(gl.int64) * (64 * kind.SHARES * K) + out
    else:
        dq_at = to.dq + out
        dk_at = to.dk + out
    put(dq_at, dq_tile, STRIDE, left, K, NARROW_K)
    if DELTA:
        stores_first(left)
        de_tile = warpgroup_mma_wait(2, deps=[de_tile])
        if DECAY != "none" or ERASE:
            turned_e = of_halves(widen(k_t.load(KEYS)) * de_tile, OF_KEYS)
            if ERASE:
                put_halves(at_gate + 64, of_gate, turned_e, OF_KEYS)
    if DECAY != "none":
        if EARLY:
            ahead = gl.full([64, 2], 0.0, gl.float32, gl.SliceLayout(2, OF_KEYS))
            behind = gl.full([64, 2], 0.0, gl.float32, gl.SliceLayout(2, OF_KEYS))
            if READ_EARLY:
                ahead += turn
            else:
                behind += turn
            if DELTA:
                if ERASE_EARLY:
                    ahead += turned_e
                else:
                    behind += turned_e
            turn = behind
            put_halves(at_gate + 192, of_gate, ahead, OF_KEYS)
        elif DELTA:
            turn += turned_e
    # the buffers too: else the compiler takes them for free from where the products start
    if DELTA:
        dk_tile, _, _, _, _ = warpgroup_mma_wait(0, deps=[dk_tile, low_q_s, q_t, low_e_s, k_t])
    else:
        dk_tile, _, _ = warpgroup_mma_wait(0, deps=[dk_tile, low_q_s, q_t])
    if SUMS_OF_K:
        turn_k = of_halves(widen(k_t.load(KEYS)) * dk_tile, OF_KEYS)
        if WRITE and not DELTA:
            strengths = clamp_away_from_zero(
                room.w_s.index(stage).load(gl.SliceLayout(1, gl.SliceLayout(2, OF_KEYS))), MIN_BETA
            )
            put_halves(at_gate + 128, of_gate, turn_k / strengths[:, None], OF_KEYS)
        if DECAY != "none":
            put_halves(at_gate, of_gate, turn - turn_k, OF_KEYS)
    if DELTA:
        dk_tile += de_tile
    put(dk_at, dk_tile, STRIDE, left, K, NARROW_K)
    return dS


@gluon.jit
def walk_chunk(dS, v, b, to, scale, room, to_come, stage, phase, odd, segments, slots, held, kind: gl.constexpr):
    """dS^T before a chunk, whose gradients go to memory, and how many chunks are to come.

    That is counted by the copying warp group: a number of this one's own would be spilled, and waited for."""
    dS, intra_q, inter_q = reverse_chunk(dS, to, scale, room, opaque_zero(to_come, 20), stage, phase, odd, slots, kind)
    dS = chunk_gradients(
        dS, intra_q, inter_q, v, b, to, scale, room, opaque_zero(to_come, 21), stage + opaque_zero(to_come, 22),
        segments, slots, held, kind,
    )  # fmt: skip
    return dS, number(room.numbers_s.index(stage), TO_COME).to(gl.int32)
