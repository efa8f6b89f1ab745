"""Index arithmetic that every kernel of the family shares.

A chunk of C tokens of a sequence has a slot, its place among all chunks. N sequences (the rows of a batch or of a
pack), H key heads, HV value heads, K key width, G cumulative log2 decay from the beginning of the chunk
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# log2 of a decay that leaves nothing that counts; a stronger one, summed, would cost its neighbours their digits
MIN_LOG2_DECAY = tl.constexpr(-96.0)


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
def first_chunk_slot(n, cu, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Slot of the first chunk of sequence n.

    In a pack, floor(cu[n] / C) + n: never overlaps the slots before it, and needs no prefix sum.
    """
    if PACKED:
        return tl.load(cu + n) // C + n
    else:
        return n * tl.cdiv(T, C)


@triton.jit
def locate_chunk(slot, cu, N, T, C: tl.constexpr, PACKED: tl.constexpr):
    """First token and length of the sequence that owns a slot, the last whose first slot is not beyond it; and how many
    of its tokens come before the slot's chunk."""
    n = find_sequence(slot, cu, N, 1, 0, C) if PACKED else slot // tl.cdiv(T, C)
    start, length = sequence_bounds(n, cu, T, PACKED)
    return start, length, (slot - first_chunk_slot(n, cu, T, C, PACKED)) * C


