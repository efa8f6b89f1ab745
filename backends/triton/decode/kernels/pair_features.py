"""Products of pairs of channels as features of a query and a key (`deltazoo.mixers.parts.feature_maps`).

    y = weight (x - mean(x)) / sqrt(var(x) + eps) + bias, or x without a norm
    quadratic  phi = [y_i^2, sqrt(2) y_i y_j] / sqrt(K)                                                      (ReBased)
    taylor     phi = [1, y_i / K^(1/4), y_i^2 / sqrt(2 K), y_i y_j / sqrt(K)]                                  (Based)

Pairs are in the order of their cyclic shifts: j = (i - s) mod K for s = 1, 2, ... and all i; if K is even, i < K / 2
for the last s.
K channels
"""

import triton
import triton.language as tl


@triton.jit
def pair_features(q, k, weight, bias, traits: tl.constexpr):
    """Return the features of a query and those of a key, with zeros beyond the last.

    Args: q, k: of their head. weight, bias: [K], of the norm that q and k share; read with KEY_NORM.
    """
    q_mean, q_factor = 0.0, 1.0
    k_mean, k_factor = 0.0, 1.0
    if traits.KEY_NORM:
        q_mean, q_factor = mean_and_factor(q, traits)
        k_mean, k_factor = mean_and_factor(k, traits)
    return (
        features(q, q_mean, q_factor, weight, bias, traits),
        features(k, k_mean, k_factor, weight, bias, traits),
    )


@triton.jit
def mean_and_factor(x, traits: tl.constexpr):
    """Return mean and 1 / sqrt(variance + KEY_EPS) of the channels of a query or a key."""
    K: tl.constexpr = traits.K
    c = tl.arange(0, traits.INPUTS)
    y = tl.load(x + c, mask=c < K, other=0.0).to(tl.float32)
    mean = tl.sum(y, 0) / K
    centred = tl.where(c < K, y - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(centred * centred, 0) / K + traits.KEY_EPS)


@triton.jit
def features(x, mean, factor, weight, bias, traits: tl.constexpr):
    """Return the features of a query or a key."""
    K: tl.constexpr = traits.K
    LINEAR: tl.constexpr = 1 + K if traits.FEATURE == "taylor" else 0  # features before the squares
    r = tl.arange(0, traits.BR)
    in_r = r < traits.ROWS
    pair = tl.where(in_r, tl.maximum(r - LINEAR, 0), 0)
    i = pair % K
    j = (i + K - pair // K) % K
    if traits.FEATURE == "taylor":
        i = tl.where(r < LINEAR, tl.maximum(r - 1, 0), i)
    y_i = normed_channels(x, i, mean, factor, weight, bias, traits)
    y_j = normed_channels(x, j, mean, factor, weight, bias, traits)
    phi = y_i * y_j * tl.where(pair < K, 1.0, 2.0**0.5)
    if traits.FEATURE == "taylor":
        phi = tl.where(r < LINEAR, y_i * K**-0.25, phi * (0.5 / K) ** 0.5)
        phi = tl.where(r == 0, 1.0, phi)
    else:
        phi *= K**-0.5
    return tl.where(in_r, phi, 0.0)


@triton.jit
def normed_channels(x, channels, mean, factor, weight, bias, traits: tl.constexpr):
    """Load channels of a query or a key, and apply the norm."""
    y = tl.load(x + channels).to(tl.float32)
    if traits.KEY_NORM:
        y = (y - mean) * factor * tl.load(weight + channels).to(tl.float32) + tl.load(bias + channels).to(tl.float32)
    return y
