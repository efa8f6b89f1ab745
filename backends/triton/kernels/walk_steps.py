"""The steps of walk_hopper.py, of one chunk and one of its two warp groups, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.kernels.hopper import (
    COLUMNS,
    COPY,
    LEFT,
    LINE,
    MMA,
    PIECE,
    ROWS,
    SHARED_TILE,
    barrier,
    meet,
    narrow,
    of_end,
    of_warps,
    put,
    put_across,
    times_inverse,
    widen,
)
from deltazoo.backends.triton.kernels.layout import held_off


@gluon.jit
def faded(intra, G_at, G_from, factor):
    """A product over tokens [64, 64] with the decay from one to the other; where none is seen it may be no number."""
    intra *= gl.exp2(G_at[:, None] - G_from[None, :])
    return intra * factor


@gluon.jit
def reverse_chunk(
    dS, dv, scale, k_s, q_s, do_h, do_s, T_s, P_s, G_s, before_s, c_s, w_s, dS_s, du_s, x_s, low_s,
    came, rest_came, states_came, shared, walked, z, stage, phase, odd, value, left, columns,
    HALF: gl.constexpr, HV: gl.constexpr, V: gl.constexpr, DECAY: gl.constexpr, DELTA: gl.constexpr,
    WRITE: gl.constexpr, READ_EARLY: gl.constexpr, SHARED: gl.constexpr, LEAST: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """A step of the reverse scan by one of the two warp groups.

    What both need of each other's half then lies in shared memory: dS', du with an erase, and without one P and dP."""
    low = (narrow(dS[0], dtype), narrow(dS[1], dtype))
    mbarrier.wait(came.index(stage), phase)
    # here, where no product is under way: else the compiler waits for those that are
    if DECAY != "none":
        end = of_end(G_s.index(stage))
        of_state = gl.exp2(end)
        dS0 = (dS[0] * of_state, dS[1] * of_state)
    else:
        end = 0.0
        dS0 = dS
    # dx = scale P'^T do + (e^(Gend - G) k) dS'
    dx = gl.zeros([64, 64], gl.float32, MMA)
    for tk in gl.static_range(2):
        left_S = gl.convert_layout(low[tk], LEFT, assert_trivial=True)
        dx = warpgroup_mma(left_S, k_s[tk].index(stage).permute((1, 0)), dx, use_acc=tk > 0, is_async=True)
    do_T = do_h.index(stage).permute((1, 0))
    left_do = do_T.load(LEFT)
    of_reads = gl.zeros([64, 64], gl.float32, MMA)
    if DELTA:
        of_reads = warpgroup_mma(do_T, P_s.index(stage).permute((1, 0)), of_reads, use_acc=False, is_async=True)
    if DECAY != "none":
        G = G_s.index(stage).load(COLUMNS)
        G_read = before_s.index(stage).load(COLUMNS) if READ_EARLY else G
    do_tile = widen(gl.convert_layout(left_do, MMA, assert_trivial=True))
    if DECAY != "none":
        do_tile *= (gl.exp2(G_read) * scale)[None, :]
    else:
        do_tile *= scale
    left_doq = gl.convert_layout(narrow(do_tile, dtype), LEFT, assert_trivial=True)
    mbarrier.wait(rest_came.index(stage), phase)
    if not DELTA:
        # dP by the one, P^T by the other
        mbarrier.wait(states_came, odd)
        square = gl.zeros([64, 64], gl.float32, MMA)
        for t in gl.static_range(2):
            if HALF == 0:
                square = warpgroup_mma(
                    do_s[t].index(stage), x_s[t].index(z).permute((1, 0)), square, use_acc=t > 0, is_async=True
                )
            else:
                square = warpgroup_mma(
                    q_s[t].index(stage), k_s[t].index(stage).permute((1, 0)), square, use_acc=t > 0, is_async=True
                )
    # e^Gend dS' + scale (e^G'' q)^T do
    dS_a = warpgroup_mma(left_doq, q_s[0].index(stage), dS0[0], is_async=True)
    dS_b = warpgroup_mma(left_doq, q_s[1].index(stage), dS0[1], is_async=True)
    # the other warp group has done with the chunk after this one
    mbarrier.wait(walked, odd ^ 1)
    for tk in gl.static_range(2):
        dS_s[HALF * 2 + tk].index(z).store(low[tk])
    if DECAY != "none":
        fade = gl.exp2(end - G_s.index(stage).load(COLUMNS))
    if WRITE:
        write = w_s.index(stage).load(COLUMNS)
        if SHARED or not DELTA:
            write = held_off(write, LEAST)
    if DELTA:
        dx, of_reads, _, _ = warpgroup_mma_wait(2, deps=[dx, of_reads, low[0], low[1]])
        if DECAY != "none":
            dx = dx * fade[None, :] + of_reads
        else:
            dx += of_reads
        # du = T^T dx
        SCALED: gl.constexpr = T_s.dtype == gl.float16 and dtype != gl.float16
        dx, left_x, up = times_inverse(dx, T_s.index(stage), SCALED)
        erase = c_s.index(stage).load(COLUMNS)
        dx, left_x = warpgroup_mma_wait(0, deps=[dx, left_x])
        if SCALED:
            dx *= up[:, None]
        # - (c e)^T du
        left_e = gl.convert_layout(narrow(dx * -erase[None, :], dtype), LEFT, assert_trivial=True)
        dS_a = warpgroup_mma(left_e, k_s[0].index(stage), dS_a, is_async=True)
        dS_b = warpgroup_mma(left_e, k_s[1].index(stage), dS_b, is_async=True)
    else:
        dx, square, _, _ = warpgroup_mma_wait(2, deps=[dx, square, low[0], low[1]])
        i = gl.arange(0, 64, ROWS)[:, None]
        j = gl.arange(0, 64, COLUMNS)[None, :]
        if DECAY != "none":
            G_i = before_s.index(stage).load(ROWS) if READ_EARLY else G_s.index(stage).load(ROWS)
            square = faded(square, G_i, G, scale)
        else:
            square *= scale
        if WRITE and HALF == 0:
            square *= write[None, :]
        square = narrow(gl.where(i >= j + (1 if READ_EARLY else 0), square, 0.0), dtype)
        if HALF == 0:
            low_s.index(stage).store(square)
        else:
            P_s.index(stage).store(square)
        meet(shared, odd)
        of_reads = warpgroup_mma(do_T, P_s.index(stage), of_reads, use_acc=False, is_async=True)
        of_reads, dS_a, dS_b, left_doq = warpgroup_mma_wait(0, deps=[of_reads, dS_a, dS_b, left_doq])
        if DECAY != "none":
            dx = dx * fade[None, :] + of_reads
        else:
            dx += of_reads
    if DELTA and not SHARED:
        du_s[HALF].index(z).store(narrow(dx, dtype))
    if WRITE:
        dx *= write[None, :]
    dvalue = narrow(dx, dtype)
    if DELTA and SHARED:
        du_s[HALF].index(z).store(dvalue)
    put_across(dv + value + HALF * 64, dvalue, HV * V, left, columns, V % 128 != 0)
    if DELTA:
        dS_a, dS_b, left_e, left_doq = warpgroup_mma_wait(0, deps=[dS_a, dS_b, left_e, left_doq])
        meet(shared, odd)
    return dS_a, dS_b, end


@gluon.jit
def keep_end(end, dk_stored, S_s, dS_s, k_t, sums_s, at_kept, z, HALF: gl.constexpr):
    """<dS', S'> of the last chunk of a sequence, whose S' = e^Gend S + (e^(Gend - G) k)^T x nobody keeps."""
    kept = gl.zeros([64, 16], gl.float32, PIECE)
    for tv in gl.static_range(2):
        for piece in gl.static_range(4):
            S_p = S_s[tv * 2 + HALF].index(z).slice(piece * 16, 16, dim=1).load(PIECE)
            dS_p = dS_s[tv * 2 + HALF].index(z).slice(piece * 16, 16, dim=1).load(PIECE)
            kept += widen(S_p) * widen(dS_p)
    rows = gl.convert_layout(gl.sum(kept, 1), ROWS, assert_trivial=True) * gl.exp2(end)
    sums_s.store(of_warps(rows + gl.sum(widen(k_t.load(MMA)) * dk_stored, 1)))
    barrier()
    gl.store(at_kept, gl.sum(sums_s.load(LINE), 0))
    barrier()


