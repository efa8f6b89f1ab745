"""Reverse-scan step of one chunk of the backward sweep in the consumers (sweep.py).

    dx = P^T do + 2^(Gend - G) k dS',   du = T^T dx,   dv = w du,   dS = 2^Gend dS' + (scale 2^G'' q)^T do - (c k)^T du

dS' is the gradient of the state after the chunk, G'' is G or G before each token (READ_BEFORE). prepare.py defines T,
P, G, c and w. S and dS are kept transposed, as [V, K]. An additive update has du = dx.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltazoo.backends.triton.chunk.kernels.sm90.common import (
    barrier,
    consumer_release,
    low_term,
    matmul_inverse_async,
    to_16_bits,
    to_float32,
)
from deltazoo.backends.triton.chunk.kernels.sm90.sweep_producer import low_inverse_tile
from deltazoo.backends.triton.chunk.kernels.sm90.sweep_reductions import (
    A_VK,
    A_VT,
    ACC_TK,
    ACC_TT,
    ACC_TT_COLUMNS,
    ACC_TT_ROWS,
    ACC_VK_COLUMNS,
    ACC_VT,
    ACC_VT_COLUMNS,
    GATE_ROW,
    IS_FIRST,
    TOKENS_LEFT,
    V_ROW,
    decay_to_chunk_end,
    read_chunk_info,
    reduce_state_dot,
    store_state_products,
    store_transposed,
)
from deltazoo.backends.triton.device.layout import clamp_away_from_zero


@gluon.jit
def keep_stores_before_wait(value):
    """Keep ptxas from moving the wait for a product above the global stores that precede this call.

    value: any live int32 register; it only carries the dependency.
    """
    text: gl.constexpr = "bar.warp.sync 0xffffffff;\nmov.b32 $0, $1;"
    gl.inline_asm_elementwise(text, "=r,r", [value], gl.int32, is_pure=False, pack=1)


@gluon.jit
def reverse_scan_chunk(dS, grads, scale, smem, zero, pipeline, slots, traits: gl.constexpr):
    """Compute dS^T before a chunk from dS^T after it, and store dv.

    Also stores the state product <dS, S> of the chunk processed before. Leaves in shared memory dS' and, with DELTA,
    du, otherwise P and dP.

    pipeline: sweep_traits.Pipeline. zero: an opaque zero.
    Returns: the accumulators of dS^T, of do x^T (in flight; without DELTA the complete dP) and of do S^T (in flight).
    """
    HV: gl.constexpr = traits.HV
    V: gl.constexpr = traits.V
    DECAY: gl.constexpr = traits.DECAY
    DELTA: gl.constexpr = traits.DELTA
    WRITE: gl.constexpr = traits.WRITE
    READ_BEFORE: gl.constexpr = traits.READ_BEFORE
    DU_IS_DV: gl.constexpr = traits.DU_IS_DV
    MIN_BETA: gl.constexpr = traits.MIN_BETA
    dtype: gl.constexpr = traits.dtype
    stage = pipeline.stage
    dS_16 = to_16_bits(dS, dtype)
    mbarrier.wait(smem.k_full.index(stage), pipeline.phase)
    dx = gl.zeros([128, 64], gl.float32, ACC_VT)
    if traits.TERMS == 2:
        # complete before the other products are issued, which then do not share the registers with the low term
        a_dS_low = gl.convert_layout(low_term(dS, dS_16), A_VT, assert_trivial=True)
        dx = warpgroup_mma(a_dS_low, smem.k.index(stage).permute((1, 0)), dx, use_acc=False, is_async=True)
        dx, a_dS_low = warpgroup_mma_wait(0, deps=[dx, a_dS_low])
    # Scale dS before the first wgmma: with wgmmas in flight the compiler would insert a wait before this load.
    if DECAY != "none":
        end = smem.G.index(stage).slice(63, 1).load(ACC_VK_COLUMNS)
        dS0 = dS * gl.exp2(end)[None, :]
    else:
        dS0 = dS
    # dx = P^T do + 2^(Gend - G) k dS', transposed
    a_dS = gl.convert_layout(dS_16, A_VT, assert_trivial=True)
    dx = warpgroup_mma(a_dS, smem.k.index(stage).permute((1, 0)), dx, use_acc=traits.TERMS == 2, is_async=True)
    do_T = smem.do.index(stage).permute((1, 0))
    a_do = do_T.load(A_VT)
    dx_intra = gl.zeros([128, 64], gl.float32, ACC_VT)
    do_S = gl.zeros([64, 128], gl.float32, ACC_TK)
    if DELTA:
        dx_intra = warpgroup_mma(do_T, smem.P.index(stage).permute((1, 0)), dx_intra, use_acc=False, is_async=True)
    if DECAY != "none":
        G = smem.G.index(stage).load(ACC_VT_COLUMNS)
        G_read = smem.G_prev.index(stage).load(ACC_VT_COLUMNS) if READ_BEFORE else G
    do_tile = to_float32(gl.convert_layout(a_do, ACC_VT, assert_trivial=True))
    if DECAY != "none":
        do_tile *= (gl.exp2(G_read) * scale)[None, :]
    else:
        do_tile *= scale
    a_doq = gl.convert_layout(to_16_bits(do_tile, dtype), A_VK, assert_trivial=True)
    # Every warp has finished with dS, du and sums of the chunk processed before, which are overwritten or read below.
    # The barrier is between the waits for k_full and q_full because the compiler emits one there anyway.
    barrier()
    if traits.TERMS == 2:
        consumer_release(smem.du_empty)
    mbarrier.wait(smem.q_full.index(stage), pipeline.phase)
    if not DELTA:
        # dP and P
        mbarrier.wait(smem.state_full, pipeline.state_phase)
        dP = gl.zeros([64, 64], gl.float32, ACC_TT)
        dP = warpgroup_mma(smem.do.index(stage), smem.x.index(zero).permute((1, 0)), dP, use_acc=False, is_async=True)
        P = gl.zeros([64, 64], gl.float32, ACC_TT)
        P = warpgroup_mma(smem.q.index(stage), smem.k.index(stage).permute((1, 0)), P, use_acc=False, is_async=True)
    # dS = 2^Gend dS' + (scale 2^G'' q)^T do, transposed
    dS = warpgroup_mma(a_doq, smem.q.index(stage), dS0, is_async=True)
    if DECAY != "none":
        # of the chunk processed before, c + 1, whose row of gates is the next
        has_previous = read_chunk_info(smem.chunk_info.index(stage), IS_FIRST) == 0
        store_state_products(
            grads.state_products + read_chunk_info(smem.chunk_info.index(stage), GATE_ROW) + HV,
            slots.to(gl.int64) * HV,
            smem.sums,
            has_previous,
        )
    smem.dS.index(zero).store(dS_16)
    if DELTA:
        if DECAY != "none":
            decay_to_end = decay_to_chunk_end(smem.G.index(stage), ACC_VT_COLUMNS)
        if WRITE:
            write = smem.w.index(stage).load(ACC_VT_COLUMNS)
            if DU_IS_DV:
                write = clamp_away_from_zero(write, MIN_BETA)
        dx, dx_intra, _ = warpgroup_mma_wait(1, deps=[dx, dx_intra, dS_16])
        if DECAY != "none":
            dx = dx * decay_to_end[None, :] + dx_intra
        else:
            dx += dx_intra
        # du = T^T dx
        SCALED: gl.constexpr = smem.T.dtype == gl.float16 and dtype != gl.float16
        if traits.TERMS == 2:
            mbarrier.wait(smem.T_low_full, pipeline.state_phase)
        du, a_dx, scales = matmul_inverse_async(
            dx, smem.T.index(stage), low_inverse_tile(smem), A_VT, SCALED, traits.TERMS
        )
        erase = smem.erase.index(stage).load(ACC_VT_COLUMNS)
        mbarrier.wait(smem.state_full, pipeline.state_phase)
        do_x = gl.zeros([64, 64], gl.float32, ACC_TT)
        do_x = warpgroup_mma(
            smem.do.index(stage), smem.x.index(zero).permute((1, 0)), do_x, use_acc=False, is_async=True
        )
        du, a_dx, a_doq = warpgroup_mma_wait(1, deps=[du, a_dx, a_doq])
        if traits.TERMS == 2:
            barrier()  # both warp groups have read T_low, which du overwrites
        if SCALED:
            du *= scales[:, None]
        # dS -= (c k)^T du
        erased = du * -erase[None, :]
        erased_16 = to_16_bits(erased, dtype)
        a_du = gl.convert_layout(erased_16, A_VK, assert_trivial=True)
        dS = warpgroup_mma(a_du, smem.k.index(stage), dS, is_async=True)
        if traits.TERMS == 2:
            a_du_low = gl.convert_layout(low_term(erased, erased_16), A_VK, assert_trivial=True)
            dS = warpgroup_mma(a_du_low, smem.k.index(stage), dS, is_async=True)
        do_S = warpgroup_mma(smem.do.index(stage), smem.S.index(zero), do_S, use_acc=False, is_async=True)
    else:
        dx, dP, P, _ = warpgroup_mma_wait(1, deps=[dx, dP, P, dS_16])
        i = gl.arange(0, 64, ACC_TT_ROWS)[:, None]
        j = gl.arange(0, 64, ACC_TT_COLUMNS)[None, :]
        if DECAY != "none":
            G_i = smem.G_prev.index(stage).load(ACC_TT_ROWS) if READ_BEFORE else smem.G.index(stage).load(ACC_TT_ROWS)
            # may be inf or NaN at non-causal positions, masked below
            D = gl.exp2(G_i[:, None] - smem.G.index(stage).load(ACC_TT_COLUMNS)[None, :]) * scale
            P *= D
            dP *= D
        else:
            P *= scale
            dP *= scale
        if WRITE:
            dP *= clamp_away_from_zero(smem.w.index(stage).load(ACC_TT_COLUMNS), MIN_BETA)[None, :]
        causal = i >= j + (1 if READ_BEFORE else 0)
        smem.P.index(stage).store(to_16_bits(gl.where(causal, P, 0.0), dtype))
        smem.dP.index(stage).store(to_16_bits(gl.where(causal, dP, 0.0), dtype))
        fence_async_shared()
        barrier()
        dx_intra = warpgroup_mma(do_T, smem.P.index(stage), dx_intra, use_acc=False, is_async=True)
        dx_intra, dS, a_doq = warpgroup_mma_wait(0, deps=[dx_intra, dS, a_doq])
        if WRITE:
            write = clamp_away_from_zero(smem.w.index(stage).load(ACC_VT_COLUMNS), MIN_BETA)
        if DECAY != "none":
            decay_to_end = decay_to_chunk_end(smem.G.index(stage), ACC_VT_COLUMNS)
        do_S = warpgroup_mma(smem.do.index(stage), smem.S.index(zero), do_S, use_acc=False, is_async=True)
        if DECAY != "none":
            dx = dx * decay_to_end[None, :] + dx_intra
        else:
            dx += dx_intra
        du = dx
        do_x = dP
    if DELTA and not DU_IS_DV:
        smem.du.index(zero).store(to_16_bits(du, dtype))
    dv = du
    if WRITE:
        dv *= write[None, :]
    dv_16 = to_16_bits(dv, dtype)
    if DELTA and DU_IS_DV:
        smem.du.index(zero).store(dv_16)
    info = smem.chunk_info.index(stage)
    tokens_left = read_chunk_info(info, TOKENS_LEFT).to(gl.int32)
    store_transposed(grads.dv + read_chunk_info(info, V_ROW) * V, dv_16, zero, HV * V, tokens_left, V, V % 128 != 0)
    if DELTA:
        keep_stores_before_wait(tokens_left)
        if traits.TERMS == 2:
            dS, a_du, _ = warpgroup_mma_wait(1, deps=[dS, a_du, a_du_low])
        else:
            dS, a_du = warpgroup_mma_wait(1, deps=[dS, a_du])
        if DECAY != "none":
            reduce_state_dot(smem.G.index(stage), smem.S.index(zero), smem.dS.index(zero), smem.sums)
        fence_async_shared()
        barrier()
    elif DECAY != "none":
        reduce_state_dot(smem.G.index(stage), smem.S.index(zero), smem.dS.index(zero), smem.sums)
    return dS, do_x, do_S
