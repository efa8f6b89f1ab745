"""Combination of the segments of a sequence: the only sequential step of a segment-parallel scan.

    forward:  S^T before segment p + 1 = (S^T before segment p) M_p + N_p
    reverse:  dS^T after segment p - 1 = (dS^T after segment p) M_p^T + N_p

M_p [K, K] is the map that segment p applies to a state, and N_p [V, K] what it produces from a zero state.
C tokens in a chunk, HV value heads, K key width, V value width
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.device.layout import (
    chunk_range,
    load_column_major,
    load_rows,
    negligible_prefix,
    segment_slot,
    store_rows,
)


@triton.jit
def load_map(base, rows, columns, in_rows, in_columns, K: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Load a tile of the map M [K, K], or of M^T."""
    at = columns[None, :] * K + rows[:, None] if TRANSPOSED else rows[:, None] * K + columns[None, :]
    return tl.load(base + at, mask=in_rows[:, None] & in_columns[None, :], other=0.0)


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
    K0: tl.constexpr = traits.K0
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    K1: tl.constexpr = traits.K1
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
    ka = tl.arange(0, K0)
    in_v = vs < V
    in_ka = ka < K
    Sa = tl.zeros([BV, K0], tl.float32)
    if K1 > 0:
        kb = K0 + tl.arange(0, K1)
        in_kb = kb < K
        Sb = tl.zeros([BV, K1], tl.float32)
    state_offset = (tl.cast(n, tl.int64) * HV + hv) * K * V
    if traits.INITIAL:
        Sa += load_column_major(gmem.initial + state_offset, vs, ka, in_v, in_ka, V)
        if K1 > 0:
            Sb += load_column_major(gmem.initial + state_offset, vs, kb, in_v, in_kb, V)
    if TOTAL:
        Sa += tl.where(vs[:, None] - V == ka[None, :], 1.0, 0.0)
        if K1 > 0:
            Sb += tl.where(vs[:, None] - V == kb[None, :], 1.0, 0.0)
    # forward, the first segment of an empty sequence still starts from the initial state, which becomes the final one
    for step in range(used_segments if REVERSE else tl.maximum(used_segments, 1)):
        segment = used_segments - 1 - step if REVERSE else step
        segment_index = tl.cast(segment_slot(n, segment, first_scratch_slot, SEGMENT_CHUNKS), tl.int64) * HV + hv
        if not TOTAL:
            store_rows(gmem.starts + segment_index * V * K, Sa, vs, ka, in_v, in_ka, K)
            if K1 > 0:
                store_rows(gmem.starts + segment_index * V * K, Sb, vs, kb, in_v, in_kb, K)
        if step < (used_segments if TOTAL else used_segments - 1):
            N_p = gmem.ends + segment_index * (V + K) * K
            Na = load_rows(N_p, vs, ka, in_v, in_ka, K)
            if K1 > 0:
                Nb = load_rows(N_p, vs, kb, in_v, in_kb, K)
            count = tl.minimum(SEGMENT_CHUNKS, chunks - segment * SEGMENT_CHUNKS)
            negligible = negligible_prefix(
                gmem.decay_bounds, slot + segment * SEGMENT_CHUNKS, count, hv, HV, SEGMENT_CHUNKS
            )
            # forward, the first segment needs no map: the scan computed its N_p from the initial state
            if (negligible == 0) & ((step > 0) | REVERSE | traits.CARRIED):
                M_p = N_p + V * K
                Na = tl.dot(Sa, load_map(M_p, ka, ka, in_ka, in_ka, K, REVERSE), Na, input_precision=PREC)
                if K1 > 0:
                    Na = tl.dot(Sb, load_map(M_p, kb, ka, in_kb, in_ka, K, REVERSE), Na, input_precision=PREC)
                    Nb = tl.dot(Sa, load_map(M_p, ka, kb, in_ka, in_kb, K, REVERSE), Nb, input_precision=PREC)
                    Nb = tl.dot(Sb, load_map(M_p, kb, kb, in_kb, in_kb, K, REVERSE), Nb, input_precision=PREC)
            Sa = Na
            if K1 > 0:
                Sb = Nb
    if TOTAL:
        total = gmem.starts + (tl.cast(n, tl.int64) * HV + hv) * (V + K) * K
        in_rows = vs < ROWS
        store_rows(total, Sa, vs, ka, in_rows, in_ka, K)
        if K1 > 0:
            store_rows(total, Sb, vs, kb, in_rows, in_kb, K)
