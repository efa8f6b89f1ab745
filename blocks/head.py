"""Cross entropy of a language model's head, some tokens at a time, so that the logits of all never exist at once.

N tokens, C tokens in a chunk, D width, L vocabulary
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.base import state_dtype
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, operator

# 1,024 tokens of 32,000 words are 125 MiB of float32 logits, and the matrix product is as fast as it gets.
CHUNK = 1024
IGNORE = -100


def cross_entropy(x_ND: Tensor, weight_LD: Tensor, targets_N: Tensor, chunk: int = CHUNK) -> Tensor:
    """Average the negative log-likelihood of the targets under softmax(x W^T).

        loss = mean over n with target_n != -100 of log sum_l exp(x_n . w_l) - x_n . w_{target_n}

    Forward and backward hold the logits of `chunk` tokens, and the backward computes them again. The softmax is
    taken in float32.

    Args:
        x_ND: [N, D]; weight_LD: [L, D], of one dtype; under autocast both are cast to its dtype.
        targets_N: [N] int64 in [0, L); those that are -100 are left out.
    Returns: a scalar, float32 (float64 for float64 inputs); 0 where every target is left out.
    """
    device = x_ND.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x_ND, weight_LD = x_ND.to(dtype), weight_LD.to(dtype)
    total = _CrossEntropy.apply(x_ND, weight_LD, targets_N, chunk)
    return total / (targets_N != IGNORE).sum().clamp(min=1)


def _loss(x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    total = x.new_zeros((), dtype=state_dtype(x.dtype))
    with torch.autocast(x.device.type, enabled=False):
        for _, targets_C, logits_CL in _chunks(x, weight, targets, chunk):
            total += F.cross_entropy(logits_CL, targets_C, ignore_index=IGNORE, reduction="sum")
    return total


def _gradients(grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    grad_x_ND, grad_weight_LD = torch.empty_like(x), torch.zeros_like(weight, dtype=grad.dtype)
    start = 0
    with torch.autocast(x.device.type, enabled=False):
        for x_CD, targets_C, logits_CL in _chunks(x, weight, targets, chunk):
            taken_C1 = targets_C[:, None] != IGNORE
            error_CL = logits_CL.softmax(1)
            error_CL.scatter_add_(1, targets_C[:, None] * taken_C1, torch.full_like(error_CL[:, :1], -1.0))
            error_CL = (error_CL * (taken_C1 * grad)).to(x.dtype)
            grad_x_ND[start : start + x_CD.shape[0]] = error_CL @ weight
            grad_weight_LD += error_CL.T @ x_CD
            start += x_CD.shape[0]
    return grad_x_ND, grad_weight_LD.to(weight.dtype)


def _chunks(x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for x_CD, targets_C in zip(x.split(chunk), targets.split(chunk), strict=True):
        yield x_CD, targets_C, (x_CD @ weight.T).to(state_dtype(x.dtype))


def _loss_shape(x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    return x.new_empty((), dtype=state_dtype(x.dtype))


def _gradient_shapes(grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


# Operators, because a loop over N / chunk chunks in a graph would bind the graph to one N.
_OPERANDS = "Tensor x, Tensor weight, Tensor targets, int chunk"
_loss_op = operator(f"cross_entropy({_OPERANDS}) -> Tensor", _loss, _loss_shape)
_gradients_op = operator(
    f"cross_entropy_backward(Tensor grad, {_OPERANDS}) -> (Tensor, Tensor)", _gradients, _gradient_shapes
)


@cache_forward_signature
class _CrossEntropy(torch.autograd.Function):
    """The boundary between autograd and the two operators."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        return _loss_op(x, weight, targets, chunk)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        x, weight, targets, ctx.chunk = inputs
        ctx.save_for_backward(x, weight, targets)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *_gradients_op(grad, *ctx.saved_tensors, ctx.chunk), None, None
