"""One decoded token of log-linear attention: every level that holds tokens is read and written once.

    S_j = 2^g S_j - k (b k^T 2^g S_j),    o = lambda_0 (q.k) v + sum_j lambda_j S_j^T q

After the token the levels below the lowest set bit r of t + 1, and its write k v^T, move to level r (tree.py, with
tokens in place of chunks). B batch, HV value heads, K key width, V value width, L levels
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.device.layout import LOG2E
from deltazoo.backends.triton.levels.kernels.tree import count_levels, merged_level


@triton.jit
def level_step_kernel(
    q, k, v, log_decay, erase, weights, states, seen, counts, o,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, KP: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """Decode one token. Grid: row, value head, tile of BV values.

    Reads q, k [B, 1, H, K]; v [B, 1, HV, V]; log_decay, erase (or None) [B, 1, HV]; weights, lambda, [B, 1, HV, L];
    seen [B], the tokens so far; counts [B], 1 or 0: the row has no token, its states stay and its output is 0.
    Updates states [B, L - 1, HV, K, V] in place. Writes o [B, 1, HV, V].
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    vs = tl.program_id(0) % TILES * BV + tl.arange(0, BV)
    hv = tl.program_id(0) // TILES % HV
    b = tl.program_id(0) // (TILES * HV)
    h = hv // (HV // H)
    ks = tl.arange(0, KP)
    in_k = ks < K
    in_v = vs < V
    inside = in_k[:, None] & in_v[None, :]
    head = b * HV + hv
    present = tl.load(counts + b) > 0
    out = tl.zeros([BV], tl.float32)
    if present:
        position = tl.load(seen + b)
        LAST: tl.constexpr = 1 << (L - 2)
        levels = (position & (LAST - 1)).to(tl.int32) | tl.where(position >= LAST, LAST, 0)
        merged = merged_level((position & (2 * LAST - 1)).to(tl.int32), L - 1)
        q_row = tl.load(q + (b * H + h) * K + ks, mask=in_k, other=0.0).to(tl.float32)
        k_row = tl.load(k + (b * H + h) * K + ks, mask=in_k, other=0.0).to(tl.float32)
        v_row = tl.load(v + head * V + vs, mask=in_v, other=0.0).to(tl.float32)
        decay = tl.exp2(tl.load(log_decay + head).to(tl.float32) * LOG2E)
        moved = k_row[:, None] * v_row[None, :]
        out += tl.load(weights + head * L).to(tl.float32) * tl.sum(q_row * k_row, 0) * v_row
        base = states + (tl.cast(b, tl.int64) * (L - 1) * HV + hv) * (K * V) + ks[:, None] * V + vs[None, :]
        STRIDE = tl.cast(HV * K * V, tl.int64)
        bit = levels & -levels
        following = tl.load(base + count_levels(bit - 1) * STRIDE, mask=inside & (bit > 0), other=0.0)
        for _ in range(count_levels(levels)):
            S = decay * following
            current = bit
            levels = levels ^ bit
            bit = levels & -levels
            # the next level is loaded while this one is reduced
            following = tl.load(base + count_levels(bit - 1) * STRIDE, mask=inside & (bit > 0), other=0.0)
            if erase is not None:
                erased = tl.load(erase + head).to(tl.float32) * tl.sum(k_row[:, None] * S, 0)
                S -= k_row[:, None] * erased[None, :]
            level = count_levels(current - 1)
            out += tl.load(weights + head * L + level + 1).to(tl.float32) * tl.sum(q_row[:, None] * S, 0)
            if current <= merged:
                moved += S
                S = tl.zeros_like(S)
            tl.store(base + level * STRIDE, S, mask=inside)
        tl.debug_barrier()  # several threads may own an element, and one could store the old value after this one
        tl.store(base + count_levels(merged - 1) * STRIDE, moved, mask=inside)
    tl.store(o + head * V + vs, out, mask=in_v)