@triton.jit
def find_sequence(place, cu, N, segments, unit, C: tl.constexpr):
    """The last sequence of a pack whose first place in a segment is not beyond `place`.

    A search that asks 32 at once: of loads that wait for one another there is one up to 32 sequences, two up to 1024.
    """
    lane = tl.arange(0, 32)
    low = 0
    high = N
    while high - low > 1:
        step = tl.cdiv(high - low, 32)
        n = low + lane * step
        inside = n < high
        first = (tl.load(cu + n, mask=inside, other=0) // C + n) // segments + n * unit
        low += (tl.sum(tl.where(inside & (first <= place), 1, 0), 0) - 1) * step
        high = tl.minimum(low + step, high)
    return low


@triton.jit
def sequence_and_split(pid, parts, each):
    """The sequence and the part of a program, with `each` programs a part: the first parts of all sequences come first,
    for in a pack many a sequence has no others, and a program without work delays those behind it."""
    N = tl.num_programs(0) // (each * parts)
    return pid % N, pid // N


@triton.jit
def segment_bounds(n, slot, chunks, segment, segments, UNIT: tl.constexpr, PACKED: tl.constexpr):
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
def chunk_range(
    n, part, cu, T, segment, segments, C: tl.constexpr, UNIT: tl.constexpr, SPLIT: tl.constexpr, PACKED: tl.constexpr
):
    """What a program of a scan walks: first token, length and first slot of sequence n; first chunk of a segment of it,
    and the place of that one; first chunk of a part of SPLIT chunks (0: of all) and the one after its last."""
    start, length = sequence_bounds(n, cu, T, PACKED)
    slot = first_chunk_slot(n, cu, T, C, PACKED)
    begins, last, first_place = segment_bounds(n, slot, tl.cdiv(length, C), segment, segments, UNIT, PACKED)
    first = begins
    if SPLIT > 0:
        first += part * SPLIT
        last = tl.minimum(first + SPLIT, last)
    return start, length, slot, begins, first_place, first, last


@triton.jit
def scratch_slots_per_sequence(T, segments, C: tl.constexpr, UNIT: tl.constexpr):
    """Places in a segment of a sequence that is not packed."""
    chunks = tl.cdiv(T, C)
    return tl.where(segments == 1, chunks, tl.cdiv(tl.cdiv(chunks, UNIT), segments) * UNIT)


@triton.jit
def locate_scratch_chunk_in_sequence(
    place, n, cu, T, segment, segments, C: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr
):
    """First token and length of sequence n; then the slot and the number of the chunk that a place of a segment of it
    holds, and whether it holds one."""
    start, length, slot, first, first_place, _, last = chunk_range(n, 0, cu, T, segment, segments, C, UNIT, 0, PACKED)
    c = first + place - first_place
    return start, length, slot + c, c, c < last


@triton.jit
def locate_scratch_chunk(place, cu, N, T, segment, segments, C: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr):
    """What `locate_scratch_chunk_in_sequence` says of a place of a segment, whose sequence is looked for."""
    if PACKED:
        n = find_sequence(place, cu, N, segments, tl.where(segments == 1, 0, UNIT), C)
    else:
        n = place // scratch_slots_per_sequence(T, segments, C, UNIT)
    return locate_scratch_chunk_in_sequence(place, n, cu, T, segment, segments, C, UNIT, PACKED)


@triton.jit
def opaque_zero(number, BITS: tl.constexpr):
    """0, of a number below 2^BITS, which the compiler does not know: else it computes where all that a loop, or what
    comes after it, reads and writes lies once, before the loop, and has no registers for so much; what is spilled
    goes through L2, where shared memory leaves L1 next to nothing."""
    return number >> BITS


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
def load_column_major(base, rows, columns, in_rows, in_columns, stride):
    """A tile [rows, columns] of a matrix that lies in memory transposed; zeros outside."""
    return tl.load(
        base + rows[:, None] + columns[None, :] * stride, mask=in_rows[:, None] & in_columns[None, :], other=0.0
    )


@triton.jit
def store_column_major(base, tile, rows, columns, in_rows, in_columns, stride):
    tl.store(base + rows[:, None] + columns[None, :] * stride, tile, mask=in_rows[:, None] & in_columns[None, :])


@triton.jit
def mma_rows(R: tl.constexpr, LANES: tl.constexpr):
    """0 to R - 1 as [LANES, R / 16, 16 / LANES, 1]: of a tile that is loaded or stored by such rows a warp has 16 after
    16, as it has of a product, so that between the two nothing goes from warp to warp."""
    lane = tl.arange(0, LANES)[:, None, None, None]
    block = tl.arange(0, R // 16)[None, :, None, None]
    return block * 16 + tl.arange(0, 16 // LANES)[None, None, :, None] * LANES + lane


@triton.jit
def load_mma_rows(base, rows, columns, in_rows, in_columns, stride):
    """A tile [R, columns] of a row-major matrix, for rows as `mma_rows` lays them; zeros outside."""
    at = base + rows * stride + columns[None, None, None, :]
    tile = tl.load(at, mask=in_rows & in_columns[None, None, None, :], other=0.0)
    R: tl.constexpr = rows.shape[0] * rows.shape[1] * rows.shape[2]
    return tl.reshape(tl.permute(tile, [1, 2, 0, 3]), [R, columns.shape[0]])


@triton.jit
def store_mma_rows(base, tile, rows, columns, in_rows, in_columns, stride):
    """Write a tile [R, columns] to rows as `mma_rows` lays them."""
    L: tl.constexpr = rows.shape[0]
    blocks = tl.reshape(tile.to(base.dtype.element_ty), [tile.shape[0] // 16, 16 // L, L, tile.shape[1]])
    at = base + rows * stride + columns[None, None, None, :]
    tl.store(at, tl.permute(blocks, [2, 0, 1, 3]), mask=in_rows & in_columns[None, None, None, :])


@triton.jit
def store_state(base, S, column, columns, in_columns, WIDTH: tl.constexpr, stride, wanted):
    """Write S [values, keys] from row `column` on and up to WIDTH, where wanted; nothing goes from warp to warp."""
    LANES: tl.constexpr = min(16, 4096 // (S.shape[1] * base.dtype.element_ty.primitive_bitwidth))
    rows = column + mma_rows(S.shape[0], LANES)
    store_mma_rows(base, S, rows, columns, (rows < WIDTH) & wanted, in_columns, stride)


@triton.jit
def store_transposed(base, x_T, rows, column, stride, WIDTH: tl.constexpr):
    """Write x_T [columns, rows] to base [rows, stride] transposed, `rows` of them, from a column on and up to WIDTH.

    In blocks of 16 x 16, laid so that a warp writes the columns that it holds as rows of a product: nothing goes from
    warp to warp, which takes two barriers a round, and a row of a block is a sector of 32 bytes.
    """
    M: tl.constexpr = x_T.shape[0]
    C: tl.constexpr = x_T.shape[1]
    blocks = tl.permute(tl.reshape(x_T.to(base.dtype.element_ty), [M // 16, 16, C // 16, 16]), [3, 0, 2, 1])
    sixteen = tl.arange(0, 16)
    i = tl.arange(0, C // 16)[None, None, :, None] * 16 + sixteen[:, None, None, None]
    j = column + tl.arange(0, M // 16)[None, :, None, None] * 16 + sixteen[None, None, None, :]
    tl.store(base + i * stride + j, blocks, mask=(i < rows) & (j < WIDTH))


@triton.jit
def split_hi_lo(x, dtype: tl.constexpr):
    """x as a sum of two numbers of a narrower dtype."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def dot_split_lhs(x, y, acc, dtype: tl.constexpr, TERMS: tl.constexpr, PREC: tl.constexpr):
    """acc + x y with x, float32, rounded to TERMS numbers of y's dtype."""
    if TERMS == 2:
        high, low = split_hi_lo(x, dtype)
        acc = tl.dot(high, y, acc, input_precision=PREC)
        return tl.dot(low, y, acc, input_precision=PREC)
    else:
        return tl.dot(x.to(dtype), y, acc, input_precision=PREC)


@triton.jit
def load_log2_decays(log_decay, tokens, hv, in_time, HV: tl.constexpr, DECAY: tl.constexpr):
    """log2 of each token's own decay; zeros outside. tokens: rows of the flattened batch."""
    if DECAY == "head":
        return clamp_log2_decay(tl.load(log_decay + tokens * HV + hv, mask=in_time, other=0.0) * LOG2E)
    elif DECAY == "fixed":
        return tl.where(in_time, clamp_log2_decay(tl.load(log_decay + hv) * LOG2E), 0.0)
    else:
        return tl.where(in_time, 0.0, 0.0)


@triton.jit
def clamp_log2_decay(own):
    """log2 of a decay, no less than what leaves nothing; what is no number stays so."""
    return tl.where(own < MIN_LOG2_DECAY, MIN_LOG2_DECAY, own)


@triton.jit
def load_gate(gates, place, which: tl.constexpr, i, C: tl.constexpr):
    """One of a chunk's rows G, c, w [C] from gates [slots, HV, 3, C].

    It is loaded four times over: a tile of fewer numbers than threads every thread would load for itself, all that it
    needs of it, where one copy into shared memory does.
    """
    same = tl.broadcast_to((gates + (place * 3 + which) * C + i)[None, :], [4, C])
    first, _ = tl.split(tl.reshape(tl.trans(tl.load(same)), [C, 2, 2]))
    row, _ = tl.split(first)
    return row


@triton.jit
def cumulative_decays(gates, place, i, C: tl.constexpr, LOOP: tl.constexpr = True):
    """G of the chunk, G before each token, and G at the end."""
    G = load_gate(gates, place, 0, i, C) if LOOP else tl.load(gates + place * 3 * C + i)
    before = tl.load(gates + place * 3 * C + i - 1, mask=i > 0, other=0.0)
    end = tl.load(gates + place * 3 * C + C - 1)
    return G, before, end


@triton.jit
def clamp_away_from_zero(b, MIN_BETA: tl.constexpr):
    """b held away from 0, by so little that it counts for nothing, so that what it was multiplied with can be told."""
    return tl.where(b < 0.0, tl.minimum(b, -MIN_BETA), tl.maximum(b, MIN_BETA))


@triton.jit
def negligible_prefix(decay_bounds, slot, count, hv, HV: tl.constexpr, MOST: tl.constexpr):
    """How many of `count` chunks from `slot` on, counted from the first, leave less than 2^-40 of a state by the end.

    decay_bounds [slots, HV] bounds the log2 of what a chunk keeps of any state; a bound that is no number forgets nothing.
    """
    c = tl.arange(0, MOST)
    fade = tl.load(decay_bounds + tl.cast(slot + c, tl.int64) * HV + hv, mask=c < count, other=0.0)
    left = tl.sum(fade, 0) - tl.cumsum(fade, 0) + fade
    return tl.min(tl.where((left < -40.0) & (c < count), MOST, c), 0)


@triton.jit
def significant_prefix(decay_bounds, slot, count, hv, HV: tl.constexpr, MOST: tl.constexpr):
    """How many of `count` chunks from `slot` on matter before them: the rest has faded below 2^-40 there."""
    c = tl.arange(0, MOST)
    fade = tl.load(decay_bounds + tl.cast(slot + c, tl.int64) * HV + hv, mask=c < count, other=0.0)
    left = tl.cumsum(fade, 0) - fade
    return tl.max(tl.where((left < -40.0) | (c >= count), 0, c + 1), 0)
