"""Producer warp group of the scan and of the reverse scan on sm_90: the ring buffer of a chunk's tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
)

from deltazoo.backends.triton.chunk.kernels.sm90.common import (
    consumer_release,
    copy_channel_gates_async,
    copy_gates_async,
    copy_pointers,
    copy_tile_async,
    copy_wy_tile_async,
    producer_arrive,
)
from deltazoo.backends.triton.chunk.kernels.sm90.scan_traits import last_half_is_empty


@gluon.jit
def advance(stage, phase, traits: gl.constexpr):
    """Return the next stage of the ring buffer and its phase."""
    wraps = stage == traits.NUM_STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def release_chunks(smem, work, traits: gl.constexpr):
    """Release the chunks of the work tile in a consumer that has no values."""
    stage = 0
    phase = 0
    for _ in range(work.first, work.end):
        mbarrier.wait(smem.k_full.index(stage), phase)
        if traits.DECAY == "channel":
            consumer_release(smem.k_empty.index(stage))
        mbarrier.wait(smem.v_full.index(stage), phase)
        consumer_release(smem.empty.index(stage))
        stage, phase = advance(stage, phase, traits)


@gluon.jit
def release_chunks_without_values(smem, columns, work, HALF: gl.constexpr, traits: gl.constexpr):
    """Return the end of a consumer's chunks. A second consumer without values releases them and processes none.

    columns: the number of values from the consumer's first one on.
    """
    end = work.end
    if HALF == 1 and (traits.HALVES == 2 or last_half_is_empty(traits.V)):
        if columns <= 0:
            release_chunks(smem, work, traits)
            end = work.first
    return end


@gluon.jit
def copy_key_tiles_async(rings, at, keys, stage, rows, traits: gl.constexpr):
    """Issue the cp.async of the NK tiles of a chunk's keys or queries. at: the pointers of their first tile."""
    K: gl.constexpr = traits.K
    NK: gl.constexpr = traits.NK
    for tk in gl.static_range(NK):
        if rings[tk].shape[2] == 16:
            at = copy_pointers(keys, traits.H * K, 64, 16)
        copy_tile_async(rings[tk].index(stage), at, tk * 64, rows, K - tk * 64, True, tk * 64 + rings[tk].shape[2] > K)


@gluon.jit
def copy_keys_async(rings, keys, stage, rows, traits: gl.constexpr):
    """Issue the cp.async of the NK tiles of a chunk's keys or queries."""
    copy_key_tiles_async(rings, copy_pointers(keys, traits.H * traits.K), keys, stage, rows, traits)


@gluon.jit
def copy_values_async(v, token, smem, stage, rows, work, traits: gl.constexpr):
    """Issue the cp.async of the two tiles of a chunk's values."""
    HV: gl.constexpr = traits.HV
    V: gl.constexpr = traits.V
    MASK_V: gl.constexpr = V % 128 != 0 or traits.HALVES == 2
    at = copy_pointers(v + ((token * HV + work.hv) * V + work.column), HV * V)
    for half in gl.static_range(2):
        copy_tile_async(smem.v[half].index(stage), at, half * 64, rows, work.columns - half * 64, True, MASK_V)


@gluon.jit
def copy_wy_tiles_async(
    wy_tile, smem, stage, COPY_T: gl.constexpr, COPY_P: gl.constexpr, dtype: gl.constexpr, TERMS: gl.constexpr,
):  # fmt: skip
    """Issue the cp.async of T, with TERMS = 2 of both of its terms, and of P^T."""
    if COPY_T:
        copy_wy_tile_async(smem.T.index(stage), wy_tile, True)
        if TERMS == 2:
            copy_wy_tile_async(smem.T_low.index(stage), wy_tile + 64 * 72, True)
    if COPY_P:
        copy_wy_tile_async(smem.P.index(stage), wy_tile.to(gl.pointer_type(dtype), bitcast=True), False)


