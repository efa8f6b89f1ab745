"""Multi-head latent attention of one token per sequence over its cache, by a kernel on a GPU. It has no gradients.

    o_h = sum_s softmax_s(scale q_h . [c_s, r_s]) c_s

B batch, S slots, H heads, C latent width, R rotary width
"""

import torch
from torch import Tensor

from deltazoo.backends.triton.attention.latent_op import MAX_LATENT, MAX_ROTARY
from deltazoo.backends.triton.attention.latent_op import latent_attention as kernel
from deltazoo.backends.triton.limits import kernel_refusals


def refusals(q: Tensor, latent: Tensor, width: int) -> list[str]:
    """Return why the kernel does not attend, one sentence each; [] if it does. Args: as of `latent_attention`."""
    if torch.is_grad_enabled():
        return ["it has no gradients."]
    if q.dtype != latent.dtype:
        return [f"it needs a cache in {q.dtype}, the dtype of q, got {latent.dtype}."]
    if width > MAX_LATENT or q.shape[-1] - width > MAX_ROTARY:
        given = f"{width} and {q.shape[-1] - width}"
        return [f"c and r must have at most {MAX_LATENT} and {MAX_ROTARY} channels, got {given}."]
    return kernel_refusals(q)


def latent_attention(q: Tensor, latent: Tensor, ends: Tensor, width: int, scale: float) -> Tensor:
    """Attend from one token per sequence.

    Args:
        q: [B, H, C + R], without `refusals`. latent: [B, S, C + R], c and r. ends: [B] int64, the filled slots.
        width: C.
    Returns: [B, H, C], 0 for an empty cache.
    """
    o: Tensor = kernel(q, latent, ends, width, scale)
    return o
