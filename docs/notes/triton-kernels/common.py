"""Index arithmetic and small algebra that every kernel of the family shares.

N sequences (rows of a batch or of a pack), slot: a chunk's place among all chunks, C chunk length
"""

import triton
import triton.language as tl


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
def chunks_forgotten(gates, slot, count, hv, HV: tl.constexpr, C: tl.constexpr, MOST: tl.constexpr):
    """How many chunks from `slot` on, of `count`, decay below 2^-40 by the end of the last: one more than may be left out.

    Holds where an update never lengthens the state: the caller says so.
    """
    c = tl.arange(0, triton.next_power_of_2(MOST))
    at = (tl.cast(slot + c, tl.int64) * HV + hv) * 3 * C + C - 1
    G = tl.load(gates + at, mask=c < count, other=0.0)
    left = tl.sum(G, 0) - tl.cumsum(G, 0) + G
    return tl.sum(((left < -40.0) & (c < count)).to(tl.int32), 0)


@triton.jit
def load_rows(base, rows, columns, in_rows, in_columns, stride):
    """A tile [rows, columns] of a row-major matrix; zeros outside."""
    return tl.load(
        base + rows[:, None] * stride + columns[None, :], mask=in_rows[:, None] & in_columns[None, :], other=0.0
    )


@triton.jit
def prefetch_rows(base, rows, in_rows, stride, WIDTH: tl.constexpr):
    """Ask for rows of WIDTH elements to come to L2; rows outside ask for row 0."""
    LINE: tl.constexpr = 128 // (base.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = triton.next_power_of_2((WIDTH + LINE - 1) // LINE)
    rows = tl.where(in_rows, rows, 0)
    columns = tl.minimum(tl.arange(0, LINES) * LINE, WIDTH - 1)
    address = (base + rows[:, None] * stride + columns[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_rows(base, tile, rows, columns, in_rows, in_columns, stride):
    tl.store(
        base + rows[:, None] * stride + columns[None, :],
        tile.to(base.dtype.element_ty),
        mask=in_rows[:, None] & in_columns[None, :],
    )


@triton.jit
def double_level(X, L, level: tl.constexpr, C: tl.constexpr, OPERAND: tl.constexpr, PREC: tl.constexpr):
    """Merge inverted diagonal blocks of size 2^level into blocks of twice the size: X <- X - X (L o mask) X."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    below = (((i >> level) ^ (j >> level)) == 1) & (i > j)
    M = tl.where(below, L, 0.0).to(OPERAND)
    Y = tl.dot(M, X.to(OPERAND), input_precision=PREC)
    return X - tl.dot(X.to(OPERAND), Y.to(OPERAND), input_precision=PREC)


@triton.jit
def unit_lower_inverse(L, C: tl.constexpr, OPERAND: tl.constexpr, PREC: tl.constexpr, BLOCK: tl.constexpr):
    """(I + L)^-1 for strictly lower L [C, C] by level doubling, s = 1, 2, ..., C / 2.

    Every intermediate is the inverse of the diagonal blocks of size 2s, so none grows beyond the result. The levels
    below BLOCK run on the diagonal blocks alone, as one batch.
    """
    R: tl.constexpr = C // BLOCK
    if R > 1:
        batch = tl.arange(0, R)
        own = (batch[:, None] == batch[None, :])[:, None, :, None]
        D = tl.sum(tl.where(own, tl.reshape(L, [R, BLOCK, R, BLOCK]), 0.0), 2)
        i = tl.arange(0, BLOCK)[None, :, None]
        j = tl.arange(0, BLOCK)[None, None, :]
        X = tl.where(i == j, 1.0, tl.where(((i ^ j) == 1) & (i > j), -D, 0.0))
        for level in tl.static_range(1, 7):
            if 2**level < BLOCK:
                below = (((i >> level) ^ (j >> level)) == 1) & (i > j)
                M = tl.where(below, D, 0.0).to(OPERAND)
                Y = tl.dot(M, X.to(OPERAND), input_precision=PREC)
                X -= tl.dot(X.to(OPERAND), Y.to(OPERAND), input_precision=PREC)
        X = tl.reshape(tl.where(own, X[:, :, None, :], 0.0), [C, C])
    else:
        i = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
        X = tl.where(i == j, 1.0, tl.where(((i ^ j) == 1) & (i > j), -L, 0.0))
    for level in tl.static_range(1, 7):
        if 2**level < C:
            if 2**level >= BLOCK or R == 1:
                X = double_level(X, L, level, C, OPERAND, PREC)
    return X
