"""Backward pass of a sequence and head in one launch on sm_90: recompute states, then backward sweep.

Grid: one CTA for each (sequence, head); one CTA occupies an SM. It loops over the intervals of CHECKPOINT_CHUNKS
chunks between two checkpoints, the last first: it recomputes the state before each chunk and x (equations in scan.py)
from the checkpoint at the interval's start, then runs the backward sweep of sweep.py over the interval.

The recomputed x and S^T are kept where the chunk's gradients are written later: x in the rows of dv, rows 0 to 63 of
S^T [V, K] in the rows of dq, rows 64 to 127 in those of dk. The last chunk of a sequence may have fewer than 64 rows
there; its S^T is kept in the scratch tensor `spare`.

Warp groups and shared memory are those of sweep.py: two consumers in one partition of 8 warps, and a producer. While
states are recomputed, v is in the buffers of do, the second term of T in those of P, and the spilled dS^T in those of S
and dS.

Barriers as in sweep.py, with two differences:

    barrier         arrivals           arrives              waits      protects
    empty           2 x 128 (threads)  consumers, at the    producer   all buffers of a stage: one barrier per stage,
                                       end of a chunk                  because both may be released before one is waited
                                       for
    states_stored   1                  consumers, once per  producer   S^T and x of the interval in global memory
                                       interval

The ring buffer's stage alternates over all fills, of recomputed and of swept chunks, and its phase with every second
one. While states are recomputed, k_full protects k and the gates, and q_full v (in do) and T.

Supported: as sweep.py with V <= 128, as many key heads as value heads, and no segments.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.chunk.kernels.sm90.common import (
    ONE_PER_THREAD,
    SMEM_TILE,
    allocate_barriers,
    barrier,
    consumer_release,
    copy_gates_async,
    copy_indices,
    copy_pointers,
    copy_tile_async,
    copy_wy_tile_async,
    low_term,
    matmul_inverse_async,
    producer_arrive,
    to_16_bits,
    to_float32,
)
from deltazoo.backends.triton.chunk.kernels.sm90.gluon_versions import reinterpret
from deltazoo.backends.triton.chunk.kernels.sm90.interval_states import (
    FIRST_ROWS_OFFSET,
    LAST_ROWS_OFFSET,
    distance,
    load_interval_state,
    publish_states,
    reload_dstate,
    spill_dstate,
    state_rows,
    store_state,
)
from deltazoo.backends.triton.chunk.kernels.sm90.sweep_consumer import sweep_chunk
from deltazoo.backends.triton.chunk.kernels.sm90.sweep_producer import copy_chunk, copy_low_inverse
from deltazoo.backends.triton.chunk.kernels.sm90.sweep_reductions import (
    A_VK,
    A_VT,
    ACC_VK,
    ACC_VK_COLUMNS,
    ACC_VT,
    ACC_VT_COLUMNS,
    TOKENS_LEFT,
    V_ROW,
    decay_to_chunk_end,
    read_chunk_info,
    store_state_products,
    store_transposed,
)
from deltazoo.backends.triton.chunk.kernels.sm90.sweep_traits import (
    NUM_STAGES,
    GradientPointers,
    Pipeline,
    allocate_smem,
    make_traits,
    producer_registers,
)
from deltazoo.backends.triton.device.layout import first_chunk_slot, opaque_zero, sequence_bounds


@gluon.jit
def producer(
    q, k, v, do, gates, wy_tiles, grads, spare, smem, states_stored, start, length, slot, end, n, hv,
    traits: gl.constexpr, CHECKPOINT_CHUNKS: gl.constexpr,
):  # fmt: skip
    """Producer warp group: for each interval, copy the tiles for recomputing, first chunk to last, then the sweep's."""
    H: gl.constexpr = traits.H
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    V: gl.constexpr = traits.V
    DECAY: gl.constexpr = traits.DECAY
    DELTA: gl.constexpr = traits.DELTA
    WRITE: gl.constexpr = traits.WRITE
    MASK_K: gl.constexpr = K % 128 != 0
    MASK_V: gl.constexpr = V % 128 != 0
    h = hv // (HV // H)
    fills = 0  # of ring buffer stages
    intervals = 0  # that are finished
    swept = 0  # chunks whose state was copied
    interval_end = end
    while interval_end > 0:
        interval_first = (interval_end - 1) // CHECKPOINT_CHUNKS * CHECKPOINT_CHUNKS
        for c in range(interval_first, interval_end):
            zero = opaque_zero(fills, 20)
            stage = fills % 2
            mbarrier.wait(smem.empty.index(stage), (fills // 2 & 1) ^ 1)
            token = start + c * 64
            tokens_left = length - c * 64
            gate_row = (slot + c).to(gl.int64) * HV + hv
            k_s = smem.k.index(stage)
            k_at = copy_pointers(k + (token * H + h) * K, H * K, 64, 128, zero)
            copy_tile_async(k_s, k_at, 0, tokens_left, K, True, MASK_K)
            copy_gates_async(gates + gate_row * 192, smem, stage, DECAY, False, DELTA, WRITE)
            async_copy.commit_group()
            i = gl.arange(0, 8, ONE_PER_THREAD)
            first_rows, last_rows = state_rows(grads, spare, token, c + 1 == end, n, hv, traits)
            info = gl.where(i == V_ROW, token * HV + hv, distance(first_rows, grads.dq))
            info = gl.where(i == LAST_ROWS_OFFSET, distance(last_rows, first_rows), info)
            smem.chunk_info.index(stage).store(gl.where(i == TOKENS_LEFT, tokens_left.to(gl.int64), info))
            v_at = copy_pointers(v + (token * HV + hv) * V, HV * V, 64, 128, zero)
            copy_tile_async(smem.do.index(stage), v_at, 0, tokens_left, V, True, MASK_V)
            if DELTA:
                wy_tile = wy_tiles + gate_row * (traits.TERMS * 64 * 72)
                copy_wy_tile_async(smem.T.index(stage), wy_tile, True, zero)
                if traits.TERMS == 2:
                    T_low = reinterpret(smem.P.index(stage), smem.T.dtype, [64, 64], SMEM_TILE)
                    copy_wy_tile_async(T_low, wy_tile + 64 * 72, True, zero)
            async_copy.commit_group()
            producer_arrive(smem.k_full.index(stage), 1, True)
            producer_arrive(smem.q_full.index(stage), 0, True)
            fills += 1
        for step in range(0, interval_end - interval_first + 1):
            # copies S^T and x of chunk c + 1, then the tiles of chunk c
            zero = opaque_zero(fills, 20)
            c = interval_end - 1 - step + zero
            if step > 0:
                if step == 1:
                    mbarrier.wait(states_stored, intervals & 1)
                mbarrier.wait(smem.state_empty, (swept & 1) ^ 1)
                token = start + c * 64 + 64
                first_rows, last_rows = state_rows(grads, spare, token, c + 2 == end, n, hv, traits)
                r, _, _ = copy_indices(128, 128)
                first_at = copy_pointers(first_rows, H * K, 128, 128, zero)
                at = gl.where(r < 8, first_at, copy_pointers(last_rows - 64 * H * K, H * K, 128, 128, zero))
                copy_tile_async(smem.S.index(zero), at, 0, V, K, MASK_V, MASK_K)
                x = grads.dv if DELTA else v
                x_at = copy_pointers(x + (token * HV + hv) * V, HV * V, 64, 128, zero)
                copy_tile_async(smem.x.index(zero), x_at, 0, length - c * 64 - 64, V, True, MASK_V)
                async_copy.commit_group()
                producer_arrive(smem.state_full, 0, True)
                if traits.TERMS == 2:
                    copy_low_inverse(wy_tiles, smem, (slot + c + 1).to(gl.int64) * HV + hv, swept & 1, zero)
                swept += 1
            if c >= interval_first:
                stage = fills % 2
                mbarrier.wait(smem.empty.index(stage), (fills // 2 & 1) ^ 1)
                copy_chunk(
                    q, k, do, gates, wy_tiles, smem, stage, zero, start + c * 64, length - c * 64,
                    (slot + c).to(gl.int64) * HV + hv, c.to(gl.int64), c - interval_first, (c == end - 1).to(gl.int32),
                    h, hv, hv, traits,
                )  # fmt: skip
                producer_arrive(smem.k_full.index(stage), 1, True)
                producer_arrive(smem.q_full.index(stage), 0, True)
                fills += 1
        intervals += 1
        interval_end = interval_first


@gluon.jit
def recompute_chunk(S, grads, smem, zero, stage, phase, traits: gl.constexpr):
    """Store S^T before a chunk and x of the chunk; return the accumulators of S^T after it. v is in smem.do."""
    K: gl.constexpr = traits.K
    V: gl.constexpr = traits.V
    DECAY: gl.constexpr = traits.DECAY
    DELTA: gl.constexpr = traits.DELTA
    dtype: gl.constexpr = traits.dtype
    S_16 = to_16_bits(S, dtype)
    mbarrier.wait(smem.k_full.index(stage), phase)
    # before the first wgmma is issued: the compiler would wait for those under way
    if DECAY != "none":
        G_end = smem.G.index(stage).slice(63, 1).load(ACC_VK_COLUMNS)
        S0 = S * gl.exp2(G_end)[None, :]
    else:
        S0 = S
    y = gl.zeros([128, 64], gl.float32, ACC_VT)
    if traits.TERMS == 2:
        # complete before the next product is issued, which then does not share the registers with the low term
        a_S_low = gl.convert_layout(low_term(S, S_16), A_VT, assert_trivial=True)
        y = warpgroup_mma(a_S_low, smem.k.index(stage).permute((1, 0)), y, use_acc=False, is_async=True)
        y, a_S_low = warpgroup_mma_wait(0, deps=[y, a_S_low])
    if DELTA:
        a_S = gl.convert_layout(S_16, A_VT, assert_trivial=True)
        y = warpgroup_mma(a_S, smem.k.index(stage).permute((1, 0)), y, use_acc=traits.TERMS == 2, is_async=True)
    info = smem.chunk_info.index(stage)
    first_rows = grads.dq + read_chunk_info(info, FIRST_ROWS_OFFSET) * 8
    store_state(first_rows, read_chunk_info(info, LAST_ROWS_OFFSET) * 8, S_16, zero, traits.H * K, V, K)
    if DECAY != "none":
        decay_to_end = decay_to_chunk_end(smem.G.index(stage), ACC_VT_COLUMNS)
    # x^T = (w v - c S^T k)^T T^T
    mbarrier.wait(smem.q_full.index(stage), phase)
    a_v = smem.do.index(stage).permute((1, 0)).load(A_VT)
    x = to_float32(gl.convert_layout(a_v, ACC_VT, assert_trivial=True))
    if traits.WRITE:
        x *= smem.w.index(stage).load(ACC_VT_COLUMNS)[None, :]
    if DELTA:
        erase = smem.erase.index(stage).load(ACC_VT_COLUMNS)
        y, _ = warpgroup_mma_wait(0, deps=[y, S_16])
        x -= y * erase[None, :]
        SCALED: gl.constexpr = smem.T.dtype == gl.float16
        T_low = reinterpret(smem.P.index(stage), smem.T.dtype, [64, 64], SMEM_TILE)
        x, a_u, scales = matmul_inverse_async(
            x, smem.T.index(stage).permute((1, 0)), T_low.permute((1, 0)), A_VT, SCALED, traits.TERMS
        )
        x, a_u = warpgroup_mma_wait(0, deps=[x, a_u])
        if SCALED:
            x *= scales[:, None]
    # S'^T = 2^Gend S^T + (2^(Gend - G) x)^T k
    x_decayed = x
    if DECAY != "none":
        x_decayed = x * decay_to_end[None, :]
    x_high = to_16_bits(x_decayed, dtype)
    a_x = gl.convert_layout(x_high, A_VK, assert_trivial=True)
    S1 = warpgroup_mma(a_x, smem.k.index(stage), S0, is_async=True)
    if traits.TERMS == 2:
        a_x_low = gl.convert_layout(low_term(x_decayed, x_high), A_VK, assert_trivial=True)
        S1 = warpgroup_mma(a_x_low, smem.k.index(stage), S1, is_async=True)
    if DELTA:
        x_at = grads.dv + read_chunk_info(info, V_ROW) * V
        tokens_left = read_chunk_info(info, TOKENS_LEFT).to(gl.int32)
        store_transposed(x_at, to_16_bits(x, dtype), zero, traits.HV * V, tokens_left, V, V % 128 != 0)
    if traits.TERMS == 2:
        S1, a_x, _ = warpgroup_mma_wait(0, deps=[S1, a_x, a_x_low])
    else:
        S1, a_x = warpgroup_mma_wait(0, deps=[S1, a_x])
    return S1


@gluon.jit
def consumer(
    v, b, grads, state, checkpoints, dstate, scale, smem, states_stored, slots, slot, end, checkpoint_base, n, hv,
    traits: gl.constexpr, HAS_STATE: gl.constexpr, CHECKPOINT_CHUNKS: gl.constexpr,
):  # fmt: skip
    """Consumer warp groups: for each interval, the last first, recompute its states and sweep its chunks backwards."""
    dstate_at = dstate + (n.to(gl.int64) * traits.HV + hv) * traits.V * traits.K
    i = gl.arange(0, 128, gl.SliceLayout(1, ACC_VK))[:, None]
    j = gl.arange(0, 128, gl.SliceLayout(0, ACC_VK))[None, :]
    inside = (i < traits.V) & (j < traits.K)
    dS = gl.load(dstate_at + (j * traits.V + i), mask=inside, other=0.0)
    half_stride = slots.to(gl.int64) * traits.HV
    stage = 0
    phase = 0
    state_phase = 0  # parity of the number of chunks swept
    interval_end = end
    while interval_end > 0:
        interval_first = (interval_end - 1) // CHECKPOINT_CHUNKS * CHECKPOINT_CHUNKS
        spill_dstate(dS, smem.S.index(0), smem.dS.index(0))
        S = load_interval_state(
            state, checkpoints, checkpoint_base, interval_first, n, hv, traits, HAS_STATE, CHECKPOINT_CHUNKS
        )
        # With smem stores pending at loop entry the compiler would place a barrier in every iteration; so also below.
        barrier()
        for c in range(interval_first, interval_end):
            S = recompute_chunk(S, grads, smem, opaque_zero(c, 20), stage, phase, traits)
            consumer_release(smem.empty.index(stage))
            phase = phase ^ stage
            stage = stage ^ 1
        dS = reload_dstate(smem.S.index(0), smem.dS.index(0))
        publish_states(states_stored)
        chunks_left = interval_end - interval_first
        barrier()
        while chunks_left > 0:
            pipeline = Pipeline(
                stage=stage, phase=phase, state_phase=state_phase, opaque_one=1 + opaque_zero(chunks_left, 23)
            )
            dS, chunks_left = sweep_chunk(dS, v, b, grads, scale, smem, chunks_left, pipeline, slots, slots, traits)
            consumer_release(smem.empty.index(stage))
            phase = phase ^ stage
            stage = stage ^ 1
            state_phase = state_phase ^ 1
        interval_end = interval_first
    if traits.DECAY != "none":
        barrier()
        store_state_products(grads.state_products + (slot.to(gl.int64) * traits.HV + hv), half_stride, smem.sums, True)
    gl.store(dstate_at + (j * traits.V + i), dS, mask=inside)


@takes(
    pointers="q k v b do gates wy_tiles state checkpoints dstate spare dq dk dv dgates state_products slopes cu",
    traits=(
        "H HV K V C DECAY DELTA ERASE WRITE ERASE_PREVIOUS READ_BEFORE PACKED DU_IS_DV HAS_STATE CHECKPOINT_CHUNKS "
        "MIN_BETA TERMS"
    ),
)
@gluon.jit(do_not_specialize=["slots", "T"])
def sm90_fused_backward_kernel(gmem, slots, scale, T, traits: gl.constexpr):
    """Parameters and results as in sweep.py; checkpoints [checkpoint, HV, V, K] and state as in scan.py.

    spare [N, 128, H, K] is scratch. Launch with 8 warps and 168 registers per thread, reallocated as in sweep.py.
    """
    H: gl.constexpr = traits.H
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    V: gl.constexpr = traits.V
    C: gl.constexpr = traits.C
    PACKED: gl.constexpr = traits.PACKED
    CHECKPOINT_CHUNKS: gl.constexpr = traits.CHECKPOINT_CHUNKS
    gl.static_assert(C == 64 and K > 64 and K <= 128 and V <= 128 and H == HV)
    gl.static_assert(
        gmem.spare.dtype == gmem.k.dtype and gmem.dq.dtype == gmem.k.dtype and gmem.dv.dtype == gmem.k.dtype
    )
    gl.static_assert(gmem.k.dtype.element_ty.primitive_bitwidth == 16)
    dtype: gl.constexpr = gmem.k.dtype.element_ty
    pid = gl.program_id(0)
    hv = pid % HV
    n = pid // HV
    start, length = sequence_bounds(n, gmem.cu, T, PACKED)
    slot = first_chunk_slot(n, gmem.cu, T, C, PACKED)
    end = gl.cdiv(length, C)
    checkpoint_base = (slot // CHECKPOINT_CHUNKS if PACKED else n * ((end - 1) // CHECKPOINT_CHUNKS)) - 1
    if end > 0:
        derived: gl.constexpr = make_traits(traits, SHARES=HV, dtype=dtype)
        grads = GradientPointers(
            dq=gmem.dq, dk=gmem.dk, dv=gmem.dv, dgates=gmem.dgates, state_products=gmem.state_products, partial=gmem.dk,
            slopes=gmem.slopes,
        )  # fmt: skip
        smem = allocate_smem(
            derived, gmem.wy_tiles.dtype.element_ty if traits.DELTA else dtype, NUM_STAGES, gmem.slopes is not None
        )
        states_stored = allocate_barriers(1, 1).index(0)
        gl.warp_specialize(
            [
                (
                    consumer,
                    (
                        gmem.v, gmem.b, grads, gmem.state, gmem.checkpoints, gmem.dstate, scale, smem, states_stored,
                        slots, slot, end, checkpoint_base, n, hv, derived, traits.HAS_STATE, CHECKPOINT_CHUNKS,
                    ),
                ),
                (
                    producer,
                    (
                        gmem.q, gmem.k, gmem.v, gmem.do, gmem.gates, gmem.wy_tiles, grads, gmem.spare, smem,
                        states_stored, start, length, slot, end, n, hv, derived, CHECKPOINT_CHUNKS,
                    ),
                ),
            ],
            [4],
            [producer_registers(traits.DECAY, traits.DELTA)],
        )  # fmt: skip
