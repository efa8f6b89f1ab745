"""One token of RWKV-4 from the products of the shifted input up to the output map, per channel.

    o = sigmoid(r) (s e^(m - n) + e^(u + k - n) v) / (z e^(m - n) + e^(u + k - n)),    n = max(m, u + k)
    [s, z] <- e^(m - exp(w) - m') [s, z] + e^(k - m') [v, 1],    m <- m' = max(m - exp(w), k)

The state is divided by e^m. The token shift's state becomes the input of the mixer.

B rows, C channels, D width
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.overlap import start_next, wait_for_previous
from deltazoo.backends.triton.element.kernels.channels import load_channels, load_pairs, store_pairs


class WKVTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        C, D: sizes. BLOCK: channels of a program. BD: channels of the shift's state of a program. Powers of two.
        STRIDE: elements from row to row of the products. OVERLAP: see device/overlap.py.
    """

    C: int
    D: int
    BLOCK: int
    BD: int
    STRIDE: int
    OVERLAP: bool


@triton.jit
def wkv_step_kernel(k, v, r, w, u, x, largest, previous, states, o, traits: tl.constexpr):
    """Decode the token of BLOCK channels of a row.

    Grid: row, block of channels. Reads k, v, r [B, C] with a row stride, w, u [C], x [B, D]. Updates states [B, C, 2]
    (s and z) and largest [B, C] (m) float32, and previous [B, D], in place. Writes o [B, C].
    """
    C: tl.constexpr = traits.C
    D: tl.constexpr = traits.D
    BLOCKS: tl.constexpr = (C + traits.BLOCK - 1) // traits.BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    c = block * traits.BLOCK + tl.arange(0, traits.BLOCK)
    in_c = c < C
    if traits.OVERLAP:
        start_next()
        wait_for_previous()
    states += row * (2 * C)
    products = row * traits.STRIDE
    d = block * traits.BD + tl.arange(0, traits.BD)
    # all loads come before the first use of one, which waits for the memory
    state = load_pairs(states, c, in_c)
    m = load_channels(largest + row * C, c, in_c)
    key = load_channels(k + products, c, in_c)
    value = load_channels(v + products, c, in_c)
    receptance = load_channels(r + products, c, in_c)
    bonus_weight = load_channels(u, c, in_c)
    log_rate = load_channels(w, c, in_c)
    token = tl.load(x + row * D + d, mask=d < D, other=0.0)
    s, z = tl.split(state)
    current = key + bonus_weight
    n = tl.maximum(m, current)
    past = tl.exp(m - n)
    bonus = tl.exp(current - n)
    out = tl.sigmoid(receptance) * (s * past + bonus * value) / (z * past + bonus)
    tl.store(o + row * C + c, out.to(o.dtype.element_ty), mask=in_c)
    decayed = m - tl.exp(log_rate)
    m = tl.maximum(decayed, key)
    keep = tl.exp(decayed - m)
    write = tl.exp(key - m)
    store_pairs(states, c, in_c, keep * s + write * value, keep * z + write)
    tl.store(largest + row * C + c, m, mask=in_c)
    tl.store(previous + row * D + d, token, mask=d < D)
