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
