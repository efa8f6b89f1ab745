"""Linear maps of several groups of rows, such as the tokens of each expert, in one product.

A rows, sorted by group; G groups, D inputs, F outputs
"""

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, operator


class Groups(NamedTuple):
    """Assignments of tokens to groups, sorted by group.

    order: [A] int64, the assignment in each row; assignment n k + i is the i-th choice of token n. Within a group, the
        assignments keep their order.
    ends: [G] int32, the row after the last one of each group; ends[-1] = A.
    """

    order: Tensor
    ends: Tensor


def group_rows(group_NK: Tensor, count: int) -> Groups:
    """Sort the assignments of tokens to groups. Args: group_NK: [N, k] int64 in [0, count)."""
    group_A, order = group_NK.flatten().sort(stable=True)
    ends = torch.searchsorted(group_A, torch.arange(count, device=group_A.device), right=True)
    return Groups(order, ends.to(torch.int32))


class GroupedLinear(nn.Module):
    """y_a = W_g x_a for row a of group g.

    Initialisation: as torch's Linear, uniform in +-1 / sqrt(D).
    """

    def __init__(self, groups: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, outputs, inputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.weight.shape[2] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x_AD: Tensor, ends: Tensor) -> Tensor:
        """Map rows x [A, D] sorted by group to [A, F]. Args: ends: as in `Groups`."""
        return grouped_linear(x_AD, self.weight, ends)

    def extra_repr(self) -> str:
        groups, outputs, inputs = self.weight.shape
        return f"groups={groups}, inputs={inputs}, outputs={outputs}"


def grouped_linear(x_AD: Tensor, weight_GFD: Tensor, ends: Tensor) -> Tensor:
    """Compute y_a = W_g x_a, [A, F], for rows x [A, D] sorted by group; `ends` as in `Groups`.

    The shapes do not depend on `ends`. The product is `torch._grouped_mm` for
    bfloat16 on a GPU if D and F are multiples of 8, as that operator demands. Other products run group by group: on the
    CPU on the rows of the group, elsewhere on all rows, of which those of the group are selected, which takes G times
    the operations.
    """
    device = x_AD.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and x_AD.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x_AD, weight_GFD = x_AD.to(dtype), weight_GFD.to(dtype)
    return _GroupedLinear.apply(x_AD, weight_GFD, ends)


def grouped_sum(x_AC: Tensor, ends: Tensor) -> Tensor:
    """Sum the rows x [A, C] of each group: [G, C]; `ends` as in `Groups`. Not differentiable."""
    return _outer_op(x_AC.new_ones(x_AC.shape[0], 1), x_AC, ends)[:, 0]


def _has_kernel(x: Tensor, *sizes: int) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16 and all(size % 8 == 0 for size in sizes)


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


def _product_shape(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _outer_products_shape(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


_product_op = operator("grouped_product(Tensor x, Tensor weight, Tensor ends) -> Tensor", _product, _product_shape)
_outer_op = operator(
    "grouped_outer_products(Tensor grad, Tensor x, Tensor ends) -> Tensor", _outer_products, _outer_products_shape
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
