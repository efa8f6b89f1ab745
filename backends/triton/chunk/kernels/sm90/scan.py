"""Scan over the chunks of a sequence on sm_90: outputs and final state, or the recomputed state of every chunk.

For a chunk with initial state S [K, V], WY tiles T and P and gates G, G'', c and w (portable/prepare.py), per value
head:

    x  = T (w v - c (S^T e))                  e is k, or an operand; x = w v for an additive update
    o  = scale 2^G'' (S^T q) + P x            OUTPUT
    S' = 2^Gend S + (2^(Gend - G) k)^T x

With a decay per channel the scaled operands Q, k_decayed and E of portable/channel/prepare.py replace q, k and e, and
2^Gend is a vector [K]; P is always a tile:

    x = T (w v - E S),    o = Q S + P x,    S' = diag(2^Gend) S + k_decayed^T x

Grid: one CTA for each (sequence, segment, value head, tile of 128 values); it loops over its chunks of 64 tokens. With
HALVES = 2 long sequences have two per tile, each with one busy consumer, which shortens a chunk by 30 %. One CTA
occupies an SM. A segment is SEGMENT_CHUNKS consecutive chunks of a sequence; segments are computed in parallel. A
window is the chunks of each sequence whose states scratch memory holds at a time (../layout.py).

Warp groups: two consumers and a producer. Consumer HALF computes 64 of the 128 values and keeps its S^T [64, K] in
float32 accumulators. All of its matrices are transposed, so that S^T and x^T are A operands in registers and the tiles
of the chunk are B operands in shared memory. The producer copies the tiles of one chunk after the other with cp.async.

Barriers (scan_traits.SharedStorage), each an array over the stages of the ring buffer, 2 or 3 (scan_traits.num_stages):

    barrier  arrivals             arrives              waits      protects
    k_full   1                    producer             consumers  k, or e if it is an operand; q, G, G_prev, erase, w
    v_full   1                    producer             consumers  v, T, P; k beside an operand e
    empty    2 x 128 (threads)    consumers, at the    producer   all buffers of the stage
                                  end of the chunk

With a decay per channel and an erase term only two stages fit. The consumers therefore release E and Q as soon as E S
and Q S are complete (k_empty), and the producer replaces them while the consumers compute the rest of the chunk:

    k_full   1                    producer             consumers  E, Q
    v_full   1                    producer             consumers  k_decayed, v, T, P, 2^Gend, w
    k_empty  2 x 128 (threads)    consumers, after     producer   E, Q
                                  Q S and E S
    empty    2 x 128 (threads)    consumers, at the    producer   the other buffers of the stage
                                  end of the chunk

The consumers start with phase 0 and the producer with phase 1, so its first wait on each empty barrier returns at once;
a phase flips when the stage wraps to 0. The consumers share no data and drift apart by up to the depth of the ring.

Each store to global memory goes through the consumer's own staging tile (state_copies.store_tile) and takes one barrier
of the warp group.

TERMS = 2 splits S in S^T e, and x in P x and in S', into two 16-bit terms (hi + lo), and T has two; docs/kernels.md.

With more than two tiles of keys the last has 16 columns if that is enough (scan_traits.tail_width).

Supported: operands and scratch of one 16-bit dtype, chunks of 64, K <= 256 (128 with an operand e, a decay per channel
or TERMS = 2; the last two exclude each other), K and V multiples of 8, modes "output" and "recompute" (of states).
"""

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
    read_state_by_key_tiles,
    scale_channels,
    scale_state,
    store_p_tile,
)
from deltazoo.backends.triton.chunk.kernels.sm90.scan_traits import (
    GlobalPointers,
    WorkTile,
    allocate_smem,
    make_traits,
    num_stages,
    program_values,
    tail_width,
    value_tile_and_head,
)
from deltazoo.backends.triton.chunk.kernels.sm90.state_copies import (
    load_checkpoint,
    load_state,
    store_state,
    store_tile,
    zero_state,
)
from deltazoo.backends.triton.device.layout import chunk_range, segment_slot, sequence_and_segment


