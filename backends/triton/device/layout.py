"""Index arithmetic, tile loads and stores, and decay helpers that all kernels share.

Terms:
    chunk         C consecutive tokens of a sequence; the last chunk of a sequence may be shorter.
    chunk slot    index of a chunk among the chunks of all sequences; gates, decay bounds and WY tiles are stored by it.
    window        range of chunks of every sequence that one launch of the backward handles; bounds scratch memory.
    scratch slot  index of a chunk among the chunks of one window of all sequences; scratch buffers are stored by it.
    segment       SEGMENT_CHUNKS consecutive chunks of a window; the segments of a sequence are computed in parallel.

Shapes: N sequences (rows of the batch, or sequences of a pack with bounds cu [N + 1]), T tokens in a row of the batch,
C tokens in a chunk, H key heads, HV value heads, K key width, V value width. G is the cumulative log2 decay from the
start of the chunk.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# After a decay of 2^-96 a state is negligible. Larger magnitudes would lose float32 precision in the cumulative sum.
MIN_LOG2_DECAY = tl.constexpr(-96.0)
# The decays of a chunk are weak (channel/dplr_levels.py) if each half decays every channel by a factor above 2^-60: the
# inverse of the factor fits bfloat16.
WEAK = tl.constexpr(60.0)


@triton.jit
def sequence_bounds(n, cu, T, PACKED: tl.constexpr):
    """Return the first token of sequence n (int64, row of the flattened batch) and its length."""
    if PACKED:
        start = tl.load(cu + n).to(tl.int64)
        length = (tl.load(cu + n + 1).to(tl.int64) - start).to(tl.int32)
    else:
        start = tl.cast(n, tl.int64) * T
        length = T
    return start, length


@triton.jit
def first_chunk_slot(n, cu, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Return the slot of the first chunk of sequence n.

    In a pack this is floor(cu[n] / C) + n, which never overlaps the slots of the sequences before it and needs no
    prefix sum over their chunk counts. Some slots stay unused.
    """
    if PACKED:
        return tl.load(cu + n) // C + n
    else:
        return n * tl.cdiv(T, C)


