"""Linear maps of several groups of rows, such as the tokens of each expert, in one product.

A rows, sorted by group; G groups, D inputs, F outputs
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from deltazoo.backends.ops.grouped import grouped_linear


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
