"""Attention of new tokens to the cached keys, whose queries have moved to the start of the call.

path_flash.py defines the online softmax, path_tiles.py the sizes. S slots of a row of the cache
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.attention.kernels.online_softmax import add_scores
from deltazoo.backends.triton.attention.kernels.path_tiles import LOG2E, load_tile, locate_tile, store_tile


@triton.jit(do_not_specialize=["N", "T", "S"])
def path_past_kernel(
    q_start, cache_k, cache_v, seen, sums, past_bias, o_local, lse_local, cu, N, T, S, BM: tl.constexpr,
    BN: tl.constexpr, traits: tl.constexpr,
):  # fmt: skip
    """Add the cached keys to the attention within blocks.

    Grid: tiles of BM queries x H. Reads q_start; row n of cache_k [N, S, G, CACHE], whose first D channels are keys,
    and of cache_v [N, S, G, V], for sequence n; seen [N] int64, the slots in use; sums, past_bias [N, S, H] float32,
    the gates from each cached token to the start, or None. Updates o_local and lse_local.
    """
    H: tl.constexpr = traits.H
    G: tl.constexpr = traits.G
    D: tl.constexpr = traits.D
    V: tl.constexpr = traits.V
    h = tl.program_id(0) % H
    g = h // (H // G)
    n, start, length, t0 = locate_tile(tl.program_id(0) // H, cu, N, T, BM, traits.PACKED)
    if t0 < length:
        i = t0 + tl.arange(0, BM)
        in_time = i < length
        q_t = load_tile(q_start + (start * H + h) * D, i, in_time, H * D, D, traits.BD, True)
        o_t = load_tile(o_local + (start * H + h) * V, i, in_time, H * V, V, traits.BV, True)
        m = tl.load(lse_local + (start + i) * H + h, mask=in_time, other=0.0)
        l = tl.full([BM], 1.0, tl.float32)
        gate_q = l
        if traits.GATED:
            gate_q = (tl.load(sums + (start + i) * H + h, mask=in_time, other=0.0) * LOG2E).to(tl.float32)
        count = tl.minimum(tl.load(seen + n), S).to(tl.int32)
        row = tl.cast(n, tl.int64) * S
        for j in range(0, count, BN):
            s = j + tl.arange(0, BN)
            in_use = s < count
            at = cache_k + (row * G + g) * traits.CACHE
            k_t = load_tile(at, s, in_use, G * traits.CACHE, D, traits.BD, True).to(q_t.dtype)
            x = tl.dot(q_t, tl.trans(k_t), input_precision=traits.PREC) * (traits.SCALE * LOG2E)
            if traits.GATED:
                bias = tl.load(past_bias + (row + s) * H + h, mask=in_use, other=0.0)
                x += gate_q[:, None] + (bias * LOG2E)[None, :]
            x = tl.where(in_use[None, :], x, float("-inf"))
            p, m, l, o_t = add_scores(x, m, l, o_t)
            v_t = load_tile(cache_v + (row * G + g) * V, s, in_use, G * V, V, traits.BV, True).to(q_t.dtype)
            o_t = tl.dot(p.to(v_t.dtype), v_t, o_t, input_precision=traits.PREC)
        store_tile(o_local + (start * H + h) * V, o_t / l[:, None], i, in_time, H * V, V)
        tl.store(lse_local + (start + i) * H + h, m + tl.log2(l), mask=in_time)