@gluon.jit
def producer(q, k, e, v, gates, wy_tiles, smem, slot, work, traits: gl.constexpr, REVERSED: gl.constexpr):
    """Producer warp group: copy the tiles of each chunk, from the first to the last, or the other way if REVERSED.

    Each chunk is two cp.async groups: k, the gates and q, then v, T and P. A separate erase key is the last copy, or
    takes the place of k, which then is the last, unless REVERSED. With a decay per channel the first group is what the
    consumers release early, e and q, or if REVERSED k, v and P; the second all else. slot: slot of the sequence's first
    chunk.
    """
    H: gl.constexpr = traits.H
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    NK: gl.constexpr = traits.NK
    DECAY: gl.constexpr = traits.DECAY
    DELTA: gl.constexpr = traits.DELTA
    WRITE: gl.constexpr = traits.WRITE
    GATES_BEFORE: gl.constexpr = traits.GATES_BEFORE
    OUTPUT: gl.constexpr = traits.OUTPUT
    BY_CHANNEL: gl.constexpr = DECAY == "channel"
    OWN_KEY: gl.constexpr = traits.OWN_KEY
    E_FIRST: gl.constexpr = OWN_KEY and not REVERSED
    dtype: gl.constexpr = traits.dtype
    # Arrive on v_full only after the copies of the next chunk's first group have been issued, where these do not wait
    # for the end of this chunk: with a spare stage, or because their buffers are released early.
    DEFER_V: gl.constexpr = traits.NUM_STAGES > 2 or BY_CHANNEL
    h = work.hv // (HV // H)
    stage = 0
    phase = 1
    deferred = 0  # the stage whose v_full has not been arrived on
    for i in range(work.first, work.end):
        c = work.first + work.end - 1 - i if REVERSED else i
        rows = work.length - c * 64
        token = work.start + c * 64
        gate_row = (slot + c).to(gl.int64) * HV + work.hv
        key = (token * H + h) * K
        wy_tile = wy_tiles + gate_row * (traits.TERMS * 64 * 72) if DELTA or BY_CHANNEL else wy_tiles
        if BY_CHANNEL:
            mbarrier.wait(smem.k_empty.index(stage), phase)
            if REVERSED:
                copy_keys_async(smem.k, k + key, stage, rows, traits)
                copy_values_async(v, token, smem, stage, rows, work, traits)
                copy_wy_tiles_async(wy_tile, smem, stage, False, True, dtype, 1)
            else:
                if DELTA:
                    copy_keys_async(smem.e, e + key, stage, rows, traits)
                if OUTPUT:
                    copy_keys_async(smem.q, q + key, stage, rows, traits)
        else:
            first = (e if E_FIRST else k) + key
            first_at = copy_pointers(first, H * K)
            mbarrier.wait(smem.empty.index(stage), phase)
            copy_key_tiles_async(smem.e if E_FIRST else smem.k, first_at, first, stage, rows, traits)
            copy_gates_async(gates + gate_row * 192, smem, stage, DECAY, GATES_BEFORE, DELTA, WRITE)
            if OUTPUT:
                copy_keys_async(smem.q, q + key, stage, rows, traits)
        async_copy.commit_group()
        if DEFER_V:
            producer_arrive(smem.v_full.index(deferred), 1, i > work.first)
        if BY_CHANNEL:
            mbarrier.wait(smem.empty.index(stage), phase)
            if REVERSED:
                copy_wy_tiles_async(wy_tile, smem, stage, DELTA, False, dtype, 1)
                copy_keys_async(smem.q, q + key, stage, rows, traits)
                if DELTA:
                    copy_keys_async(smem.e, e + key, stage, rows, traits)
            else:
                copy_values_async(v, token, smem, stage, rows, work, traits)
                copy_wy_tiles_async(wy_tile, smem, stage, DELTA, OUTPUT, dtype, 1)
                copy_keys_async(smem.k, k + key, stage, rows, traits)
            copy_channel_gates_async(gates + gate_row * (K + 64), smem, stage, K, NK, WRITE)
        else:
            copy_values_async(v, token, smem, stage, rows, work, traits)
            copy_wy_tiles_async(wy_tile, smem, stage, DELTA, DELTA and OUTPUT, dtype, traits.TERMS)
            if OWN_KEY:
                copy_keys_async(smem.k if E_FIRST else smem.e, (k if E_FIRST else e) + key, stage, rows, traits)
        async_copy.commit_group()
        producer_arrive(smem.k_full.index(stage), 1, True)
        if not DEFER_V:
            producer_arrive(smem.v_full.index(stage), 0, True)
        deferred = stage
        stage, phase = advance(stage, phase, traits)
    if DEFER_V:
        producer_arrive(smem.v_full.index(deferred), 0, work.first < work.end)
