"""Index arithmetic that every kernel of the family shares.

A chunk of C tokens of a sequence has a slot, its place among all chunks. N sequences (the rows of a batch or of a
pack), H key heads, HV value heads, K key width, G cumulative log2 decay from the beginning of the chunk
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
_NARROWEST = 64


@triton.jit
def sequence_bounds(n, cu, T, PACKED: tl.constexpr):
    """First token (int64, in the flattened batch) and length of sequence n."""
    if PACKED:
        start = tl.load(cu + n).to(tl.int64)
        length = (tl.load(cu + n + 1).to(tl.int64) - start).to(tl.int32)
    else:
        start = tl.cast(n, tl.int64) * T
        length = T
    return start, length


@triton.jit
def first_slot(n, cu, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Slot of the first chunk of sequence n.

    In a pack, floor(cu[n] / C) + n: never overlaps the slots before it, and needs no prefix sum.
    """
    if PACKED:
        return tl.load(cu + n) // C + n
    else:
        return n * tl.cdiv(T, C)


@triton.jit
def sequence_of_slot(slot, cu, N, T, C: tl.constexpr, PACKED: tl.constexpr):
    """The sequence that owns a slot: the last n whose first slot is not beyond it."""
    if PACKED:
        low = 0
        high = N
        while high - low > 1:
            middle = (low + high) // 2
            at_or_before = tl.load(cu + middle) // C + middle <= slot
            low = tl.where(at_or_before, middle, low)
            high = tl.where(at_or_before, high, middle)
        return low
    else:
        return slot // tl.cdiv(T, C)


@triton.jit
def sequence_and_part(pid, parts, each):
    """The sequence and the part of a program, with `each` programs a part: the first parts of all sequences come first,
    for in a pack many a sequence has no others, and a program without work delays those behind it."""
    N = tl.num_programs(0) // (each * parts)
    return pid % N, pid // N


