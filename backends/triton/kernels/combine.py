"""Chain the parts of a sequence: the only step that is sequential when parts run in parallel."""

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
    """A tile of the map M [K, K], or of M^T."""
    at = columns[None, :] * K + rows[:, None] if TRANSPOSED else rows[:, None] * K + columns[None, :]
    return tl.load(base + at, mask=in_rows[:, None] & in_columns[None, :], other=0.0)


@triton.jit(do_not_specialize=["T", "segment", "segments", "parts"])
def combine_kernel(
    decay_bounds, given, begins, ends, cu, T, segment, segments, parts,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, BV: tl.constexpr, GIVEN: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr, UNIT: tl.constexpr, REVERSE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, value head, V tile). ends [N parts, HV, V + K, K] = N_p above M_p, p a part.

    Forward: S^T before part p + 1 = (S^T before p) M_p + N_p. REVERSE: dS^T after part p - 1 = (dS^T after p) M_p^T +
    N_p. GIVEN: the first of them begins from given [N, HV, K, V]. What each part begins with goes to
    begins [N parts, HV, V, K].
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    n = pid // TILES // HV
    hv = pid // TILES % HV
    start, length, slot, first, first_place, _, last = chunk_range(n, 0, cu, T, segment, segments, C, UNIT, 0, PACKED)
    slot += first
    inside = last - first
    used = tl.cdiv(inside, SPLIT)
    vs = (pid % TILES) * BV + tl.arange(0, BV)
    ka = tl.arange(0, K0)
    in_v = vs < V
    in_ka = ka < K
    Sa = tl.zeros([BV, K0], tl.float32)
    if K1 > 0:
        kb = K0 + tl.arange(0, K1)
        in_kb = kb < K
        Sb = tl.zeros([BV, K1], tl.float32)
    at = (tl.cast(n, tl.int64) * HV + hv) * K * V
    if GIVEN:
        Sa += load_column_major(given + at, vs, ka, in_v, in_ka, V)
        if K1 > 0:
            Sb += load_column_major(given + at, vs, kb, in_v, in_kb, V)
    # an empty sequence going forward still begins with what is given
    for step in range(used if REVERSE else tl.maximum(used, 1)):
        part = used - 1 - step if REVERSE else step
        place = (tl.cast(n, tl.int64) * parts + part) * HV + hv
        store_rows(begins + place * V * K, Sa, vs, ka, in_v, in_ka, K)
        if K1 > 0:
            store_rows(begins + place * V * K, Sb, vs, kb, in_v, in_kb, K)
        if step < used - 1:
            end = ends + place * (V + K) * K
            Na = load_rows(end, vs, ka, in_v, in_ka, K)
            if K1 > 0:
                Nb = load_rows(end, vs, kb, in_v, in_kb, K)
            count = tl.minimum(SPLIT, inside - part * SPLIT)
            forgotten = negligible_prefix(decay_bounds, slot + part * SPLIT, count, hv, HV, SPLIT)
            # going forward the first part has no map: its end knows what it began with
            if (forgotten == 0) & ((step > 0) | REVERSE):
                M = end + V * K
                Na = tl.dot(Sa, load_map(M, ka, ka, in_ka, in_ka, K, REVERSE), Na, input_precision=PREC)
                if K1 > 0:
                    Na = tl.dot(Sb, load_map(M, kb, ka, in_kb, in_ka, K, REVERSE), Na, input_precision=PREC)
                    Nb = tl.dot(Sa, load_map(M, ka, kb, in_ka, in_kb, K, REVERSE), Nb, input_precision=PREC)
                    Nb = tl.dot(Sb, load_map(M, kb, kb, in_kb, in_kb, K, REVERSE), Nb, input_precision=PREC)
            Sa = Na
            if K1 > 0:
                Sb = Nb
