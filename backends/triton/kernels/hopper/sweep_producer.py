"""What the copying warp group of walk_hopper.py does, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from deltazoo.backends.triton.kernels.hopper.common import fetch, fetch_gates, fetch_square, of_copy, tell
from deltazoo.backends.triton.kernels.hopper.sweep_reductions import LEFT_TOKENS, PLACE, ROW_OF_VALUES, TO_COME
from deltazoo.backends.triton.kernels.layout import opaque_zero

FEW = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def fetch_first(
    q, k, do, gates, wy_tiles, room, stage, z, row, left, place, local, to_come, fresh, h, hv, share, kind: gl.constexpr
):
    """Copy what the reverse scan takes of a chunk, in two groups: k, do, P^T and the gates; then q and T.

    Leave the chunk's numbers, too. share: which of all SHARES this program has."""
    EARLY: gl.constexpr = kind.ERASE_EARLY or kind.READ_EARLY
    DECAY: gl.constexpr = kind.DECAY
    DELTA: gl.constexpr = kind.DELTA
    WRITE: gl.constexpr = kind.WRITE
    H: gl.constexpr = kind.H
    HV: gl.constexpr = kind.HV
    K: gl.constexpr = kind.K
    V: gl.constexpr = kind.V
    key = (row * H + h) * K
    i = gl.arange(0, 8, FEW)
    of_keys = local * 64 * kind.SHARES + share if kind.SHARES > H else row * H + h
    numbers = gl.where(i == ROW_OF_VALUES, row * HV + hv, of_keys)
    numbers = gl.where(i == PLACE, place, numbers)
    numbers = gl.where(i == LEFT_TOKENS, left.to(gl.int64), numbers)
    small = gl.where(i == TO_COME, to_come, fresh)
    room.numbers_s.index(stage).store(gl.where(i >= TO_COME, small.to(gl.int64), numbers))
    fetch(room.k_s.index(stage), of_copy(k + key, H * K, 64, 128, z), 0, left, K, True, K % 128 != 0)
    fetch(room.do_s.index(stage), of_copy(do + (row * HV + hv) * V, HV * V, 64, 128, z), 0, left, V, True, V % 128 != 0)
    fetch_gates(gates + place * 192, room, stage, DECAY, EARLY, DELTA, WRITE)
    if DELTA:
        square = wy_tiles + place * (64 * 72)
        fetch_square(room.P_s.index(stage), square.to(gl.pointer_type(kind.dtype), bitcast=True), False, z)
    async_copy.commit_group()
    fetch(room.q_s.index(stage), of_copy(q + key, H * K, 64, 128, z), 0, left, K, True, K % 128 != 0)
    if DELTA:
        fetch_square(room.T_s.index(stage), square, True, z)
    async_copy.commit_group()


@gluon.jit
def copy_chunks(
    q, k, do, gates, wy_tiles, states, xs, room, start, length, slot, first_chunk, first, last, first_place, hv, share,
    kind: gl.constexpr,
):  # fmt: skip
    """The copying warp group: the chunks from the last to the first; of each its state and x once the others have done
    with those of the chunk after it, and then what the scan takes of the one before it."""
    HV: gl.constexpr = kind.HV
    K: gl.constexpr = kind.K
    V: gl.constexpr = kind.V
    MASK_X: gl.constexpr = not kind.DELTA
    done = room.done.index(0)
    h = hv // (HV // kind.H)
    c = last - 1
    fetch_first(
        q, k, do, gates, wy_tiles, room, 0, 0, start + c * 64, length - c * 64, (slot + c).to(gl.int64) * HV + hv,
        (first_place + c - first_chunk).to(gl.int64), c - first, 1, h, hv, share, kind,
    )  # fmt: skip
    tell(room.came.index(0), 1, True)
    tell(room.rest_came.index(0), 0, True)
    for back in range(0, last - first):
        z = opaque_zero(back, 20)
        c = last - 1 - back + z
        row = start + c * 64
        local = (first_place + c - first_chunk).to(gl.int64)
        mbarrier.wait(room.walked, (back & 1) ^ 1)
        at = of_copy(states + (local * HV + hv) * V * K, K, 128, 128, z)
        fetch(room.S_s.index(z), at, 0, V, K, V % 128 != 0, K % 128 != 0)
        x_row = local * 64 if kind.DELTA else row
        x_at = of_copy(xs + (x_row * HV + hv) * V, HV * V, 64, 128, z)
        fetch(room.x_s.index(z), x_at, 0, length - c * 64, V, MASK_X, V % 128 != 0)
        async_copy.commit_group()
        # before the others can be done with this chunk: a barrier tells the last phase from the one before it, no more
        mbarrier.wait(done, (back & 1) ^ 1)
        tell(room.states_came, 0, True)
        stage = 1 - back % 2
        if c > first:
            fetch_first(
                q, k, do, gates, wy_tiles, room, stage, z, row - 64, length - (c - 1) * 64,
                (slot + c - 1).to(gl.int64) * HV + hv, local - 1, c - 1 - first, 0, h, hv, share, kind,
            )  # fmt: skip
            tell(room.came.index(stage), 1, True)
            tell(room.rest_came.index(stage), 0, True)
