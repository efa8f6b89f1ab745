"""A gather of rows whose gradient is a gather, too: deterministic, without atomics."""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import differentiable_once


def gather_rows(x: Tensor, index: Tensor, inverse: Tensor, has_gaps: bool = False) -> Tensor:
    """Return the rows `index` of x, each of which is gathered at most once.

    Args:
        inverse: for each row of x its place in the result.
        has_gaps: whether an index or its inverse may be one past the last row, which selects zeros.
    """
    return _Gather.apply(x, index, inverse, has_gaps)


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
    return (torch.cat([x, x.new_zeros(1, *x.shape[1:])]) if has_gaps else x).index_select(0, index)
