"""Tiles of the chunks of one sequence: which rows they are, loads, stores, and products.

M tokens per chunk, E head width, H heads
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.chunk.kernels.portable.channel.dplr_prepare import round_operand


@triton.jit
def load_span(spans, n):
    """Load the span of sequence n (backends/ops/fast_weights/spans.py)."""
    at = spans + n.to(tl.int64) * 4
    return tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3) > 0


@triton.jit
def count_chunks(tokens, place, M: tl.constexpr):
    """Return the number of chunks of a span whose first token is at `place` of its chunk."""
    return tl.where(tokens > 0, tl.cdiv(place + tokens, M), 0)


@triton.jit
def chunk_rows(start, tokens, place, i, rows, M: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the rows of the tokens of chunk i, [BLOCK_M], and where there is a token."""
    m = tl.arange(0, BLOCK_M)
    at = i * M + m - place  # of the token in its sequence
    row = start + at
    return row, (m < M) & (at >= 0) & (at < tokens) & (row >= 0) & (row < rows)


@triton.jit
def load_tokens(x, row, present, h, H: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Load x [rows, H, E] at these rows as [BLOCK_M, BLOCK_E] in its dtype; zeros where there is no token."""
    e = tl.arange(0, BLOCK_E)
    at = (row[:, None] * H + h) * E + e[None, :]
    return tl.load(x + at, mask=present[:, None] & (e < E)[None, :], other=0.0)


@triton.jit
def store_tokens(x, values, row, present, h, H: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Store values [BLOCK_M, BLOCK_E] to x [rows, H, E]."""
    e = tl.arange(0, BLOCK_E)
    at = (row[:, None] * H + h) * E + e[None, :]
    tl.store(x + at, values.to(x.dtype.element_ty), mask=present[:, None] & (e < E)[None, :])


@triton.jit
def load_matrix(x, index, R: tl.constexpr, C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Load matrix `index` of x [.., R, C] in float32, zero outside."""
    r = tl.arange(0, BLOCK_R)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    x += tl.cast(index, tl.int64) * (R * C)  # a scalar: addresses of a tile take registers
    if R == BLOCK_R and C == BLOCK_C:
        values = tl.load(x + (r * C + c))
    else:
        values = tl.load(x + (r * C + c), mask=(r < R) & (c < C), other=0.0)
    return values.to(tl.float32)


@triton.jit
def store_matrix(x, values, index, R: tl.constexpr, C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Store matrix `index` of x [.., R, C]."""
    r = tl.arange(0, BLOCK_R)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    x += tl.cast(index, tl.int64) * (R * C)
    if R == BLOCK_R and C == BLOCK_C:
        tl.store(x + (r * C + c), values)
    else:
        tl.store(x + (r * C + c), values, mask=(r < R) & (c < C))


@triton.jit
def load_vector(x, index, C: tl.constexpr, BLOCK: tl.constexpr):
    """Load row `index` of x [.., C] in float32, zero outside."""
    c = tl.arange(0, BLOCK)
    return tl.load(x + tl.cast(index, tl.int64) * C + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit
def store_vector(x, values, index, C: tl.constexpr, BLOCK: tl.constexpr):
    """Store row `index` of x [.., C]."""
    c = tl.arange(0, BLOCK)
    tl.store(x + tl.cast(index, tl.int64) * C + c, values, mask=c < C)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Multiply float32 tiles on the tensor cores, in float32 accumulators."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def rounded(x):
    """Round float32 to the nearest tf32 number. `tl.dot` truncates, and errors of one sign accumulate."""
    return round_operand(x, False)
