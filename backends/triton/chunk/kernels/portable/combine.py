"""Combination of the segments of a sequence: the only sequential step of a segment-parallel scan.

    forward:  S^T before segment p + 1 = (S^T before segment p) M_p + N_p
    reverse:  dS^T after segment p - 1 = (dS^T after segment p) M_p^T + N_p

M_p [K, K] is the map that segment p applies to a state, and N_p [V, K] what it produces from a zero state.
C tokens in a chunk, HV value heads, K key width, V value width
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.chunk.kernels.portable.key_tiles import (
    add_column_major,
    add_identity,
    key_columns,
    load_tiles,
    store_tiles,
    zero_tiles,
)
from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.device.layout import chunk_range, negligible_prefix, segment_slot


@triton.jit
def add_mapped(
    N, S, base, keys, in_keys, K: tl.constexpr, TRANSPOSED: tl.constexpr, PREC: tl.constexpr, NK: tl.constexpr
):
    """Return N + S M, or N + S M^T, for the map M [K, K]."""
    tiles = (_dot_map(N[0], S, base, keys, in_keys, 0, K, TRANSPOSED, PREC, NK),)
    for t in tl.static_range(1, NK):
        tiles = tiles + (_dot_map(N[t], S, base, keys, in_keys, t, K, TRANSPOSED, PREC, NK),)
    return tiles


@triton.jit
def _dot_map(
    total,
    S,
    base,
    keys,
    in_keys,
    t: tl.constexpr,
    K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PREC: tl.constexpr,
    NK: tl.constexpr,
):
    """Add the tile t of S M to a total."""
    for s in tl.static_range(NK):
        rows, columns = keys[s], keys[t]
        at = columns[None, :] * K + rows[:, None] if TRANSPOSED else rows[:, None] * K + columns[None, :]
        M = tl.load(base + at, mask=in_keys[s][:, None] & in_keys[t][None, :], other=0.0)
        total = tl.dot(S[s], M, total, input_precision=PREC)
    return total


@takes(
    pointers="decay_bounds initial starts ends cu",
    traits="HV K V C K0 K1 BV INITIAL PACKED SEGMENT_CHUNKS UNIT REVERSE PREC CARRIED TOTAL",
)
@triton.jit(do_not_specialize=["T", "window", "windows"])
def combine_kernel(gmem, T, window, windows, traits: tl.constexpr):
    """Compute the state, or with REVERSE the gradient of the state, that each segment starts from.

    Grid: sequence, value head, V tile. Each program owns S^T [BV, K] as tiles of K0 and K1 keys and loops over the
    segments of its sequence.

    Reads ends [segments, HV, V + K, K], which holds N_p in rows 0 to V - 1 and M_p in the rows after them;
    decay_bounds [slots, HV]; with INITIAL the state before the first segment (REVERSE: its gradient after the last),
    initial [N, HV, K, V].
    Writes starts [segments, HV, V, K], the state before (REVERSE: its gradient after) each segment.

    CARRIED: N_p of the first segment starts from zero, too, so that its map is applied.
    TOTAL: the sums and products over all segments instead, written to starts [N, HV, V + K, K]: what the sequence
    produces from a zero state (REVERSE: from a zero gradient), and not with REVERSE below it the map of the sequence.
    """
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    BV: tl.constexpr = traits.BV
    SEGMENT_CHUNKS: tl.constexpr = traits.SEGMENT_CHUNKS
    REVERSE: tl.constexpr = traits.REVERSE
    PREC: tl.constexpr = traits.PREC
    TOTAL: tl.constexpr = traits.TOTAL
    ROWS: tl.constexpr = V + K if TOTAL and not REVERSE else V
    TILES: tl.constexpr = (ROWS + BV - 1) // BV
    pid = tl.program_id(0)
    n = pid // TILES // HV
    hv = pid // TILES % HV
    _, _, slot, first, first_scratch_slot, _, last = chunk_range(
        n, 0, gmem.cu, T, window, windows, traits.C, traits.UNIT, 0, traits.PACKED
    )
    slot += first
    chunks = last - first
    used_segments = tl.cdiv(chunks, SEGMENT_CHUNKS)
    vs = (pid % TILES) * BV + tl.arange(0, BV)
    in_v = vs < V
    NK: tl.constexpr = 2 if traits.K1 > 0 else 1
    keys, in_keys = key_columns(K, traits.K0, traits.K1)
    S = zero_tiles(BV, traits.K0, traits.K1)
    state_offset = (tl.cast(n, tl.int64) * HV + hv) * K * V
    if traits.INITIAL:
        S = add_column_major(S, gmem.initial + state_offset, vs, keys, in_v, in_keys, V, NK)
    if TOTAL:
        S = add_identity(S, vs - V, keys, NK)
    # forward, the first segment of an empty sequence still starts from the initial state, which becomes the final one
    for step in range(used_segments if REVERSE else tl.maximum(used_segments, 1)):
        segment = used_segments - 1 - step if REVERSE else step
        segment_index = tl.cast(segment_slot(n, segment, first_scratch_slot, SEGMENT_CHUNKS), tl.int64) * HV + hv
        if not TOTAL:
            store_tiles(gmem.starts + segment_index * V * K, S, vs, keys, in_v, in_keys, K, NK)
        if step < (used_segments if TOTAL else used_segments - 1):
            N_p = gmem.ends + segment_index * (V + K) * K
            N = load_tiles(N_p, vs, keys, in_v, in_keys, K, NK)
            count = tl.minimum(SEGMENT_CHUNKS, chunks - segment * SEGMENT_CHUNKS)
            negligible = negligible_prefix(
                gmem.decay_bounds, slot + segment * SEGMENT_CHUNKS, count, hv, HV, SEGMENT_CHUNKS
            )
            # forward, the first segment needs no map: the scan computed its N_p from the initial state
            if (negligible == 0) & ((step > 0) | REVERSE | traits.CARRIED):
                N = add_mapped(N, S, N_p + V * K, keys, in_keys, K, REVERSE, PREC, NK)
            S = N
    if TOTAL:
        total = gmem.starts + (tl.cast(n, tl.int64) * HV + hv) * (V + K) * K
        store_tiles(total, S, vs, keys, vs < ROWS, in_keys, K, NK)