@gluon.jit
def chunk_gradients(
    dS_a, dS_b, end, v, b, dq, dk, dgates, kepts, partial, scale,
    k_s, q_s, do_s, T_s, P_s, G_s, before_s, w_s, S_s, x_s, dS_s, du_s, low_s, sums_s, states_came, lows, walked,
    z, stage, odd, segments, place, slots, local, held, row, left, h, hv, is_first, is_last,
    HALF: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, DECAY: gl.constexpr,
    DELTA: gl.constexpr, ERASE: gl.constexpr, WRITE: gl.constexpr, ERASE_EARLY: gl.constexpr,
    READ_EARLY: gl.constexpr, SHARED: gl.constexpr, LEAST: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The gradients of a chunk with half of the keys, by one of the two warp groups."""
    EARLY: gl.constexpr = ERASE_EARLY or READ_EARLY
    GATE_ROWS: gl.constexpr = 4 if EARLY else 3
    FIRST: gl.constexpr = 1 if READ_EARLY else 0
    COLUMN: gl.constexpr = HALF * 64
    NARROW_K: gl.constexpr = K % 128 != 0 and HALF == 1
    t = gl.arange(0, 64, ROWS)
    j = gl.arange(0, 64, COLUMNS)
    at_gate = dgates + (HALF * slots.to(gl.int64) * HV + place) * (GATE_ROWS * 64)
    k_t = k_s[HALF].index(stage)
    q_t = q_s[HALF].index(stage)
    if DELTA:
        mbarrier.wait(states_came, odd)
        # du x^T by the one, do x^T by the other
        intra = gl.zeros([64, 64], gl.float32, MMA)
        for tv in gl.static_range(2):
            rows = du_s[tv].index(z).permute((1, 0)) if HALF == 0 else do_s[tv].index(stage)
            intra = warpgroup_mma(rows, x_s[tv].index(z).permute((1, 0)), intra, use_acc=tv > 0, is_async=True)
    inter_q = gl.zeros([64, 64], gl.float32, MMA)
    dk_stored = gl.zeros([64, 64], gl.float32, MMA)
    for tv in gl.static_range(2):
        inter_q = warpgroup_mma(
            do_s[tv].index(stage), S_s[tv * 2 + HALF].index(z), inter_q, use_acc=tv > 0, is_async=True
        )
    for tv in gl.static_range(2):
        dS_t = dS_s[tv * 2 + HALF].index(z)
        dk_stored = warpgroup_mma(x_s[tv].index(z), dS_t, dk_stored, use_acc=tv > 0, is_async=True)
    if DECAY != "none":
        G = G_s.index(stage).load(ROWS)
        G_early = before_s.index(stage).load(ROWS) if EARLY else G
        G_q = G_early if READ_EARLY else G
        G_e = G_early if ERASE_EARLY else G
        G_j = G_s.index(stage).load(COLUMNS)
    if DELTA and ERASE and not (SHARED and WRITE):
        erase = gl.load(b + (row + t) * HV + hv, mask=t < left, other=0.0).to(gl.float32)
        strength = -held_off(erase, LEAST)
    else:
        # -1, which the compiler must not know: it changes signs between products then
        strength = gl.full([64], gl.where(segments > 0, -1.0, 0.0), gl.float32, ROWS)
    if DELTA:
        low_q_s = P_s.index(stage)
        low_e_s = T_s.index(stage)._reinterpret(dtype, [64, 64], SHARED_TILE)
        intra = warpgroup_mma_wait(4, deps=[intra])
        if HALF == 0:
            if SHARED and WRITE:
                of_write = gl.sum(gl.where(t[:, None] == j[None, :], intra, 0.0), 1)
                gl.store(at_gate + 128 + t, of_write)
            if DECAY != "none":
                intra = faded(intra, G_e, G_j, strength[:, None])
            else:
                intra *= strength[:, None]
            low_e_s.store(narrow(gl.where(t[:, None] > j[None, :], intra, 0.0), dtype))
        else:
            if DECAY != "none":
                intra = faded(intra, G_q, G_j, scale)
            else:
                intra *= scale
            low_q_s.store(narrow(gl.where(t[:, None] >= j[None, :] + FIRST, intra, 0.0), dtype))
        inter_e = gl.zeros([64, 64], gl.float32, MMA)
        for tv in gl.static_range(2):
            inter_e = warpgroup_mma(
                du_s[tv].index(z).permute((1, 0)), S_s[tv * 2 + HALF].index(z), inter_e, use_acc=tv > 0, is_async=True
            )
        meet(lows, odd)
        inter_q, dk_stored, inter_e = warpgroup_mma_wait(0, deps=[inter_q, dk_stored, inter_e])
    else:
        low_q_s = low_s.index(stage)
        inter_q, dk_stored = warpgroup_mma_wait(0, deps=[inter_q, dk_stored])
    if DECAY != "none":
        inter_q *= (gl.exp2(G_q) * scale)[:, None]
    else:
        inter_q *= scale
    if DELTA:
        if DECAY != "none":
            inter_e *= (gl.exp2(G_e) * strength)[:, None]
        else:
            inter_e *= strength[:, None]
    SUMS: gl.constexpr = DECAY != "none" or (WRITE and not DELTA)
    at_kept = kepts + (HALF * slots.to(gl.int64) * HV + place)
    if DECAY != "none":
        fade_k = gl.exp2(end - G)
    if WRITE and not DELTA:
        write = held_off(w_s.index(stage).load(ROWS), LEAST)
        fade_k = fade_k * write if DECAY != "none" else write
    if SUMS:
        dk_stored *= fade_k[:, None]
    # before dk takes dk_stored over; with an erase that comes later, and there are registers after dq
    if DECAY != "none" and not DELTA:
        if is_last:
            keep_end(end, dk_stored, S_s, dS_s, k_t, sums_s, at_kept, z, HALF)
    dq_tile = warpgroup_mma(low_q_s, k_t, inter_q, is_async=True)
    if DELTA:
        de_tile = warpgroup_mma(low_e_s, k_t, inter_e, is_async=True)
    else:
        dk_tile = warpgroup_mma(low_q_s.permute((1, 0)), q_t, dk_stored, is_async=True)
    dq_tile = warpgroup_mma_wait(1, deps=[dq_tile])
    if DECAY != "none":
        turn = gl.sum(widen(q_t.load(MMA)) * dq_tile, 1)
    STRIDE: gl.constexpr = HV * K if HV > H else H * K
    if HV > H:
        out = (local * 64 * HV + hv) * K + COLUMN
        dq_at = partial + out
        dk_at = partial + held.to(gl.int64) * (64 * HV * K) + out
    else:
        out = (row * H + h) * K + COLUMN
        dq_at = dq + out
        dk_at = dk + out
    put(dq_at, dq_tile, STRIDE, left, K - COLUMN, NARROW_K)
    if DECAY != "none" and DELTA:
        if is_last:
            keep_end(end, dk_stored, S_s, dS_s, k_t, sums_s, at_kept, z, HALF)
    if DECAY != "none":
        # <dS', S'> of the chunk before, whose S' is this one's state
        kept = dS_a * widen(S_s[HALF * 2].index(z).load(MMA)) + dS_b * widen(S_s[HALF * 2 + 1].index(z).load(MMA))
        sums_s.store(of_warps(gl.sum(kept, 1)))
    if DELTA and WRITE and not SHARED:
        # of its half of the values, as of its half of the keys
        i = gl.arange(0, 64, gl.SliceLayout(1, COPY))
        vs = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(0, COPY))
        v_at = v + ((row * HV + hv) * V + (i[:, None] * (HV * V) + vs[None, :]))
        v_tile = gl.load(v_at, mask=(i < left)[:, None] & (vs < V)[None, :], other=0.0)
        du_tile = du_s[HALF].index(z).permute((1, 0)).load(COPY)
        gl.store(at_gate + 128 + i, gl.sum(v_tile.to(gl.float32) * du_tile.to(gl.float32), 1))
    barrier()
    mbarrier.arrive(walked, count=1)
    if DECAY != "none":
        gl.store(at_kept - HV, gl.sum(sums_s.load(LINE), 0), mask=is_first == 0)
    turned_e = gl.full([64], 0.0, gl.float32, ROWS)
    # the buffers too: else the compiler takes them for free from where the products start
    if DELTA:
        de_tile = warpgroup_mma_wait(0, deps=[de_tile])
        if DECAY != "none" or ERASE:
            turned_e = gl.sum(widen(k_t.load(MMA)) * de_tile, 1)
            if ERASE:
                gl.store(at_gate + 64 + t, turned_e)
        dk_tile = warpgroup_mma(low_q_s.permute((1, 0)), q_t, de_tile + dk_stored, is_async=True)
        dk_tile = warpgroup_mma(low_e_s.permute((1, 0)), k_t, dk_tile, is_async=True)
    if DECAY != "none" and EARLY:
        ahead = gl.full([64], 0.0, gl.float32, ROWS)
        behind = gl.full([64], 0.0, gl.float32, ROWS)
        if READ_EARLY:
            ahead += turn
        else:
            behind += turn
        if ERASE_EARLY:
            ahead += turned_e
        else:
            behind += turned_e
        turn = behind
        gl.store(at_gate + 192 + t, ahead)
    elif DECAY != "none":
        turn += turned_e
    if DELTA:
        dk_tile, _, _, _, _ = warpgroup_mma_wait(0, deps=[dk_tile, low_q_s, q_t, low_e_s, k_t])
    else:
        dk_tile, _, _ = warpgroup_mma_wait(0, deps=[dk_tile, low_q_s, q_t])
    if SUMS:
        turn_k = gl.sum(widen(k_t.load(MMA)) * dk_tile, 1) - turned_e
        if WRITE and not DELTA:
            gl.store(at_gate + 128 + t, turn_k / write)
        if DECAY != "none":
            gl.store(at_gate + t, turn - turn_k)
    put(dk_at, dk_tile, STRIDE, left, K - COLUMN, NARROW_K)
