"""Weights that are a softmax over time, with the decays that make them a recurrence, by kernels: forward and backward.

    z_t = log(exp(z_(t-1)) + exp(s_t)),    w_t = exp(s_t - z_t),    log a_t = z_(t-1) - z_t

B batch, T time, D channels, N sequences
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, differentiate_exported
from deltazoo.backends.triton.limits import kernel_refusals as refusals
from deltazoo.backends.triton.operands import flatten
from deltazoo.backends.triton.time_softmax.op import (
    TimeSoftmaxBackwardCall,
    TimeSoftmaxCall,
    time_softmax_backward,
)
from deltazoo.backends.triton.time_softmax.op import time_softmax as _time_softmax

__all__ = ["TimeSoftmaxCall", "refusals", "time_softmax"]


def time_softmax(x: TimeSoftmaxCall) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log a and w, for `x.raw` without `refusals`; differentiable once.

    Returns: log a, [B, T, D] float32; w, [B, T, D] of the dtype of raw, both 0 after the last packed sequence; z after
        the last token, [N, D] float32.
    """
    needs_gradient = torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in (x.raw, x.state))
    log_decay, w, final, _ = (_TimeSoftmax.apply if needs_gradient else _time_softmax)(*x)
    return log_decay, w, final


@cache_forward_signature
class _TimeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_time_softmax(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        call, (*_, final, before) = TimeSoftmaxCall(*inputs), output
        ctx.mark_non_differentiable(before)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(call.raw, call.state, call.cu_seqlens, final, before)
        ctx.numbers = call.bound, call.initial

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raw, state, cu_seqlens, final, before = ctx.saved_tensors
        d_log_decay, d_w, d_final, _ = grads
        if d_log_decay is None:
            d_log_decay = torch.zeros_like(raw, dtype=torch.float32)
        x = TimeSoftmaxCall(raw, state, cu_seqlens, *ctx.numbers)
        d_w = torch.zeros_like(raw) if d_w is None else d_w
        call = TimeSoftmaxBackwardCall(x, before, final, d_log_decay, d_w, d_final)
        d_raw, d_state = time_softmax_backward(*flatten(call))
        return d_raw, None if state is None else d_state, None, None, None


differentiate_exported("triton_time_softmax", lambda *arguments: _TimeSoftmax.apply(*arguments))
