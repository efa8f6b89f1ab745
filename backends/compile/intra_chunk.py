"""Operands of a chunk after the lowering, and the cumulative decays within a chunk.

B batch, N chunks, C tokens per chunk, M = C x householders micro-steps per chunk, H key heads, HV value heads,
K key width, V value width
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.update.spec import UpdateSpec

# A lower bound on a log decay, whose exp is 0 in float64, too: a larger magnitude would cost all other terms of the
# cumulative sum their precision, and differences of infinite ones are NaN.
MIN_LOG_DECAY = -1000.0


class LoweredChunks(NamedTuple):
    """Operands in chunks, in `state_dtype`.

    Args:
        q: [B, N, C, H, K], scaled.
        k, e: write and erase keys [B, N, M, H, K]; e None: the erase key is k.
        v: [B, N, M, HV, V], multiplied by the write strength.
        a, b: [B, N, M, HV, K], of transition "dplr".
        erase: erase strength [B, N, M, HV] or [B, N, M, HV, K]; None is 1.
        decay: log decay [B, N, M, HV] or [B, N, M, HV, K].
        has_16_bits: whether q had 16 bits; then float32 is enough for the cumulative decays per channel.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    e: Tensor | None
    a: Tensor | None
    b: Tensor | None
    erase: Tensor | None
    decay: Tensor | None
    has_16_bits: bool


def cumulative_decay(decay: Tensor, dim: int) -> Tensor:
    """Return g, the cumulative sum of the log decay within a chunk, along `dim` (last or second to last).

    The sum is in float64, except on MPS, so that differences g_i - g_j stay accurate after a token with the lowest log
    decay. It is a product with a triangular matrix of ones, whose gradient is one product; that of `cumsum` is two
    flips and a sum.
    """
    wide = decay.to(decay.dtype if decay.device.type == "mps" else torch.float64)
    M = decay.shape[dim]
    lower = torch.ones(M, M, dtype=wide.dtype, device=decay.device).tril()
    return wide @ lower.T if dim == decay.dim() - 1 else lower @ wide


def decays_between(g: Tensor, like: Tensor) -> Tensor:
    """Return exp(g_i - g_j) for j <= i, else 0, in the dtype of `like`: [.., M] -> [.., M, M]."""
    return exp_as((g[..., :, None] - g[..., None, :]).tril(), like).tril()


def decay_at_reads(spec: UpdateSpec, g: Tensor, decay: Tensor, dim: int) -> Tensor:
    """Return the cumulative decay at which each token's query reads the state: [.., M, ..] -> [.., C, ..]."""
    g_read = g - decay if spec.read == "before" else g
    n = spec.householders
    return g_read if n == 1 else torch.unflatten(g_read, dim, (-1, n)).select(dim + 1, 0)


def exp_as(x: Tensor, like: Tensor) -> Tensor:
    """Return exp(x) in the dtype of `like`."""
    return x.to(like.dtype).exp()
