"""Reverse scan over the chunks of a sequence on sm_90: the gradients of states and values.

For a chunk with final-state gradient dS' [K, V], output gradient do and WY tiles T and P (P includes scale), per value
head:

    dx = P^T do + 2^(Gend - G) k dS'
    du = T^T dx                                                     du = dx for an additive update
    dv = w du
    dS = 2^Gend dS' + (scale 2^G'' q)^T do - (c e)^T du             e is k, or an operand

With a decay per channel the scaled operands Q, k_decayed and E of portable/channel/prepare.py replace q, k and e:

    dx = P^T do + k_decayed dS',    dS = diag(2^Gend) dS' + Q^T do - E^T du

dS' and du of every chunk go to scratch memory for gradients.py.

Grid, warp groups, ring buffer and barrier protocol are those of scan.py, with the chunks in reverse order and do in the
buffers of v. With a decay per channel k_full and k_empty protect k_decayed, do and P, which the consumers release when
dx is complete, and v_full and empty T, Q, E, 2^Gend and w. Each consumer keeps the float32 accumulators of dS^T [64
values,
K].

TERMS = 2 splits dS' in k dS' and du in dS into two 16-bit terms (hi + lo), and T has two; docs/kernels.md.

Supported: operands and scratch of one 16-bit dtype, chunks of 64, K <= 256 (128 with an operand e, a decay per channel
or TERMS = 2; the last two exclude each other), K and V multiples of 8. With neither e nor a decay per channel, shapes
that sweep.py takes (64 < K <= 128, V <= 128 or a multiple of 128) run sweep.py instead.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.chunk.kernels.sm90.common import (
    A_OPERAND,
    ACC,
    ACC_COLUMNS,
    barrier,
    consumer_release,
    low_term,
    matmul_inverse_async,
    store_accumulator,
    to_16_bits,
    to_float32,
)
from deltazoo.backends.triton.chunk.kernels.sm90.scan_producer import advance, producer, release_chunks_without_values
from deltazoo.backends.triton.chunk.kernels.sm90.scan_products import (
    issue_kq,
    scale_channels,
    scale_state,
    store_p_tile,
)
from deltazoo.backends.triton.chunk.kernels.sm90.scan_traits import (
    WorkTile,
    allocate_smem,
    make_traits,
    num_stages,
    program_values,
    tail_width,
    value_tile_and_head,
)
from deltazoo.backends.triton.chunk.kernels.sm90.state_copies import load_state, store_state, store_tile
from deltazoo.backends.triton.device.layout import (
    chunk_range,
    clamp_away_from_zero,
    segment_slot,
    sequence_and_segment,
)


class GlobalPointers(NamedTuple):
    """Global memory that the consumers read and write.

    dstate [N, HV, K, V]: dS after the last chunk of the launch, replaced by dS before its first; starts [segments,
    HV, V, K]: dS^T after each segment; dstates [scratch slot, HV, V, K], du [scratch slot, 64, HV, V]: dS'^T and du of
    every chunk; dv [B, T, HV, V]. With traits.IN_GRADIENTS dstates and dstates_high [token, HV, K] are dS'^T of values
    0 to 63 and 64 to 127.
    """

    dstate: Any
    starts: Any
    dstates: Any
    dstates_high: Any
    du: Any
    dv: Any


@gluon.jit
def multiply_keys(dS, at, smem, stage, columns, traits: gl.constexpr):
    """Return dS'^T k^T, one tile of 64 keys after the other. Each tile of dS'^T is stored while its wgmma runs."""
    K: gl.constexpr = traits.K
    STRIDE: gl.constexpr = traits.HV * K if traits.IN_GRADIENTS else K
    NK: gl.constexpr = traits.NK
    dx = gl.zeros([64, 64], gl.float32, ACC)
    for tk in gl.static_range(NK):
        dS_16 = to_16_bits(dS[tk], traits.dtype)
        a_dS = gl.convert_layout(dS_16, A_OPERAND, assert_trivial=True)
        if traits.TERMS == 2:  # before the first wgmma, which ptxas would otherwise wait for
            a_dS_low = gl.convert_layout(low_term(dS[tk], dS_16), A_OPERAND, assert_trivial=True)
        k_T = smem.k[tk].index(stage).permute((1, 0))
        dx = warpgroup_mma(a_dS, k_T, dx, use_acc=tk > 0, is_async=True)
        if traits.TERMS == 2:
            dx = warpgroup_mma(a_dS_low, k_T, dx, is_async=True)
        store_accumulator(at + tk * 64, dS[tk], STRIDE, columns, K - tk * 64, tk * 64 + dS[tk].shape[1] > K)
        if traits.TERMS == 2:
            dx, a_dS, a_dS_low = warpgroup_mma_wait(0, deps=[dx, a_dS, a_dS_low])
        else:
            dx, a_dS = warpgroup_mma_wait(0, deps=[dx, a_dS])
    return dx


@gluon.jit
def issue_outer_products(a, tiles, stage, dS, traits: gl.constexpr):
    """Issue the wgmmas dS^T += a B, one for each tile B of 64 keys."""
    NK: gl.constexpr = traits.NK
    out = (warpgroup_mma(a, tiles[0].index(stage), dS[0], is_async=True),)
    for tk in gl.static_range(NK - 1):
        out = out + (warpgroup_mma(a, tiles[tk + 1].index(stage), dS[tk + 1], is_async=True),)
    return out


@gluon.jit
def reverse_chunk(
    dS, gmem, scale, smem, P_s, staging, stage, phase, c, column, work, min_beta: gl.constexpr, DU_IS_DV: gl.constexpr,
    HALF: gl.constexpr, traits: gl.constexpr,
):  # fmt: skip
    """Process chunk c in a consumer: return the accumulators of dS^T before the chunk, from those after it."""
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    V: gl.constexpr = traits.V
    NK: gl.constexpr = traits.NK
    DECAY: gl.constexpr = traits.DECAY
    DELTA: gl.constexpr = traits.DELTA
    WRITE: gl.constexpr = traits.WRITE
    BY_CHANNEL: gl.constexpr = DECAY == "channel"
    BY_TOKEN: gl.constexpr = DECAY != "none" and not BY_CHANNEL
    P_IS_LOADED: gl.constexpr = DELTA or BY_CHANNEL
    TERMS: gl.constexpr = traits.TERMS
    dtype: gl.constexpr = traits.dtype
    MASK_V: gl.constexpr = V % 128 != 0
    columns = work.columns - HALF * 64
    scratch_slot = (work.first_scratch_slot + c - work.window_first).to(gl.int64)

    mbarrier.wait(smem.k_full.index(stage), phase)
    if not P_IS_LOADED:
        store_p_tile(issue_kq(smem, stage, traits), 0, P_s, smem, stage, scale, traits)
    # dx = P^T do + 2^(Gend - G) k dS', transposed
    if traits.IN_GRADIENTS:
        at = gmem.dstates if HALF == 0 else gmem.dstates_high
        if traits.HALVES == 2:
            at = gmem.dstates if column == 0 else gmem.dstates_high
        at += ((work.start + c * 64) * HV + work.hv) * K
    else:
        at = gmem.dstates + ((scratch_slot * HV + work.hv) * V + column) * K
    dx = multiply_keys(dS, at, smem, stage, columns, traits)
    if not BY_CHANNEL:
        mbarrier.wait(smem.v_full.index(stage), phase)
    do_T = smem.v[HALF].index(stage).permute((1, 0)).load(ACC)
    if not BY_CHANNEL:
        doq = to_float32(do_T) * scale
    if BY_TOKEN:
        G = smem.G.index(stage).load(ACC_COLUMNS)
        G_read = smem.G_prev.index(stage).load(ACC_COLUMNS) if traits.GATES_BEFORE else G
        G_end = smem.G.index(stage).slice(63, 1).load(ACC_COLUMNS)
        dx *= gl.exp2(G_end - G)[None, :]
        doq *= gl.exp2(G_read)[None, :]
    a_do = gl.convert_layout(do_T, A_OPERAND, assert_trivial=True)
    P = P_s.index(stage if P_IS_LOADED else 0).permute((1, 0))
    dx = warpgroup_mma(a_do, P, dx, is_async=True)
    # dS = 2^Gend dS' + (scale 2^G'' q)^T do - (c e)^T du, transposed
    if BY_CHANNEL:
        mbarrier.wait(smem.v_full.index(stage), phase)
        dS0 = scale_channels(dS, smem.G, stage, NK)
    elif BY_TOKEN:
        dS0 = scale_state(dS, gl.exp2(G_end), NK)
    else:
        dS0 = dS
    a_doq = a_do if BY_CHANNEL else gl.convert_layout(to_16_bits(doq, dtype), A_OPERAND, assert_trivial=True)
    dS1 = issue_outer_products(a_doq, smem.q, stage, dS0, traits)
    dx, a_do = warpgroup_mma_wait(NK, deps=[dx, a_do])
    if BY_CHANNEL:
        consumer_release(smem.k_empty.index(stage))
    # du = T^T dx
    if DELTA:
        SCALED: gl.constexpr = smem.T.dtype == gl.float16
        dx, a_dx, scales = matmul_inverse_async(
            dx, smem.T.index(stage), smem.T_low.index(stage), A_OPERAND, SCALED, TERMS
        )
        dx, a_dx = warpgroup_mma_wait(0, deps=[dx, a_dx])
        if SCALED:
            dx *= scales[:, None]
        if BY_CHANNEL:
            minus_du = -dx
        else:
            erase = smem.erase.index(stage).load(ACC_COLUMNS)
            minus_du = dx * -erase[None, :]
        minus_du_16 = to_16_bits(minus_du, dtype)
        a_du = gl.convert_layout(minus_du_16, A_OPERAND, assert_trivial=True)
        dS1 = issue_outer_products(a_du, smem.e, stage, dS1, traits)
        if TERMS == 2:
            a_du_low = gl.convert_layout(low_term(minus_du, minus_du_16), A_OPERAND, assert_trivial=True)
            dS1 = issue_outer_products(a_du_low, smem.e, stage, dS1, traits)
        else:
            a_du_low = a_du
    else:
        a_du = a_doq
        a_du_low = a_du
    if (DELTA or WRITE) and not DU_IS_DV:
        staging.permute((1, 0)).store(to_16_bits(dx, dtype))
        store_tile(
            gmem.du + ((scratch_slot * 64 * HV + work.hv) * V + column), staging, HV * V, 64, columns, False, MASK_V
        )
    if WRITE:
        write = smem.w.index(stage).load(ACC_COLUMNS)
        dx *= (clamp_away_from_zero(write, min_beta) if DU_IS_DV else write)[None, :]
    staging.permute((1, 0)).store(to_16_bits(dx, dtype))
    at = gmem.dv + (((work.start + c * 64) * HV + work.hv) * V + column)
    store_tile(at, staging, HV * V, work.length - c * 64, columns, True, MASK_V)
    if TERMS == 2:
        waited = warpgroup_mma_wait(0, deps=dS1 + (a_doq, a_du, a_du_low))
    else:
        waited = warpgroup_mma_wait(0, deps=dS1 + (a_doq, a_du))
    dS_next = (waited[0],)
    for tk in gl.static_range(NK - 1):
        dS_next = dS_next + (waited[tk + 1],)
    consumer_release(smem.empty.index(stage))
    return dS_next


@gluon.jit
def consumer(
    gmem, scale, smem, P_s, staging, work, min_beta: gl.constexpr, DU_IS_DV: gl.constexpr, HALF: gl.constexpr,
    traits: gl.constexpr,
):  # fmt: skip
    """Consumer warp group: process the chunks of the work tile, the last first, for 64 of its 128 values."""
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    V: gl.constexpr = traits.V
    NK: gl.constexpr = traits.NK
    column = work.column + HALF * 64
    columns = work.columns - HALF * 64
    at_dstate = gmem.dstate + ((work.n.to(gl.int64) * HV + work.hv) * K * V + column)
    if traits.SEGMENT_CHUNKS > 0:
        at = gmem.starts + ((work.segment_slot.to(gl.int64) * HV + work.hv) * V + column) * K
        dS = load_state(at, staging, K, columns, False, traits)
    else:
        dS = load_state(at_dstate, staging, V, columns, True, traits)
    barrier()  # outside the loop for the reason given in scan.py
    stage = 0
    phase = 0
    end = release_chunks_without_values(smem, columns, work, HALF, traits)
    for i in range(0, end - work.first):
        c = end - 1 - i
        dS = reverse_chunk(
            dS, gmem, scale, smem, P_s, staging, stage, phase, c, column, work, min_beta, DU_IS_DV, HALF, traits
        )
        stage, phase = advance(stage, phase, traits)
    if work.is_last:
        store_state(at_dstate, dS, staging, K, V, columns, NK)


@takes(
    pointers="q k e do gates wy_tiles dstate dstates dstates_high du dv starts cu",
    traits=(
        "H HV K V C K0 K1 DECAY DELTA WRITE READ_BEFORE PACKED DU_IS_DV UNIT SEGMENT_CHUNKS MIN_BETA TERMS "
        "IN_GRADIENTS HALVES"
    ),
)
@gluon.jit(do_not_specialize=["T", "window", "windows", "num_segments", "narrow_tile_min_chunks"])
def sm90_reverse_kernel(gmem, scale, T, window, windows, num_segments, narrow_tile_min_chunks, traits: gl.constexpr):
    """Parameters and results as in portable/reverse.py. e is None if the erase key is k.

    IN_GRADIENTS: dstates and dstates_high are the rows of dq and dk (channel_gradients.py); V = 128, no pack. Else
    dstates_high is None. HALVES, narrow_tile_min_chunks: scan_traits.program_values.

    Launch with 4 warps and 168 registers per thread, reallocated as in scan.py; with a decay per channel 216 per thread
    in a consumer and 72 in the producer.
    """
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    V: gl.constexpr = traits.V
    C: gl.constexpr = traits.C
    DECAY: gl.constexpr = traits.DECAY
    DELTA: gl.constexpr = traits.DELTA
    HALVES: gl.constexpr = traits.HALVES
    MIN_BETA: gl.constexpr = traits.MIN_BETA
    DU_IS_DV: gl.constexpr = traits.DU_IS_DV
    gl.static_assert(C == 64 and K <= traits.K0 + traits.K1)
    gl.static_assert(K % 8 == 0 and V % 8 == 0)
    gl.static_assert(traits.TERMS == 1 or (DELTA and traits.K0 + traits.K1 <= 128 and DECAY != "channel"))
    gl.static_assert(gmem.dstates.dtype == gmem.k.dtype and gmem.k.dtype.element_ty.primitive_bitwidth == 16)
    NK: gl.constexpr = (traits.K0 + traits.K1) // 64
    TAIL: gl.constexpr = tail_width(K, NK)
    OWN_KEY: gl.constexpr = DELTA and gmem.e is not None
    NUM_STAGES: gl.constexpr = num_stages(NK, OWN_KEY, True, traits.TERMS)
    V_TILES: gl.constexpr = (V + 127) // 128
    GATES_BEFORE: gl.constexpr = traits.READ_BEFORE and DECAY != "none" and DECAY != "channel"
    dtype: gl.constexpr = gmem.k.dtype.element_ty
    value_tile, half, hv, pid = value_tile_and_head(HV, V, HALVES)
    n, segment = sequence_and_segment(pid, num_segments, HALVES * V_TILES * HV)
    start, length, slot, window_first, first_scratch_slot, first, end = chunk_range(
        n, segment, gmem.cu, T, window, windows, C, traits.UNIT, traits.SEGMENT_CHUNKS, traits.PACKED
    )
    column, columns = program_values(value_tile, half, gl.cdiv(length, C), narrow_tile_min_chunks, V, HALVES)
    has_work = first < end
    if HALVES == 2:
        has_work = has_work & (columns > 0)
    if has_work:
        derived: gl.constexpr = make_traits(
            traits, NK=NK, TAIL=TAIL, NUM_STAGES=NUM_STAGES, OWN_KEY=OWN_KEY, GATES_BEFORE=GATES_BEFORE, OUTPUT=True,
            HAS_STATE=True, CHECKPOINT_CHUNKS=0, dtype=dtype,
        )  # fmt: skip
        T_dtype: gl.constexpr = gmem.wy_tiles.dtype.element_ty if DELTA else dtype
        smem, P_s, staging, _ = allocate_smem(derived, T_dtype)
        results = GlobalPointers(
            dstate=gmem.dstate, starts=gmem.starts, dstates=gmem.dstates, dstates_high=gmem.dstates_high, du=gmem.du,
            dv=gmem.dv,
        )  # fmt: skip
        work = WorkTile(
            start, length, window_first, first, first, end, first_scratch_slot, 0,
            n, segment_slot(n, segment, first_scratch_slot, traits.SEGMENT_CHUNKS), segment == 0, hv, column, columns,
        )  # fmt: skip
        gl.warp_specialize(
            [
                (
                    consumer,
                    (results, scale, smem, P_s[0], staging[0], work, MIN_BETA, DU_IS_DV, 0, derived),
                ),
                (
                    consumer,
                    (results, scale, smem, P_s[1], staging[1], work, MIN_BETA, DU_IS_DV, 1, derived),
                ),
                (
                    producer,
                    (gmem.q, gmem.k, gmem.e, gmem.do, gmem.gates, gmem.wy_tiles, smem, slot, work, derived, True),
                ),
            ],
            [4, 4],
            [240, 24] if NK > 3 and TAIL == 64 else [216, 72] if DECAY == "channel" else [232, 40],
        )
