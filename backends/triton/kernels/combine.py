"""Combination of the splits of a sequence: the only sequential step of a split-parallel scan.

    forward:  S^T before split p + 1 = (S^T before split p) M_p + N_p
    reverse:  dS^T after split p - 1 = (dS^T after split p) M_p^T + N_p

M_p [K, K] is the map that split p applies to a state, and N_p [V, K] what it produces from a zero state.
C chunk, HV value heads, K key width, V value width
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.kernels.layout import (
    chunk_range,
    load_column_major,
    load_rows,
    negligible_prefix,
    store_rows,
)


@triton.jit
def load_map(base, rows, columns, in_rows, in_columns, K: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Load a tile of the map M [K, K], or of M^T."""
    at = columns[None, :] * K + rows[:, None] if TRANSPOSED else rows[:, None] * K + columns[None, :]
    return tl.load(base + at, mask=in_rows[:, None] & in_columns[None, :], other=0.0)


@triton.jit(do_not_specialize=["T", "segment", "segments", "num_splits"])
def combine_kernel(
    decay_bounds, initial, starts, ends, cu, T, segment, segments, num_splits,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, BV: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr, UNIT: tl.constexpr, REVERSE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute the state, or with REVERSE the gradient of the state, that each split starts from.

    Grid: sequence, value head, V tile. Each program owns S^T [BV, K] as tiles of K0 and K1 keys and loops over the
    splits of its sequence.

    Reads ends [N splits, HV, V + K, K], N_p above M_p; decay_bounds [slots, HV]; with INITIAL the state that the first
    split (REVERSE: the last one) starts from, initial [N, HV, K, V].
    Writes starts [N splits, HV, V, K].
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    n = pid // TILES // HV
    hv = pid // TILES % HV
    _, _, slot, first, _, _, last = chunk_range(n, 0, cu, T, segment, segments, C, UNIT, 0, PACKED)
    slot += first
    chunks = last - first
    used_splits = tl.cdiv(chunks, SPLIT)
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
    if INITIAL:
        Sa += load_column_major(initial + state_offset, vs, ka, in_v, in_ka, V)
        if K1 > 0:
            Sb += load_column_major(initial + state_offset, vs, kb, in_v, in_kb, V)
    # forward, the first split of an empty sequence still starts from the initial state, which becomes the final one
    for step in range(used_splits if REVERSE else tl.maximum(used_splits, 1)):
        split = used_splits - 1 - step if REVERSE else step
        split_index = (tl.cast(n, tl.int64) * num_splits + split) * HV + hv
        store_rows(starts + split_index * V * K, Sa, vs, ka, in_v, in_ka, K)
        if K1 > 0:
            store_rows(starts + split_index * V * K, Sb, vs, kb, in_v, in_kb, K)
        if step < used_splits - 1:
            N_p = ends + split_index * (V + K) * K
            Na = load_rows(N_p, vs, ka, in_v, in_ka, K)
            if K1 > 0:
                Nb = load_rows(N_p, vs, kb, in_v, in_kb, K)
            count = tl.minimum(SPLIT, chunks - split * SPLIT)
            negligible = negligible_prefix(decay_bounds, slot + split * SPLIT, count, hv, HV, SPLIT)
            # forward, the first split has no map: the scan computed N_0 from the initial state
            if (negligible == 0) & ((step > 0) | REVERSE):
                M_p = N_p + V * K
                Na = tl.dot(Sa, load_map(M_p, ka, ka, in_ka, in_ka, K, REVERSE), Na, input_precision=PREC)
                if K1 > 0:
                    Na = tl.dot(Sb, load_map(M_p, kb, ka, in_kb, in_ka, K, REVERSE), Na, input_precision=PREC)
                    Nb = tl.dot(Sa, load_map(M_p, ka, kb, in_ka, in_kb, K, REVERSE), Nb, input_precision=PREC)
                    Nb = tl.dot(Sb, load_map(M_p, kb, kb, in_kb, in_kb, K, REVERSE), Nb, input_precision=PREC)
            Sa = Na
            if K1 > 0:
                Sb = Nb
