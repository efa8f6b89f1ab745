"""Chunked cross entropy of the head: the logits of only one chunk of tokens are in memory at a time.

N tokens, C tokens per chunk, D width, L vocabulary
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.base import state_dtype
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, operator

# 1,024 tokens and a vocabulary of 32,000 take 125 MiB of float32 logits; larger chunks do not speed up the product.
CHUNK = 1024
IGNORE_INDEX = -100


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return c tanh(logits / c) with c = cap; the logits if there is no cap. Source: Gemma 2, arXiv 2408.00118."""
    return logits if cap is None else cap * (logits / cap).tanh()


def cross_entropy(
    x_ND: Tensor, weight_LD: Tensor, targets_N: Tensor, chunk: int = CHUNK, cap: float | None = None
) -> Tensor:
    """Compute the mean negative log-likelihood of the targets under softmax(z), z = x W^T or c tanh(x W^T / c).

        loss = mean over n with target_n != -100 of log sum_l exp(z_nl) - z_{n target_n}

    The forward and the backward hold the logits of `chunk` tokens; the backward recomputes them. The softmax is
    computed in float32.

    Args:
        x_ND: [N, D], features.
        weight_LD: [L, D], weights of the head, with the dtype of x_ND; autocast casts both.
        targets_N: [N] int64 in [0, L); -100 is ignored.
        chunk: tokens per chunk.
        cap: c; None: the logits are not capped.
    Returns: a scalar, float32 (float64 for float64 inputs); 0 if every target is ignored.
    """
    device = x_ND.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x_ND, weight_LD = x_ND.to(dtype), weight_LD.to(dtype)
    total = _CrossEntropy.apply(x_ND, weight_LD, targets_N, chunk, cap)
    return total / (targets_N != IGNORE_INDEX).sum().clamp(min=1)


def _loss(x: Tensor, weight: Tensor, targets: Tensor, chunk: int, cap: float | None) -> Tensor:
    total = x.new_zeros((), dtype=state_dtype(x.dtype))
    with torch.autocast(x.device.type, enabled=False):
        for _, targets_C, logits_CL in _chunks(x, weight, targets, chunk, cap):
            total += F.cross_entropy(logits_CL, targets_C, ignore_index=IGNORE_INDEX, reduction="sum")
    return total


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, cap: float | None
) -> tuple[Tensor, Tensor]:
    grad_x_ND, grad_weight_LD = torch.empty_like(x), torch.zeros_like(weight, dtype=grad.dtype)
    start = 0
    with torch.autocast(x.device.type, enabled=False):
        for x_CD, targets_C, logits_CL in _chunks(x, weight, targets, chunk, cap):
            valid_C1 = targets_C[:, None] != IGNORE_INDEX
            error_CL = logits_CL.softmax(1)
            error_CL.scatter_add_(1, targets_C[:, None] * valid_C1, torch.full_like(error_CL[:, :1], -1.0))
            if cap is not None:
                error_CL *= 1 - (logits_CL / cap).square()  # the derivative of the cap: 1 - tanh^2
            error_CL = (error_CL * (valid_C1 * grad)).to(x.dtype)
            grad_x_ND[start : start + x_CD.shape[0]] = error_CL @ weight
            grad_weight_LD += error_CL.T @ x_CD
            start += x_CD.shape[0]
    return grad_x_ND, grad_weight_LD.to(weight.dtype)


def _chunks(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int, cap: float | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for x_CD, targets_C in zip(x.split(chunk), targets.split(chunk), strict=True):
        yield x_CD, targets_C, cap_logits((x_CD @ weight.T).to(state_dtype(x.dtype)), cap)


def _loss_shape(x: Tensor, weight: Tensor, targets: Tensor, chunk: int, cap: float | None) -> Tensor:
    return x.new_empty((), dtype=state_dtype(x.dtype))


def _gradient_shapes(
    grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, cap: float | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


# Custom operators: a traced loop over N / chunk chunks would specialise the graph to one N.
_OPERANDS = "Tensor x, Tensor weight, Tensor targets, int chunk, float? cap"
_loss_op = operator(f"cross_entropy({_OPERANDS}) -> Tensor", _loss, _loss_shape)
_gradients_op = operator(
    f"cross_entropy_backward(Tensor grad, {_OPERANDS}) -> (Tensor, Tensor)", _gradients, _gradient_shapes
)


@cache_forward_signature
class _CrossEntropy(torch.autograd.Function):
    """Autograd function of the two operators."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, targets: Tensor, chunk: int, cap: float | None) -> Tensor:
        return _loss_op(x, weight, targets, chunk, cap)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int, float | None], output: Tensor) -> None:
        x, weight, targets, ctx.chunk, ctx.cap = inputs
        ctx.save_for_backward(x, weight, targets)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        return *_gradients_op(grad, *ctx.saved_tensors, ctx.chunk, ctx.cap), None, None, None
