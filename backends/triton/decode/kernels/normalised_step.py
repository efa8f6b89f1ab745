"""One token of linear attention, Based, ReBased, gated RFA or mLSTM, from products of the input to the output map.

The last column of a state is the normaliser.

    q, k = phi(q), phi(k)
    S <- a S + w k [v, 1]^T,    [y, n] = scale S^T q
    o = y / (n + eps), or y / (max(|n|, floor) + eps);  then optionally a norm of the head and a gate

    no gates     a = w = 1                                              (linear attention, Based and ReBased)
    sigmoid      a = sigmoid(g), w = 1 - a                                                      (gated RFA)
    exponential  i, f = cap(g + bias), m' = max(m + log sigmoid(f), i), cap(x) = 15 tanh(x / 15)    (mLSTM)
                 a = sigmoid(f) exp(m - m'), w = exp(i - m'), floor = exp(-m')

phi is the identity, elu(x) + 1, products of pairs of channels (pair_features.py), or
[sin(G^T sigma x), cos(G^T sigma x)] / sqrt(R) with x / |x| for x.
H key heads, HV value heads, K channels of q and k, R random directions, V value width
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.decode.kernels.pair_features import pair_features
from deltazoo.backends.triton.decode.kernels.step_parts import load_head, norm_and_gate, softplus
from deltazoo.backends.triton.device.overlap import prefetch_state, start_next, wait_for_previous
from deltazoo.backends.triton.element.kernels.complex_step import cos_and_sin

CAP: tl.constexpr = tl.constexpr(15.0)
UNIT_EPS: tl.constexpr = tl.constexpr(1e-6)


class NormalisedTraits(NamedTuple):
    """Compile-time properties.

    Args:
        QKV_STRIDE, RAW_STRIDE, GATE_STRIDE: elements from row to row of qkv, raw and gate.
        H, HV, K, R, V: sizes; R is 0 without random features. HALVES: of the rows of the state: 2 with them.
        ROWS: of a half. BR: ROWS as a power of 2. TILE_ROWS, BV: rows and columns that are processed at a time, powers
        of 2; TILE_ROWS is BR, or less if there is one half.
        INPUTS: channels of q and k of a product with the directions, or at least K: a power of 2.
        GATES: "sigmoid", "exponential" or "". FEATURE: "elu+1", "taylor", "quadratic" or "".
        KEY_NORM: whether q and k pass a layer norm, with KEY_EPS, before "taylor" or "quadratic".
        DIVISOR: "sum": n + eps; "floor": with FLOOR; "one": with the floor of the exponential gates.
        NORM to GATE_BEFORE_NORM: as in `StepTraits`. OVERLAP: see device/overlap.py.
    """

    QKV_STRIDE: int
    RAW_STRIDE: int
    GATE_STRIDE: int
    H: int
    HV: int
    K: int
    R: int
    V: int
    HALVES: int
    ROWS: int
    BR: int
    BV: int
    TILE_ROWS: int
    INPUTS: int
    GATES: str
    FEATURE: str
    KEY_NORM: bool
    KEY_EPS: float
    DIVISOR: str
    FLOOR: float
    EPS: float
    NORM: str
    NORM_PER_HEAD: bool
    NORM_BIAS: bool
    NORM_EPS: float
    GATE: str
    GATE_BEFORE_NORM: bool
    OVERLAP: bool


@triton.jit
def fourier_features(q, k, directions, sigma, traits: tl.constexpr):
    """Return [sine, cosine] of the random directions of a query and of a key. Args: of their head."""
    K: tl.constexpr = traits.K
    R: tl.constexpr = traits.R
    BR: tl.constexpr = traits.BR
    INPUTS: tl.constexpr = traits.INPUTS
    r = tl.arange(0, BR)
    q_angle = tl.zeros([BR], tl.float32)
    k_angle = tl.zeros([BR], tl.float32)
    q_square = 0.0
    k_square = 0.0
    for start in tl.static_range(0, K, INPUTS):
        c = start + tl.arange(0, INPUTS)
        in_k = c < K
        direction = tl.load(
            directions + c[:, None] * R + r[None, :], mask=in_k[:, None] & (r < R)[None, :], other=0.0
        ).to(tl.float32)
        q_c = tl.load(q + c, mask=in_k, other=0.0).to(tl.float32)
        k_c = tl.load(k + c, mask=in_k, other=0.0).to(tl.float32)
        width = tl.load(sigma + c, mask=in_k, other=0.0).to(tl.float32)
        q_square += tl.sum(q_c * q_c, 0)
        k_square += tl.sum(k_c * k_c, 0)
        q_angle += tl.sum((q_c * width)[:, None] * direction, 0)
        k_angle += tl.sum((k_c * width)[:, None] * direction, 0)
    return (
        sine_and_cosine(q_angle * tl.rsqrt(q_square + UNIT_EPS), r < R, R),
        sine_and_cosine(k_angle * tl.rsqrt(k_square + UNIT_EPS), r < R, R),
    )


@triton.jit
def sine_and_cosine(angle, mask, R: tl.constexpr):
    """Return sine and cosine, divided by sqrt(R); zeros outside the mask."""
    turn = angle * 0.15915494309189535
    cos, sin = cos_and_sin(turn - tl.floor(turn))
    factor = tl.where(mask, R**-0.5, 0.0)
    return sin * factor, cos * factor


@triton.jit
def elu_plus_1(x):
    """Return elu(x) + 1."""
    return tl.where(x > 0.0, x + 1.0, tl.exp(x))


@triton.jit
def capped(raw, bias):
    """Return 15 tanh(x / 15) of a gate and its bias."""
    x = tl.load(raw).to(tl.float32) + tl.load(bias).to(tl.float32)
    return (2.0 * tl.sigmoid(x * 2.0 / CAP) - 1.0) * CAP


@triton.jit
def larger(x, y):
    """Return the maximum; NaN propagates."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def step_of_row_tiles(at, S, queries, keys, decay, v, in_v, traits: tl.constexpr):
    """Update columns of a state, TILE_ROWS rows at a time, and return S^T q.

    Args: at, S: addresses and numbers of the first rows. v: of the columns, times w. in_v: mask of the columns.
    """
    ROWS: tl.constexpr = traits.ROWS
    TILE_ROWS: tl.constexpr = traits.TILE_ROWS
    COLUMNS: tl.constexpr = traits.V + 1
    read = tl.zeros_like(S)
    for first in tl.range(0, ROWS, TILE_ROWS):
        rows = first + tl.arange(0, TILE_ROWS)
        in_following = (rows + TILE_ROWS < ROWS)[None, :, None] & in_v[:, None, :]
        ahead = tl.load(at + TILE_ROWS * COLUMNS, mask=in_following, other=0.0)
        S = decay * S + tl.gather(keys, rows, 0)[None, :, None] * v[:, None, :]
        tl.store(at, S, mask=(rows < ROWS)[None, :, None] & in_v[:, None, :])
        read += S * tl.gather(queries, rows, 0)[None, :, None]
        S = ahead
        at += TILE_ROWS * COLUMNS
    return tl.sum(read, 1)


