"""Decoding through a mixture of experts: only the weights of the active experts are read.

    r = W_r n,  n = norm_weight * x / sqrt(mean(x^2) + eps)               by gemv_kernel, in float32
    experts: the k largest s + bias, s = softmax(r) or sigmoid(r);  w = SCALE s, or SCALE s / (sum of s over the k)
    h_j = phi(G_j n) * (U_j n), or phi(U_j n)         of each active expert, and of the shared expert
    y = x + sum_j w_j V_j h_j + sigmoid(w_s n) V_s h_s

B rows, D width, E experts, k active ones, F hidden width, S hidden width of the shared expert (0: none)
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.overlap import LINE, prefetch_line, start_next, wait_for_previous
from deltazoo.backends.triton.gemv.kernels.gemv import activate


class ExpertTraits(NamedTuple):
    """Compile-time properties.

    Args:
        D, E, ACTIVE, F, S: sizes. ROUTES: logits of a row: E, and one more with a gate of the shared expert.
        BE: E rounded up to a power of two; RANKED: experts of a program of `select_kernel`.
        ROWS, OUTPUTS: hidden channels and outputs of a program. BLOCK: inputs that it reads at a time.
        BF, BS: F and S rounded up to powers of two.
    """

    D: int
    E: int
    ACTIVE: int
    F: int
    S: int
    ROUTES: int
    BE: int
    RANKED: int
    ROWS: int
    OUTPUTS: int
    BLOCK: int
    BF: int
    BS: int
    BIAS: bool
    SIGMOID: bool
    NORMALIZE: bool
    SCALE: float
    ACTIVATION: str
    GATED: bool
    EPS: float
    OVERLAP: bool


@triton.jit
def select_kernel(logits, bias, expert, score, traits: tl.constexpr):
    """Rank RANKED experts of a row, and store those among its k best at their rank.

    Grid: row, block of experts. Reads logits [B, ROUTES] float32, bias [E]. Writes expert [B, k] int32 and score
    [B, k] float32. Of equal experts the first is better; NaN counts as the largest number.
    """
    E: tl.constexpr = traits.E
    BLOCKS: tl.constexpr = (E + traits.RANKED - 1) // traits.RANKED
    if traits.OVERLAP:
        start_next()
        wait_for_previous()
    b = tl.program_id(0) // BLOCKS
    own = tl.program_id(0) % BLOCKS * traits.RANKED + tl.arange(0, traits.RANKED)
    every = tl.arange(0, traits.BE)
    of_row = logits + b * traits.ROUTES
    r = tl.load(of_row + every, mask=every < E, other=float("-inf"))
    r_own = tl.load(of_row + own, mask=own < E, other=float("-inf"))
    if traits.SIGMOID:
        s = tl.sigmoid(r)
        s_own = tl.sigmoid(r_own)
    else:
        largest = tl.max(r, 0)
        total = tl.sum(tl.exp(r - largest), 0)
        s = tl.exp(r - largest) / total
        s_own = tl.exp(r_own - largest) / total
    key = s
    key_own = s_own
    if traits.BIAS:
        key += tl.load(bias + every, mask=every < E, other=0.0).to(tl.float32)
        key_own += tl.load(bias + own, mask=own < E, other=0.0).to(tl.float32)
    key = tl.where(every < E, tl.where(key != key, float("inf"), key), float("-inf"))
    key_own = tl.where(key_own != key_own, float("inf"), key_own)
    first = every[None, :] < own[:, None]
    better = (key[None, :] > key_own[:, None]) | ((key[None, :] == key_own[:, None]) & first & (every < E)[None, :])
    rank = tl.sum(better.to(tl.int32), 1)
    is_active = (own < E) & (rank < traits.ACTIVE)
    at = b * traits.ACTIVE + rank
    tl.store(expert + at, own, mask=is_active)
    tl.store(score + at, s_own, mask=is_active)


@triton.jit
def prefetch_rows(w, row, size, traits: tl.constexpr):
    """Prefetch rows of w [size, D] into the L2 cache."""
    D: tl.constexpr = traits.D
    BLOCK: tl.constexpr = traits.BLOCK
    UNIT: tl.constexpr = LINE // (w.dtype.element_ty.primitive_bitwidth // 8)
    at = w + tl.minimum(row, size - 1).to(tl.int64)[:, None] * D
    for start in tl.static_range(0, D, BLOCK):
        d = start + tl.arange(0, max(1, BLOCK // UNIT)) * UNIT
        prefetch_line(at + tl.minimum(d, D - 1)[None, :])


@triton.jit
def expert_hidden_kernel(x, norm_weight, expert, w, shared, h, traits: tl.constexpr):
    """Compute ROWS hidden channels of one active expert, or of the shared one, for one row.

    Grid: row, then the tiles of ROWS channels of k experts and of the shared expert. Reads x [B, D], norm_weight [D],
    expert [B, k], w [E, F, D], shared [S, D], with GATED twice as many rows, the gate's first. Writes h [B, k F + S].
    """
    D: tl.constexpr = traits.D
    F: tl.constexpr = traits.F
    S: tl.constexpr = traits.S
    ROWS: tl.constexpr = traits.ROWS
    BLOCK: tl.constexpr = traits.BLOCK
    TILES: tl.constexpr = (F + ROWS - 1) // ROWS
    ROUTED: tl.constexpr = traits.ACTIVE * TILES
    PROGRAMS: tl.constexpr = ROUTED + (S + ROWS - 1) // ROWS
    TIMES: tl.constexpr = 2 if traits.GATED else 1
    ACTIVATION: tl.constexpr = traits.ACTIVATION
    b = tl.program_id(0) // PROGRAMS
    tile = tl.program_id(0) % PROGRAMS
    if traits.OVERLAP:
        if S > 0:
            if tile >= ROUTED:
                own = (tile - ROUTED) * ROWS + tl.arange(0, ROWS)
                prefetch_rows(shared, own, S, traits)
                if traits.GATED:
                    prefetch_rows(shared + S * D, own, S, traits)
        wait_for_previous()
        start_next()  # not before: the next kernel reads the selected experts before it waits
    choice = tl.minimum(tile // TILES, traits.ACTIVE - 1)
    base = w + tl.load(expert + b * traits.ACTIVE + choice).to(tl.int64) * (TIMES * F * D)
    if S > 0:
        base = tl.where(tile < ROUTED, base, shared)
    base = tl.multiple_of(base, 16)
    size = tl.where(tile < ROUTED, F, S)
    column = tl.where(tile < ROUTED, tile // TILES, traits.ACTIVE) * F
    row = tl.where(tile < ROUTED, tile % TILES, tile - ROUTED) * ROWS + tl.arange(0, ROWS)
    in_size = row < size
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    ups = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        in_d = d < D
        mask = in_size[:, None] & in_d[None, :]
        weight = tl.load(base + row[:, None] * D + d[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        if traits.GATED:
            at = (size + row)[:, None] * D + d[None, :]
            weight_up = tl.load(base + at, mask=mask, other=0.0, eviction_policy="evict_first")
        inputs = tl.load(x + b * D + d, mask=in_d, other=0.0).to(tl.float32)
        squares += inputs * inputs
        inputs *= tl.load(norm_weight + d, mask=in_d, other=0.0).to(tl.float32)
        sums += weight.to(tl.float32) * inputs[None, :]
        if traits.GATED:
            ups += weight_up.to(tl.float32) * inputs[None, :]
    factor = tl.rsqrt(tl.sum(squares, 0) / D + traits.EPS)
    out = activate(tl.sum(sums, 1) * factor, ACTIVATION)
    if traits.GATED:
        out *= tl.sum(ups, 1) * factor
    at = b * (traits.ACTIVE * F + S) + column + row
    tl.store(h + at, out.to(h.dtype.element_ty), mask=in_size)


@triton.jit
def load_row_weights(w, row, in_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of w [.., WIDTH], [ROWS, BLOCK]."""
    f = tl.arange(0, BLOCK)
    mask = in_rows[:, None] & (f < WIDTH)[None, :]
    return tl.load(w + row[:, None] * WIDTH + f[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_hidden(h, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load hidden channels, [ROWS, BLOCK] with equal rows: [1, BLOCK] would have another layout than the weights."""
    f = tl.arange(0, BLOCK)[None, :] + tl.zeros([ROWS, 1], tl.int32)
    return tl.load(h + f, mask=f < WIDTH, other=0.0)


@triton.jit(do_not_specialize=["early"])
def expert_output_kernel(x, logits, expert, score, h, w, shared, y, early, traits: tl.constexpr):
    """Compute OUTPUTS outputs of one row: the sum over its active experts and the shared one, added to x.

    Grid: row, tile of OUTPUTS outputs. Reads x [B, D], logits [B, ROUTES], expert and score [B, k], h [B, k F + S],
    w [E, D, F], shared [D, S]. Writes y [B, D]. early: as for `gemv_kernel`.
    """
    D: tl.constexpr = traits.D
    E: tl.constexpr = traits.E
    F: tl.constexpr = traits.F
    S: tl.constexpr = traits.S
    ACTIVE: tl.constexpr = traits.ACTIVE
    OUTPUTS: tl.constexpr = traits.OUTPUTS
    BF: tl.constexpr = traits.BF
    TILES: tl.constexpr = (D + OUTPUTS - 1) // OUTPUTS
    if traits.OVERLAP:
        start_next()
    b = tl.program_id(0) // TILES
    row = tl.program_id(0) % TILES * OUTPUTS + tl.arange(0, OUTPUTS)
    in_rows = row < D
    if traits.OVERLAP:
        if early == 0:
            wait_for_previous()
    h += b * (ACTIVE * F + S)
    experts = ()  # every load is issued before the first result is used
    scores = ()
    for j in tl.static_range(ACTIVE):
        experts = experts + (tl.load(expert + b * ACTIVE + j, cache_modifier=".cg").to(tl.int64),)
        scores = scores + (tl.load(score + b * ACTIVE + j, cache_modifier=".cg"),)
    weights = ()
    for j in tl.static_range(ACTIVE):
        weights = weights + (load_row_weights(w + experts[j] * (D * F), row, in_rows, F, BF),)
    if S > 0:
        shared_weights = load_row_weights(shared, row, in_rows, S, traits.BS)
    if traits.OVERLAP:
        wait_for_previous()
    inputs = ()
    for j in tl.static_range(ACTIVE):
        inputs = inputs + (load_hidden(h + j * F, OUTPUTS, F, BF),)
    if S > 0:
        products = shared_weights.to(tl.float32) * load_hidden(h + ACTIVE * F, OUTPUTS, S, traits.BS).to(tl.float32)
    total = 0.0
    sums = 0.0
    for j in tl.static_range(ACTIVE):
        total += scores[j]
        sums += scores[j] * (weights[j].to(tl.float32) * inputs[j].to(tl.float32))
    out = tl.sum(sums, 1)
    if traits.NORMALIZE:
        out *= 1.0 / (total + 1e-20)
    out *= traits.SCALE
    if S > 0:
        of_shared = tl.sum(products, 1)
        if traits.ROUTES > E:
            of_shared *= tl.sigmoid(tl.load(logits + b * traits.ROUTES + E))
        out += of_shared
    at = b * D + row
    out += tl.load(x + at, mask=in_rows, other=0.0).to(tl.float32)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=in_rows)
