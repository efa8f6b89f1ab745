"""The reverse scan with the gradients for Hopper GPUs, in Gluon: equations are those of reverse.py and gradients.py.

What a reverse scan finds of a chunk is what its gradients start from. Here neither the gradient of the state nor du
goes to memory, and what both read is read once. Two warp groups walk in step, by one text: of the scan each has half of
the values and its half of dS^T in registers, of the gradients half of the keys. What one needs of the other goes
through shared memory, with three barriers a chunk. A third copies chunk after chunk ahead of time. It takes operands
and scratch of one 16-bit dtype, chunks of 64, 65 to 128 keys and values a head, and k as the erase key.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltazoo.backends.triton.kernels.hopper import (
    SHARED_LINE,
    SHARED_TILE,
    WALKERS,
    barrier,
    barriers,
    free,
    ring,
    ring_of_lines,
)
from deltazoo.backends.triton.kernels.layout import first_slot, segment_of, sequence_and_part, sequence_bounds
from deltazoo.backends.triton.kernels.walk_copies import copy_chunks, hidden_zero
from deltazoo.backends.triton.kernels.walk_steps import chunk_gradients, reverse_chunk
from deltazoo.backends.triton.kernels.walk_sums import (
    SHARED_SUMS,
    STATE,
    TO_COME,
    number,
    put_kept,
)

BUFFERS = gl.constexpr(2)  # of what the reverse scan takes of a chunk: that of the next is copied meanwhile


@gluon.jit
def walk_back(
    v, b, dq, dk, dv, carry, begins, dgates, kepts, partial, scale,
    k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, S_s, x_s, dS_s, du_s, low_s, sums_s, numbers_s,
    came, rest_came, states_came, done, walked, slot, slots, held, segments, first, last, n, part, parts, hv,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, DECAY: gl.constexpr,
    DELTA: gl.constexpr, ERASE: gl.constexpr, WRITE: gl.constexpr, ERASE_EARLY: gl.constexpr,
    READ_EARLY: gl.constexpr, SHARED: gl.constexpr, SPLIT: gl.constexpr, LEAST: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The two warp groups that compute."""
    at_carry = carry + (n.to(gl.int64) * HV + hv) * V * K
    of_part = (n * parts + part).to(gl.int64)
    at_begin = begins + (of_part * HV + hv) * V * K if SPLIT > 0 else at_carry
    i = gl.arange(0, 128, gl.SliceLayout(1, STATE))[:, None]
    j = gl.arange(0, 128, gl.SliceLayout(0, STATE))[None, :]
    inside = (i < V) & (j < K)
    dS = gl.load(at_begin + (i * K + j), mask=inside, other=0.0)
    apart = slots.to(gl.int64) * HV
    stage = 0
    phase = 0
    to_come = last - first
    while to_come > 0:
        dS, intra_q, inter_q = reverse_chunk(
            dS, dv, scale, k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s,
            S_s, dS_s, du_s, x_s, low_s, sums_s, numbers_s, came, rest_came, states_came,
            hidden_zero(to_come, 20), stage, phase, stage, kepts, apart,
            HV, V, DECAY, DELTA, WRITE, READ_EARLY, SHARED, LEAST, dtype,
        )  # fmt: skip
        dS = chunk_gradients(
            dS, intra_q, inter_q, v, b, dq, dk, dgates, kepts, partial, scale,
            k_s, q_s, T_s, P_s, G_s, before_s, w_s, S_s, x_s, dS_s, du_s, low_s, sums_s, numbers_s,
            walked, hidden_zero(to_come, 21), stage + hidden_zero(to_come, 22), segments, slots, held,
            H, HV, K, V, DECAY, DELTA, ERASE, WRITE, ERASE_EARLY, READ_EARLY, SHARED, LEAST, dtype,
        )  # fmt: skip
        # counted by the copying warp group: a number of this one's own would be spilled, and waited for here
        to_come = number(numbers_s.index(stage), TO_COME).to(gl.int32)
        free(done)
        phase = phase ^ stage
        stage = stage ^ 1
    if DECAY != "none":
        barrier()
        put_kept(kepts + ((slot + first).to(gl.int64) * HV + hv), apart, sums_s, True)
    if part == 0:
        gl.store(at_carry + (i * K + j), dS, mask=inside)


