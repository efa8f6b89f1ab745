"""What a scan of scan_hopper.py is of, where it keeps what in shared memory, and where it stands, in Gluon."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltazoo.backends.triton.kernels.hopper.common import SHARED_TILE, WALKERS, allocate, barriers, ring, room_of_gates


class Kind(NamedTuple):
    """What is known when a kernel is compiled: heads, widths, the update as `ScanKind` has it, and what is wanted.

    NK: tiles of 64 keys; BUFFERS: for chunks; WRITE: w is there; STATE: an initial state is; EARLY: reads take the gate
    before each token.
    """

    H: Any
    HV: Any
    K: Any
    V: Any
    NK: Any
    BUFFERS: Any
    DECAY: Any
    DELTA: Any
    WRITE: Any
    STATE: Any
    EARLY: Any
    READ_EARLY: Any
    CHECKPOINT_EVERY: Any
    SPLIT: Any
    OUTPUT: Any
    dtype: Any


@gluon.constexpr_function
def kind_of(*fields):
    """A Kind, which a kernel may not make itself: it would take what it has for numbers of the device."""
    return Kind(*fields)


class Room(NamedTuple):
    """Shared memory, of each chunk with BUFFERS buffers: tiles of 64 columns of k, q and v, T, P^T, the gates G, G
    before each token, c and w. came: k, q and gates have come; rest_came: v, T and P; done: with a buffer."""

    k_s: Any
    q_s: Any
    v_s: Any
    T_s: Any
    P_s: Any
    G_s: Any
    before_s: Any
    c_s: Any
    w_s: Any
    came: Any
    rest_came: Any
    done: Any


class Memory(NamedTuple):
    """What a scan reads and writes by itself: the initial state, o and the final state, checkpoints, the states and x
    of a replay, and where parts start from."""

    state: Any
    o: Any
    final: Any
    checkpoints: Any
    states: Any
    xs: Any
    starts: Any


class Stand(NamedTuple):
    """Where a program stands: its sequence, from `start` on and `length` long; its chunks, from `first` to `last`, kept
    from `first_kept` on, in places of which `first_place` is that of `begins`; its first checkpoint; its number n, part
    and value head, and its pair of halves of the values. is_last: it has the final state."""

    start: Any
    length: Any
    begins: Any
    first: Any
    first_kept: Any
    last: Any
    first_place: Any
    checkpoint: Any
    n: Any
    part: Any
    parts: Any
    is_last: Any
    hv: Any
    pair: Any


@gluon.jit
def room_of(kind: gl.constexpr, T_dtype: gl.constexpr):
    """All of it, allocated; and of each of the two warp groups that compute a P, a tile for what comes and goes, and as
    many tiles for a state as there are columns."""
    NK: gl.constexpr = kind.NK
    BUFFERS: gl.constexpr = kind.BUFFERS
    DELTA: gl.constexpr = kind.DELTA
    OUTPUT: gl.constexpr = kind.OUTPUT
    dtype: gl.constexpr = kind.dtype
    k_s = ring(dtype, NK, BUFFERS)
    q_s = ring(dtype, NK, BUFFERS) if OUTPUT else k_s
    v_s = ring(dtype, 2, BUFFERS)
    T_s = ring(T_dtype, 1, BUFFERS)[0] if DELTA else k_s[0]
    if OUTPUT and DELTA:
        P_s = ring(dtype, 1, BUFFERS)[0]
        P_a = P_s
        P_b = P_s
    elif OUTPUT:
        P_s = k_s[0]
        P_a = gl.allocate_shared_memory(dtype, [1, 64, 64], SHARED_TILE)
        P_b = gl.allocate_shared_memory(dtype, [1, 64, 64], SHARED_TILE)
    else:
        P_s = k_s[0]
        P_a = P_s
        P_b = P_s
    tiles = allocate(dtype, 2)
    state_a = tiles if OUTPUT else allocate(dtype, NK)
    state_b = tiles if OUTPUT else allocate(dtype, NK)
    G_s, before_s, c_s, w_s = room_of_gates(BUFFERS, kind.EARLY, DELTA, kind.WRITE)
    came = barriers(BUFFERS, 1)
    rest_came = barriers(BUFFERS, 1)
    done = barriers(BUFFERS, 2 * WALKERS)
    room = Room(k_s, q_s, v_s, T_s, P_s, G_s, before_s, c_s, w_s, came, rest_came, done)
    return room, (P_a, P_b), tiles, (state_a, state_b)
