"""The gradients of a chunk for Hopper GPUs, in Gluon: equations, parameters and results are those of gradients.py.

A program there waits for its tiles three times, and again for the gates. Here each tile has a buffer of its own in
shared memory, all copies are under way before the first product, and products take most operands from where they were
copied to; of more than 128 values, whose tiles have two buffers by turns, those of the first. Reads (q, do) and erases
(k, du) are products of their own, and not rows of one: so the three rows of a token are in the same threads. It takes
operands and scratch of one 16-bit dtype, chunks of 64, values up to 512, and k as the erase key.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.kernels.hopper.common import (
    A_OPERAND,
    ACC,
    ACC_COLUMNS,
    ACC_N16,
    ACC_ROWS,
    FOUR_PER_THREAD,
    SMEM_TILE,
    SMEM_VECTOR,
    allocate_tiles,
    barrier,
    copy_pointers,
    copy_tile_async,
    find_sequence,
    store_accumulator,
    sum_by_warp,
    to_16_bits,
    to_float32,
)
from deltazoo.backends.triton.kernels.layout import (
    clamp_away_from_zero,
    locate_scratch_chunk_in_sequence,
    opaque_zero,
    scratch_slots_per_sequence,
)

COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def fetch_values(
    buffers, places, tv: gl.constexpr, left, column, K: gl.constexpr, V: gl.constexpr, DELTA: gl.constexpr
):  # fmt: skip
    """Copy a tile of 64 values of do, du, x, S^T and dS'^T to a buffer, those of 64 keys from `column` on."""
    do_s, du_s, x_s, S_s, dS_s = buffers
    do_at, du_at, x_at, S_at, dS_at = places
    NARROW_V: gl.constexpr = V % 64 != 0
    NARROW_K: gl.constexpr = K % 64 != 0
    at: gl.constexpr = tv % len(do_s)
    copy_tile_async(do_s[at], do_at, tv * 64, left, V - tv * 64, True, NARROW_V)
    if DELTA:
        copy_tile_async(du_s[at], du_at, tv * 64, left, V - tv * 64, True, NARROW_V)
    copy_tile_async(x_s[at], x_at, tv * 64, left, V - tv * 64, not DELTA, NARROW_V)
    copy_tile_async(S_s[at], S_at, tv * 64 * K, V - tv * 64, K - column, NARROW_V, NARROW_K)
    copy_tile_async(dS_s[at], dS_at, tv * 64 * K, V - tv * 64, K - column, NARROW_V, NARROW_K)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["N", "slots", "held", "T", "segment", "segments"])
