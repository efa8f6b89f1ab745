"""What a walk back through chunks is of, where it keeps what in shared memory, and where its results go, in Gluon."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltazoo.backends.triton.kernels.hopper.common import (
    SHARED_LINE,
    SHARED_TILE,
    WALKERS,
    barriers,
    ring,
    room_of_gates,
)
from deltazoo.backends.triton.kernels.hopper.sweep_reductions import SHARED_SUMS

BUFFERS = gl.constexpr(2)  # of what the reverse scan takes of a chunk: that of the next is copied meanwhile


class Kind(NamedTuple):
    """What is known when a kernel is compiled: heads, widths, and the update as `ScanKind` has it.

    V: values a head; SHARES: how many programs have a share of each key head's gradients, for every H of them: its
    value heads, each by tiles of 128 values. ERASE, WRITE: b and w are there; DU_IS_DV: w is b; MIN_BETA: what b is held off
    0 by; dtype: of the tiles.
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
    ERASE_EARLY: Any
    READ_EARLY: Any
    DU_IS_DV: Any
    MIN_BETA: Any
    dtype: Any


@gluon.constexpr_function
def kind_of(*fields):
    """A Kind, which a kernel may not make itself: it would take what it has for numbers of the device."""
    return Kind(*fields)


@gluon.constexpr_function
def registers_to_copy(decay, delta):
    """Of a thread that copies; 24 leave 240 to one that computes, 40 leave 232.

    With an erase and a decay those spill otherwise, and wait for it in every chunk; else those that copy would.
    """
    return 24 if delta and decay != "none" else 40


class Room(NamedTuple):
    """Shared memory. Of a chunk, with BUFFERS buffers: k, q, do, T, P^T, the gates G, G before each token, c and w, and
    its numbers; with one: its state S^T and x, which are copied, dS'^T, du^T (in the place of x where x is v), dP (in
    the place of P), and the sums of warps.

    came, rest_came: k, do, P and gates have come, and q and T; states_came: S and x; done: with a buffer; walked: with
    S and x.
    """

    k_s: Any
    q_s: Any
    do_s: Any
    T_s: Any
    P_s: Any
    G_s: Any
    before_s: Any
    c_s: Any
    w_s: Any
    numbers_s: Any
    S_s: Any
    x_s: Any
    dS_s: Any
    du_s: Any
    low_s: Any
    sums_s: Any
    came: Any
    rest_came: Any
    states_came: Any
    done: Any
    walked: Any


class Results(NamedTuple):
    """Where gradients go: as in gradients.py, with two tiles of keys."""

    dq: Any
    dk: Any
    dv: Any
    dgates: Any
    state_products: Any
    partial: Any


@gluon.jit
def room_of(kind: gl.constexpr, T_dtype: gl.constexpr, DONE: gl.constexpr):
    """All of it, allocated. DONE: how many barriers say that buffers are done with: one for all, or one each."""
    EARLY: gl.constexpr = kind.ERASE_EARLY or kind.READ_EARLY
    dtype: gl.constexpr = kind.dtype
    k_s = gl.allocate_shared_memory(dtype, [BUFFERS, 64, 128], SHARED_TILE)
    q_s = gl.allocate_shared_memory(dtype, [BUFFERS, 64, 128], SHARED_TILE)
    do_s = gl.allocate_shared_memory(dtype, [BUFFERS, 64, 128], SHARED_TILE)
    S_s = gl.allocate_shared_memory(dtype, [1, 128, 128], SHARED_TILE)
    x_s = gl.allocate_shared_memory(dtype, [1, 64, 128], SHARED_TILE)
    dS_s = gl.allocate_shared_memory(dtype, [1, 128, 128], SHARED_TILE)
    P_s = ring(dtype, 1, BUFFERS)[0]
    if kind.DELTA:
        T_s = ring(T_dtype, 1, BUFFERS)[0]
        du_s = gl.allocate_shared_memory(dtype, [1, 128, 64], SHARED_TILE)
        low_s = P_s
    else:
        T_s = P_s
        du_s = x_s
        low_s = ring(dtype, 1, BUFFERS)[0]
    G_s, before_s, c_s, w_s = room_of_gates(BUFFERS, EARLY, kind.DELTA, kind.WRITE)
    sums_s = gl.allocate_shared_memory(gl.float32, [2, 8], SHARED_SUMS)
    numbers_s = gl.allocate_shared_memory(gl.int64, [BUFFERS, 8], SHARED_LINE)
    came = barriers(BUFFERS, 1)
    rest_came = barriers(BUFFERS, 1)
    states_came = barriers(1, 1).index(0)
    done = barriers(DONE, 2 * WALKERS)
    walked = barriers(1, 2 * WALKERS).index(0)
    return Room(
        k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, numbers_s, S_s, x_s, dS_s, du_s, low_s, sums_s,
        came, rest_came, states_came, done, walked,
    )  # fmt: skip
