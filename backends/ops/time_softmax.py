"""Weights that are a softmax over time, with the decays that make them a recurrence.

    z_t = log(exp(z_(t-1)) + exp(s_t)),    w_t = exp(s_t - z_t),    log a_t = z_(t-1) - z_t

B batch, T time, D channels, N sequences
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import plain_gradients
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, differentiate_exported
from deltazoo.backends.triton.limits import kernel_refusals as refusals
from deltazoo.backends.triton.operands import flatten
from deltazoo.backends.triton.time_softmax import op as kernels
from deltazoo.backends.triton.time_softmax.op import INITIAL, SCORE_BOUND, TimeSoftmaxBackwardCall, TimeSoftmaxCall
from deltazoo.backends.update.base import state_dtype
from deltazoo.backends.update.varlen import is_in_sequence, valid_sequence_index

__all__ = [
    "INITIAL", "SCORE_BOUND", "TimeSoftmaxCall", "initial_logsumexp", "logsumexp_over_time", "refusals", "time_softmax",
]  # fmt: skip

# Offset between packed sequences: it exceeds the range of the terms, -32 to 60, by the 64 at which even 1e10 smaller
# terms are below the rounding error of float64.
_SEPARATION = 160.0


def time_softmax(x: TimeSoftmaxCall) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log a and w by kernels, for `x.raw` without `refusals`. A NaN passes to the later tokens of its sequence.

    Returns: log a, [B, T, D] float32; w, [B, T, D] of the dtype of raw, both 0 after the last packed sequence; z after
        the last token, [N, D] float32.
    """
    needs_gradient = torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in (x.raw, x.state))
    log_decay, w, final, _ = (_TimeSoftmax.apply if needs_gradient else kernels.time_softmax)(*x)
    return log_decay, w, final


@cache_forward_signature
class _TimeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(kernels.time_softmax(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *_, final, before = output
        ctx.mark_non_differentiable(before)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, final, before)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, final, before = ctx.saved_tensors
        x, (d_log_decay, d_w, d_final, _) = TimeSoftmaxCall(*tensors), grads
        d_log_decay = torch.zeros_like(x.raw, dtype=torch.float32) if d_log_decay is None else d_log_decay
        d_w = torch.zeros_like(x.raw) if d_w is None else d_w
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: differentiable again
            d_final = torch.zeros_like(final) if d_final is None else d_final
            return (*_plain_gradients(x, d_log_decay, d_w, d_final), None)
        call = TimeSoftmaxBackwardCall(x, before, final, d_log_decay, d_w, d_final)
        d_raw, d_state = kernels.time_softmax_backward(*flatten(call))
        return d_raw, None if x.state is None else d_state, None


differentiate_exported("triton_time_softmax", lambda *arguments: _TimeSoftmax.apply(*arguments))


def _plain_gradients(x: TimeSoftmaxCall, *d: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of raw and of the state, differentiable. Args: d: of the results."""

    def product(raw: Tensor, *others: Tensor) -> Tensor:
        results = _plain(x._replace(raw=raw, state=None if x.state is None else others[0]))
        of_decay, of_w, of_final = ((y * g).sum() for y, g in zip(results, others[-3:], strict=True))
        return of_decay + of_w + of_final

    tensors = [y for y in (x.raw, x.state, *d) if y is not None]
    gradients = plain_gradients(product, tensors, d[0].new_ones(()))
    return gradients[0], None if x.state is None else gradients[1]


def _plain(x: TimeSoftmaxCall) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `time_softmax` does, in plain torch."""
    score = x.raw.to(state_dtype(x.raw.dtype)).clamp(-SCORE_BOUND, SCORE_BOUND)
    is_inside = torch.ones((), dtype=torch.bool, device=score.device)
    if x.cu_seqlens is not None:
        is_inside = is_in_sequence(x.cu_seqlens, score.shape[1])[:, None]
        score = torch.where(is_inside, score, 0.0)  # torch's second derivative of logcumsumexp may be NaN there
    N = score.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    first = initial_logsumexp(N, score.shape[2], score) if x.state is None else x.state
    z, previous_z, last = logsumexp_over_time(score, first, x.cu_seqlens)
    log_decay, w = (torch.where(is_inside, y, 0.0) for y in (previous_z - z, (score - z).exp()))
    return log_decay, w.to(x.raw.dtype), last


def initial_logsumexp(batch: int, channels: int, like: Tensor) -> Tensor:
    """Return z before the first token, [B, D]."""
    return like.new_full((batch, channels), INITIAL, dtype=state_dtype(like.dtype))


def logsumexp_over_time(score: Tensor, first: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """z_t = log(exp(z_(t-1)) + exp(score_t)) for all t at once, in plain torch.

    Args: score: [B, T, D], at most `SCORE_BOUND`; first: z before the first token, [N, D].
    Returns: z_t and z_(t-1), [B, T, D]; z after the last token, [N, D].
    """
    if cu_seqlens is not None:
        return _packed(score, first, cu_seqlens)
    z = _LogCumSumExp.apply(torch.cat([first[:, None], score], 1))
    return z[:, 1:], z[:, :-1], z[:, -1]


class _LogCumSumExp(torch.autograd.Function):
    """z = torch.logcumsumexp(x, 1) for x [B, T, C] between `INITIAL` and 60, with the gradient

        dx_i = exp(x_i) sum_(t >= i) exp(-z_t) dz_t

    z does not decrease, so that exp does not overflow. torch's gradient computes two logarithms of sums instead, of the
    positive and of the negative dz.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.logcumsumexp(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> Tensor:
        x, z = ctx.saved_tensors
        return x.exp() * ((-z).exp() * dz).flip(1).cumsum(1).flip(1)


def _packed(score: Tensor, first: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum within each packed sequence, by one sum over all tokens.

    Offsets that rise from one sequence to the next make the terms of earlier sequences negligible. They grow with N, so
    that the sum is computed in float64. A score that is NaN does not enter the sum, which would pass it to later
    sequences; the caller's write strength exp(score - z) is NaN all the same.
    """
    T = score.shape[1]
    if not T:
        return score, score, first
    wide = torch.float32 if score.device.type == "mps" else torch.float64
    bounds = cu_seqlens.long()
    sequence_T = valid_sequence_index(cu_seqlens, T)
    first_TC = first[sequence_T].to(wide)
    is_start = (torch.arange(T, device=score.device) == bounds[sequence_T])[:, None]
    finite_TC = score[0].to(wide).nan_to_num()
    terms = torch.where(is_start, torch.logaddexp(finite_TC, first_TC), finite_TC)
    offset = _SEPARATION * sequence_T[:, None].to(wide)
    z = (torch.logcumsumexp(terms + offset, 0) - offset).to(score.dtype)
    previous_z = torch.where(is_start, first_TC.to(z.dtype), F.pad(z, (0, 0, 1, 0))[:-1])
    last = torch.where((bounds.diff() > 0)[:, None], z[(bounds[1:] - 1).clamp(min=0)], first)
    return z[None], previous_z[None], last