@triton.jit
def segment_of(n, slot, chunks, segment, segments, UNIT: tl.constexpr, PACKED: tl.constexpr):
    """First chunk of a segment of sequence n, the one after its last, and the place of the first.

    Segments deal the units of UNIT chunks of each sequence out evenly, whatever its length; a place is a chunk's among
    the chunks of one segment of all sequences. In a pack, floor(slot / segments) + n UNIT never overlaps.
    """
    units = tl.cdiv(chunks, UNIT)
    first = units * segment // segments * UNIT
    last = tl.minimum(units * (segment + 1) // segments * UNIT, chunks)
    place = slot // segments + n * UNIT if PACKED else n * (tl.cdiv(units, segments) * UNIT)
    return first, last, tl.where(segments == 1, slot, place)


@triton.jit
def chunk_of_place(place, cu, N, T, segment, segments, C: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr):
    """The sequence and the chunk that a place of a segment holds, and whether it holds one."""
    if PACKED:
        n = 0
        high = N
        while high - n > 1:
            middle = (n + high) // 2
            slot = first_slot(middle, cu, T, C, PACKED)
            at_or_before = tl.where(segments == 1, slot, slot // segments + middle * UNIT) <= place
            n = tl.where(at_or_before, middle, n)
            high = tl.where(at_or_before, high, middle)
    else:
        chunks = tl.cdiv(T, C)
        n = place // tl.where(segments == 1, chunks, tl.cdiv(tl.cdiv(chunks, UNIT), segments) * UNIT)
    start, length = sequence_bounds(n, cu, T, PACKED)
    slot = first_slot(n, cu, T, C, PACKED)
    first, last, first_place = segment_of(n, slot, tl.cdiv(length, C), segment, segments, UNIT, PACKED)
    c = first + place - first_place
    return n, c, c < last


@triton.jit
def load_rows(base, rows, columns, in_rows, in_columns, stride):
    """A tile [rows, columns] of a row-major matrix; zeros outside."""
    return tl.load(
        base + rows[:, None] * stride + columns[None, :], mask=in_rows[:, None] & in_columns[None, :], other=0.0
    )


@triton.jit
def store_rows(base, tile, rows, columns, in_rows, in_columns, stride):
    tl.store(
        base + rows[:, None] * stride + columns[None, :],
        tile.to(base.dtype.element_ty),
        mask=in_rows[:, None] & in_columns[None, :],
    )


@triton.jit
def two_terms(x, dtype: tl.constexpr):
    """x as a sum of two numbers of a narrower dtype."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def dot_terms(x, y, acc, dtype: tl.constexpr, TERMS: tl.constexpr, PREC: tl.constexpr):
    """acc + x y with x, float32, rounded to TERMS numbers of y's dtype."""
    if TERMS == 2:
        high, low = two_terms(x, dtype)
        acc = tl.dot(high, y, acc, input_precision=PREC)
        return tl.dot(low, y, acc, input_precision=PREC)
    else:
        return tl.dot(x.to(dtype), y, acc, input_precision=PREC)


@triton.jit
def log_decays(log_decay, tokens, hv, in_time, HV: tl.constexpr, DECAY: tl.constexpr):
    """log2 of each token's own decay; zeros outside. tokens: rows of the flattened batch."""
    if DECAY == "head":
        return tl.load(log_decay + tokens * HV + hv, mask=in_time, other=0.0) * LOG2E
    elif DECAY == "fixed":
        return tl.where(in_time, tl.load(log_decay + hv) * LOG2E, 0.0)
    else:
        return tl.where(in_time, 0.0, 0.0)


@triton.jit
def cumulative_decays(
    gates, log_decay, place, tokens, hv, i, in_time,
    HV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, PREPARED: tl.constexpr,
):  # fmt: skip
    """G of the chunk, G before each token, and G at the end: from `gates`, or summed here where nothing is prepared."""
    if PREPARED:
        G = tl.load(gates + place * 3 * C + i)
        before = tl.load(gates + place * 3 * C + i - 1, mask=i > 0, other=0.0)
        end = tl.load(gates + place * 3 * C + C - 1)
    else:
        own = log_decays(log_decay, tokens, hv, in_time, HV, DECAY)
        G = tl.cumsum(own, 0)
        before = G - own
        end = tl.sum(own, 0)
    return G, before, end


@triton.jit
def chunks_forgotten(fades, slot, count, hv, HV: tl.constexpr, MOST: tl.constexpr):
    """How many of `count` chunks from `slot` on, counted from the first, leave less than 2^-40 of a state by the end.

    fades [slots, HV] bounds the log2 of what a chunk keeps of any state; a bound that is no number forgets nothing.
    """
    c = tl.arange(0, MOST)
    fade = tl.load(fades + tl.cast(slot + c, tl.int64) * HV + hv, mask=c < count, other=0.0)
    left = tl.sum(fade, 0) - tl.cumsum(fade, 0) + fade
    return tl.min(tl.where((left < -40.0) & (c < count), MOST, c), 0)


@triton.jit
def chunks_remembered(fades, slot, count, hv, HV: tl.constexpr, MOST: tl.constexpr):
    """How many of `count` chunks from `slot` on matter before them: the rest has faded below 2^-40 there."""
    c = tl.arange(0, MOST)
    fade = tl.load(fades + tl.cast(slot + c, tl.int64) * HV + hv, mask=c < count, other=0.0)
    left = tl.cumsum(fade, 0) - fade
    return tl.max(tl.where((left < -40.0) | (c >= count), 0, c + 1), 0)


def key_tiles(K: int) -> tuple[int, int]:
    """K as one or two power-of-two tiles: 64 -> (64, 0), 128 -> (128, 0), 192 -> (128, 64), 200 -> (128, 128).

    None is narrower than 64: ptxas 12.8 miscompiled products of 16 and of 32 columns, as "miscarried" in
    docs/notes/triton-kernels/NOTES.md tells.
    """
    first = min(128, max(_NARROWEST, triton.next_power_of_2(K)))
    rest = K - first
    return first, 0 if rest <= 0 else max(_NARROWEST, triton.next_power_of_2(rest))