@gluon.jit(do_not_specialize=["slots", "held", "T", "segment", "segments", "parts"])
def hopper_walk_kernel(
    q, k, v, b, do, gates, squares, carry, states, xs, dq, dk, dv, dgates, kepts, partial, begins, cu,
    slots, held, scale, T, segment, segments, parts,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    DECAY: gl.constexpr, DELTA: gl.constexpr, ERASE: gl.constexpr, WRITE: gl.constexpr,
    ERASE_EARLY: gl.constexpr, READ_EARLY: gl.constexpr, PACKED: gl.constexpr, SHARED: gl.constexpr,
    UNIT: gl.constexpr, SPLIT: gl.constexpr, LEAST: gl.constexpr,
):  # fmt: skip
    """One program a (sequence, part, value head), as in reverse.py; results as in gradients.py with two tiles of keys.

    To be launched with 8 warps, which become 12, and 168 registers a thread, which they share out anew."""
    gl.static_assert(C == 64 and K > 64 and K <= 128 and V > 64 and V <= 128)
    gl.static_assert(states.dtype == k.dtype and k.dtype.element_ty.primitive_bitwidth == 16)
    EARLY: gl.constexpr = ERASE_EARLY or READ_EARLY
    dtype: gl.constexpr = k.dtype.element_ty
    pid = gl.program_id(0)
    hv = pid % HV
    n, part = sequence_and_part(pid // HV, parts, HV)
    start, length = sequence_bounds(n, cu, T, PACKED)
    slot = first_slot(n, cu, T, C, PACKED)
    first_chunk, last, first_place = segment_of(n, slot, gl.cdiv(length, C), segment, segments, UNIT, PACKED)
    first = first_chunk
    if SPLIT > 0:
        first += part * SPLIT
        last = gl.minimum(first + SPLIT, last)
    if first < last:
        k_s = gl.allocate_shared_memory(dtype, [BUFFERS, 64, 128], SHARED_TILE)
        q_s = gl.allocate_shared_memory(dtype, [BUFFERS, 64, 128], SHARED_TILE)
        do_s = gl.allocate_shared_memory(dtype, [BUFFERS, 64, 128], SHARED_TILE)
        S_s = gl.allocate_shared_memory(dtype, [1, 128, 128], SHARED_TILE)
        x_s = gl.allocate_shared_memory(dtype, [1, 64, 128], SHARED_TILE)
        dS_s = gl.allocate_shared_memory(dtype, [1, 128, 128], SHARED_TILE)
        P_s = ring(dtype, 1, BUFFERS)[0]
        if DELTA:
            T_s = ring(squares.dtype.element_ty, 1, BUFFERS)[0]
            du_s = gl.allocate_shared_memory(dtype, [1, 128, 64], SHARED_TILE)
            low_s = P_s
        else:
            T_s = P_s
            du_s = x_s
            low_s = ring(dtype, 1, BUFFERS)[0]
        G_s = ring_of_lines(BUFFERS)
        before_s = ring_of_lines(BUFFERS) if EARLY else G_s
        c_s = ring_of_lines(BUFFERS) if DELTA else G_s
        w_s = ring_of_lines(BUFFERS) if WRITE else G_s
        sums_s = gl.allocate_shared_memory(gl.float32, [2, 8], SHARED_SUMS)
        numbers_s = gl.allocate_shared_memory(gl.int64, [BUFFERS, 8], SHARED_LINE)
        values = xs if DELTA else v
        came = barriers(BUFFERS, 1)
        rest_came = barriers(BUFFERS, 1)
        states_came = barriers(1, 1).index(0)
        done = barriers(1, 2 * WALKERS).index(0)
        walked = barriers(1, 2 * WALKERS).index(0)
        gl.warp_specialize(
            [
                (
                    walk_back,
                    (
                        v, b, dq, dk, dv, carry, begins, dgates, kepts, partial, scale,
                        k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, S_s, x_s, dS_s, du_s, low_s, sums_s,
                        numbers_s, came, rest_came, states_came, done, walked,
                        slot, slots, held, segments, first, last, n, part, parts, hv,
                        H, HV, K, V, DECAY, DELTA, ERASE, WRITE, ERASE_EARLY, READ_EARLY, SHARED, SPLIT, LEAST, dtype,
                    ),
                ),
                (
                    copy_chunks,
                    (
                        q, k, do, gates, squares, states, values,
                        k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, S_s, x_s,
                        numbers_s, came, rest_came, states_came, done, walked,
                        start, length, slot, first_chunk, first, last, first_place, hv,
                        H, HV, K, V, DECAY, DELTA, WRITE, EARLY, dtype,
                    ),
                ),
            ],
            [4],
            [40],
        )  # fmt: skip
