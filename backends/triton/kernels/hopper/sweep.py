"""The reverse scan with the gradients for Hopper GPUs, in Gluon: equations are those of reverse.py and gradients.py.

What a reverse scan finds of a chunk is what its gradients start from. Here neither the gradient of the state nor du
goes to memory, and what both read is read once. Two warp groups walk in step, by one text: of the scan each has half of
the values and its half of dS^T in registers, of the gradients half of the keys. What one needs of the other goes
through shared memory, with three barriers a chunk. A third copies chunk after chunk ahead of time. It takes operands
and scratch of one 16-bit dtype, chunks of 64, 65 to 128 keys a head, up to 128 values or a multiple of 128, of which a
program has 128, and k as the erase key.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltazoo.backends.triton.kernels.hopper.common import barrier, free
from deltazoo.backends.triton.kernels.hopper.sweep_consumer import walk_chunk
from deltazoo.backends.triton.kernels.hopper.sweep_producer import copy_chunks
from deltazoo.backends.triton.kernels.hopper.sweep_reductions import STATE, put_kept
from deltazoo.backends.triton.kernels.hopper.sweep_traits import Results, kind_of, registers_to_copy, room_of
from deltazoo.backends.triton.kernels.layout import chunk_range, opaque_zero, sequence_and_segment


@gluon.jit
def walk_back(
    v, b, to, dstate, begins, scale, room, slot, slots, held, segments, first, last, n, part, parts, hv,
    kind: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """The two warp groups that compute."""
    i = gl.arange(0, 128, gl.SliceLayout(1, STATE))[:, None]
    j = gl.arange(0, 128, gl.SliceLayout(0, STATE))[None, :]
    inside = (i < kind.V) & (j < kind.K)
    at_carry = dstate + (n.to(gl.int64) * kind.HV + hv) * kind.V * kind.K
    if SPLIT > 0:
        of_part = (n * parts + part).to(gl.int64)
        at_begin = begins + (of_part * kind.HV + hv) * kind.V * kind.K
        dS = gl.load(at_begin + (i * kind.K + j), mask=inside, other=0.0)
    else:
        dS = gl.load(at_carry + (j * kind.V + i), mask=inside, other=0.0)
    apart = slots.to(gl.int64) * kind.HV
    stage = 0
    phase = 0
    to_come = last - first
    while to_come > 0:
        dS, to_come = walk_chunk(dS, v, b, to, scale, room, to_come, stage, phase, stage, segments, slots, held, kind)
        free(room.done.index(0))
        phase = phase ^ stage
        stage = stage ^ 1
    if kind.DECAY != "none":
        barrier()
        put_kept(to.state_products + ((slot + first).to(gl.int64) * kind.HV + hv), apart, room.sums_s, True)
    if part == 0:
        gl.store((at_carry + opaque_zero(to_come, 23)) + (j * kind.V + i), dS, mask=inside)


@gluon.jit(do_not_specialize=["slots", "held", "T", "segment", "segments", "parts"])
def hopper_backward_sweep_kernel(
    q, k, v, b, do, gates, wy_tiles, dstate, states, xs, dq, dk, dv, dgates, state_products, partial, begins, cu,
    slots, held, scale, T, segment, segments, parts,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    DECAY: gl.constexpr, DELTA: gl.constexpr, ERASE: gl.constexpr, WRITE: gl.constexpr,
    ERASE_EARLY: gl.constexpr, READ_EARLY: gl.constexpr, PACKED: gl.constexpr, DU_IS_DV: gl.constexpr,
    UNIT: gl.constexpr, SPLIT: gl.constexpr, MIN_BETA: gl.constexpr,
):  # fmt: skip
    """One program a (sequence, part, value head, tile of 128 values), as in reverse.py; results as in gradients.py with
    two tiles of keys for each tile of values.

    To be launched with 8 warps, which become 12, and 168 registers a thread, which they share out anew."""
    gl.static_assert(C == 64 and K > 64 and K <= 128 and (V <= 128 or V % 128 == 0))
    gl.static_assert(states.dtype == k.dtype and k.dtype.element_ty.primitive_bitwidth == 16)
    dtype: gl.constexpr = k.dtype.element_ty
    pid = gl.program_id(0)
    TILES: gl.constexpr = (V + 127) // 128
    share = pid % (HV * TILES)
    hv = share // TILES
    n, part = sequence_and_segment(pid // (HV * TILES), parts, HV * TILES)
    start, length, slot, first_chunk, first_place, first, last = chunk_range(
        n, part, cu, T, segment, segments, C, UNIT, SPLIT, PACKED
    )
    if first < last:
        kind: gl.constexpr = kind_of(
            H, HV, K, V, HV * TILES, DECAY, DELTA, ERASE, WRITE, ERASE_EARLY, READ_EARLY, DU_IS_DV, MIN_BETA, dtype
        )
        if TILES > 1:
            # where this program's tile lies of all that has values, and its sums among those of all
            tile = share % TILES
            GATE_ROWS: gl.constexpr = 4 if ERASE_EARLY or READ_EARLY else 3
            v += tile * 128
            do += tile * 128
            dv += tile * 128
            dstate += tile * 128
            states += tile * (128 * K)
            if DELTA:
                xs += tile * 128
            if SPLIT > 0:
                begins += tile * (128 * K)
            of_tile = tile * 2 * (slots.to(gl.int64) * HV)
            state_products += of_tile
            dgates += of_tile * (GATE_ROWS * 64)
        to = Results(dq, dk, dv, dgates, state_products, partial)
        room = room_of(kind, wy_tiles.dtype.element_ty if DELTA else dtype, 1)
        values = xs if DELTA else v
        gl.warp_specialize(
            [
                (
                    walk_back,
                    (
                        v, b, to, dstate, begins, scale, room,
                        slot, slots, held, segments, first, last, n, part, parts, hv, kind, SPLIT,
                    ),
                ),
                (
                    copy_chunks,
                    (
                        q, k, do, gates, wy_tiles, states, values, room,
                        start, length, slot, first_chunk, first, last, first_place, hv, share, kind,
                    ),
                ),
            ],
            [4],
            [registers_to_copy(DECAY, DELTA)],
        )  # fmt: skip
