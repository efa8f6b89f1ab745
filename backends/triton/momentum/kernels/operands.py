"""Kernels of the chunk operands of the delta rule with momentum: A, P and the gates, and the gradients of the gates.

`backends/ops/momentum_chunks.py` has the equations. G chunk slots, C tokens of a chunk, H heads, K key width
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.chunk.kernels.portable.prepare import unit_lower_inverse
from deltazoo.backends.triton.momentum.kernels.tiles import load_tile


@triton.jit
def load_token_gate(x, slot, h, traits: tl.constexpr):
    """Load a gate x [G, C, H] of a chunk, [C]."""
    i = tl.arange(0, traits.C)
    return tl.load(x + (slot * traits.C + i) * traits.H + h).to(tl.float32)


@triton.jit
def products(total):
    """Return exp(total_t - total_s) for s < t, and 0 elsewhere."""
    i = tl.arange(0, total.shape[0])
    later = i[:, None] > i[None, :]
    return tl.where(later, tl.exp(tl.where(later, total[:, None] - total[None, :], 0.0)), 0.0)


@triton.jit
def last(x):
    """Return the last row of x [C, C]."""
    i = tl.arange(0, x.shape[0])
    return tl.sum(tl.where((i == x.shape[0] - 1)[:, None], x, 0.0), 0)


@triton.jit
def key_products(q, k, slot, h, traits: tl.constexpr):
    """Compute k k^T and q k^T of a chunk."""
    C: tl.constexpr = traits.C
    keys = tl.zeros([C, C], tl.float32)
    queries = tl.zeros([C, C], tl.float32)
    for start in range(0, traits.K, traits.BK):
        ks = start + tl.arange(0, traits.BK)
        k_tile = load_tile(k, slot, h, ks, traits.K, traits)
        keys = tl.dot(k_tile, tl.trans(k_tile), keys)
        queries = tl.dot(load_tile(q, slot, h, ks, traits.K, traits), tl.trans(k_tile), queries)
    return keys, queries


@triton.jit
def token_weights(log_alpha, log_mu, beta, slot, h, traits: tl.constexpr):
    """Return alpha, mu, written and earlier of `Weights`, the cumulative sums of log alpha and log mu, and beta."""
    i = tl.arange(0, traits.C)
    a = tl.cumsum(load_token_gate(log_alpha, slot, h, traits), 0)
    m = tl.cumsum(load_token_gate(log_mu, slot, h, traits), 0)
    strength = load_token_gate(beta, slot, h, traits)
    alpha = products(a)
    mu = products(m) + tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    written = strength[:, None] * mu
    earlier = tl.dot(alpha, written, input_precision="tf32")
    return alpha, mu, written, earlier, a, m, strength


@triton.jit
def momentum_prepare_kernel(q, k, log_alpha, log_mu, beta, eta, inverse, scores, gates, traits: tl.constexpr):
    """Compute (I + A)^-1, P and the gates of a chunk. Grid: slot, head.

    Reads q and k; log_alpha, log_mu, beta and eta [G, C, H]. Writes inverse and scores [G, H, C, C], and gates [G, H,
    6, C].
    """
    C: tl.constexpr = traits.C
    chunk = tl.program_id(0).to(tl.int64)
    slot, h = chunk // traits.H, chunk % traits.H
    i = tl.arange(0, C)
    alpha, mu, written, earlier, a, m, strength = token_weights(log_alpha, log_mu, beta, slot, h, traits)
    keys, queries = key_products(q, k, slot, h, traits)
    rate = load_token_gate(eta, slot, h, traits)
    A = tl.where(i[:, None] > i[None, :], earlier * keys * rate[None, :], 0.0)
    T, _ = unit_lower_inverse(A, C, tl.float32, "tf32x3", 16)
    at = chunk * (C * C) + i[:, None] * C + i[None, :]
    tl.store(inverse + at, T.to(inverse.dtype.element_ty))
    both = earlier + written
    tl.store(scores + at, (both * queries * rate[None, :]).to(scores.dtype.element_ty))
    held = tl.exp(m)
    written_N = strength * held
    earlier_N = tl.sum(alpha * written_N[None, :], 1)
    base = gates + chunk * 6 * C + i
    tl.store(base, tl.exp(a))
    tl.store(base + C, earlier_N + written_N)
    tl.store(base + 2 * C, earlier_N)
    tl.store(base + 3 * C, last(both) * rate)
    tl.store(base + 4 * C, last(mu) * rate)
    tl.store(base + 5 * C, held)


@triton.jit
def store_token_gate(x, values, slot, h, traits: tl.constexpr):
    """Store a gate x [G, C, H] of a chunk."""
    i = tl.arange(0, traits.C)
    tl.store(x + (slot * traits.C + i) * traits.H + h, values)


@triton.jit
def below_sums(x):
    """Return the gradient of a total of which x is the gradient of total_t - total_s, s < t."""
    i = tl.arange(0, x.shape[0])
    below = tl.where(i[:, None] > i[None, :], x, 0.0)
    return tl.sum(below, 1) - tl.sum(below, 0)


@triton.jit(do_not_specialize=["G"])
def momentum_gates_kernel(
    log_alpha, log_mu, beta, eta, d_pairs, partial, d_log_alpha, d_log_mu, d_beta, d_eta, G, traits: tl.constexpr
):
    """Compute the gradients of the gates of the tokens. Grid: slot, head.

    Reads the gates; d_pairs; partial [key tiles, G, H, 6, C]. Writes d_log_alpha, d_log_mu, d_beta, d_eta [G, C, H].
    """
    C: tl.constexpr = traits.C
    tiles: tl.constexpr = (traits.K + traits.BK - 1) // traits.BK
    chunk = tl.program_id(0).to(tl.int64)
    slot, h = chunk // traits.H, chunk % traits.H
    i = tl.arange(0, C)
    alpha, mu, written, earlier, a, m, strength = token_weights(log_alpha, log_mu, beta, slot, h, traits)
    rate = load_token_gate(eta, slot, h, traits)
    d_kept = tl.zeros([C], tl.float32)
    d_carried = tl.zeros([C], tl.float32)
    d_early = tl.zeros([C], tl.float32)
    d_write_S = tl.zeros([C], tl.float32)
    d_write_N = tl.zeros([C], tl.float32)
    d_held = tl.zeros([C], tl.float32)
    for tile in range(tiles):
        base = partial + ((tile * G).to(tl.int64) * traits.H + chunk) * (6 * C) + i
        d_kept += tl.load(base)
        d_carried += tl.load(base + C)
        d_early += tl.load(base + 2 * C)
        d_write_S += tl.load(base + 3 * C)
        d_write_N += tl.load(base + 4 * C)
        d_held += tl.load(base + 5 * C)
    at = d_pairs + chunk * (2 * C * C) + i[:, None] * C + i[None, :]
    of_system, of_scores = tl.load(at), tl.load(at + C * C)
    both = earlier + written
    is_last = (i == C - 1)[:, None]
    gradient = tl.sum(of_system * earlier + of_scores * both, 0)
    store_token_gate(d_eta, gradient + d_write_S * last(both) + d_write_N * last(mu), slot, h, traits)
    d_both = of_scores * rate[None, :] + tl.where(is_last, (d_write_S * rate)[None, :], 0.0)
    d_earlier = d_both + of_system * rate[None, :]
    d_earlier_N = d_carried + d_early
    held = tl.exp(m)
    d_written = d_both + tl.dot(tl.trans(alpha), d_earlier, input_precision="tf32")
    d_written_N = d_carried + tl.sum(alpha * d_earlier_N[:, None], 0)
    d_alpha = tl.dot(d_earlier, tl.trans(written), input_precision="tf32")
    d_alpha += d_earlier_N[:, None] * (strength * held)[None, :]
    store_token_gate(d_beta, tl.sum(d_written * mu, 1) + d_written_N * held, slot, h, traits)
    d_a = below_sums(d_alpha * alpha) + d_kept * tl.exp(a)
    store_token_gate(d_log_alpha, tl.cumsum(d_a, 0, reverse=True), slot, h, traits)
    d_mu = d_written * strength[:, None] + tl.where(is_last, (d_write_N * rate)[None, :], 0.0)
    d_m = below_sums(d_mu * mu) + (d_written_N * strength + d_held) * held
    store_token_gate(d_log_mu, tl.cumsum(d_m, 0, reverse=True), slot, h, traits)