def hopper_gradients_kernel(
    q, k, e, v, b, do, gates, states, dstates, xs, du, dq, dk, de, dgates, state_products, partial, cu, N,
    slots, held, scale, T, segment, segments,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    BK: gl.constexpr, BV: gl.constexpr,
    DECAY: gl.constexpr, DELTA: gl.constexpr, OWN: gl.constexpr, ERASE: gl.constexpr, WRITE: gl.constexpr,
    ERASE_EARLY: gl.constexpr, READ_EARLY: gl.constexpr, PACKED: gl.constexpr,
    DU_IS_DV: gl.constexpr, MIN_BETA: gl.constexpr, UNIT: gl.constexpr, PREC: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head, tile of 64 keys); values in tiles of 64, zeros beyond V."""
    gl.static_assert(C == 64 and BK == 64 and V <= 512 and not OWN)
    gl.static_assert(states.dtype == k.dtype and k.dtype.element_ty.primitive_bitwidth == 16)
    EARLY: gl.constexpr = ERASE_EARLY or READ_EARLY
    GATE_ROWS: gl.constexpr = 4 if EARLY else 3
    NK: gl.constexpr = (K + BK - 1) // BK
    NV: gl.constexpr = (V + 63) // 64
    NB: gl.constexpr = min(NV, 2)  # buffers
    GROUP: gl.constexpr = HV // H
    dtype: gl.constexpr = states.dtype.element_ty
    pid = gl.program_id(0)
    tile = pid % NK
    hv = pid // NK % HV
    h = hv // GROUP
    local = pid // NK // HV
    if PACKED:
        n = find_sequence(local, cu, N, segments, gl.where(segments == 1, 0, UNIT), C)
    else:
        n = local // scratch_slots_per_sequence(T, segments, C, UNIT)
    start, length, slot, c, held_here = locate_scratch_chunk_in_sequence(
        local, n, cu, T, segment, segments, C, UNIT, PACKED
    )
    if held_here:
        left = length - c * C
        row = start + c * C
        column = tile * BK
        key = (row * H + h) * K + column
        place = slot.to(gl.int64) * HV + hv
        scratch = local.to(gl.int64) * HV + hv
        value = (row * HV + hv) * V
        local_value = (local.to(gl.int64) * C * HV + hv) * V
        du_value = value if DU_IS_DV else local_value

        S_s = allocate_tiles(dtype, NB)
        dS_s = allocate_tiles(dtype, NB)
        x_s = allocate_tiles(dtype, NB)
        do_s = allocate_tiles(dtype, NB)
        du_s = allocate_tiles(dtype, NB) if DELTA else do_s
        q_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        k_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        G_s = gl.allocate_shared_memory(gl.float32, [C], SMEM_VECTOR)
        sums_s = gl.allocate_shared_memory(gl.float32, [4], SMEM_VECTOR)

        of_chunk = gates + place * 3 * C
        if DECAY != "none":
            async_copy.async_copy_global_to_shared(G_s, of_chunk + gl.arange(0, C, FOUR_PER_THREAD))
            G_end = gl.load(of_chunk + C - 1)
            if EARLY:
                i = gl.arange(0, C, ACC_ROWS)
                G_early = gl.load(of_chunk + i - 1, mask=i > 0, other=0.0)
        if WRITE and not DELTA:
            w_s = gl.allocate_shared_memory(gl.float32, [C], SMEM_VECTOR)
            async_copy.async_copy_global_to_shared(w_s, of_chunk + 2 * C + gl.arange(0, C, FOUR_PER_THREAD))
        NARROW_K: gl.constexpr = K % 64 != 0
        do_at = copy_pointers(do + value, HV * V)
        if DELTA:
            du_at = copy_pointers(du + du_value, HV * V)
            x_at = copy_pointers(xs + local_value, HV * V)
        else:
            du_at = do_at
            x_at = copy_pointers(v + value, HV * V)
        S_at = copy_pointers(states + scratch * V * K + column, K)
        dS_at = copy_pointers(dstates + scratch * V * K + column, K)
        buffers = (do_s, du_s, x_s, S_s, dS_s)
        places = (do_at, du_at, x_at, S_at, dS_at)
        for tv in gl.static_range(NB):
            fetch_values(buffers, places, tv, left, column, K, V, DELTA)
        copy_tile_async(k_s, copy_pointers(k + key, H * K), 0, left, K - column, True, NARROW_K)
        copy_tile_async(q_s, copy_pointers(q + key, H * K), 0, left, K - column, True, NARROW_K)
        async_copy.commit_group()

        t = gl.arange(0, C, ACC_ROWS)
        j = gl.arange(0, C, ACC_COLUMNS)
        in_time = t < left
        if DELTA and ERASE and not (DU_IS_DV and WRITE):
            erase = gl.load(b + (row + t) * HV + hv, mask=in_time, other=0.0).to(gl.float32)

        inter_q = gl.zeros([C, BK], gl.float32, ACC)  # do S^T
        inter_e = gl.zeros([C, BK], gl.float32, ACC)  # du S^T
        intra_q = gl.zeros([C, C], gl.float32, ACC)  # do x^T
        intra_e = gl.zeros([C, C], gl.float32, ACC)  # du x^T
        dk_stored = gl.zeros([C, BK], gl.float32, ACC)
        kept = gl.zeros([64, 16], gl.float32, ACC_N16)
        for tv in gl.static_range(NV):
            # those of k and q are under way, too, of the first tiles, and those of the next tile
            async_copy.wait_group((1 if tv < NB else 0) + (1 if tv + 1 < NV else 0))
            fence_async_shared()
            S_t = S_s[tv % NB]
            dS_t = dS_s[tv % NB]
            x_t = x_s[tv % NB]
            do_t = do_s[tv % NB]
            inter_q = warpgroup_mma(do_t, S_t, inter_q, is_async=True)
            intra_q = warpgroup_mma(do_t, x_t.permute((1, 0)), intra_q, is_async=True)
            if DELTA:
                du_t = du_s[tv % NB]
                inter_e = warpgroup_mma(du_t, S_t, inter_e, is_async=True)
                intra_e = warpgroup_mma(du_t, x_t.permute((1, 0)), intra_e, is_async=True)
            dk_stored = warpgroup_mma(x_t, dS_t, dk_stored, is_async=True)
            if DECAY != "none":
                for piece in gl.static_range(4):
                    S_p = S_t.slice(piece * 16, 16, dim=1).load(ACC_N16)
                    dS_p = dS_t.slice(piece * 16, 16, dim=1).load(ACC_N16)
                    kept += to_float32(S_p) * to_float32(dS_p)
            if tv + NB < NV:
                inter_q, intra_q, inter_e, intra_e, dk_stored = warpgroup_mma_wait(
                    0, deps=[inter_q, intra_q, inter_e, intra_e, dk_stored]
                )
                barrier()  # all have done with the buffer
                far = opaque_zero(c, 25 + tv) * 64
                moved = (do_at + far, du_at + far, x_at + far, S_at + far, dS_at + far)
                fetch_values(buffers, moved, tv + NB, left, column, K, V, DELTA)
        if DELTA:
            inter_q, intra_q, inter_e, intra_e, dk_stored = warpgroup_mma_wait(
                0, deps=[inter_q, intra_q, inter_e, intra_e, dk_stored]
            )
        else:
            inter_q, intra_q, dk_stored = warpgroup_mma_wait(0, deps=[inter_q, intra_q, dk_stored])
        async_copy.wait_group(0)  # the fence for k, q and e is the one for low_q and low_e

        at_gate = dgates + (tile.to(gl.int64) * slots * HV + place) * GATE_ROWS * C
        if WRITE and not DELTA:
            write_row = w_s.load(ACC_ROWS)
            intra_q *= w_s.load(ACC_COLUMNS)[None, :]
        if DU_IS_DV and WRITE:
            of_write = gl.sum(gl.where(t[:, None] == j[None, :], intra_e, 0.0), 1)
            gl.store(at_gate + 2 * C + t, of_write)
        if DELTA:
            # -1, which the compiler must not know: it changes signs between products then
            one = gl.where(segments > 0, -1.0, 0.0)
            if ERASE and not (DU_IS_DV and WRITE):
                strength = -clamp_away_from_zero(erase, MIN_BETA)
            else:
                strength = gl.full([C], one, gl.float32, ACC_ROWS)
        FIRST: gl.constexpr = 1 if READ_EARLY else 0
        if DECAY != "none":
            G = G_s.load(ACC_ROWS)
            G_j = G_s.load(ACC_COLUMNS)
            G_q = G_early if READ_EARLY else G
            G_e = G_early if ERASE_EARLY else G
            # where a token is not seen this may be no number
            fade_q = gl.exp2(G_q[:, None] - G_j[None, :])
            intra_q *= fade_q * scale
            inter_q *= (gl.exp2(G_q) * scale)[:, None]
            if DELTA:
                fade_e = fade_q if READ_EARLY == ERASE_EARLY else gl.exp2(G_e[:, None] - G_j[None, :])
                intra_e *= fade_e * strength[:, None]
                inter_e *= (gl.exp2(G_e) * strength)[:, None]
            fade_k = gl.exp2(G_end - G)
            if WRITE and not DELTA:
                fade_k *= write_row
        else:
            if WRITE and not DELTA:
                fade_k = write_row
            intra_q *= scale
            inter_q *= scale
            if DELTA:
                intra_e *= strength[:, None]
                inter_e *= strength[:, None]
        low_q = to_16_bits(gl.where(t[:, None] >= j[None, :] + FIRST, intra_q, 0.0), dtype)
        left_q = gl.convert_layout(low_q, A_OPERAND, assert_trivial=True)
        low_q_s = do_s[0]
        low_q_s.store(low_q)
        if DELTA:
            low_e = to_16_bits(gl.where(t[:, None] > j[None, :], intra_e, 0.0), dtype)
            left_e = gl.convert_layout(low_e, A_OPERAND, assert_trivial=True)
            low_e_s = du_s[0]
            low_e_s.store(low_e)
        fence_async_shared()
        barrier()
        dq_tile = warpgroup_mma(left_q, k_s, inter_q, is_async=True)
        if DELTA:
            de_tile = warpgroup_mma(left_e, k_s, inter_e, is_async=True)
        dk_tile = gl.zeros([C, BK], gl.float32, ACC)
        dk_tile = warpgroup_mma(low_q_s.permute((1, 0)), q_s, dk_tile, is_async=True)
        if DELTA:
            dk_tile = warpgroup_mma(low_e_s.permute((1, 0)), k_s, dk_tile, is_async=True)
        if DECAY != "none":
            k_tile = to_float32(k_s.load(ACC))
            stored = gl.sum(k_tile * dk_stored, 1) * fade_k
            kept_row = gl.convert_layout(gl.sum(kept, 1), ACC_ROWS, assert_trivial=True)
            sums_s.store(sum_by_warp(kept_row * gl.exp2(G_end) + stored))
        if DELTA:
            dq_tile, left_q, de_tile, left_e = warpgroup_mma_wait(2, deps=[dq_tile, left_q, de_tile, left_e])
        else:
            dq_tile, left_q = warpgroup_mma_wait(1, deps=[dq_tile, left_q])
        if DECAY != "none":
            turn = gl.sum(to_float32(q_s.load(ACC)) * dq_tile, 1)
        if DELTA and (DECAY != "none" or ERASE):
            turned_e = gl.sum(to_float32(k_s.load(ACC)) * de_tile, 1)
            if ERASE:
                gl.store(at_gate + C + t, turned_e)
        if DECAY != "none":
            if EARLY:
                ahead = gl.full([C], 0.0, gl.float32, ACC_ROWS)
                if READ_EARLY:
                    ahead += turn
                    turn = gl.full([C], 0.0, gl.float32, ACC_ROWS)
                if DELTA:
                    if ERASE_EARLY:
                        ahead += turned_e
                    else:
                        turn += turned_e
                gl.store(at_gate + 3 * C + t, ahead)
            elif DELTA:
                turn += turned_e
        if GROUP > 1:
            out = (local.to(gl.int64) * C * HV + hv) * K + column
            dq_at = partial + out
            dk_at = partial + held.to(gl.int64) * C * HV * K + out
        else:
            dq_at = dq + key
            dk_at = dk + key
        store_accumulator(dq_at, dq_tile, HV * K, left, K - column, NARROW_K)
        # the buffers too: else the compiler takes them for free from where the products start
        if DELTA:
            dk_tile, _, _, _, _ = warpgroup_mma_wait(0, deps=[dk_tile, low_q_s, q_s, low_e_s, k_s])
        else:
            dk_tile, _, _ = warpgroup_mma_wait(0, deps=[dk_tile, low_q_s, q_s])
        if DECAY != "none":
            turn_k = gl.sum(to_float32(k_s.load(ACC)) * dk_tile, 1)
            gl.store(at_gate + t, turn - (turn_k + stored))
            kept_all = gl.sum(sums_s.load(FOUR_PER_THREAD), 0)
            gl.store(state_products + tile.to(gl.int64) * slots * HV + place, kept_all)
        if DECAY != "none" or (WRITE and not DELTA):
            dk_tile += dk_stored * fade_k[:, None]
        else:
            dk_tile += dk_stored
        if DELTA:
            dk_tile += de_tile
        store_accumulator(dk_at, dk_tile, HV * K, left, K - column, NARROW_K)
        if WRITE and not DU_IS_DV:
            # each K tile takes a share of the values
            i = gl.arange(0, C, gl.SliceLayout(1, COPY))
            vs = gl.arange(0, 64, gl.SliceLayout(0, COPY))
            dwrite = gl.zeros([C], gl.float32, gl.SliceLayout(1, COPY))
            for tw in range(tile, NV, NK):
                at_v = i[:, None] * (HV * V) + (tw * 64 + vs)[None, :]
                inside = (tw * 64 + vs < V)[None, :]
                v_tile = gl.load(v + value + at_v, mask=(i < left)[:, None] & inside, other=0.0)
                du_tile = gl.load(du + local_value + at_v, mask=(i < C)[:, None] & inside, other=0.0)
                dwrite += gl.sum(v_tile.to(gl.float32) * du_tile.to(gl.float32), 1)
            gl.store(at_gate + 2 * C + i, dwrite)
