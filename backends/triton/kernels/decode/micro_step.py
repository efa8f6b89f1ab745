"""One micro-step of the state, shared by the decode kernels and the fused decode kernel."""

import triton
import triton.language as tl


@triton.jit
def micro_step(
    S, k, e, u, decay, DECAYS: tl.constexpr, DELTA: tl.constexpr, ERASE_EARLY: tl.constexpr,
):  # fmt: skip
    """Return decay S + k x^T in float32 and the written value x = u - R^T e, where R is decay S, or S with ERASE_EARLY.

    S [K, V]; k [K]; e [K], the erase key times the erase strength; u [V], the value times the write strength.
    """
    if DELTA and ERASE_EARLY:
        u -= tl.sum(S * e[:, None], 0)
    if DECAYS:
        S *= decay
    if DELTA and not ERASE_EARLY:
        u -= tl.sum(S * e[:, None], 0)
    return S + k[:, None] * u[None, :], u


@triton.jit
def efla_factor(x):
    """Return (1 - exp(-x)) / x for x >= 0; below 1/4 by its series, whose remainder is below 1e-10."""
    series = tl.full(x.shape, 1.0, tl.float32)
    for i in tl.static_range(8):
        series = 1.0 - tl.minimum(x, 0.25) * series / (9 - i)
    return tl.where(x < 0.25, series, (1.0 - tl.exp(-x)) / tl.maximum(x, 0.25))
