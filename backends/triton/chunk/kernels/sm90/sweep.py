"""Backward sweep on sm_90: the reverse scan over the chunks of a sequence fused with the gradients of each chunk.

The equations are those of reverse.py and portable/gradients.py. Fused, neither dS nor du goes through global memory,
and k, do, T and the gates of a chunk are read once.

Grid: one CTA for each (sequence, segment, value head, tile of 128 values); it loops over its chunks of 64 tokens, the
last first. One CTA occupies an SM. Segments and windows as in scan.py.

Warp groups: two consumers, which run the same code in step as one partition of 8 warps, and a producer. In the reverse
scan each consumer computes half of the values and keeps the float32 accumulators of dS^T [64 values, 128 keys]; in the
gradients it computes half of the keys. They exchange data through shared memory, with three barriers of the partition
(bar.sync over 8 warps) per chunk. The producer copies with cp.async, one chunk ahead.

Barriers (sweep_traits.SharedStorage); k_full and q_full are arrays over the two stages of the ring buffer:

    barrier      arrivals           arrives              waits      protects
    k_full       1                  producer             consumers  k, do, P, G, G_prev, erase, w, chunk_info of a stage
    q_full       1                  producer             consumers  q, T of a stage
    state_full   1                  producer             consumers  S, x
    state_empty  2 x 128 (threads)  consumers, after     producer   S, x
                                    the last read of S, x
    empty        2 x 128 (threads)  consumers, at the    producer   every buffer of the chunk's stage
                                    end of a chunk
    du_empty     2 x 128 (threads)  consumers, after     producer   du, where T_low of the chunk is copied
                                    they have read du
    T_low_full   1                  producer             consumers  T_low (in du)

The last two exist with TERMS = 2 (split terms) only. They share phases with state_full.

A chunk is a phase of state_full, state_empty and empty (one barrier for both stages: at most one chunk is unreleased
when the producer waits, see sweep_producer.py); the stages alternate, so k_full and q_full change phase every second
chunk. The producer's first wait on each empty barrier returns at once.

Supported: operands and scratch of one 16-bit dtype, chunks of 64, 64 < K <= 128, V <= 128 or a multiple of 128, erase
keys equal to k.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.chunk.kernels.sm90.common import barrier, consumer_release
from deltazoo.backends.triton.chunk.kernels.sm90.sweep_consumer import sweep_chunk
from deltazoo.backends.triton.chunk.kernels.sm90.sweep_producer import producer
from deltazoo.backends.triton.chunk.kernels.sm90.sweep_reductions import ACC_VK, store_state_products
from deltazoo.backends.triton.chunk.kernels.sm90.sweep_traits import (
    GradientPointers,
    Pipeline,
    allocate_smem,
    make_traits,
    producer_registers,
)
from deltazoo.backends.triton.device.layout import chunk_range, opaque_zero, segment_slot, sequence_and_segment


@gluon.jit
def consumer(
    v, b, grads, dstate, starts, scale, smem, slot, slots, num_scratch_slots, windows, first, end, n, segment,
    slot_of_segment, hv, traits: gl.constexpr, SEGMENT_CHUNKS: gl.constexpr,
):  # fmt: skip
    """Consumer warp groups: sweep the chunks [first, end) of sequence n, the last first."""
    i = gl.arange(0, 128, gl.SliceLayout(1, ACC_VK))[:, None]
    j = gl.arange(0, 128, gl.SliceLayout(0, ACC_VK))[None, :]
    inside = (i < traits.V) & (j < traits.K)
    dstate_at = dstate + (n.to(gl.int64) * traits.HV + hv) * traits.V * traits.K
    if SEGMENT_CHUNKS > 0:
        start_at = starts + (slot_of_segment.to(gl.int64) * traits.HV + hv) * traits.V * traits.K
        dS = gl.load(start_at + (i * traits.K + j), mask=inside, other=0.0)
    else:
        dS = gl.load(dstate_at + (j * traits.V + i), mask=inside, other=0.0)
    half_stride = slots.to(gl.int64) * traits.HV
    stage = 0
    phase = 0
    chunks_left = end - first
    while chunks_left > 0:
        pipeline = Pipeline(stage=stage, phase=phase, state_phase=stage, opaque_one=windows)
        dS, chunks_left = sweep_chunk(
            dS, v, b, grads, scale, smem, chunks_left, pipeline, slots, num_scratch_slots, traits
        )
        consumer_release(smem.empty.index(0))
        phase = phase ^ stage
        stage = stage ^ 1
    if traits.DECAY != "none":
        barrier()
        at = grads.state_products + ((slot + first).to(gl.int64) * traits.HV + hv)
        store_state_products(at, half_stride, smem.sums, True)
    if segment == 0:
        gl.store((dstate_at + opaque_zero(chunks_left, 23)) + (j * traits.V + i), dS, mask=inside)


@takes(
    pointers="q k v b do gates wy_tiles dstate states v_new dq dk dv dgates state_products partial starts slopes cu",
    traits=(
        "H HV K V C DECAY DELTA ERASE WRITE ERASE_PREVIOUS READ_BEFORE PACKED DU_IS_DV UNIT SEGMENT_CHUNKS MIN_BETA "
        "TERMS"
    ),
)
@gluon.jit(do_not_specialize=["slots", "num_scratch_slots", "T", "window", "windows", "num_segments"])
def sm90_backward_sweep_kernel(
    gmem, slots, num_scratch_slots, scale, T, window, windows, num_segments, traits: gl.constexpr
):
    """Parameters as in portable/reverse.py and portable/gradients.py; results as in portable/gradients.py, with two K
    tiles per V tile.

    Launch with 8 warps and 168 registers per thread. warp_specialize adds the producer's 4 warps and reallocates the
    registers: 240 per thread in the consumers and 24 in the producer, or 232 and 40 (sweep_traits.producer_registers).
    """
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    V: gl.constexpr = traits.V
    C: gl.constexpr = traits.C
    DELTA: gl.constexpr = traits.DELTA
    SEGMENT_CHUNKS: gl.constexpr = traits.SEGMENT_CHUNKS
    v = gmem.v
    do = gmem.do
    dstate = gmem.dstate
    states = gmem.states
    x = gmem.v_new if DELTA else gmem.v
    dv = gmem.dv
    dgates = gmem.dgates
    state_products = gmem.state_products
    if SEGMENT_CHUNKS > 0:
        starts = gmem.starts
    gl.static_assert(C == 64 and K > 64 and K <= 128 and (V <= 128 or V % 128 == 0))
    gl.static_assert(states.dtype == gmem.k.dtype and gmem.k.dtype.element_ty.primitive_bitwidth == 16)
    dtype: gl.constexpr = gmem.k.dtype.element_ty
    pid = gl.program_id(0)
    TILES: gl.constexpr = (V + 127) // 128
    share = pid % (HV * TILES)
    hv = share // TILES
    n, segment = sequence_and_segment(pid // (HV * TILES), num_segments, HV * TILES)
    start, length, slot, window_first, first_scratch_slot, first, end = chunk_range(
        n, segment, gmem.cu, T, window, windows, C, traits.UNIT, SEGMENT_CHUNKS, traits.PACKED
    )
    if first < end:
        derived: gl.constexpr = make_traits(traits, SHARES=HV * TILES, dtype=dtype)
        if TILES > 1:
            # advance the pointers to the program's tile of values, and to its partial sums
            tile = share % TILES
            GATE_ROWS: gl.constexpr = 4 if traits.ERASE_PREVIOUS or traits.READ_BEFORE else 3
            v += tile * 128
            do += tile * 128
            dv += tile * 128
            dstate += tile * 128
            states += tile * (128 * K)
            x += tile * 128
            if SEGMENT_CHUNKS > 0:
                starts += tile * (128 * K)
            tile_offset = tile * 2 * (slots.to(gl.int64) * HV)
            state_products += tile_offset
            dgates += tile_offset * (GATE_ROWS * 64)
        grads = GradientPointers(
            dq=gmem.dq, dk=gmem.dk, dv=dv, dgates=dgates, state_products=state_products, partial=gmem.partial,
            slopes=gmem.slopes,
        )  # fmt: skip
        smem = allocate_smem(derived, gmem.wy_tiles.dtype.element_ty if DELTA else dtype, 1, gmem.slopes is not None)
        gl.warp_specialize(
            [
                (
                    consumer,
                    (
                        v, gmem.b, grads, dstate, starts if SEGMENT_CHUNKS > 0 else gmem.starts, scale, smem,
                        slot, slots, num_scratch_slots, windows, first, end, n, segment,
                        segment_slot(n, segment, first_scratch_slot, SEGMENT_CHUNKS), hv,
                        derived, SEGMENT_CHUNKS,
                    ),
                ),
                (
                    producer,
                    (
                        gmem.q, gmem.k, do, gmem.gates, gmem.wy_tiles, states, x, smem,
                        start, length, slot, window_first, first, end, first_scratch_slot, hv, share, derived,
                    ),
                ),
            ],
            [4],
            [producer_registers(traits.DECAY, DELTA)],
        )  # fmt: skip
