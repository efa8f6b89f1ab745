"""One micro-step of the state, shared by the decode kernels and the fused decode kernel."""

import triton
import triton.language as tl


@triton.jit
def micro_step(
    S, k, e, u, decay, DECAYS: tl.constexpr, DELTA: tl.constexpr, ERASE_PREVIOUS: tl.constexpr,
):  # fmt: skip
    """Return decay S + k x^T in float32 and the written value x = u - R^T e, where R is decay S, or S with
    ERASE_PREVIOUS.

    S [K, V]; k [K]; e [K], the erase key times the erase strength; u [V], the value times the write strength.
    """
    if DELTA and ERASE_PREVIOUS:
        u -= tl.sum(S * e[:, None], 0)
    if DECAYS:
        S *= decay
    if DELTA and not ERASE_PREVIOUS:
        u -= tl.sum(S * e[:, None], 0)
    return S + k[:, None] * u[None, :], u
