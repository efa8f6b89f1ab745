"""Gradients of q, k, e and the gates of a chunk on sm_90, from the states and dstates of the reverse scan.

With S the state before the chunk, dS' the gradient of the state after it, x and du [64, V], and G', G'' as in
prepare.py:

    dP = scale 2^(G''_i - G_j) do x^T  (j <= i, or j < i),   dA = -b 2^(G'_i - G_j) du x^T  (j < i)
    dq = scale 2^G'' do S^T + dP k,   de = -b 2^G' du S^T + dA k
    dk = 2^(Gend - G) x dS' + dP^T q + dA^T e

where the erase key e is an operand, or k; then dk includes de.

and the sums over keys from which portable/gradients.py computes the gradients of the gates: dG = q . dq + e . de - k .
dk, e . de, v . du, and <dS', S'>. An additive update has du = dx and no dA or de.

Grid: one CTA of 4 warps for each (chunk, value head, tile of 64 keys); it loops over tiles of 64 values, two stages of
which are in shared memory. It is not warp specialised: all copies of the first two value tiles, of k, q and e are
issued before the first wgmma, each tile has its own buffer, and most wgmma operands are in shared memory. If the last
tile has at most 16 values (tail_width), it has buffers of its own, whose copies are also issued before the first wgmma.

The products of the read (q, do) and of the erase (e, du) have separate accumulators, not stacked rows as in
portable/gradients.py: the rows of one token are then in the same threads without a permutation.

Supported: operands and scratch of one 16-bit dtype, chunks of 64, V <= 512.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.chunk.kernels.sm90.common import (
    A_OPERAND,
    ACC,
    ACC_COLUMNS,
    ACC_N16,
    ACC_ROWS,
    FOUR_PER_THREAD,
    SMEM_TILE,
    SMEM_TILE_N16,
    SMEM_VECTOR,
    allocate_tiles,
    barrier,
    copy_pointers,
    copy_tile_async,
    locate_scratch_chunk,
    store_accumulator,
    sum_by_warp,
    to_16_bits,
    to_float32,
)
from deltazoo.backends.triton.chunk.kernels.sm90.gluon_versions import async_load, reinterpret
from deltazoo.backends.triton.chunk.kernels.sm90.scan_traits import tail_width
from deltazoo.backends.triton.chunk.kernels.sm90.value_tiles import (
    allocate_value_tail,
    copy_value_tail,
    copy_value_tile,
    store_write_sums,
)
from deltazoo.backends.triton.device.layout import clamp_away_from_zero, locate_key_tile, opaque_zero


@takes(
    pointers="q k e v b do gates states dstates v_new du dq dk de dgates state_products partial slopes cu",
    traits="H HV K V C BK DECAY DELTA ERASE WRITE ERASE_PREVIOUS READ_BEFORE PACKED DU_IS_DV MIN_BETA UNIT",
)
@gluon.jit(do_not_specialize=["N", "slots", "num_scratch_slots", "T", "window", "windows"])
def sm90_gradients_kernel(gmem, N, slots, num_scratch_slots, scale, T, window, windows, traits: gl.constexpr):
    """Parameters and results as in portable/gradients.py. e and de are None if the erase key is k."""
    H: gl.constexpr = traits.H
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    V: gl.constexpr = traits.V
    C: gl.constexpr = traits.C
    BK: gl.constexpr = traits.BK
    DECAY: gl.constexpr = traits.DECAY
    DELTA: gl.constexpr = traits.DELTA
    ERASE: gl.constexpr = traits.ERASE
    WRITE: gl.constexpr = traits.WRITE
    ERASE_PREVIOUS: gl.constexpr = traits.ERASE_PREVIOUS
    READ_BEFORE: gl.constexpr = traits.READ_BEFORE
    DU_IS_DV: gl.constexpr = traits.DU_IS_DV
    gl.static_assert(C == 64 and BK == 64 and V <= 512)
    gl.static_assert(gmem.states.dtype == gmem.k.dtype and gmem.k.dtype.element_ty.primitive_bitwidth == 16)
    GATES_BEFORE: gl.constexpr = ERASE_PREVIOUS or READ_BEFORE
    GATE_ROWS: gl.constexpr = 4 if GATES_BEFORE else 3
    OWN_KEY: gl.constexpr = gmem.e is not None
    NK: gl.constexpr = (K + BK - 1) // BK
    NV: gl.constexpr = (V + 63) // 64
    NARROW: gl.constexpr = tail_width(V, NV) == 16 and not OWN_KEY  # with e they would not fit twice in an SM
    FULL: gl.constexpr = NV - 1 if NARROW else NV  # value tiles in the two stages
    NUM_STAGES: gl.constexpr = min(FULL, 2)
    GROUP: gl.constexpr = HV // H
    dtype: gl.constexpr = gmem.states.dtype.element_ty
    scratch_slot, hv, h, tile = locate_key_tile(NK, traits)
    start, length, slot, c, in_use = locate_scratch_chunk(
        scratch_slot, gmem.cu, N, T, window, windows, C, traits.UNIT, traits.PACKED
    )  # fmt: skip
    if in_use:
        tokens_left = length - c * C
        token = start + c * C
        column = tile * BK
        key = (token * H + h) * K + column
        gate_row = slot.to(gl.int64) * HV + hv
        scratch_row = scratch_slot.to(gl.int64) * HV + hv
        value = (token * HV + hv) * V
        local_value = (scratch_slot.to(gl.int64) * C * HV + hv) * V
        du_value = value if DU_IS_DV else local_value

        S_s = allocate_tiles(dtype, NUM_STAGES)
        dS_s = allocate_tiles(dtype, NUM_STAGES)
        x_s = allocate_tiles(dtype, NUM_STAGES)
        do_s = allocate_tiles(dtype, NUM_STAGES)
        du_s = allocate_tiles(dtype, NUM_STAGES) if DELTA else do_s
        q_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        k_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        e_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE) if OWN_KEY else k_s
        G_s = gl.allocate_shared_memory(gl.float32, [C], SMEM_VECTOR)
        sums_s = gl.allocate_shared_memory(gl.float32, [4], SMEM_VECTOR)

        gates_at = gmem.gates + gate_row * 3 * C
        if DECAY != "none":
            async_load(G_s, gates_at + gl.arange(0, C, FOUR_PER_THREAD))
            G_end = gl.load(gates_at + C - 1)
            if GATES_BEFORE:
                i = gl.arange(0, C, ACC_ROWS)
                G_prev = gl.load(gates_at + i - 1, mask=i > 0, other=0.0)
        if WRITE and not DELTA:
            w_s = gl.allocate_shared_memory(gl.float32, [C], SMEM_VECTOR)
            async_load(w_s, gates_at + 2 * C + gl.arange(0, C, FOUR_PER_THREAD))
        MASK_K: gl.constexpr = K % 64 != 0
        do_at = copy_pointers(gmem.do + value, HV * V)
        if DELTA:
            du_at = copy_pointers(gmem.du + du_value, HV * V)
            x_at = copy_pointers(gmem.v_new + local_value, HV * V)
        else:
            du_at = do_at
            x_at = copy_pointers(gmem.v + value, HV * V)
        S_at = copy_pointers(gmem.states + scratch_row * V * K + column, K)
        dS_at = copy_pointers(gmem.dstates + scratch_row * V * K + column, K)
        buffers = (do_s, du_s, x_s, S_s, dS_s)
        pointers = (do_at, du_at, x_at, S_at, dS_at)
        if NARROW:
            tail = allocate_value_tail(dtype, DELTA)
            state_row = scratch_row * V * K + column
            rows = (
                gmem.do + value, gmem.du + du_value if DELTA else gmem.do + value,
                gmem.v_new + local_value if DELTA else gmem.v + value, gmem.states + state_row,
                gmem.dstates + state_row,
            )  # fmt: skip
            copy_value_tail(tail, rows, tokens_left, column, HV, K, V, DELTA)
        for tv in gl.static_range(NUM_STAGES):
            copy_value_tile(buffers, pointers, tv, tokens_left, column, K, V, DELTA, 64 * K)
        copy_tile_async(k_s, copy_pointers(gmem.k + key, H * K), 0, tokens_left, K - column, True, MASK_K)
        copy_tile_async(q_s, copy_pointers(gmem.q + key, H * K), 0, tokens_left, K - column, True, MASK_K)
        if OWN_KEY:
            copy_tile_async(e_s, copy_pointers(gmem.e + key, H * K), 0, tokens_left, K - column, True, MASK_K)
        async_copy.commit_group()

        t = gl.arange(0, C, ACC_ROWS)
        j = gl.arange(0, C, ACC_COLUMNS)
        in_sequence = t < tokens_left
        if DELTA and ERASE and not (DU_IS_DV and WRITE):
            erase = gl.load(gmem.b + (token + t) * HV + hv, mask=in_sequence, other=0.0).to(gl.float32)

        inter_q = gl.zeros([C, BK], gl.float32, ACC)  # do S^T
        inter_e = gl.zeros([C, BK], gl.float32, ACC)  # du S^T
        intra_q = gl.zeros([C, C], gl.float32, ACC)  # do x^T
        intra_e = gl.zeros([C, C], gl.float32, ACC)  # du x^T
        dk_state = gl.zeros([C, BK], gl.float32, ACC)
        products = gl.zeros([64, 16], gl.float32, ACC_N16)
        for tv in gl.static_range(NV):
            if tv < FULL:
                # leave pending: the group of k, q and e, committed after the first value tiles, and that of the next
                # value tile
                async_copy.wait_group((1 if tv < NUM_STAGES else 0) + (1 if tv + 1 < FULL else 0))
                fence_async_shared()
                S_t = S_s[tv % NUM_STAGES]
                dS_t = dS_s[tv % NUM_STAGES]
                x_t = x_s[tv % NUM_STAGES]
                do_t = do_s[tv % NUM_STAGES]
                du_t = du_s[tv % NUM_STAGES]
            else:
                do_t, du_t, x_t, S_t, dS_t = tail
            inter_q = warpgroup_mma(do_t, S_t, inter_q, is_async=True)
            intra_q = warpgroup_mma(do_t, x_t.permute((1, 0)), intra_q, is_async=True)
            if DELTA:
                inter_e = warpgroup_mma(du_t, S_t, inter_e, is_async=True)
                intra_e = warpgroup_mma(du_t, x_t.permute((1, 0)), intra_e, is_async=True)
            dk_state = warpgroup_mma(x_t, dS_t, dk_state, is_async=True)
            if DECAY != "none":
                for block in gl.static_range(4 if tv < FULL else 1):
                    if tv < FULL:
                        S_block = S_t.slice(block * 16, 16, dim=1).load(ACC_N16)
                        dS_block = dS_t.slice(block * 16, 16, dim=1).load(ACC_N16)
                    else:  # any order of the elements, the same for both
                        S_block = reinterpret(S_t, dtype, [64, 16], SMEM_TILE_N16).load(ACC_N16)
                        dS_block = reinterpret(dS_t, dtype, [64, 16], SMEM_TILE_N16).load(ACC_N16)
                    products += to_float32(S_block) * to_float32(dS_block)
            if tv + NUM_STAGES < FULL:
                inter_q, intra_q, inter_e, intra_e, dk_state = warpgroup_mma_wait(
                    0, deps=[inter_q, intra_q, inter_e, intra_e, dk_state]
                )
                barrier()  # every warp has read the stage
                zero = opaque_zero(c, 25 + tv) * 64
                next_pointers = (do_at + zero, du_at + zero, x_at + zero, S_at + zero, dS_at + zero)
                copy_value_tile(buffers, next_pointers, tv + NUM_STAGES, tokens_left, column, K, V, DELTA, 64 * K)
        if DELTA:
            inter_q, intra_q, inter_e, intra_e, dk_state = warpgroup_mma_wait(
                0, deps=[inter_q, intra_q, inter_e, intra_e, dk_state]
            )
        else:
            inter_q, intra_q, dk_state = warpgroup_mma_wait(0, deps=[inter_q, intra_q, dk_state])
        async_copy.wait_group(0)  # of k, q and e; the proxy fence below covers them

        dgates_at = gmem.dgates + (tile.to(gl.int64) * slots * HV + gate_row) * GATE_ROWS * C
        if WRITE and not DELTA:
            write = w_s.load(ACC_ROWS)
            intra_q *= w_s.load(ACC_COLUMNS)[None, :]
        if (DU_IS_DV and WRITE) or gmem.slopes is not None:
            du_dot_x = gl.sum(gl.where(t[:, None] == j[None, :], intra_e, 0.0), 1)
        if DU_IS_DV and WRITE:
            gl.store(dgates_at + 2 * C + t, du_dot_x)
        if gmem.slopes is not None:
            step_gradient = du_dot_x * gl.load(gmem.slopes + gate_row * 2 * C + t)
        if DELTA:
            # a -1 that the compiler cannot fold: otherwise it emits sign changes between the wgmmas, which serialises
            # them (C7514)
            minus_one = gl.where(windows > 0, -1.0, 0.0)
            if ERASE and not (DU_IS_DV and WRITE):
                erase_scale = -clamp_away_from_zero(erase, traits.MIN_BETA)
            else:
                erase_scale = gl.full([C], minus_one, gl.float32, ACC_ROWS)
        DIAGONAL: gl.constexpr = 1 if READ_BEFORE else 0
        if DECAY != "none":
            G = G_s.load(ACC_ROWS)
            G_j = G_s.load(ACC_COLUMNS)
            G_q = G_prev if READ_BEFORE else G
            G_e = G_prev if ERASE_PREVIOUS else G
            # may be inf or NaN at non-causal positions, masked below
            D_q = gl.exp2(G_q[:, None] - G_j[None, :])
            intra_q *= D_q * scale
            inter_q *= (gl.exp2(G_q) * scale)[:, None]
            if DELTA:
                D_e = D_q if READ_BEFORE == ERASE_PREVIOUS else gl.exp2(G_e[:, None] - G_j[None, :])
                intra_e *= D_e * erase_scale[:, None]
                inter_e *= (gl.exp2(G_e) * erase_scale)[:, None]
            key_scale = gl.exp2(G_end - G)
            if WRITE and not DELTA:
                key_scale *= write
        else:
            if WRITE and not DELTA:
                key_scale = write
            intra_q *= scale
            inter_q *= scale
            if DELTA:
                intra_e *= erase_scale[:, None]
                inter_e *= erase_scale[:, None]
        dP = to_16_bits(gl.where(t[:, None] >= j[None, :] + DIAGONAL, intra_q, 0.0), dtype)
        a_dP = gl.convert_layout(dP, A_OPERAND, assert_trivial=True)
        dP_s = do_s[0]
        dP_s.store(dP)
        if DELTA:
            dA = to_16_bits(gl.where(t[:, None] > j[None, :], intra_e, 0.0), dtype)
            a_dA = gl.convert_layout(dA, A_OPERAND, assert_trivial=True)
            dA_s = du_s[0]
            dA_s.store(dA)
        fence_async_shared()
        barrier()
        dq_tile = warpgroup_mma(a_dP, k_s, inter_q, is_async=True)
        if DELTA:
            de_tile = warpgroup_mma(a_dA, k_s, inter_e, is_async=True)
        dk_tile = gl.zeros([C, BK], gl.float32, ACC)
        dk_tile = warpgroup_mma(dP_s.permute((1, 0)), q_s, dk_tile, is_async=True)
        if DELTA:
            dk_tile = warpgroup_mma(dA_s.permute((1, 0)), e_s, dk_tile, is_async=True)
        if DECAY != "none":
            k_tile = to_float32(k_s.load(ACC))
            write_dots = gl.sum(k_tile * dk_state, 1) * key_scale
            state_rows = gl.convert_layout(gl.sum(products, 1), ACC_ROWS, assert_trivial=True)
            sums_s.store(sum_by_warp(state_rows * gl.exp2(G_end) + write_dots))
        if DELTA:
            dq_tile, a_dP, de_tile, a_dA = warpgroup_mma_wait(2, deps=[dq_tile, a_dP, de_tile, a_dA])
        else:
            dq_tile, a_dP = warpgroup_mma_wait(1, deps=[dq_tile, a_dP])
        if DECAY != "none":
            q_dq = gl.sum(to_float32(q_s.load(ACC)) * dq_tile, 1)
        if DELTA and (DECAY != "none" or ERASE):
            e_de = gl.sum(to_float32(e_s.load(ACC)) * de_tile, 1)
            if ERASE:
                gl.store(dgates_at + C + t, e_de)
        if DECAY != "none":
            dG = q_dq
            if GATES_BEFORE:
                dG_prev = gl.full([C], 0.0, gl.float32, ACC_ROWS)
                if READ_BEFORE:
                    dG_prev += q_dq
                    dG = gl.full([C], 0.0, gl.float32, ACC_ROWS)
                if DELTA:
                    if ERASE_PREVIOUS:
                        dG_prev += e_de
                    else:
                        dG += e_de
                gl.store(dgates_at + 3 * C + t, dG_prev)
            elif DELTA:
                dG += e_de
        if GROUP > 1:
            offset = (scratch_slot.to(gl.int64) * C * HV + hv) * K + column
            dq_at = gmem.partial + offset
            dk_at = gmem.partial + num_scratch_slots.to(gl.int64) * C * HV * K + offset
            de_at = dk_at + num_scratch_slots.to(gl.int64) * C * HV * K
        else:
            dq_at = gmem.dq + key
            dk_at = gmem.dk + key
            de_at = gmem.de + key if OWN_KEY else dk_at
        store_accumulator(dq_at, dq_tile, HV * K, tokens_left, K - column, MASK_K)
        if OWN_KEY:
            store_accumulator(de_at, de_tile, HV * K, tokens_left, K - column, MASK_K)
        # The buffers are dependencies too: the compiler would treat them as free from the issue of the wgmmas on.
        if DELTA:
            dk_tile, _, _, _, _ = warpgroup_mma_wait(0, deps=[dk_tile, dP_s, q_s, dA_s, e_s])
        else:
            dk_tile, _, _ = warpgroup_mma_wait(0, deps=[dk_tile, dP_s, q_s])
        if DECAY != "none":
            k_dk = gl.sum(to_float32(k_s.load(ACC)) * dk_tile, 1)
            gl.store(dgates_at + t, dG - (k_dk + write_dots))
            state_dot = gl.sum(sums_s.load(FOUR_PER_THREAD), 0)
            gl.store(gmem.state_products + tile.to(gl.int64) * slots * HV + gate_row, state_dot)
        if DECAY != "none" or (WRITE and not DELTA):
            dk_tile += dk_state * key_scale[:, None]
        else:
            dk_tile += dk_state
        if DELTA and not OWN_KEY:
            dk_tile += de_tile
        if gmem.slopes is not None:
            dk_tile += to_float32(k_s.load(ACC)) * step_gradient[:, None]
        store_accumulator(dk_at, dk_tile, HV * K, tokens_left, K - column, MASK_K)
        if WRITE and not DU_IS_DV:
            store_write_sums(dgates_at, gmem.v, value, gmem.du, local_value, tile, tokens_left, HV, V, NK)
