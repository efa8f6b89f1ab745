"""Producer warp group of the backward sweep (sweep.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from deltazoo.backends.triton.chunk.kernels.sm90.common import (
    ONE_PER_THREAD,
    SMEM_TILE,
    copy_gates_async,
    copy_pointers,
    copy_tile_async,
    copy_wy_tile_async,
    producer_arrive,
)
from deltazoo.backends.triton.chunk.kernels.sm90.gluon_versions import reinterpret
from deltazoo.backends.triton.chunk.kernels.sm90.sweep_reductions import CHUNKS_LEFT, GATE_ROW, TOKENS_LEFT, V_ROW
from deltazoo.backends.triton.device.layout import opaque_zero


@gluon.jit
def copy_chunk(
    q, k, do, gates, wy_tiles, smem, stage, zero, token, tokens_left, gate_row, scratch_slot, chunks_left, is_first,
    h, hv, share, traits: gl.constexpr,
):  # fmt: skip
    """Issue the copies of a chunk to a stage of the ring buffer, and store its chunk_info.

    Two cp.async groups: k, do, P^T and the gates, then q and T. token: the chunk's first token; share: this program's
    number among all SHARES.
    """
    GATES_BEFORE: gl.constexpr = traits.ERASE_PREVIOUS or traits.READ_BEFORE
    DECAY: gl.constexpr = traits.DECAY
    DELTA: gl.constexpr = traits.DELTA
    WRITE: gl.constexpr = traits.WRITE
    H: gl.constexpr = traits.H
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    V: gl.constexpr = traits.V
    MASK_K: gl.constexpr = K % 128 != 0
    MASK_V: gl.constexpr = V % 128 != 0
    key = (token * H + h) * K
    i = gl.arange(0, 8, ONE_PER_THREAD)
    k_row = scratch_slot * 64 * traits.SHARES + share if traits.SHARES > H else token * H + h
    info = gl.where(i == V_ROW, token * HV + hv, k_row)
    info = gl.where(i == GATE_ROW, gate_row, info)
    info = gl.where(i == TOKENS_LEFT, tokens_left.to(gl.int64), info)
    flags = gl.where(i == CHUNKS_LEFT, chunks_left, is_first)
    smem.chunk_info.index(stage).store(gl.where(i >= CHUNKS_LEFT, flags.to(gl.int64), info))
    k_s = smem.k.index(stage)
    copy_tile_async(k_s, copy_pointers(k + key, H * K, 64, 128, zero), 0, tokens_left, K, True, MASK_K)
    do_s = smem.do.index(stage)
    value = (token * HV + hv) * V
    copy_tile_async(do_s, copy_pointers(do + value, HV * V, 64, 128, zero), 0, tokens_left, V, True, MASK_V)
    copy_gates_async(gates + gate_row * 192, smem, stage, DECAY, GATES_BEFORE, DELTA, WRITE)
    if DELTA:
        wy_tile = wy_tiles + gate_row * (traits.TERMS * 64 * 72)
        P_s = smem.P.index(stage)
        copy_wy_tile_async(P_s, wy_tile.to(gl.pointer_type(traits.dtype), bitcast=True), False, zero)
    async_copy.commit_group()
    q_s = smem.q.index(stage)
    copy_tile_async(q_s, copy_pointers(q + key, H * K, 64, 128, zero), 0, tokens_left, K, True, MASK_K)
    if DELTA:
        copy_wy_tile_async(smem.T.index(stage), wy_tile, True, zero)
    async_copy.commit_group()


@gluon.jit
def low_inverse_tile(smem):
    """Return the tile of the second term of T, in the buffer of du, which is unused until du is stored."""
    return reinterpret(smem.du.index(0), smem.T.dtype, [2, 64, 64], SMEM_TILE).index(0)


@gluon.jit
def copy_low_inverse(wy_tiles, smem, gate_row, parity, zero):
    """Copy the second term of T of the chunk that the consumers process, once they have read du of the one before."""
    mbarrier.wait(smem.du_empty, parity)
    copy_wy_tile_async(low_inverse_tile(smem), wy_tiles + gate_row * (2 * 64 * 72) + 64 * 72, True, zero)
    async_copy.commit_group()
    producer_arrive(smem.T_low_full, 0, True)


@gluon.jit
def producer(
    q, k, do, gates, wy_tiles, states, v_new, smem, start, length, slot, window_first, first, end, first_scratch_slot,
    hv, share, traits: gl.constexpr,
):  # fmt: skip
    """Producer warp group: for each chunk, the last first, copy its S^T and x, then the tiles of the chunk before it.

    slot: slot of the sequence's first chunk; first_scratch_slot: scratch slot of chunk window_first, in states and
    v_new.
    """
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    V: gl.constexpr = traits.V
    MASK_X: gl.constexpr = not traits.DELTA
    empty = smem.empty.index(0)
    h = hv // (HV // traits.H)
    c = end - 1
    copy_chunk(
        q, k, do, gates, wy_tiles, smem, 0, 0, start + c * 64, length - c * 64, (slot + c).to(gl.int64) * HV + hv,
        (first_scratch_slot + c - window_first).to(gl.int64), c - first, 1, h, hv, share, traits,
    )  # fmt: skip
    producer_arrive(smem.k_full.index(0), 1, True)
    producer_arrive(smem.q_full.index(0), 0, True)
    for i in range(0, end - first):
        zero = opaque_zero(i, 20)
        c = end - 1 - i + zero
        token = start + c * 64
        scratch_slot = (first_scratch_slot + c - window_first).to(gl.int64)
        mbarrier.wait(smem.state_empty, (i & 1) ^ 1)
        at = copy_pointers(states + (scratch_slot * HV + hv) * V * K, K, 128, 128, zero)
        copy_tile_async(smem.S.index(zero), at, 0, V, K, V % 128 != 0, K % 128 != 0)
        x_row = scratch_slot * 64 if traits.DELTA else token
        x_at = copy_pointers(v_new + (x_row * HV + hv) * V, HV * V, 64, 128, zero)
        copy_tile_async(smem.x.index(zero), x_at, 0, length - c * 64, V, MASK_X, V % 128 != 0)
        async_copy.commit_group()
        # Wait for the release of the previous chunk before arriving on state_full. After that arrival the consumers
        # could release this chunk too, and a wait by parity cannot tell a phase from the one two before it: it would
        # hang.
        mbarrier.wait(empty, (i & 1) ^ 1)
        producer_arrive(smem.state_full, 0, True)
        if traits.TERMS == 2:
            copy_low_inverse(wy_tiles, smem, (slot + c).to(gl.int64) * HV + hv, i & 1, zero)
        stage = 1 - i % 2
        if c > first:
            copy_chunk(
                q, k, do, gates, wy_tiles, smem, stage, zero, token - 64, length - (c - 1) * 64,
                (slot + c - 1).to(gl.int64) * HV + hv, scratch_slot - 1, c - 1 - first, 0, h, hv, share, traits,
            )  # fmt: skip
            producer_arrive(smem.k_full.index(stage), 1, True)
            producer_arrive(smem.q_full.index(stage), 0, True)
