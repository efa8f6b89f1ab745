"""Gather rows by a permutation, with a gradient that is also a gather: deterministic, without atomics."""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import differentiable_once


def gather_rows(x: Tensor, index: Tensor, inverse: Tensor, has_gaps: bool = False) -> Tensor:
    """Return x[index] along dimension 0; the gradient of x is grad[inverse].

    Args:
        x: [R, ..].
        index: [S] int64, the row of x for each row of the result; no two are equal.
        inverse: [R] int64, the row of the result for each row of x.
        has_gaps: whether `index` may also contain R, any number of times, which selects a row of zeros, and `inverse`
            S, for rows of x that are not gathered.
    Returns: [S, ..].
    """
    return _Gather.apply(x, index, inverse, has_gaps)


def copy_rows(x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """Return x[order // copies]: every row `copies` times, in this order. The gradient of x sums over the copies.

    Args: x: [R, ..]; order: a permutation of the copies, of which those of row r are from r * copies on, [R * copies];
        inverse: its inverse.
    """
    return _Copy.apply(x, order, inverse, copies)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        return x.index_select(0, order // copies)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])
        ctx.copies = inputs[3]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return torch.unflatten(grad.index_select(0, inverse), 0, (-1, ctx.copies)).sum(1), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor, has_gaps: bool) -> Tensor:
        return _select(x, index, has_gaps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])
        ctx.has_gaps = inputs[3]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _select(grad, inverse, ctx.has_gaps), None, None, None


def _select(x: Tensor, index: Tensor, has_gaps: bool) -> Tensor:
    padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])]) if has_gaps else x
    return padded.index_select(0, index)
