"""Products, sums and copies by group of rows, such as the tokens of each expert. Shapes do not depend on the groups.

A rows, sorted by group; G groups, D inputs, F outputs, C columns
ends: [G] int32, the row after the last one of each group; ends[-1] = A.
"""

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, differentiate_exported, operator


class Copies(NamedTuple):
    """Copies of rows, `times` each: order and inverse as in `backends.torch_ext.gather.copy_rows`."""

    order: Tensor
    inverse: Tensor
    times: int


def grouped_linear(x_AD: Tensor, weight_GFD: Tensor, ends: Tensor) -> Tensor:
    """Compute y_a = W_g x_a, [A, F], for rows x [A, D].

    The product is `torch._grouped_mm` for bfloat16 on a GPU if D and F are multiples of 8, as that operator demands.
    Other products run group by group: on the CPU on the rows of the group, elsewhere on all rows, of which those of the
    group are selected, which takes G times the operations.
    """
    return _GroupedLinear.apply(*_autocast(x_AD, weight_GFD), ends)


def grouped_linear_of_copies(x_ND: Tensor, copies: Copies, weight_GFD: Tensor, ends: Tensor) -> Tensor:
    """Compute `grouped_linear` of copies of rows x [N, D]. The copies are not kept for the backward."""
    x_ND, weight_GFD = _autocast(x_ND, weight_GFD)
    return _LinearOfCopies.apply(x_ND, copies.order // copies.times, copies.inverse, copies.times, weight_GFD, ends)


def expand_rows(matrix_GC: Tensor, group_A: Tensor, ends: Tensor) -> Tensor:
    """Return the row of each group at its rows, [A, C]. Args: group_A: from `group_of_row`."""
    return _Expand.apply(matrix_GC, group_A, ends)


def group_of_row(ends: Tensor, rows: int) -> Tensor:
    """Return the group of each row, [A] int64. Args: rows: A."""
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True)


def grouped_sum(x_AC: Tensor, ends: Tensor) -> Tensor:
    """Sum the rows x [A, C] of each group: [G, C]. Not differentiable."""
    return _outer_op(x_AC.new_ones(x_AC.shape[0], 1), x_AC, ends)[:, 0]


def _autocast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x, weight
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), weight.to(dtype)


def _has_kernel(x: Tensor, *sizes: int) -> bool:
    return x.is_cuda and x.shape[0] > 0 and x.dtype == torch.bfloat16 and all(size % 8 == 0 for size in sizes)


def _runs_by_rows(x: Tensor) -> bool:
    """Whether the host may read the bounds of the groups without waiting."""
    return x.device.type == "cpu"


def _bounds(ends: Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *ends.tolist()]))


def _is_in_group(ends: Tensor, rows: int) -> Tensor:
    """Whether each row belongs to each group, [G, A]."""
    row_A = torch.arange(rows, device=ends.device)
    return (row_A < ends[:, None]) & (row_A >= F.pad(ends[:-1], (1, 0))[:, None])


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x_a W_g for weight [G, D, F]."""
    if _has_kernel(x, *weight.shape[1:]):
        return torch._grouped_mm(x.contiguous(), weight, offs=ends)
    if _runs_by_rows(x):
        y = x.new_empty(x.shape[0], weight.shape[2])
        for g, (start, end) in enumerate(_bounds(ends)):
            torch.mm(x[start:end], weight[g], out=y[start:end])
        return y
    y = x.new_zeros(x.shape[0], weight.shape[2])
    for g, rows in enumerate(_is_in_group(ends, x.shape[0])):
        y = torch.where(rows[:, None], x @ weight[g], y)
    return y


def _outer_products(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Sum over the rows a of each group of grad_a x_a^T: [G, F, D]."""
    if _has_kernel(x, x.shape[1], grad.shape[1]):
        return torch._grouped_mm(grad.contiguous().T, x.contiguous(), offs=ends)
    if _runs_by_rows(x):
        return torch.stack([grad[start:end].T @ x[start:end] for start, end in _bounds(ends)])
    groups = (rows[:, None] for rows in _is_in_group(ends, x.shape[0]))
    return torch.stack([torch.where(rows, grad, 0).T @ torch.where(rows, x, 0) for rows in groups])


def _product_of_rows(x: Tensor, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _product(x.index_select(0, rows), weight, ends)


def _outer_products_of_rows(grad: Tensor, x: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return _outer_products(grad, x.index_select(0, rows), ends)


def _product_shape(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _outer_products_shape(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


_product_op = operator("grouped_product(Tensor x, Tensor weight, Tensor ends) -> Tensor", _product, _product_shape)
_outer_op = operator(
    "grouped_outer_products(Tensor grad, Tensor x, Tensor ends) -> Tensor", _outer_products, _outer_products_shape
)
_product_of_rows_op = operator(
    "grouped_product_of_rows(Tensor x, Tensor rows, Tensor weight, Tensor ends) -> Tensor",
    _product_of_rows,
    lambda x, rows, weight, ends: x.new_empty(rows.shape[0], weight.shape[2]),
)
_outer_of_rows_op = operator(
    "grouped_outer_products_of_rows(Tensor grad, Tensor x, Tensor rows, Tensor ends) -> Tensor",
    _outer_products_of_rows,
    lambda grad, x, rows, ends: _outer_products_shape(grad, x, ends),
)


@cache_forward_signature
class _GroupedLinear(torch.autograd.Function):
    """Autograd function of the two operators."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return _product_op(x, weight.mT, ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, ends = ctx.saved_tensors
        return _product_op(grad, weight, ends), _outer_op(grad, x, ends), None


@cache_forward_signature
class _LinearOfCopies(torch.autograd.Function):
    """Autograd function of the operators that copy the rows: the backward copies them again."""

    @staticmethod
    def forward(x: Tensor, rows: Tensor, inverse: Tensor, count: int, weight: Tensor, ends: Tensor) -> Tensor:
        return _product_of_rows_op(x, rows, weight.mT, ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, rows, inverse, ctx.count, weight, ends = inputs
        ctx.save_for_backward(x, rows, inverse, weight, ends)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rows, inverse, weight, ends = ctx.saved_tensors
        grad_copies = _product_op(grad, weight, ends).index_select(0, inverse)
        grad_x = torch.unflatten(grad_copies, 0, (-1, ctx.count)).sum(1)
        return grad_x, None, None, None, _outer_of_rows_op(grad, x, rows, ends), None


class _Expand(torch.autograd.Function):
    """Rows of a matrix [G, C] by group, [A, C]. The gradient is a sum over contiguous rows."""

    @staticmethod
    def forward(matrix: Tensor, group: Tensor, ends: Tensor) -> Tensor:
        return matrix.index_select(0, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grouped_sum(grad, *ctx.saved_tensors), None, None


differentiate_exported("grouped_product", lambda x, weight, ends: _GroupedLinear.apply(x, weight.mT, ends))
differentiate_exported(
    "grouped_product_of_rows",
    lambda x, rows, weight, ends: _GroupedLinear.apply(x.index_select(0, rows), weight.mT, ends),
)