@triton.jit
def locate_chunk(slot, cu, N, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Return the first token and the length of the sequence that owns a chunk slot, and the chunk's offset in tokens.

    An unused slot of a pack belongs to the last sequence whose first slot is not beyond it; its offset is then at or
    beyond the length.
    """
    n = find_sequence(slot, cu, N, 1, 0, C) if PACKED else slot // tl.cdiv(T, C)
    start, length = sequence_bounds(n, cu, T, PACKED)
    return start, length, (slot - first_chunk_slot(n, cu, T, C, PACKED)) * C


@triton.jit
def find_sequence(slot, cu, N, windows, unit, C: tl.constexpr):
    """Return the last sequence of a pack whose first slot is not beyond `slot`.

    `slot` is a scratch slot, or with windows = 1 and unit = 0 a chunk slot. Each round compares 32 candidates at once:
    the search makes one dependent load for up to 32 sequences, and two for up to 1024.
    """
    lane = tl.arange(0, 32)
    low = 0
    high = N
    while high - low > 1:
        step = tl.cdiv(high - low, 32)
        n = low + lane * step
        in_range = n < high
        first = (tl.load(cu + n, mask=in_range, other=0) // C + n) // windows + n * unit
        low += (tl.sum(tl.where(in_range & (first <= slot), 1, 0), 0) - 1) * step
        high = tl.minimum(low + step, high)
    return low


@triton.jit
def sequence_and_segment(pid, num_segments, programs_per_segment):
    """Return the sequence and the segment of a program.

    The first segments of all sequences come first in the grid: in a pack many sequences have no second segment, and
    programs without work would delay the programs behind them.
    """
    N = tl.num_programs(0) // (programs_per_segment * num_segments)
    return pid % N, pid // N


@triton.jit
def window_bounds(n, slot, chunks, window, windows, UNIT: tl.constexpr, PACKED: tl.constexpr):
    """Return the first chunk of a window of sequence n, the chunk after its last, and the first chunk's scratch slot.

    A sequence of `chunks` chunks, the first of them in chunk slot `slot`, is divided in units of UNIT chunks, and the
    units are distributed evenly over the windows, whatever the length. In a pack the first scratch slot is
    floor(slot / windows) + n UNIT, which never overlaps. With one window scratch slots are chunk slots.
    """
    units = tl.cdiv(chunks, UNIT)
    first = units * window // windows * UNIT
    last = tl.minimum(units * (window + 1) // windows * UNIT, chunks)
    scratch_slot = slot // windows + n * UNIT if PACKED else n * (tl.cdiv(units, windows) * UNIT)
    return first, last, tl.where(windows == 1, slot, scratch_slot)


@triton.jit
def chunk_range(
    n,
    segment,
    cu,
    T,
    window,
    windows,
    C: tl.constexpr,
    UNIT: tl.constexpr,
    SEGMENT_CHUNKS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Return the chunks of a scan program: those of one segment of a window of sequence n.

    Returns: first token, length and first chunk slot of the sequence; first chunk of the window and its scratch slot;
        first chunk of the segment and the chunk after its last. SEGMENT_CHUNKS = 0: the segment is the whole window.
    """
    start, length = sequence_bounds(n, cu, T, PACKED)
    slot = first_chunk_slot(n, cu, T, C, PACKED)
    window_first, last, first_scratch_slot = window_bounds(n, slot, tl.cdiv(length, C), window, windows, UNIT, PACKED)
    first = window_first
    if SEGMENT_CHUNKS > 0:
        first += segment * SEGMENT_CHUNKS
        last = tl.minimum(first + SEGMENT_CHUNKS, last)
    return start, length, slot, window_first, first_scratch_slot, first, last


@triton.jit
def segment_slot(n, segment, first_scratch_slot, SEGMENT_CHUNKS: tl.constexpr):
    """Return the slot of a segment of sequence n in `starts` and `ends`; SEGMENT_CHUNKS = 0: the window is one segment.

    L chunks from the first scratch slot on (`chunk_range`) are at most floor(L / SEGMENT_CHUNKS) + 1 segments, so that
    the slots of sequences never overlap.
    """
    return first_scratch_slot // SEGMENT_CHUNKS + n + segment if SEGMENT_CHUNKS > 0 else n


@triton.jit
def scratch_slots_per_sequence(T, windows, C: tl.constexpr, UNIT: tl.constexpr):
    """Return the number of scratch slots of one sequence in a window, for sequences that are not packed."""
    chunks = tl.cdiv(T, C)
    return tl.where(windows == 1, chunks, tl.cdiv(tl.cdiv(chunks, UNIT), windows) * UNIT)


@triton.jit
def locate_key_tile(NK: tl.constexpr, traits: tl.constexpr):
    """Return the scratch slot, value head, key head and tile of keys of a program, of NK tiles."""
    pid = tl.program_id(0)
    tile = pid % NK
    hv = pid // NK % traits.HV
    h = hv // (traits.HV // traits.H)
    return pid // NK // traits.HV, hv, h, tile


@triton.jit
def locate_scratch_chunk_in_sequence(
    scratch_slot, n, cu, T, window, windows, C: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr
):
    """Return the chunk in a scratch slot of sequence n.

    Returns: first token and length of the sequence; chunk slot; number of the chunk in its sequence; whether the
        scratch slot is in use.
    """
    start, length, slot, first, first_scratch_slot, _, last = chunk_range(
        n, 0, cu, T, window, windows, C, UNIT, 0, PACKED
    )
    c = first + scratch_slot - first_scratch_slot
    return start, length, slot + c, c, c < last


@triton.jit
def locate_scratch_chunk(
    scratch_slot, cu, N, T, window, windows, C: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr
):
    """Return what `locate_scratch_chunk_in_sequence` does, for a scratch slot whose sequence is not known."""
    if PACKED:
        n = find_sequence(scratch_slot, cu, N, windows, tl.where(windows == 1, 0, UNIT), C)
    else:
        n = scratch_slot // scratch_slots_per_sequence(T, windows, C, UNIT)
    return locate_scratch_chunk_in_sequence(scratch_slot, n, cu, T, window, windows, C, UNIT, PACKED)


@triton.jit
def opaque_zero(x, BITS: tl.constexpr):
    """Return 0, computed from x < 2^BITS so that the compiler cannot fold it.

    Added to a pointer it keeps address arithmetic inside or after a loop. Otherwise the compiler hoists the addresses
    of all loads and stores out of the loop and spills. Spills are slow here: shared memory takes almost all of L1, so
    they go through L2.
    """
    return x >> BITS


@triton.jit
def load_rows(base, rows, columns, in_rows, in_columns, stride):
    """Load a tile [rows, columns] of a row-major matrix; zeros outside the masks."""
    return tl.load(
        base + rows[:, None] * stride + columns[None, :], mask=in_rows[:, None] & in_columns[None, :], other=0.0
    )


@triton.jit
def store_rows(base, tile, rows, columns, in_rows, in_columns, stride):
    """Store a tile [rows, columns] to a row-major matrix."""
    tl.store(
        base + rows[:, None] * stride + columns[None, :],
        tile.to(base.dtype.element_ty),
        mask=in_rows[:, None] & in_columns[None, :],
    )


@triton.jit
def load_column_major(base, rows, columns, in_rows, in_columns, stride):
    """Load a tile [rows, columns] of a column-major matrix; zeros outside the masks."""
    return tl.load(
        base + rows[:, None] + columns[None, :] * stride, mask=in_rows[:, None] & in_columns[None, :], other=0.0
    )


@triton.jit
def store_column_major(base, tile, rows, columns, in_rows, in_columns, stride):
    """Store a tile [rows, columns] to a column-major matrix."""
    tl.store(base + rows[:, None] + columns[None, :] * stride, tile, mask=in_rows[:, None] & in_columns[None, :])


@triton.jit
def mma_rows(R: tl.constexpr, LANES: tl.constexpr):
    """Return 0 to R - 1 as [LANES, R / 16, 16 / LANES, 1].

    A tile that is loaded or stored by rows in this order has 16 consecutive rows in each warp, as an MMA accumulator
    does, so converting between the two layouts moves no data between warps.
    """
    lane = tl.arange(0, LANES)[:, None, None, None]
    block = tl.arange(0, R // 16)[None, :, None, None]
    return block * 16 + tl.arange(0, 16 // LANES)[None, None, :, None] * LANES + lane


@triton.jit
def load_mma_rows(base, rows, columns, in_rows, in_columns, stride):
    """Load a tile [R, columns] of a row-major matrix, its rows ordered by `mma_rows`; zeros outside the masks."""
    at = base + rows * stride + columns[None, None, None, :]
    tile = tl.load(at, mask=in_rows & in_columns[None, None, None, :], other=0.0)
    R: tl.constexpr = rows.shape[0] * rows.shape[1] * rows.shape[2]
    return tl.reshape(tl.permute(tile, [1, 2, 0, 3]), [R, columns.shape[0]])


@triton.jit
def store_mma_rows(base, tile, rows, columns, in_rows, in_columns, stride):
    """Store a tile [R, columns] to a row-major matrix, its rows ordered by `mma_rows`."""
    L: tl.constexpr = rows.shape[0]
    blocks = tl.reshape(tile.to(base.dtype.element_ty), [tile.shape[0] // 16, 16 // L, L, tile.shape[1]])
    at = base + rows * stride + columns[None, None, None, :]
    tl.store(at, tl.permute(blocks, [2, 0, 1, 3]), mask=in_rows & in_columns[None, None, None, :])


@triton.jit
def store_state(base, S_T, column, columns, in_columns, WIDTH: tl.constexpr, stride, enabled):
    """Store S^T [values, keys] to the rows from `column` up to WIDTH, if enabled; moves no data between warps."""
    LANES: tl.constexpr = min(16, 4096 // (S_T.shape[1] * base.dtype.element_ty.primitive_bitwidth))
    rows = column + mma_rows(S_T.shape[0], LANES)
    store_mma_rows(base, S_T, rows, columns, (rows < WIDTH) & enabled, in_columns, stride)


@triton.jit
def store_transposed(base, x_T, rows, column, stride, WIDTH: tl.constexpr):
    """Store x_T [columns, rows] transposed to base [rows, stride]: `rows` rows, columns from `column` up to WIDTH.

    The store is made of 16 x 16 blocks, arranged so that a warp stores the columns that it holds as rows of an MMA
    accumulator. No data moves between warps, which would take two barriers per round, and each row of a block is one
    sector of 32 bytes.
    """
    M: tl.constexpr = x_T.shape[0]
    C: tl.constexpr = x_T.shape[1]
    blocks = tl.permute(tl.reshape(x_T.to(base.dtype.element_ty), [M // 16, 16, C // 16, 16]), [3, 0, 2, 1])
    lane = tl.arange(0, 16)
    i = tl.arange(0, C // 16)[None, None, :, None] * 16 + lane[:, None, None, None]
    j = column + tl.arange(0, M // 16)[None, :, None, None] * 16 + lane[None, None, None, :]
    tl.store(base + i * stride + j, blocks, mask=(i < rows) & (j < WIDTH))


@triton.jit
def split_hi_lo(x, dtype: tl.constexpr):
    """Return hi and lo of a narrower dtype with x ~ hi + lo."""
    hi = x.to(dtype)
    return hi, (x - hi.to(tl.float32)).to(dtype)


@triton.jit
def dot_split_lhs(x, y, acc, dtype: tl.constexpr, TERMS: tl.constexpr, PREC: tl.constexpr):
    """Return acc + x y, with x float32 rounded to TERMS terms (hi, or hi + lo) of y's dtype."""
    if TERMS == 2:
        hi, lo = split_hi_lo(x, dtype)
        acc = tl.dot(hi, y, acc, input_precision=PREC)
        return tl.dot(lo, y, acc, input_precision=PREC)
    else:
        return tl.dot(x.to(dtype), y, acc, input_precision=PREC)


@triton.jit
def load_log2_decays(log_decay, tokens, hv, in_time, HV: tl.constexpr, DECAY: tl.constexpr):
    """Load log2 of each token's decay; zeros outside. tokens: rows of the flattened batch."""
    if DECAY == "head":
        return clamp_log2_decay(tl.load(log_decay + tokens * HV + hv, mask=in_time, other=0.0) * LOG2E)
    elif DECAY == "fixed":
        return tl.where(in_time, clamp_log2_decay(tl.load(log_decay + hv) * LOG2E), 0.0)
    else:
        return tl.where(in_time, 0.0, 0.0)


@triton.jit
def clamp_log2_decay(log2_decay):
    """Clamp the log2 of a decay at MIN_LOG2_DECAY; NaN propagates."""
    return tl.where(log2_decay < MIN_LOG2_DECAY, MIN_LOG2_DECAY, log2_decay)


@triton.jit
def load_gate(gates, chunk, which: tl.constexpr, i, C: tl.constexpr):
    """Load one of a chunk's rows G, c, w [C] from gates [slots, HV, 3, C]; chunk: index slot * HV + hv.

    The row is loaded as four copies, because the compiler stages a tile with at least one element per thread in shared
    memory. Of a smaller tile every thread would load all elements that it needs.
    """
    copies = tl.broadcast_to((gates + (chunk * 3 + which) * C + i)[None, :], [4, C])
    first, _ = tl.split(tl.reshape(tl.trans(tl.load(copies)), [C, 2, 2]))
    row, _ = tl.split(first)
    return row


@triton.jit
def load_write_strengths(gates, chunk, i, K: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
    """Load w [C] of a chunk, from gates [slots, HV, 3, C] or, for a decay per channel, [slots, HV, K + C]."""
    if DECAY == "channel":
        return tl.load(gates + chunk * (K + C) + K + i)
    else:
        return load_gate(gates, chunk, 2, i, C)


@triton.jit
def load_chunk_decay(gates, chunk, ks, in_k, K: tl.constexpr, C: tl.constexpr):
    """Load 2^Gend per channel, by which a chunk scales the state; gates [slots, HV, K + C]."""
    return tl.load(gates + chunk * (K + C) + ks, mask=in_k, other=1.0)


@triton.jit
def cumulative_decays(gates, chunk, i, C: tl.constexpr, LOOP: tl.constexpr = True):
    """Load G of a chunk, G before each token, and G at the end of the chunk. LOOP: the load is inside a loop."""
    G = load_gate(gates, chunk, 0, i, C) if LOOP else tl.load(gates + chunk * 3 * C + i)
    G_before = tl.load(gates + chunk * 3 * C + i - 1, mask=i > 0, other=0.0)
    G_end = tl.load(gates + chunk * 3 * C + C - 1)
    return G, G_before, G_end


@triton.jit
def clamp_away_from_zero(b, MIN_BETA: tl.constexpr):
    """Clamp |b| to at least MIN_BETA, which is negligible, so that a product with b can be divided by b again."""
    return tl.where(b < 0.0, tl.minimum(b, -MIN_BETA), tl.maximum(b, MIN_BETA))


@triton.jit
def negligible_prefix(decay_bounds, slot, count, hv, HV: tl.constexpr, MAX_CHUNKS: tl.constexpr):
    """Return the first of `count` chunks from `slot` on whose initial state is not negligible after the last one.

    The states before earlier chunks decay below 2^-40. Returns `count` if all states do. decay_bounds [slots, HV]:
    upper bounds of the log2 of the factor by which a chunk scales any state. A NaN bound makes no state negligible.
    """
    c = tl.arange(0, MAX_CHUNKS)
    bound = tl.load(decay_bounds + tl.cast(slot + c, tl.int64) * HV + hv, mask=c < count, other=0.0)
    from_c_to_end = tl.sum(bound, 0) - tl.cumsum(bound, 0) + bound
    return tl.min(tl.where((from_c_to_end < -40.0) & (c < count), MAX_CHUNKS, c), 0)


@triton.jit
def significant_prefix(decay_bounds, slot, count, hv, HV: tl.constexpr, MAX_CHUNKS: tl.constexpr):
    """Return how many of `count` chunks from `slot` on contribute to the gradient of the state before them all.

    The contributions of later chunks decay below 2^-40.
    """
    c = tl.arange(0, MAX_CHUNKS)
    bound = tl.load(decay_bounds + tl.cast(slot + c, tl.int64) * HV + hv, mask=c < count, other=0.0)
    before_c = tl.cumsum(bound, 0) - bound
    return tl.max(tl.where((before_c < -40.0) | (c >= count), 0, c + 1), 0)
