"""Softmax attention with a forget gate per head, by flash kernels on a GPU: one operator forward, one backward.

    o_t = sum over s <= t of softmax_s(scale q_t . k_s + log f_(s+1) + ... + log f_t) v_s

B batch, T time, S slots of a cache, H query heads, G key-value heads, E head width, N packed sequences
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, differentiate_exported
from deltazoo.backends.triton.attention import op as kernels
from deltazoo.backends.triton.limits import kernel_refusals

MAX_WIDTH = 256


def refusals(q: Tensor) -> list[str]:
    """Return why the kernels do not attend from queries q [B, T, H, E], one sentence each; [] if they do."""
    if q.shape[-1] > MAX_WIDTH:
        return [f"heads must have at most {MAX_WIDTH} channels, got {q.shape[-1]}."]
    return kernel_refusals(q)


def forgetting_attention(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, scale: float, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Attend causally among the tokens of the call; differentiable once.

    Args:
        q: [B, T, H, E], without `refusals`; k, v: [B, T, G, E] in the same dtype.
        log_f: [B, T, H] float32, natural logarithms of the gates, at most 0.
        cu_seqlens: [N + 1] int32, bounds of packed sequences; then B = 1. The tokens after the last one are a further
            sequence.
    Returns: [B, T, H, E].
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, log_f)):
        o: Tensor = _ForgettingAttention.apply(q, k, v, log_f, cu_seqlens, scale)[0]
        return o
    return kernels.attention(q, k, v, log_f, cu_seqlens, scale, False)[0]


def attention_with_cache(
    q: Tensor, k: Tensor, v: Tensor, sums: Tensor, before: Tensor, ends: Tensor, scale: float,
    cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend from new tokens to a cache that includes them, without gradients.

    Args:
        q: [B, T, H, E], without `refusals`.
        k: [N, S, G, E or more], of which E channels count. v: [N, S, G, E].
        sums: [N, S, H] float32, log f_1 + ... + log f_s for the token in each slot.
        before, ends: [N] int64. Query t of sequence n has position before[n] + t; slots from ends[n] on are empty.
        cu_seqlens: [N + 1] int32, bounds of packed sequences in q; then B = 1, else B = N.
    Returns: [B, T, H, E], 0 for queries that see no key and for tokens after the last packed sequence.
    """
    o: Tensor = kernels.attention_with_cache(q, k, v, sums, before, ends, cu_seqlens, scale)
    return o


def decode_attention(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float) -> Tensor:
    """Attend from one token per sequence to its cache, without gates and gradients; widths of k and v may differ.

    Args: q: [B, 1, H, E], without `refusals`; k: [B, S, G, E]; v: [B, S, G, V]; ends: [B] int64, the number
        of filled slots.
    Returns: [B, 1, H, V], 0 for an empty cache.
    """
    o: Tensor = kernels.decode_attention(q, k, v, ends, scale)
    return o


@cache_forward_signature
class _ForgettingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, cu_seqlens: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return kernels.attention(q, k, v, log_f, cu_seqlens, scale, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, log_f, cu_seqlens, ctx.scale = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(q, k, v, log_f, *output, cu_seqlens)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_o: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *saved, cu_seqlens = ctx.saved_tensors
        grads = kernels.attention_backward(*saved, d_o, cu_seqlens, ctx.scale)
        return (*grads, None, None)


differentiate_exported("triton_forgetting_attention", lambda *x: _ForgettingAttention.apply(*x[:-1]))  # without save
