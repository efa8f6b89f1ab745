"""One micro-step of a state, as a decode step takes it: by itself or with what a mixer has around it."""

import triton
import triton.language as tl


@triton.jit
def micro_step(
    S, k, e, u, fade, FADES: tl.constexpr, DELTA: tl.constexpr, ERASE_EARLY: tl.constexpr,
):  # fmt: skip
    """fade S + k (u - S^T e)^T, what is erased read from the faded state or, early, from the one before; float32.

    S [K, V]; k, e [K], e times the strength of the erase; u [V], v times that of the write.
    """
    if DELTA and ERASE_EARLY:
        u -= tl.sum(S * e[:, None], 0)
    if FADES:
        S *= fade
    if DELTA and not ERASE_EARLY:
        u -= tl.sum(S * e[:, None], 0)
    return S + k[:, None] * u[None, :]


@triton.jit
def last_step(
    S, q, k, e, u, fade, FADES: tl.constexpr, DELTA: tl.constexpr, ERASE_EARLY: tl.constexpr, READ_EARLY: tl.constexpr
):  # fmt: skip
    """`micro_step`, and what is read of the state before it, early, or after it: S^T q, by both sums of S as it came,
    for (fade S + k u^T)^T q = fade S^T q + (k^T q) u."""
    out = tl.sum(S * q[:, None], 0)
    if DELTA:
        old = tl.sum(S * e[:, None], 0)
        if FADES and not ERASE_EARLY:
            old *= fade
        u -= old
    if FADES:
        S *= fade
        if not READ_EARLY:
            out *= fade
    if not READ_EARLY:
        out += tl.sum(k * q, 0) * u
    return S + k[:, None] * u[None, :], out
