"""One token of a selective state space from the convolved values up to the output map (Mamba, diagonal Longhorn).

    [r, k, q] = streams,    z = W_dt r + bias
    Mamba      step = softplus(z),    S <- exp(-step exp(A_log)) S + step v k
    Longhorn   step = sigmoid(z),     S <- (1 - d k^2) S + d v k,    d = step / (1 + step |k|^2)
    o = (q^T S + D v) silu(gate)

B rows, C channels, N states per channel, R rank of the step size
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.decode.kernels.step_parts import softplus
from deltazoo.backends.triton.device.overlap import start_next, wait_for_previous


class SelectiveTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        C, N, R: sizes. BN: N as a power of two. BR: ranks of a product, a power of two.
        ROWS, CHANNELS: of a tile, at least 16. SPAN: rows of a program, a multiple of ROWS. STAGES: tiles in flight.
        VALUES, STREAMS, GATE: elements from row to row of v, streams and gate.
        LONGHORN: whether the update is that of Longhorn. OVERLAP: see device/overlap.py.
    """

    C: int
    N: int
    R: int
    BN: int
    BR: int
    ROWS: int
    CHANNELS: int
    SPAN: int
    STAGES: int
    VALUES: int
    STREAMS: int
    GATE: int
    LONGHORN: bool
    OVERLAP: bool


@triton.jit(do_not_specialize=["B"])
def selective_step_kernel(v, streams, gate, to_step, bias, A_log, skip, states, o, B, traits: tl.constexpr):
    """Decode the token of SPAN rows.

    Grid: SPAN rows, CHANNELS channels. Reads v [B, C], streams [B, R + 2 N], gate [B, C], to_step [C, R], bias, skip
    [C] and, of Mamba, A_log [C, N]. Updates states [B, C, N] float32 in place. Writes o [B, C].
    """
    C: tl.constexpr = traits.C
    N: tl.constexpr = traits.N
    R: tl.constexpr = traits.R
    ROWS: tl.constexpr = traits.ROWS
    CHANNELS: tl.constexpr = traits.CHANNELS
    BR: tl.constexpr = traits.BR
    BLOCKS: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    if traits.OVERLAP:
        start_next()
        wait_for_previous()
    channel = tl.program_id(0) % BLOCKS * CHANNELS + tl.arange(0, CHANNELS)
    n = tl.arange(0, traits.BN)
    in_c = channel < C
    in_n = n < N
    weights = ()
    for part in tl.static_range(0, R, BR):
        i = part + tl.arange(0, BR)
        at_weight = to_step + channel[None, :] * R + i[:, None]
        weights = weights + (tl.load(at_weight, mask=in_c[None, :] & (i < R)[:, None], other=0.0),)
    shift = tl.load(bias + channel, mask=in_c, other=0.0).to(tl.float32)[None, :]
    bypass = tl.load(skip + channel, mask=in_c, other=0.0).to(tl.float32)[None, :]
    if not traits.LONGHORN:
        at_rate = A_log + channel[:, None] * N + n[None, :]
        rate = -tl.exp(tl.load(at_rate, mask=in_c[:, None] & in_n[None, :], other=0.0).to(tl.float32))
    first = tl.program_id(0) // BLOCKS * traits.SPAN
    for start in tl.range(first, tl.minimum(first + traits.SPAN, B), ROWS, num_stages=traits.STAGES):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        in_b = row < B
        in_rows = in_b[:, None] & in_c[None, :]
        in_state = in_rows[:, :, None] & in_n[None, None, :]
        at = states + (row[:, None] * C + channel[None, :])[:, :, None] * N + n[None, None, :]
        S = tl.load(at, mask=in_state, other=0.0)
        stream = streams + row[:, None] * traits.STREAMS
        k = tl.load(stream + R + n[None, :], mask=in_b[:, None] & in_n[None, :], other=0.0).to(tl.float32)
        q = tl.load(stream + R + N + n[None, :], mask=in_b[:, None] & in_n[None, :], other=0.0).to(tl.float32)
        value = tl.load(v + row[:, None] * traits.VALUES + channel[None, :], mask=in_rows, other=0.0).to(tl.float32)
        g = tl.load(gate + row[:, None] * traits.GATE + channel[None, :], mask=in_rows, other=0.0).to(tl.float32)
        z = tl.zeros([ROWS, CHANNELS], tl.float32)
        for part in tl.static_range(len(weights)):
            rank = part * BR + tl.arange(0, BR)
            low = tl.load(stream + rank[None, :], mask=in_b[:, None] & (rank < R)[None, :], other=0.0)
            z = tl.dot(low, weights[part], z, input_precision="ieee")
        z += shift
        if traits.LONGHORN:
            step = tl.sigmoid(z)
            k_square = k * k
            write = step / (1.0 + step * tl.sum(k_square, 1)[:, None])
            decay = 1.0 - write[:, :, None] * k_square[:, None, :]
        else:
            write = softplus(z)
            decay = tl.exp(write[:, :, None] * rate[None, :, :])
        S = S * decay + (write * value)[:, :, None] * k[:, None, :]
        tl.store(at, S, mask=in_state)
        out = tl.sum(S * q[:, None, :], 2) + bypass * value
        out *= g * tl.sigmoid(g)
        tl.store(o + row[:, None] * C + channel[None, :], out.to(o.dtype.element_ty), mask=in_rows)
