"""One chunk of the backward sweep in the consumers (sweep.py): the step of the reverse scan, then the gradients.

sweep_reverse_scan.py computes dx, du, dv and dS. With these:

    dP = scale 2^(G''_i - G_j) do x^T  (j <= i, or j < i),   dA = -b 2^(G'_i - G_j) du x^T  (j < i)
    dq = scale 2^G'' do S^T + dP k,   de = -b 2^G' du S^T + dA k
    dk = 2^(Gend - G) x dS' + dP^T q + dA^T k + de

where S is the state before the chunk, dS' the gradient of the state after it, and G', G'' are G or G before each token
(ERASE_PREVIOUS, READ_BEFORE). dG = q . dq + e . de - k . dk; terms of an early read or erase go to dG_prev. An additive
update has du = dx and no dA or de, and its dP includes w. With EFLA and Longhorn dk also has the gradient through the
strengths, (m du . x) k (../step_size.py); its factors pass between the warp groups in smem.steps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltazoo.backends.triton.chunk.kernels.sm90.common import (
    SMEM_TILE,
    barrier,
    consumer_release,
    low_term,
    store_accumulator,
    to_16_bits,
    to_float32,
)
from deltazoo.backends.triton.chunk.kernels.sm90.gluon_versions import reinterpret
from deltazoo.backends.triton.chunk.kernels.sm90.sweep_reductions import (
    ACC_TK,
    ACC_TK_HALVES,
    ACC_TK_ROWS,
    ACC_TT,
    ACC_TT_COLUMNS,
    ACC_TT_ROWS,
    CHUNKS_LEFT,
    GATE_ROW,
    K_ROW,
    TOKENS_LEFT,
    V_ROW,
    load_slopes,
    load_step_gradient,
    read_chunk_info,
    reduce_write_dot,
    store_diagonal,
    store_half_sums,
    store_write_gradient,
    sum_diagonal,
    sum_halves,
)
from deltazoo.backends.triton.chunk.kernels.sm90.sweep_reverse_scan import keep_stores_before_wait, reverse_scan_chunk
from deltazoo.backends.triton.device.layout import clamp_away_from_zero, opaque_zero


@gluon.jit
def chunk_gradients(
    do_x, do_S, v, b, grads, scale, smem, zero, stage, opaque_one, slots, num_scratch_slots, traits: gl.constexpr
):
    """Compute and store dq, dk and the sums for the gates of a chunk.

    do_x, do_S: accumulators of do x^T (additive updates: of dP) and of do S^T.
    """
    H: gl.constexpr = traits.H
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    V: gl.constexpr = traits.V
    DECAY: gl.constexpr = traits.DECAY
    DELTA: gl.constexpr = traits.DELTA
    ERASE: gl.constexpr = traits.ERASE
    WRITE: gl.constexpr = traits.WRITE
    ERASE_PREVIOUS: gl.constexpr = traits.ERASE_PREVIOUS
    READ_BEFORE: gl.constexpr = traits.READ_BEFORE
    DU_IS_DV: gl.constexpr = traits.DU_IS_DV
    MIN_BETA: gl.constexpr = traits.MIN_BETA
    dtype: gl.constexpr = traits.dtype
    GATES_BEFORE: gl.constexpr = ERASE_PREVIOUS or READ_BEFORE
    GATE_ROWS: gl.constexpr = 4 if GATES_BEFORE else 3
    DIAGONAL: gl.constexpr = 1 if READ_BEFORE else 0
    # d_log_decay is a sum over products with dP and dA that nearly cancel
    SPLIT_DP: gl.constexpr = traits.TERMS == 2 and DECAY != "none"
    DP_TERMS: gl.constexpr = 2 if SPLIT_DP else 1
    MASK_K: gl.constexpr = K % 128 != 0
    gate_stride = slots.to(gl.int64) * HV * (GATE_ROWS * 64)  # between the sums of the two halves of the keys
    info = smem.chunk_info.index(stage)
    gate_row = read_chunk_info(info, GATE_ROW)
    tokens_left = read_chunk_info(info, TOKENS_LEFT).to(gl.int32)
    gates_at = grads.dgates + gate_row * (GATE_ROWS * 64)
    k_s = smem.k.index(stage)
    q_s = smem.q.index(stage)
    if DELTA:
        du_T = smem.du.index(zero).permute((1, 0))
        intra_e = gl.zeros([64, 64], gl.float32, ACC_TT)
        intra_e = warpgroup_mma(du_T, smem.x.index(zero).permute((1, 0)), intra_e, use_acc=False, is_async=True)
    dk_state = gl.zeros([64, 128], gl.float32, ACC_TK)
    dk_state = warpgroup_mma(smem.x.index(zero), smem.dS.index(zero), dk_state, use_acc=False, is_async=True)
    if DECAY != "none":
        G = smem.G.index(stage).load(ACC_TK_ROWS)
        G_early = smem.G_prev.index(stage).load(ACC_TK_ROWS) if GATES_BEFORE else G
        G_q = G_early if READ_BEFORE else G
        G_e = G_early if ERASE_PREVIOUS else G
        read_scale = gl.exp2(G_q) * scale
        key_scale = gl.exp2(smem.G.index(stage).slice(63, 1).load(ACC_TK_ROWS) - G)
    if DELTA and ERASE and not (DU_IS_DV and WRITE):
        t = gl.arange(0, 64, ACC_TK_ROWS)
        erase = gl.load(b + read_chunk_info(info, V_ROW) + t * HV, mask=t < tokens_left, other=0.0).to(gl.float32)
        erase_scale = -clamp_away_from_zero(erase, MIN_BETA)
    else:
        # a -1 that the compiler cannot fold: otherwise it emits sign changes between the wgmmas, which serialises them
        # (C7514)
        erase_scale = gl.full([64], gl.where(opaque_one > 0, -1.0, 0.0), gl.float32, ACC_TK_ROWS)
    if DELTA:
        i = gl.arange(0, 64, ACC_TT_ROWS)[:, None]
        j = gl.arange(0, 64, ACC_TT_COLUMNS)[None, :]
        if grads.slopes is not None:
            slope = load_slopes(grads.slopes, gate_row)
        erase_rows = gl.convert_layout(erase_scale, ACC_TT_ROWS, assert_trivial=True)[:, None]
        dP_s = smem.P.index(stage)
        dA_s = reinterpret(smem.T.index(stage), dtype, [64, 64], SMEM_TILE)
        if DECAY != "none":
            # may be inf or NaN at non-causal positions, masked below
            G_j = smem.G.index(stage).load(ACC_TT_COLUMNS)
            D_q = gl.exp2(gl.convert_layout(G_q, ACC_TT_ROWS, assert_trivial=True)[:, None] - G_j[None, :])
            if READ_BEFORE == ERASE_PREVIOUS:
                D_e = D_q
            else:
                D_e = gl.exp2(gl.convert_layout(G_e, ACC_TT_ROWS, assert_trivial=True)[:, None] - G_j[None, :])
        do_x, intra_e = warpgroup_mma_wait(1, deps=[do_x, intra_e])
        if (DU_IS_DV and WRITE) or grads.slopes is not None:
            du_dot_x = sum_diagonal(intra_e)
            if DU_IS_DV and WRITE:
                store_diagonal(gates_at + 128, du_dot_x)
        if grads.slopes is not None:
            smem.steps.store(gl.permute((du_dot_x * slope[:, None]).to(smem.steps.dtype), (1, 0)))
        if DECAY != "none":
            intra_e *= D_e * erase_rows
            do_x *= D_q * scale
        else:
            intra_e *= erase_rows
            do_x *= scale
        if SPLIT_DP:
            dA = gl.where(i > j, intra_e, 0.0)
            dP = gl.where(i >= j + DIAGONAL, do_x, 0.0)
            dA_16 = to_16_bits(dA, dtype)
            dP_16 = to_16_bits(dP, dtype)
            dA_s.store(dA_16)
            dP_s.store(dP_16)
            dA_low = low_term(dA, dA_16)
            dP_low = low_term(dP, dP_16)
        else:
            dA_s.store(to_16_bits(gl.where(i > j, intra_e, 0.0), dtype))
            dP_s.store(to_16_bits(gl.where(i >= j + DIAGONAL, do_x, 0.0), dtype))
        # Not directly before warpgroup_mma_wait: there ptxas 12.8 omits the wait for the result of exp2
        # (docs/compiler-bugs.md).
        fence_async_shared()
        inter_e = gl.zeros([64, 128], gl.float32, ACC_TK)
        inter_e = warpgroup_mma(du_T, smem.S.index(zero), inter_e, use_acc=False, is_async=True)
        do_S, dk_state = warpgroup_mma_wait(1, deps=[do_S, dk_state])
    else:
        dP_s = smem.dP.index(stage)
        do_S, dk_state = warpgroup_mma_wait(0, deps=[do_S, dk_state])
    if DECAY != "none":
        do_S *= read_scale[:, None]
    else:
        do_S *= scale
    SUMS_OF_K: gl.constexpr = DECAY != "none" or (WRITE and not DELTA)
    if WRITE and not DELTA:
        write = clamp_away_from_zero(smem.w.index(stage).load(ACC_TK_ROWS), MIN_BETA)
        key_scale = key_scale * write if DECAY != "none" else write
    if SUMS_OF_K:
        dk_state *= key_scale[:, None]
    if DELTA:
        barrier()
    low_s = reinterpret(smem.do.index(stage), dtype, [2, 64, 64], SMEM_TILE)
    if SPLIT_DP:
        # do has been read
        low_s.index(0).store(dP_low)
        low_s.index(1).store(dA_low)
        fence_async_shared()
        barrier()
    dq_tile = warpgroup_mma(dP_s, k_s, do_S, is_async=True)
    if SPLIT_DP:
        dq_tile = warpgroup_mma(low_s.index(0), k_s, dq_tile, is_async=True)
    if DELTA:
        inter_e = warpgroup_mma_wait(DP_TERMS, deps=[inter_e])
        consumer_release(smem.state_empty)
        if DECAY != "none":
            inter_e *= (gl.exp2(G_e) * erase_scale)[:, None]
        else:
            inter_e *= erase_scale[:, None]
        de_tile = warpgroup_mma(dA_s, k_s, inter_e, is_async=True)
        if SPLIT_DP:
            de_tile = warpgroup_mma(low_s.index(1), k_s, de_tile, is_async=True)
    if DECAY != "none":
        reduce_write_dot(dk_state, k_s, smem.sums)
    dk_tile = warpgroup_mma(dP_s.permute((1, 0)), q_s, dk_state, is_async=True)
    if DELTA:
        dk_tile = warpgroup_mma(dA_s.permute((1, 0)), k_s, dk_tile, is_async=True)
        if SPLIT_DP:
            dk_tile = warpgroup_mma(low_s.index(0).permute((1, 0)), q_s, dk_tile, is_async=True)
            dk_tile = warpgroup_mma(low_s.index(1).permute((1, 0)), k_s, dk_tile, is_async=True)
    if DELTA and WRITE and not DU_IS_DV:
        store_write_gradient(
            gates_at + 128, gate_stride, v + read_chunk_info(info, V_ROW) * V, du_T, tokens_left, HV, V
        )
    if not DELTA:
        consumer_release(smem.state_empty)
    dq_tile = warpgroup_mma_wait(3 * DP_TERMS if DELTA else 1, deps=[dq_tile])
    if DECAY != "none":
        q_dq = sum_halves(to_float32(q_s.load(ACC_TK)) * dq_tile, ACC_TK_HALVES)
    STRIDE: gl.constexpr = traits.SHARES * K if traits.SHARES > H else H * K
    offset = read_chunk_info(info, K_ROW) * K
    if traits.SHARES > H:
        dq_at = grads.partial + offset
        dk_at = grads.partial + num_scratch_slots.to(gl.int64) * (64 * traits.SHARES * K) + offset
    else:
        dq_at = grads.dq + offset
        dk_at = grads.dk + offset
    store_accumulator(dq_at, dq_tile, STRIDE, tokens_left, K, MASK_K)
    if DELTA:
        keep_stores_before_wait(tokens_left)
        de_tile = warpgroup_mma_wait(2 * DP_TERMS, deps=[de_tile])
        if DECAY != "none" or ERASE:
            e_de = sum_halves(to_float32(k_s.load(ACC_TK)) * de_tile, ACC_TK_HALVES)
            if ERASE:
                store_half_sums(gates_at + 64, gate_stride, e_de, ACC_TK_HALVES)
    if DECAY != "none":
        if GATES_BEFORE:
            dG_prev = gl.full([64, 2], 0.0, gl.float32, gl.SliceLayout(2, ACC_TK_HALVES))
            dG = gl.full([64, 2], 0.0, gl.float32, gl.SliceLayout(2, ACC_TK_HALVES))
            if READ_BEFORE:
                dG_prev += q_dq
            else:
                dG += q_dq
            if DELTA:
                if ERASE_PREVIOUS:
                    dG_prev += e_de
                else:
                    dG += e_de
            store_half_sums(gates_at + 192, gate_stride, dG_prev, ACC_TK_HALVES)
        else:
            dG = q_dq
            if DELTA:
                dG += e_de
    # The buffers are dependencies too: the compiler would treat them as free from the issue of the wgmmas on.
    if DELTA:
        if SPLIT_DP:
            dk_tile, _, _, _, _, _ = warpgroup_mma_wait(0, deps=[dk_tile, dP_s, q_s, dA_s, k_s, low_s])
        else:
            dk_tile, _, _, _, _ = warpgroup_mma_wait(0, deps=[dk_tile, dP_s, q_s, dA_s, k_s])
    else:
        dk_tile, _, _ = warpgroup_mma_wait(0, deps=[dk_tile, dP_s, q_s])
    if SUMS_OF_K:
        k_dk = sum_halves(to_float32(k_s.load(ACC_TK)) * dk_tile, ACC_TK_HALVES)
        if WRITE and not DELTA:
            write_columns = clamp_away_from_zero(
                smem.w.index(stage).load(gl.SliceLayout(1, gl.SliceLayout(2, ACC_TK_HALVES))), MIN_BETA
            )
            store_half_sums(gates_at + 128, gate_stride, k_dk / write_columns[:, None], ACC_TK_HALVES)
        if DECAY != "none":
            store_half_sums(gates_at, gate_stride, dG - k_dk, ACC_TK_HALVES)
    if DELTA:
        dk_tile += de_tile
    if grads.slopes is not None:
        dk_tile += to_float32(k_s.load(ACC_TK)) * load_step_gradient(smem.steps)[:, None]
    store_accumulator(dk_at, dk_tile, STRIDE, tokens_left, K, MASK_K)


@gluon.jit
def sweep_chunk(
    dS, v, b, grads, scale, smem, chunks_left, pipeline, slots, num_scratch_slots, traits: gl.constexpr,
):  # fmt: skip
    """Process a chunk: return the accumulators of dS^T before it, and the number of chunks that remain.

    pipeline: sweep_traits.Pipeline. The number of chunks is read from chunk_info: as a loop variable of the consumers
    it would be spilled, and every chunk would wait for the reload.
    """
    dS, do_x, do_S = reverse_scan_chunk(dS, grads, scale, smem, opaque_zero(chunks_left, 20), pipeline, slots, traits)
    chunk_gradients(
        do_x, do_S, v, b, grads, scale, smem, opaque_zero(chunks_left, 21),
        pipeline.stage + opaque_zero(chunks_left, 22), pipeline.opaque_one, slots, num_scratch_slots, traits,
    )  # fmt: skip
    return dS, read_chunk_info(smem.chunk_info.index(pipeline.stage), CHUNKS_LEFT).to(gl.int32)
