"""What the copying warp group of walk_hopper.py does, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from deltazoo.backends.triton.kernels.hopper import fetch, fetch_gates, fetch_square, hidden_zero, of_copy, tell


@gluon.jit
def fetch_first(
    q, k, do, gates, squares, k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, stage,
    row, left, place, h, hv,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, DECAY: gl.constexpr, DELTA: gl.constexpr,
    WRITE: gl.constexpr, EARLY: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Copy what the reverse scan takes of a chunk, in two groups: k, do, P^T and the gates; then q and T."""
    key = (row * H + h) * K
    k_at = of_copy(k + key, H * K)
    for tk in gl.static_range(2):
        fetch(k_s[tk].index(stage), k_at, tk * 64, left, K - tk * 64, True, tk * 64 + 64 > K)
    do_at = of_copy(do + (row * HV + hv) * V, HV * V)
    for tv in gl.static_range(2):
        fetch(do_s[tv].index(stage), do_at, tv * 64, left, V - tv * 64, True, V % 128 != 0)
    fetch_gates(
        gates + place * 192, G_s.index(stage), before_s.index(stage), c_s.index(stage), w_s.index(stage),
        DECAY, EARLY, DELTA, WRITE,
    )  # fmt: skip
    if DELTA:
        square = squares + place * (64 * 72)
        fetch_square(P_s.index(stage), square.to(gl.pointer_type(dtype), bitcast=True), False)
    async_copy.commit_group()
    q_at = of_copy(q + key, H * K)
    for tk in gl.static_range(2):
        fetch(q_s[tk].index(stage), q_at, tk * 64, left, K - tk * 64, True, tk * 64 + 64 > K)
    if DELTA:
        fetch_square(T_s.index(stage), square, True)
    async_copy.commit_group()


@gluon.jit
def copy_chunks(
    q, k, do, gates, squares, states, xs, k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, S_s, x_s,
    came, rest_came, states_came, done, walked, start, length, slot, first_chunk, first, last, first_place,
    hv,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, DECAY: gl.constexpr, DELTA: gl.constexpr,
    WRITE: gl.constexpr, EARLY: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The copying warp group: the chunks from the last to the first; of each its state and x once both warp groups have
    done with the chunk after it, and then what the scan takes of the one before it."""
    h = hv // (HV // H)
    c = last - 1
    fetch_first(
        q, k, do, gates, squares, k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, 0,
        start + c * 64, length - c * 64, (slot + c).to(gl.int64) * HV + hv, h, hv,
        H, HV, K, V, DECAY, DELTA, WRITE, EARLY, dtype,
    )  # fmt: skip
    tell(came.index(0), 1, True)
    tell(rest_came.index(0), 0, True)
    for back in range(0, last - first):
        c = last - 1 - back
        row = start + c * 64
        local = (first_place + c - first_chunk).to(gl.int64)
        mbarrier.wait(walked, (back & 1) ^ 1)
        z = hidden_zero(back, 20)
        at = of_copy(states + (local * HV + hv) * V * K, K)
        for tv in gl.static_range(2):
            for tk in gl.static_range(2):
                fetch(
                    S_s[tv * 2 + tk].index(z), at, tv * 64 * K + tk * 64, V - tv * 64, K - tk * 64, tv * 64 + 64 > V,
                    tk * 64 + 64 > K,
                )  # fmt: skip
        x_row = local * 64 if DELTA else row
        x_at = of_copy(xs + (x_row * HV + hv) * V, HV * V)
        for tv in gl.static_range(2):
            fetch(x_s[tv].index(z), x_at, tv * 64, length - c * 64, V - tv * 64, not DELTA, tv * 64 + 64 > V)
        async_copy.commit_group()
        tell(states_came, 0, True)
        mbarrier.wait(done, (back & 1) ^ 1)
        stage = 1 - back % 2
        if c > first:
            fetch_first(
                q, k, do, gates, squares, k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, stage,
                row - 64, length - (c - 1) * 64, (slot + c - 1).to(gl.int64) * HV + hv, h, hv,
                H, HV, K, V, DECAY, DELTA, WRITE, EARLY, dtype,
            )  # fmt: skip
            tell(came.index(stage), 1, True)
            tell(rest_came.index(stage), 0, True)
