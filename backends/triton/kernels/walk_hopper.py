"""The reverse scan with the gradients for Hopper GPUs, in Gluon: equations are those of reverse.py and gradients.py.

What a reverse scan finds of a chunk is what its gradients start from. Here neither the gradient of the state nor du
goes to memory, and what both read is read once. Two warp groups share the tiles of a chunk in shared memory: each has
half of the values and its half of dS^T in registers, and takes half of the keys for the gradients. A third copies chunk
after chunk ahead of time. It takes operands and scratch of one 16-bit dtype, chunks of 64, 65 to 128 keys and values a
head, and k as the erase key.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltazoo.backends.triton.kernels.hopper import (
    COLUMNS,
    ROWS,
    SHARED_LINE,
    WALKERS,
    barriers,
    free,
    hidden_zero,
    ring,
    ring_of_lines,
)
from deltazoo.backends.triton.kernels.layout import first_slot, segment_of, sequence_and_part, sequence_bounds
from deltazoo.backends.triton.kernels.walk_copies import copy_chunks
from deltazoo.backends.triton.kernels.walk_steps import chunk_gradients, reverse_chunk

BUFFERS = gl.constexpr(2)  # of what the reverse scan takes of a chunk: that of the next is copied meanwhile


@gluon.jit
def walk_back(
    v, b, dq, dk, dv, carry, begins, dgates, kepts, partial, scale,
    k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, S_s, x_s, dS_s, du_s, low_s, sums_s,
    came, rest_came, states_came, done, shared, lows, walked,
    start, length, slot, slots, held, segments, first_chunk, first, last, first_place, n, part, parts, h, hv,
    HALF: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, DECAY: gl.constexpr,
    DELTA: gl.constexpr, ERASE: gl.constexpr, WRITE: gl.constexpr, ERASE_EARLY: gl.constexpr,
    READ_EARLY: gl.constexpr, SHARED: gl.constexpr, SPLIT: gl.constexpr, LEAST: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """One of the two warp groups that compute: its half of the values in the scan, of the keys in the gradients."""
    at_carry = carry + ((n.to(gl.int64) * HV + hv) * V + HALF * 64) * K
    of_part = (n * parts + part).to(gl.int64)
    at_begin = begins + ((of_part * HV + hv) * V + HALF * 64) * K if SPLIT > 0 else at_carry
    i = gl.arange(0, 64, ROWS)[:, None]
    j = gl.arange(0, 64, COLUMNS)[None, :]
    dS_a = gl.load(at_begin + (i * K + j), mask=(i < V - HALF * 64) & (j < K), other=0.0)
    dS_b = gl.load(at_begin + (i * K + j) + 64, mask=(i < V - HALF * 64) & (j < K - 64), other=0.0)
    for back in range(0, last - first):
        c = last - 1 - back
        stage = back % 2
        left = length - c * 64
        row = start + c * 64
        place = (slot + c).to(gl.int64) * HV + hv
        local = (first_place + c - first_chunk).to(gl.int64)
        dS_a, dS_b, end = reverse_chunk(
            (dS_a, dS_b), dv, scale, k_s, q_s, do_s[HALF], do_s, T_s, P_s, G_s, before_s, c_s, w_s,
            dS_s, du_s, x_s, low_s, came, rest_came, states_came, shared, walked,
            hidden_zero(back, 20), stage, back // 2 % 2, back % 2, (row * HV + hv) * V, left, V - HALF * 64,
            HALF, HV, V, DECAY, DELTA, WRITE, READ_EARLY, SHARED, LEAST, dtype,
        )  # fmt: skip
        chunk_gradients(
            dS_a, dS_b, end, v, b, dq, dk, dgates, kepts, partial, scale,
            k_s, q_s, do_s, T_s, P_s, G_s, before_s, w_s, S_s, x_s, dS_s, du_s, low_s, sums_s,
            states_came, lows, walked, hidden_zero(back, 21), stage + hidden_zero(back, 22), back % 2,
            segments, place, slots, local, held, row, left, h, hv, c == 0, left <= 64,
            HALF, H, HV, K, V, DECAY, DELTA, ERASE, WRITE, ERASE_EARLY, READ_EARLY, SHARED, LEAST, dtype,
        )  # fmt: skip
        free(done)
    if part == 0:
        gl.store(at_carry + (i * K + j), dS_a, mask=(i < V - HALF * 64) & (j < K))
        gl.store(at_carry + (i * K + j) + 64, dS_b, mask=(i < V - HALF * 64) & (j < K - 64))


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

    To be launched with 4 warps, which become 12, and 168 registers a thread, which they share out anew."""
    gl.static_assert(C == 64 and K > 64 and K <= 128 and V > 64 and V <= 128)
    gl.static_assert(states.dtype == k.dtype and k.dtype.element_ty.primitive_bitwidth == 16)
    EARLY: gl.constexpr = ERASE_EARLY or READ_EARLY
    dtype: gl.constexpr = k.dtype.element_ty
    pid = gl.program_id(0)
    hv = pid % HV
    h = hv // (HV // H)
    n, part = sequence_and_part(pid // HV, parts, HV)
    start, length = sequence_bounds(n, cu, T, PACKED)
    slot = first_slot(n, cu, T, C, PACKED)
    first_chunk, last, first_place = segment_of(n, slot, gl.cdiv(length, C), segment, segments, UNIT, PACKED)
    first = first_chunk
    if SPLIT > 0:
        first += part * SPLIT
        last = gl.minimum(first + SPLIT, last)
    if first < last:
        k_s = ring(dtype, 2, BUFFERS)
        q_s = ring(dtype, 2, BUFFERS)
        do_s = ring(dtype, 2, BUFFERS)
        S_s = ring(dtype, 4, 1)
        x_s = ring(dtype, 2, 1)
        dS_s = ring(dtype, 4, 1)
        P_s = ring(dtype, 1, BUFFERS)[0]
        if DELTA:
            T_s = ring(squares.dtype.element_ty, 1, BUFFERS)[0]
            du_s = ring(dtype, 2, 1)
            low_s = x_s[0]
        else:
            T_s = P_s
            du_s = x_s
            low_s = ring(dtype, 1, BUFFERS)[0]
        G_s = ring_of_lines(BUFFERS)
        before_s = ring_of_lines(BUFFERS) if EARLY else G_s
        c_s = ring_of_lines(BUFFERS) if DELTA else G_s
        w_s = ring_of_lines(BUFFERS) if WRITE else G_s
        sums_0 = gl.allocate_shared_memory(gl.float32, [4], SHARED_LINE)
        sums_1 = gl.allocate_shared_memory(gl.float32, [4], SHARED_LINE)
        values = xs if DELTA else v
        came = barriers(BUFFERS, 1)
        rest_came = barriers(BUFFERS, 1)
        states_came = barriers(1, 1).index(0)
        done = barriers(1, 2 * WALKERS).index(0)
        shared = barriers(1, 2).index(0)
        lows = barriers(1, 2).index(0)
        walked = barriers(1, 2).index(0)
        gl.warp_specialize(
            [
                (
                    walk_back,
                    (
                        v, b, dq, dk, dv, carry, begins, dgates, kepts, partial, scale,
                        k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, S_s, x_s, dS_s, du_s, low_s, sums_0,
                        came, rest_came, states_came, done, shared, lows, walked,
                        start, length, slot, slots, held, segments, first_chunk, first, last, first_place, n, part,
                        parts, h, hv, 0,
                        H, HV, K, V, DECAY, DELTA, ERASE, WRITE, ERASE_EARLY, READ_EARLY, SHARED, SPLIT, LEAST, dtype,
                    ),
                ),
                (
                    walk_back,
                    (
                        v, b, dq, dk, dv, carry, begins, dgates, kepts, partial, scale,
                        k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, S_s, x_s, dS_s, du_s, low_s, sums_1,
                        came, rest_came, states_came, done, shared, lows, walked,
                        start, length, slot, slots, held, segments, first_chunk, first, last, first_place, n, part,
                        parts, h, hv, 1,
                        H, HV, K, V, DECAY, DELTA, ERASE, WRITE, ERASE_EARLY, READ_EARLY, SHARED, SPLIT, LEAST, dtype,
                    ),
                ),
                (
                    copy_chunks,
                    (
                        q, k, do, gates, squares, states, values,
                        k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, S_s, x_s,
                        came, rest_came, states_came, done, walked,
                        start, length, slot, first_chunk, first, last, first_place, hv,
                        H, HV, K, V, DECAY, DELTA, WRITE, EARLY, dtype,
                    ),
                ),
            ],
            [4, 4],
            [232, 40],
        )  # fmt: skip