@triton.jit
def normalised_step_kernel(
    qkv, raw, bias, directions, sigma, key_weight, key_bias, norm_weight, gate, largest, states, o, scale,
    traits: tl.constexpr,
):  # fmt: skip
    """Decode the token of one value head.

    Grid: row, value head. Reads qkv [B, 2 H K + HV V], raw [B, HV] (sigmoid) or [B, 2 HV] (exponential) and gate
    [B, HV V], each with a row stride, bias [2 HV], directions [H, K, R], sigma [H, K], key_weight and key_bias [K]
    (KEY_NORM) and norm_weight [V] or [HV V]. Updates states [B, HV, HALVES ROWS, V + 1] float32 and largest [B, HV] (m)
    in place. Writes o [B, HV V].

    A program also processes the last column: programs for one column would read whole sectors of each row again.
    Tiles are [BV / LANES, TILE_ROWS, LANES], so that a warp, whose loads are not vectors because rows have an odd
    number of columns, owns few rows of all columns, and a thread few elements of q and k.
    """
    H: tl.constexpr = traits.H
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    BV: tl.constexpr = traits.BV
    ROWS: tl.constexpr = traits.ROWS
    HALVES: tl.constexpr = traits.HALVES
    GATE: tl.constexpr = traits.GATE  # Triton 3.6 cannot pass a str field of a constexpr tuple to a function
    COLUMNS: tl.constexpr = V + 1
    SIZE: tl.constexpr = HALVES * ROWS * COLUMNS
    TILES: tl.constexpr = (V + BV - 1) // BV
    LANES: tl.constexpr = min(BV, 32)
    head = tl.program_id(0)
    row = tl.cast(head // HV, tl.int64)
    hv = head % HV
    h = hv // (HV // H)
    states += head.to(tl.int64) * SIZE
    if traits.OVERLAP:
        start_next()
        prefetch_state(states, SIZE, 32768, 256)
        wait_for_previous()
    r = tl.arange(0, traits.BR)
    in_r = r < ROWS
    c = tl.arange(0, BV // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    tile_row = tl.arange(0, traits.TILE_ROWS)
    in_rows = (tile_row < ROWS)[None, :, None]
    at = states + tile_row[None, :, None] * COLUMNS + c[:, None, :]
    # the other half follows the features, beside which it would spill registers
    ahead = tl.load(at, mask=in_rows & (c < V)[:, None, :], other=0.0)
    columns = ()
    for half in tl.static_range(HALVES):
        columns = columns + (tl.load(states + (half * ROWS + r) * COLUMNS + V, mask=in_r, other=0.0),)

    qkv += row * traits.QKV_STRIDE
    if traits.R > 0:
        queries, keys = fourier_features(
            qkv + h * K, qkv + (H + h) * K, directions + h * (K * traits.R), sigma + h * K, traits
        )
    elif traits.FEATURE == "taylor" or traits.FEATURE == "quadratic":
        q, k = pair_features(qkv + h * K, qkv + (H + h) * K, key_weight, key_bias, traits)
        queries = (q,)
        keys = (k,)
    else:
        q = tl.load(qkv + h * K + r, mask=in_r, other=0.0).to(tl.float32)
        k = tl.load(qkv + (H + h) * K + r, mask=in_r, other=0.0).to(tl.float32)
        if traits.FEATURE == "elu+1":
            q = tl.where(in_r, elu_plus_1(q), 0.0)
            k = tl.where(in_r, elu_plus_1(k), 0.0)
        queries = (q,)
        keys = (k,)
    decay = 1.0
    write = 1.0
    if traits.GATES == "sigmoid":
        g = tl.load(raw + row * traits.RAW_STRIDE + hv).to(tl.float32)
        decay = tl.sigmoid(g)
        write = tl.sigmoid(-g)
    if traits.GATES == "exponential":
        raw += row * traits.RAW_STRIDE + hv
        log_input = capped(raw, bias + hv)
        log_decay = -softplus(-capped(raw + HV, bias + HV + hv))
        decayed = tl.load(largest + head) + log_decay
        m = larger(decayed, log_input)
        decay = tl.exp(decayed - m)
        write = tl.exp(log_input - m)

    n = 0.0
    written = ()
    for half in tl.static_range(HALVES):
        column = decay * columns[half] + write * keys[half]
        n += tl.sum(column * queries[half], 0)
        written = written + (column,)
    n *= scale
    if traits.DIVISOR == "floor":
        n = larger(tl.abs(n), traits.FLOOR)
    if traits.DIVISOR == "one":
        n = larger(tl.abs(n), tl.exp(-m))
    divisor = n + traits.EPS
    gates = ()
    if GATE != "":
        gates = load_head(gate + row * traits.GATE_STRIDE + hv * V, V, BV, TILES)
    outs = ()
    for i in tl.static_range(TILES):
        in_v = i * BV + c < V
        v = tl.load(qkv + 2 * H * K + hv * V + i * BV + c, mask=in_v, other=0.0).to(tl.float32)
        in_tile = in_rows & in_v[:, None, :]
        out = tl.zeros([BV // LANES, LANES], tl.float32)
        tiles = (ahead,)
        if HALVES > 1:
            tiles = tiles + (tl.load(at + ROWS * COLUMNS + i * BV, mask=in_tile, other=0.0),)
        if i + 1 < TILES:
            ahead = tl.load(at + i * BV + BV, mask=in_rows & (i * BV + BV + c < V)[:, None, :], other=0.0)
        if traits.TILE_ROWS < traits.BR:
            out = step_of_row_tiles(at + i * BV, tiles[0], queries[0], keys[0], decay, write * v, in_v, traits)
        else:
            for half in tl.static_range(HALVES):
                S = decay * tiles[half] + keys[half][None, :, None] * (write * v)[:, None, :]
                tl.store(at + half * (ROWS * COLUMNS) + i * BV, S, mask=in_tile)
                out += tl.sum(S * queries[half][None, :, None], 1)
        outs = outs + (tl.reshape(out * scale / divisor, [BV]),)
    outs = norm_and_gate(outs, gates, norm_weight, norm_weight, hv, BV, GATE, traits)
    for i in tl.static_range(TILES):
        vs = i * BV + tl.arange(0, BV)
        tl.store(o + (row * HV + hv) * V + vs, outs[i].to(o.dtype.element_ty), mask=vs < V)
    tl.debug_barrier()  # several threads may have loaded the same number, and one of them stores it
    for half in tl.static_range(HALVES):
        tl.store(states + (half * ROWS + r) * COLUMNS + V, written[half], mask=in_r)
    if traits.GATES == "exponential":
        tl.store(largest + head, m)
