"""Kernel traits, shared memory and result pointers of the backward sweep (sweep.py, fused_backward.py)."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltazoo.backends.triton.chunk.kernels.sm90.common import (
    SMEM_TILE,
    SMEM_VECTOR,
    WARP_GROUP_THREADS,
    allocate_barriers,
    allocate_gate_rings,
    allocate_tile,
)
from deltazoo.backends.triton.chunk.kernels.sm90.sweep_reductions import SMEM_SUMS

NUM_STAGES = gl.constexpr(2)  # of the ring buffer: the next chunk is copied while one is processed


class KernelTraits(NamedTuple):
    """Compile-time constants of a kernel: heads, widths and the variant of the update.

    V: values per head. SHARES: programs that contribute to dq and dk of all key heads, one for each value head and tile
    of 128 values; where SHARES > H, sum_groups_kernel adds their results. DECAY, DELTA: as in scan_traits.py. ERASE,
    WRITE: there is a b, a w. ERASE_PREVIOUS, READ_BEFORE: erase or read the state before the token's decay or update.
    DU_IS_DV: du is not stored because dv = w du and w is b, or there is no w. MIN_BETA: |b| and |w| are clamped to at
    least this where a result is divided by them. dtype: of the tiles. TERMS: 2 if values that feed back into S and dS
    are split into two terms (hi + lo).
    """

    H: Any
    HV: Any
    K: Any
    V: Any
    SHARES: Any
    DECAY: Any
    DELTA: Any
    ERASE: Any
    WRITE: Any
    ERASE_PREVIOUS: Any
    READ_BEFORE: Any
    DU_IS_DV: Any
    MIN_BETA: Any
    dtype: Any
    TERMS: Any


@gluon.constexpr_function
def make_traits(given, **derived):
    """Return KernelTraits from the traits of a launch, and those that the kernel derives.

    Constructed inside a kernel, its fields would become run-time values.
    """
    fields = given._asdict() | derived
    return KernelTraits(**{name: fields[name] for name in KernelTraits._fields})


@gluon.constexpr_function
def producer_registers(decay, delta):
    """Return the registers per thread of the producer: 24 leave 240 to a consumer thread, 40 leave 232.

    With an erase and a decay the consumers would spill at 232 and wait for the spills in every chunk; in the other
    variants the producer would spill at 24.
    """
    return 24 if delta and decay != "none" else 40


class SharedStorage(NamedTuple):
    """Shared memory and mbarriers.

    Ring buffers of NUM_STAGES chunks: k, q, do [64, 128]; T, P: the WY tiles T and P^T; G, G_prev, erase, w: gates
    [64]; chunk_info: integers that describe the chunk (sweep_reductions.py).

    Single buffers: S: S^T [128 values, 128 keys] before the chunk and x [64, 128], both copied by the producer; dS:
    dS'^T; du: du^T [128 values, 64] (additive updates: alias of x); dP: the causal dP [64, 64] (with an erase: alias of
    P); sums: one partial sum per warp; steps: factors of the gradient of k through the strengths [2 halves, 64].

    k_full, q_full, state_full, empty, state_empty, T_low_full, du_empty: mbarriers (protocol in sweep.py).
    """

    k: Any
    q: Any
    do: Any
    T: Any
    P: Any
    G: Any
    G_prev: Any
    erase: Any
    w: Any
    chunk_info: Any
    S: Any
    x: Any
    dS: Any
    du: Any
    dP: Any
    sums: Any
    steps: Any
    k_full: Any
    q_full: Any
    state_full: Any
    empty: Any
    state_empty: Any
    T_low_full: Any
    du_empty: Any


class Pipeline(NamedTuple):
    """State of the software pipeline in the consumers of a sweep.

    stage: of the ring buffer; it holds the chunk. phase: parity of the uses of that stage. state_phase: parity of the
    number of chunks swept, the phase of the single buffers. opaque_one: a positive integer that the compiler cannot
    fold.
    """

    stage: Any
    phase: Any
    state_phase: Any
    opaque_one: Any


class GradientPointers(NamedTuple):
    """Global memory of the gradients, as in portable/gradients.py with two K tiles; slopes: an input."""

    dq: Any
    dk: Any
    dv: Any
    dgates: Any
    state_products: Any
    partial: Any
    slopes: Any


@gluon.jit
def allocate_smem(traits: gl.constexpr, T_dtype: gl.constexpr, EMPTY_BARRIERS: gl.constexpr, STEPS: gl.constexpr):
    """Allocate the shared memory and its mbarriers.

    EMPTY_BARRIERS: one for all stages, or one per stage. STEPS: with steps.
    """
    GATES_BEFORE: gl.constexpr = traits.ERASE_PREVIOUS or traits.READ_BEFORE
    dtype: gl.constexpr = traits.dtype
    k_s = gl.allocate_shared_memory(dtype, [NUM_STAGES, 64, 128], SMEM_TILE)
    q_s = gl.allocate_shared_memory(dtype, [NUM_STAGES, 64, 128], SMEM_TILE)
    do_s = gl.allocate_shared_memory(dtype, [NUM_STAGES, 64, 128], SMEM_TILE)
    S_s = gl.allocate_shared_memory(dtype, [1, 128, 128], SMEM_TILE)
    x_s = gl.allocate_shared_memory(dtype, [1, 64, 128], SMEM_TILE)
    dS_s = gl.allocate_shared_memory(dtype, [1, 128, 128], SMEM_TILE)
    P_s = allocate_tile(dtype, NUM_STAGES=NUM_STAGES)
    if traits.DELTA:
        T_s = allocate_tile(T_dtype, NUM_STAGES=NUM_STAGES)
        du_s = gl.allocate_shared_memory(dtype, [1, 128, 64], SMEM_TILE)
        dP_s = P_s
    else:
        T_s = P_s
        du_s = x_s
        dP_s = allocate_tile(dtype, NUM_STAGES=NUM_STAGES)
    G_s, G_prev_s, erase_s, w_s = allocate_gate_rings(NUM_STAGES, GATES_BEFORE, traits.DELTA, traits.WRITE)
    sums_s = gl.allocate_shared_memory(gl.float32, [2, 8], SMEM_SUMS)
    # float32 does not fit beside the ring of G_prev
    steps_dtype: gl.constexpr = gl.bfloat16 if GATES_BEFORE else gl.float32
    steps_s = gl.allocate_shared_memory(steps_dtype, [2, 64], SMEM_SUMS) if STEPS else sums_s
    chunk_info_s = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 8], SMEM_VECTOR)
    k_full = allocate_barriers(NUM_STAGES, 1)
    q_full = allocate_barriers(NUM_STAGES, 1)
    state_full = allocate_barriers(1, 1).index(0)
    empty = allocate_barriers(EMPTY_BARRIERS, 2 * WARP_GROUP_THREADS)
    state_empty = allocate_barriers(1, 2 * WARP_GROUP_THREADS).index(0)
    T_low_full = state_full
    du_empty = state_empty
    if traits.TERMS == 2:
        T_low_full = allocate_barriers(1, 1).index(0)
        du_empty = allocate_barriers(1, 2 * WARP_GROUP_THREADS).index(0)
    return SharedStorage(
        k_s, q_s, do_s, T_s, P_s, G_s, G_prev_s, erase_s, w_s, chunk_info_s, S_s, x_s, dS_s, du_s, dP_s, sums_s,
        steps_s,
        k_full, q_full, state_full, empty, state_empty, T_low_full, du_empty,
    )  # fmt: skip
