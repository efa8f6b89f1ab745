"""One token of attention to M memory slots with a router, from the products of the input up to the output parts.

    q, k = norm(silu(q)), norm(silu(k)),    v = silu(v)
    r: a share for the `ACTIVE` slots with the largest scores x, and 0 for the others; of equal scores the first slots
       are active. sigmoid: sigmoid(x) / (sum of those of active slots + 1e-9); softmax: softmax(x)
    log a = -r exp(A_log) softplus(decay + dt_bias),    w = 1 - a
    K <- Diag(a) K + w k^T,    V <- Diag(a) V + w v^T,    o = V^T softmax(scale K q)

B rows, H heads, G key-value heads, M slots, K key width, V value width
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.decode.kernels.step_parts import activate, softplus
from deltazoo.backends.triton.device.overlap import prefetch_state, start_next, wait_for_previous
from deltazoo.backends.triton.element.kernels.channels import load_raw
from deltazoo.backends.triton.element.kernels.rg_lru_step import one_minus_exp

ROUTER_EPS: tl.constexpr = tl.constexpr(1e-9)


class SlotTraits(NamedTuple):
    """Compile-time parameters.

    Args:
        H, G, M, K, V: sizes. BM, BK, BV: M, K and V as powers of two. STRIDE: elements from row to row of the products.
        ACTIVE: slots that a token writes to. SOFTMAX: whether r is a softmax. EPS: of the norms.
        OVERLAP: see device/overlap.py.
    """

    H: int
    G: int
    M: int
    K: int
    V: int
    BM: int
    BK: int
    BV: int
    STRIDE: int
    ACTIVE: int
    SOFTMAX: bool
    SCALE: float
    EPS: float
    OVERLAP: bool


@triton.jit
def normed(x, weight, traits: tl.constexpr):
    """Apply SiLU and its norm to a key or query."""
    y = activate(x.to(tl.float32), "silu")
    return y * tl.rsqrt(tl.sum(y * y, 0) / traits.K + traits.EPS) * weight.to(tl.float32)


@triton.jit
def route(scores, m, traits: tl.constexpr):
    """Return r, and whether the token writes to each slot, from the scores of the router: [BM]."""
    scores = tl.where(m < traits.M, scores, float("-inf"))
    mine, other = scores[:, None], scores[None, :]
    is_before = (other > mine) | ((other == mine) & (m[None, :] < m[:, None]))
    is_active = (tl.sum(is_before.to(tl.int32), 1) < traits.ACTIVE) & (m < traits.M)
    if traits.SOFTMAX:
        share = tl.exp(scores - tl.max(scores, 0))
        share /= tl.sum(share, 0)
    else:
        share = tl.where(is_active, tl.sigmoid(scores), 0.0)
        share /= tl.sum(share, 0) + ROUTER_EPS
    return tl.where(is_active, share, 0.0), is_active


@triton.jit
def routed_slots_step_kernel(
    q, k, v, decay, scores, q_weight, k_weight, A_log, dt_bias, keys, values, o, traits: tl.constexpr
):  # fmt: skip
    """Decode the token of a head.

    Grid: row, head. Reads q [B, H K], k [B, G K], v [B, G V], decay [B, G] and scores [B, G M] with a row stride;
    q_weight, k_weight [K]; A_log, dt_bias [G]. Updates keys [B, H, M, K] and values [B, H, M, V] float32 in place;
    only active slots are written. Writes o [B, H V].
    """
    H: tl.constexpr = traits.H
    M: tl.constexpr = traits.M
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    row = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    g = h // (H // traits.G)
    m = tl.arange(0, traits.BM)
    c = tl.arange(0, traits.BK)
    e = tl.arange(0, traits.BV)
    keys += (row * H + h) * (M * K)
    values += (row * H + h) * (M * V)
    if traits.OVERLAP:
        start_next()
        prefetch_state(keys, M * K, M * K, max(1, traits.BM * traits.BK // 32))
        prefetch_state(values, M * V, M * V, max(1, traits.BM * traits.BV // 32))
        wait_for_previous()
    at_keys = keys + m[:, None] * K + c[None, :]
    at_values = values + m[:, None] * V + e[None, :]
    in_keys = (m < M)[:, None] & (c < K)[None, :]
    in_values = (m < M)[:, None] & (e < V)[None, :]
    products = row * traits.STRIDE
    # all loads come before the first use of one, which waits for the memory
    query = load_raw(q + products + h * K, c, c < K)
    key = load_raw(k + products + g * K, c, c < K)
    value = load_raw(v + products + g * V, e, e < V)
    weight_q = load_raw(q_weight, c, c < K)
    weight_k = load_raw(k_weight, c, c < K)
    score = load_raw(scores + products + g * M, m, m < M)
    raw = tl.load(decay + products + g)
    bias = tl.load(dt_bias + g)
    log_rate = tl.load(A_log + g)
    query = normed(query, weight_q, traits)
    key = normed(key, weight_k, traits)
    value = activate(value.to(tl.float32), "silu")
    log_decay = -tl.exp(log_rate.to(tl.float32)) * softplus(raw.to(tl.float32) + bias.to(tl.float32))
    r, is_active = route(score.to(tl.float32), m, traits)
    log_a = r * log_decay
    a = tl.exp(log_a)[:, None]
    w = one_minus_exp(log_a)[:, None]
    K_state = a * tl.load(at_keys, mask=in_keys, other=0.0) + w * key[None, :]
    tl.store(at_keys, K_state, mask=in_keys & is_active[:, None])
    logits = tl.where(m < M, traits.SCALE * tl.sum(K_state * query[None, :], 1), float("-inf"))
    weights = tl.exp(logits - tl.max(logits, 0))
    V_state = a * tl.load(at_values, mask=in_values, other=0.0) + w * value[None, :]
    tl.store(at_values, V_state, mask=in_values & is_active[:, None])
    out = tl.sum((weights / tl.sum(weights, 0))[:, None] * V_state, 0)
    tl.store(o + row * (H * V) + h * V + e, out.to(o.dtype.element_ty), mask=e < V)
