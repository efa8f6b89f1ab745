"""Rotation of q and k by angles that accumulate over the tokens, by kernels: on a GPU, forward and backward.

    theta_t = theta_(t-1) + dt_t rate_t,    q'_t = R(theta_t) (q_t + c),    k'_t = R(theta_t) (k_t + d)
    u_t = q'_t^T k'_t

B batch, T time, N sequences, H key heads, HV value heads, K key width, R pairs of channels
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, differentiate_exported
from deltazoo.backends.triton.limits import kernel_refusals
from deltazoo.backends.triton.rotary import op as kernels
from deltazoo.backends.triton.rotary.op import RotaryOperands as RotaryOperands


class Rotated(NamedTuple):
    """Results of a rotation.

    Args:
        q, k: [B, T, HV, K], 0 after the last packed sequence. overlap: u, [B, T, HV] float32.
        state: theta after the last token modulo 2 pi, [N, HV, R] float32.
    """

    q: Tensor
    k: Tensor
    overlap: Tensor
    state: Tensor


def refusals(q: Tensor) -> list[str]:
    """Return why the kernels do not rotate q, one sentence each; [] if they do."""
    if q.shape[-1] > kernels.MAX_WIDTH:
        return [f"heads must have at most {kernels.MAX_WIDTH} channels, got {q.shape[-1]}."]
    return kernel_refusals(q)


def rotate(x: RotaryOperands) -> Rotated:
    """Rotate q and k, if `refusals(q)` is []; differentiable once. Sums of angles are exact modulo 2 pi."""
    run = (
        _Rotate.apply
        if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in x)
        else kernels.rotate
    )
    return Rotated(*run(*x)[:4])


@cache_forward_signature
class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(*operands: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(kernels.rotate(*operands))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[4])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, output[4])
        ctx.shapes = output[0].shape, output[2].shape

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *operands, sums = ctx.saved_tensors
        x, (d_q, d_k, d_overlap, d_state, _) = RotaryOperands(*operands), grads
        d_q, d_k = (x.q.new_zeros(ctx.shapes[0]) if y is None else y for y in (d_q, d_k))
        d_overlap = x.dt.new_zeros(ctx.shapes[1]) if d_overlap is None else d_overlap
        results = kernels.rotate_backward(*operands, sums, d_q, d_k, d_overlap, d_state)
        return *results[:6], None if x.state is None else results[6], None


differentiate_exported("triton_rotate", lambda *operands: _Rotate.apply(*operands))
