"""Kernel traits, shared memory, global pointers and work tile of the scan and reverse scan (scan.py, reverse.py)."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltazoo.backends.triton.chunk.kernels.sm90.common import (
    SMEM_TILE,
    WARP_GROUP_THREADS,
    allocate_barriers,
    allocate_gate_rings,
    allocate_tile,
    allocate_tiles,
    allocate_vector_ring,
)


class KernelTraits(NamedTuple):
    """Compile-time constants of a kernel: heads, widths and the variant of the update.

    NK: tiles of keys, each with 64 but the last with TAIL. NUM_STAGES: chunks in the ring buffer. DECAY: "none",
    "fixed" per head, "head": per token and head, or "channel": also per key. DELTA: the update has an erase term.
    OWN_KEY: its key is the operand e, as E is with a decay per channel. WRITE: there is a w. HAS_STATE: there is an
    initial state. READ_BEFORE: the output is read from the state before the token's update. GATES_BEFORE: G before each
    token is needed.
    CHECKPOINT_CHUNKS: chunks between checkpoints (0: none). SEGMENT_CHUNKS: chunks per segment (0: one segment).
    OUTPUT: compute o and the final state, else recompute the states of chunks. TERMS: 2 if S in S^T k, and x in S',
    are split into two terms (hi + lo); then NK <= 2. IN_GRADIENTS: states and dstates of a chunk are in the rows of its
    gradients. HALVES: 2 if long sequences have two programs per tile of 128 values, otherwise 1.
    """

    H: Any
    HV: Any
    K: Any
    V: Any
    NK: Any
    TAIL: Any
    NUM_STAGES: Any
    DECAY: Any
    DELTA: Any
    OWN_KEY: Any
    WRITE: Any
    HAS_STATE: Any
    GATES_BEFORE: Any
    READ_BEFORE: Any
    CHECKPOINT_CHUNKS: Any
    SEGMENT_CHUNKS: Any
    OUTPUT: Any
    dtype: Any
    TERMS: Any
    IN_GRADIENTS: Any
    HALVES: Any


@gluon.constexpr_function
def make_traits(given, **derived):
    """Return KernelTraits from the traits of a launch, and those that the kernel derives.

    Constructed inside a kernel, its fields would become run-time values.
    """
    fields = given._asdict() | derived
    return KernelTraits(**{name: fields[name] for name in KernelTraits._fields})


@gluon.constexpr_function
def tail_width(K, NK):
    """The width of the last tile of keys: 16 if that is enough and there are at least two others, otherwise 64."""
    return 16 if NK > 2 and K <= 64 * NK - 48 else 64


@gluon.constexpr_function
def num_stages(NK, OWN_KEY, OUTPUT, TERMS=1):
    """The chunks that fit in the ring buffer.

    A stage of two tiles of keys has 56 KiB with e, and 8 KiB more with two terms. With OUTPUT it has 64 KiB, and 16 KiB
    more with e, 8 KiB with two terms.
    """
    own_key = NK == 2 and OWN_KEY and (OUTPUT or TERMS == 2)
    return 2 if NK > 2 or own_key or (OUTPUT and TERMS == 2) else 3


@gluon.constexpr_function
def last_half_is_empty(V):
    """Whether the last tile of 128 values has at most 64, so that its second consumer has no values."""
    return 0 < V % 128 <= 64


@gluon.jit
def value_tile_and_head(HV: gl.constexpr, V: gl.constexpr, HALVES: gl.constexpr):
    """Return a program's tile of 128 values, which of HALVES it is, its value head, and its number among all of these.

    If the second consumer of the last tiles has no values, their programs finish sooner. They then come last in the
    grid, and run on the SMs that the other programs leave idle: 4 x 4096 tokens, 9 heads of 400 values.
    """
    V_TILES: gl.constexpr = (V + 127) // 128
    half = gl.program_id(0) % HALVES
    pid = gl.program_id(0) // HALVES
    if V_TILES > 1 and last_half_is_empty(V):
        programs = gl.num_programs(0) // (HALVES * V_TILES)
        return pid // programs, half, pid % programs % HV, pid % programs // HV
    return pid % V_TILES, half, pid // V_TILES % HV, pid // (V_TILES * HV)


@gluon.jit
def program_values(value_tile, half, chunks, narrow_tile_min_chunks, V: gl.constexpr, HALVES: gl.constexpr):
    """Return a program's first value and the number of values from it on, 0 if it has none.

    With HALVES = 2 a sequence of at least `narrow_tile_min_chunks` chunks has a program for each half of a tile of 128
    values, any other sequence one program, the first, for the whole tile.
    """
    column = value_tile * 128
    columns = V - column
    if HALVES == 2:
        halved = chunks >= narrow_tile_min_chunks
        column += gl.where(halved, half * 64, 0)
        columns = gl.where(halved, gl.minimum(columns - half * 64, 64), gl.where(half == 0, columns, 0))
    return column, columns


class SharedStorage(NamedTuple):
    """Shared memory: ring buffers of NUM_STAGES chunks and their mbarriers.

    k, q, e, v: NK, NK, NK and 2 tiles of 64 columns; T, P: the WY tiles T and P^T; T_low: second term of T; G, G_prev,
    erase, w: gates [64], with a decay per channel G: 2^Gend [64 NK]. k_full, v_full: the first and the second group of
    the producer's copies to a stage have completed; empty: both consumers have released it. k_empty: with a decay per
    channel, both consumers have released what the first group holds.
    """

    k: Any
    q: Any
    e: Any
    v: Any
    T: Any
    T_low: Any
    P: Any
    G: Any
    G_prev: Any
    erase: Any
    w: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    empty: Any


class GlobalPointers(NamedTuple):
    """Global memory that the consumers read and write.

    state [N, HV, K, V]: initial state; o [B, T, HV, V]; final [N, HV, K, V]: final state; checkpoints [checkpoint, HV,
    V, K]; states [scratch slot, HV, V, K] and v_new [scratch slot, 64, HV, V]: recomputed S^T and x of each chunk;
    starts [segments, HV, V, K]: S^T at the start of each segment.
    """

    state: Any
    o: Any
    final: Any
    checkpoints: Any
    states: Any
    v_new: Any
    starts: Any


class WorkTile(NamedTuple):
    """The work of a program: chunks [first, end) of sequence n and up to 128 values of value head hv.

    start, length: first token and length of the sequence. window_first, first_scratch_slot: first chunk of the window
    whose states are in scratch memory, and that chunk's slot there. first_stored: first chunk whose state is stored.
    checkpoint: index of the checkpoint of chunk 0, which is not stored: it is the initial state. segment_slot: slot
    of the segment in `starts`. is_last: the program stores the final state, or the gradient of the initial one.
    column: first value. columns: values from it on; the program takes the first 128.
    """

    start: Any
    length: Any
    window_first: Any
    first: Any
    first_stored: Any
    end: Any
    first_scratch_slot: Any
    checkpoint: Any
    n: Any
    segment_slot: Any
    is_last: Any
    hv: Any
    column: Any
    columns: Any


@gluon.jit
def allocate_smem(traits: gl.constexpr, T_dtype: gl.constexpr):
    """Allocate the ring buffers, their mbarriers and the private buffers of the two consumer warp groups.

    Returns: the SharedStorage, and for each consumer a buffer of P^T (private where each consumer computes P: an
    additive update without a decay per channel), a staging tile, and NK staging tiles for a state (the one staging tile
    with OUTPUT).
    """
    NK: gl.constexpr = traits.NK
    TAIL: gl.constexpr = traits.TAIL
    NUM_STAGES: gl.constexpr = traits.NUM_STAGES
    DELTA: gl.constexpr = traits.DELTA
    OUTPUT: gl.constexpr = traits.OUTPUT
    BY_CHANNEL: gl.constexpr = traits.DECAY == "channel"
    dtype: gl.constexpr = traits.dtype
    k_s = allocate_tiles(dtype, NK, NUM_STAGES, TAIL)
    q_s = allocate_tiles(dtype, NK, NUM_STAGES, TAIL) if OUTPUT else k_s
    e_s = allocate_tiles(dtype, NK, NUM_STAGES, TAIL) if traits.OWN_KEY else k_s
    v_s = allocate_tiles(dtype, 2, NUM_STAGES)
    T_s = allocate_tile(T_dtype, NUM_STAGES=NUM_STAGES) if DELTA else k_s[0]
    T_low_s = allocate_tile(T_dtype, NUM_STAGES=NUM_STAGES) if traits.TERMS == 2 else T_s
    if OUTPUT and (DELTA or BY_CHANNEL):
        P_s = allocate_tile(dtype, NUM_STAGES=NUM_STAGES)
        P_a = P_s
        P_b = P_s
    elif OUTPUT:
        P_s = k_s[0]
        P_a = gl.allocate_shared_memory(dtype, [1, 64, 64], SMEM_TILE)
        P_b = gl.allocate_shared_memory(dtype, [1, 64, 64], SMEM_TILE)
    else:
        P_s = k_s[0]
        P_a = P_s
        P_b = P_s
    staging = allocate_tiles(dtype, 2)
    state_a = staging if OUTPUT else allocate_tiles(dtype, NK, LAST=TAIL)
    state_b = staging if OUTPUT else allocate_tiles(dtype, NK, LAST=TAIL)
    if BY_CHANNEL:
        G_s = allocate_vector_ring(NUM_STAGES, 64 * NK)
        G_prev_s = G_s
        erase_s = G_s
        w_s = allocate_vector_ring(NUM_STAGES) if traits.WRITE else G_s
    else:
        G_s, G_prev_s, erase_s, w_s = allocate_gate_rings(NUM_STAGES, traits.GATES_BEFORE, DELTA, traits.WRITE)
    k_full = allocate_barriers(NUM_STAGES, 1)
    v_full = allocate_barriers(NUM_STAGES, 1)
    empty = allocate_barriers(NUM_STAGES, 2 * WARP_GROUP_THREADS)
    k_empty = allocate_barriers(NUM_STAGES, 2 * WARP_GROUP_THREADS) if BY_CHANNEL else empty
    smem = SharedStorage(
        k_s, q_s, e_s, v_s, T_s, T_low_s, P_s, G_s, G_prev_s, erase_s, w_s, k_full, v_full, k_empty, empty
    )
    return smem, (P_a, P_b), staging, (state_a, state_b)