@gluon.jit
def scan_chunk(
    S, gmem, scale, smem, P_s, staging, state_s, stage, phase, c, column, work,
    HALF: gl.constexpr, traits: gl.constexpr,
):  # fmt: skip
    """Process chunk c in a consumer: return the accumulators of S^T after the chunk, from those before it."""
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    V: gl.constexpr = traits.V
    NK: gl.constexpr = traits.NK
    DECAY: gl.constexpr = traits.DECAY
    DELTA: gl.constexpr = traits.DELTA
    GATES_BEFORE: gl.constexpr = traits.GATES_BEFORE
    OUTPUT: gl.constexpr = traits.OUTPUT
    CHECKPOINT_CHUNKS: gl.constexpr = traits.CHECKPOINT_CHUNKS
    BY_CHANNEL: gl.constexpr = DECAY == "channel"
    BY_TOKEN: gl.constexpr = DECAY != "none" and not BY_CHANNEL
    P_IS_LOADED: gl.constexpr = DELTA or BY_CHANNEL
    dtype: gl.constexpr = traits.dtype
    MASK_V: gl.constexpr = V % 128 != 0
    columns = work.columns - HALF * 64
    scratch_slot = (work.first_scratch_slot + c - work.window_first).to(gl.int64)

    TERMS: gl.constexpr = traits.TERMS
    BY_KEY_TILES: gl.constexpr = NK > 2
    S_low = (to_16_bits(S[0], dtype),)
    a_S = (gl.convert_layout(S_low[0], A_OPERAND, assert_trivial=True),)
    for tk in gl.static_range(0 if BY_KEY_TILES else NK - 1):
        S_low = S_low + (to_16_bits(S[tk + 1], dtype),)
        a_S = a_S + (gl.convert_layout(S_low[tk + 1], A_OPERAND, assert_trivial=True),)
    if OUTPUT and CHECKPOINT_CHUNKS > 0:
        if (c > 0) & (c % CHECKPOINT_CHUNKS == 0):
            at = (
                gmem.checkpoints
                + (((work.checkpoint + c // CHECKPOINT_CHUNKS).to(gl.int64) * HV + work.hv) * V + column) * K
            )
            for tk in gl.static_range(NK):
                if S[tk].shape[1] == 16:
                    store_accumulator(at + tk * 64, S[tk], K, columns, K - tk * 64, tk * 64 + S[tk].shape[1] > K)
                else:
                    staging.store(to_16_bits(S[tk], dtype) if BY_KEY_TILES else S_low[tk])
                    store_tile(at + tk * 64, staging, K, columns, K - tk * 64, MASK_V, tk * 64 + S[tk].shape[1] > K)

    mbarrier.wait(smem.k_full.index(stage), phase)
    y = gl.zeros([64, 64], gl.float32, ACC)
    out = gl.zeros([64, 64], gl.float32, ACC)
    if OUTPUT and not P_IS_LOADED:
        P = issue_kq(smem, stage, traits)
    if TERMS == 2:
        # complete before the other products are issued, which then do not share the registers with the low terms
        for tk in gl.static_range(NK):
            a_S_low = gl.convert_layout(low_term(S[tk], S_low[tk]), A_OPERAND, assert_trivial=True)
            y = warpgroup_mma(a_S_low, smem.e[tk].index(stage).permute((1, 0)), y, use_acc=tk > 0, is_async=True)
            y, a_S_low = warpgroup_mma_wait(0, deps=[y, a_S_low])
    if DELTA and not BY_KEY_TILES:
        for tk in gl.static_range(NK):
            e_T = smem.e[tk].index(stage).permute((1, 0))
            y = warpgroup_mma(a_S[tk], e_T, y, use_acc=tk > 0 or TERMS == 2, is_async=True)
    if OUTPUT and not BY_KEY_TILES:
        for tk in gl.static_range(NK):
            out = warpgroup_mma(a_S[tk], smem.q[tk].index(stage).permute((1, 0)), out, use_acc=tk > 0, is_async=True)

    if OUTPUT and not P_IS_LOADED:
        store_p_tile(P, 0 if BY_KEY_TILES else NK, P_s, smem, stage, scale, traits)
    if BY_KEY_TILES:
        y, out = read_state_by_key_tiles(S, smem, state_s, stage, traits)
    if not OUTPUT:
        if traits.IN_GRADIENTS:
            at = gmem.states + (((work.start + c * 64) * HV + work.hv) * (2 * K) + HALF * 64)
        else:
            at = gmem.states + ((scratch_slot * HV + work.hv) * V + column) * K
        STRIDE: gl.constexpr = 2 * HV * K if traits.IN_GRADIENTS else K
        STEP: gl.constexpr = 128 if traits.IN_GRADIENTS else 64
        rows = gl.where(c >= work.first_stored, columns, 0)
        for tk in gl.static_range(0 if BY_KEY_TILES else NK):
            state_s[tk].store(S_low[tk])
        for tk in gl.static_range(NK):
            store_tile(at + tk * STEP, state_s[tk], STRIDE, rows, K - tk * 64, True, tk * 64 + state_s[tk].shape[1] > K)

    # x^T = (w v - c S^T e)^T T^T
    mbarrier.wait(smem.v_full.index(stage), phase)
    x = to_float32(smem.v[HALF].index(stage).permute((1, 0)).load(ACC))
    if traits.WRITE:
        x *= smem.w.index(stage).load(ACC_COLUMNS)[None, :]
    if DELTA:
        if not BY_CHANNEL:
            erase = smem.erase.index(stage).load(ACC_COLUMNS)
        if not BY_KEY_TILES:
            y, _, _ = warpgroup_mma_wait(NK if OUTPUT else 0, deps=[y, a_S[0], a_S[NK - 1]])
        x -= y if BY_CHANNEL else y * erase[None, :]
        SCALED: gl.constexpr = smem.T.dtype == gl.float16
        x, a_u, scales = matmul_inverse_async(
            x, smem.T.index(stage).permute((1, 0)), smem.T_low.index(stage).permute((1, 0)), A_OPERAND, SCALED, TERMS
        )
    if BY_CHANNEL:
        S0 = scale_channels(S, smem.G, stage, NK)
    elif BY_TOKEN:
        G = smem.G.index(stage).load(ACC_COLUMNS)
        G_end = smem.G.index(stage).slice(63, 1).load(ACC_COLUMNS)
        S0 = scale_state(S, gl.exp2(G_end), NK)
        decay_to_end = gl.exp2(G_end - G)
    else:
        S0 = S
    # o^T = scale 2^G'' S^T q^T + x^T P^T
    if OUTPUT:
        if not BY_KEY_TILES:
            out, _, _ = warpgroup_mma_wait(TERMS if DELTA else 0, deps=[out, a_S[0], a_S[NK - 1]])
        if BY_TOKEN:
            G_read = smem.G_prev.index(stage).load(ACC_COLUMNS) if GATES_BEFORE else G
            out *= (gl.exp2(G_read) * scale)[None, :]
        elif not BY_CHANNEL:
            out *= scale
    if BY_CHANNEL:
        consumer_release(smem.k_empty.index(stage))
    if DELTA:
        x, a_u = warpgroup_mma_wait(0, deps=[x, a_u])
        if SCALED:
            x *= scales[:, None]
    x_low = to_16_bits(x, dtype)
    a_x = gl.convert_layout(x_low, A_OPERAND, assert_trivial=True)
    if BY_TOKEN:
        x_decayed = to_16_bits(x * decay_to_end[None, :], dtype)
        a_x_decayed = gl.convert_layout(x_decayed, A_OPERAND, assert_trivial=True)
    else:
        x_decayed = x_low
        a_x_decayed = a_x
    if TERMS == 2:
        x_rest = low_term(x, x_low)
        a_x_rest = gl.convert_layout(x_rest, A_OPERAND, assert_trivial=True)
        if BY_TOKEN:
            x_rest = low_term(x * decay_to_end[None, :], x_decayed)
        a_x_decayed_rest = gl.convert_layout(x_rest, A_OPERAND, assert_trivial=True)
    if OUTPUT:
        out = warpgroup_mma(a_x, P_s.index(stage if P_IS_LOADED else 0), out, is_async=True)
        if TERMS == 2:
            out = warpgroup_mma(a_x_rest, P_s.index(stage), out, is_async=True)
    # S'^T = 2^Gend S^T + (2^(Gend - G) x)^T k
    S1 = (warpgroup_mma(a_x_decayed, smem.k[0].index(stage), S0[0], is_async=True),)
    for tk in gl.static_range(NK - 1):
        S1 = S1 + (warpgroup_mma(a_x_decayed, smem.k[tk + 1].index(stage), S0[tk + 1], is_async=True),)
    if TERMS == 2:
        S2 = (warpgroup_mma(a_x_decayed_rest, smem.k[0].index(stage), S1[0], is_async=True),)
        for tk in gl.static_range(NK - 1):
            S2 = S2 + (warpgroup_mma(a_x_decayed_rest, smem.k[tk + 1].index(stage), S1[tk + 1], is_async=True),)
        S1 = S2
    if OUTPUT:
        if TERMS == 2:
            out, a_x, a_x_rest = warpgroup_mma_wait(2 * NK, deps=[out, a_x, a_x_rest])
        else:
            out, a_x = warpgroup_mma_wait(NK, deps=[out, a_x])
        staging.permute((1, 0)).store(to_16_bits(out, dtype))
        at = gmem.o + (((work.start + c * 64) * HV + work.hv) * V + column)
        store_tile(at, staging, HV * V, work.length - c * 64, columns, True, MASK_V)
    elif DELTA:
        staging.permute((1, 0)).store(x_low)
        at = gmem.v_new + ((scratch_slot * 64 * HV + work.hv) * V + column)
        store_tile(at, staging, HV * V, gl.where(c >= work.first_stored, 64, 0), columns, True, MASK_V)
    if TERMS == 2:
        waited = warpgroup_mma_wait(0, deps=S1 + (a_x_decayed, a_x_decayed_rest))
    else:
        waited = warpgroup_mma_wait(0, deps=S1 + (a_x_decayed,))
    S_next = (waited[0],)
    for tk in gl.static_range(NK - 1):
        S_next = S_next + (waited[tk + 1],)
    consumer_release(smem.empty.index(stage))
    return S_next


@gluon.jit
def consumer(gmem, scale, smem, P_s, staging, state_s, work, HALF: gl.constexpr, traits: gl.constexpr):
    """Consumer warp group: scan the chunks of the work tile for values 128 value_tile + 64 HALF and the next 63.

    P_s: P^T, private to the consumer where the update is additive. staging, state_s: its staging tiles.
    """
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    V: gl.constexpr = traits.V
    NK: gl.constexpr = traits.NK
    CHECKPOINT_CHUNKS: gl.constexpr = traits.CHECKPOINT_CHUNKS
    HAS_STATE: gl.constexpr = traits.HAS_STATE
    SEGMENT_CHUNKS: gl.constexpr = traits.SEGMENT_CHUNKS
    OUTPUT: gl.constexpr = traits.OUTPUT
    column = work.column + HALF * 64
    columns = work.columns - HALF * 64
    at_state = (work.n.to(gl.int64) * HV + work.hv) * K * V + column
    S = zero_state(traits)
    if OUTPUT and SEGMENT_CHUNKS > 0:
        at = gmem.starts + ((work.segment_slot.to(gl.int64) * HV + work.hv) * V + column) * K
        S = load_state(at, staging, K, columns, False, traits)
    elif OUTPUT:
        if HAS_STATE:
            S = load_state(gmem.state + at_state, staging, V, columns, True, traits)
    elif work.first > 0:
        checkpoint = (work.checkpoint + work.first // CHECKPOINT_CHUNKS).to(gl.int64)
        at = gmem.checkpoints + ((checkpoint * HV + work.hv) * V + column) * K
        S = load_checkpoint(at, state_s, K, columns, NK, V % 128 != 0)
    elif HAS_STATE:
        S = load_state(gmem.state + at_state, staging, V, columns, True, traits)
    # With smem accesses pending at loop entry the compiler would place a barrier in every iteration; this one avoids
    # it.
    barrier()
    stage = 0
    phase = 0
    end = release_chunks_without_values(smem, columns, work, HALF, traits)
    for c in range(work.first, end):
        S = scan_chunk(S, gmem, scale, smem, P_s, staging, state_s, stage, phase, c, column, work, HALF, traits)
        stage, phase = advance(stage, phase, traits)
    if OUTPUT:
        if work.is_last:
            store_state(gmem.final + at_state, S, staging, K, V, columns, NK)


@takes(
    pointers="q k e v gates wy_tiles state o final checkpoints states v_new starts cu",
    traits=(
        "H HV K V C K0 K1 DECAY DELTA WRITE HAS_STATE READ_BEFORE PACKED CHECKPOINT_CHUNKS UNIT SEGMENT_CHUNKS MODE "
        "TERMS IN_GRADIENTS HALVES"
    ),
)
@gluon.jit(do_not_specialize=["T", "window", "windows", "num_segments", "narrow_tile_min_chunks"])
def sm90_scan_kernel(gmem, scale, T, window, windows, num_segments, narrow_tile_min_chunks, traits: gl.constexpr):
    """Parameters and results as in portable/scan.py, modes "output" and "recompute". e is None if the erase key is k.

    IN_GRADIENTS: `states` are the rows of d_log_decay, as elements of 16 bits (channel_gradients.py); V = 128, no pack.
    HALVES, narrow_tile_min_chunks: scan_traits.program_values; HALVES = 1 to recompute.

    Launch with 4 warps and 168 registers per thread. warp_specialize adds two warp groups of 4 warps and reallocates
    the registers: 232 per thread in a consumer and 40 in the producer, 240 and 24 with four tiles of 64 keys, or 224
    and 56 with a decay per channel.
    """
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    V: gl.constexpr = traits.V
    DECAY: gl.constexpr = traits.DECAY
    CHECKPOINT_CHUNKS: gl.constexpr = traits.CHECKPOINT_CHUNKS
    OUTPUT: gl.constexpr = traits.MODE == "output"
    gl.static_assert(OUTPUT or (traits.MODE == "recompute" and CHECKPOINT_CHUNKS > 0))
    gl.static_assert(traits.C == 64 and K <= traits.K0 + traits.K1 and K % 8 == 0 and V % 8 == 0)
    gl.static_assert(traits.TERMS == 1 or (traits.DELTA and traits.K0 + traits.K1 <= 128 and DECAY != "channel"))
    gl.static_assert(gmem.k.dtype.element_ty.primitive_bitwidth == 16)
    gl.static_assert(CHECKPOINT_CHUNKS == 0 or gmem.checkpoints.dtype == gmem.k.dtype)
    gl.static_assert(OUTPUT or (gmem.states.dtype == gmem.k.dtype and traits.HALVES == 1))
    gl.static_assert(not traits.IN_GRADIENTS or (V == 128 and K % 64 == 0 and not traits.PACKED))
    if traits.HAS_STATE:
        gl.static_assert(gmem.state.dtype.element_ty == gl.float32)
    NK: gl.constexpr = (traits.K0 + traits.K1) // 64
    TAIL: gl.constexpr = tail_width(K, NK)
    OWN_KEY: gl.constexpr = traits.DELTA and gmem.e is not None
    NUM_STAGES: gl.constexpr = num_stages(NK, OWN_KEY, OUTPUT, traits.TERMS)
    GATES_BEFORE: gl.constexpr = OUTPUT and traits.READ_BEFORE and DECAY != "none" and DECAY != "channel"
    dtype: gl.constexpr = gmem.k.dtype.element_ty
    value_tile, half, hv, pid = value_tile_and_head(HV, V, traits.HALVES)
    n, segment = sequence_and_segment(pid, num_segments, traits.HALVES * ((V + 127) // 128) * HV)
    start, length, slot, window_first, first_scratch_slot, first, end = chunk_range(
        n, segment, gmem.cu, T, window, windows, traits.C, traits.UNIT, traits.SEGMENT_CHUNKS, traits.PACKED
    )
    chunks = gl.cdiv(length, traits.C)
    first_stored = first
    has_work = first < end
    is_last = segment == 0
    if OUTPUT:
        if traits.SEGMENT_CHUNKS > 0:
            is_last = segment == gl.maximum(chunks - 1, 0) // traits.SEGMENT_CHUNKS
        has_work = has_work | is_last  # a sequence without tokens has a final state
    else:
        first = first // CHECKPOINT_CHUNKS * CHECKPOINT_CHUNKS
    column, columns = program_values(value_tile, half, chunks, narrow_tile_min_chunks, V, traits.HALVES)
    if traits.HALVES == 2:
        has_work = has_work & (columns > 0)
    checkpoint = 0
    if CHECKPOINT_CHUNKS > 0:
        checkpoint = (slot // CHECKPOINT_CHUNKS if traits.PACKED else n * ((chunks - 1) // CHECKPOINT_CHUNKS)) - 1
    if has_work:
        derived: gl.constexpr = make_traits(
            traits, NK=NK, TAIL=TAIL, NUM_STAGES=NUM_STAGES, OWN_KEY=OWN_KEY, GATES_BEFORE=GATES_BEFORE, OUTPUT=OUTPUT,
            dtype=dtype,
        )  # fmt: skip
        smem, P_s, staging, states_s = allocate_smem(derived, gmem.wy_tiles.dtype.element_ty if traits.DELTA else dtype)
        results = GlobalPointers(
            state=gmem.state, o=gmem.o, final=gmem.final, checkpoints=gmem.checkpoints, states=gmem.states,
            v_new=gmem.v_new, starts=gmem.starts,
        )  # fmt: skip
        work = WorkTile(
            start, length, window_first, first, first_stored, end, first_scratch_slot, checkpoint,
            n, segment_slot(n, segment, first_scratch_slot, traits.SEGMENT_CHUNKS), is_last, hv, column, columns,
        )  # fmt: skip
        gl.warp_specialize(
            [
                (consumer, (results, scale, smem, P_s[0], staging[0], states_s[0], work, 0, derived)),
                (consumer, (results, scale, smem, P_s[1], staging[1], states_s[1], work, 1, derived)),
                (
                    producer,
                    (gmem.q, gmem.k, gmem.e, gmem.v, gmem.gates, gmem.wy_tiles, smem, slot, work, derived, False),
                ),
            ],
            [4, 4],
            [240, 24] if NK > 3 and TAIL == 64 else [224, 56] if DECAY == "channel" else [232, 40],
        )
