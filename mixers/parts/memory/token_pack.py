"""The tokens of several memories as one pack, sorted by memory.

B batch, T time, D width, M memories, k memories of a token, A = B T k assignments, N sequences: the B rows, or packed
"""

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.context_parallel.memories import plan_of_memories
from deltazoo.backends.context_parallel.plan import ContextPlan
from deltazoo.backends.ops.grouped import Copies, group_of_row
from deltazoo.backends.torch_ext.gather import copy_rows, gather_rows
from deltazoo.backends.update.varlen import sequence_index
from deltazoo.mixers.core.grouped import Rows
from deltazoo.mixers.core.mixer import Context


class TokenPack(NamedTuple):
    """Assignments of tokens to memories, sorted by memory, then by sequence; a memory keeps the order of its tokens.

    The pack has a sequence for each memory and sequence of x, M N in all, ordered by memory, and with padding a last
    one for the padded tokens, whose outputs are discarded.

    Args:
        order, inverse: [A] int64, the assignment in each row of the pack, and its inverse; k assignments per token.
        memory, weight: [B, T, k], the memory and the weight of each assignment.
        rows: the memory of each row. bounds: [M N + 1] int32, or [M N + 2], the bounds of the sequences.
        real: [B, T] bool, whether a token belongs to a sequence; None: all do.
        sizes: M, and the number of states of a memory: N, or with context parallelism that of all documents.
        parallel: the plan of context parallelism of the pack.
    """

    order: Tensor
    inverse: Tensor
    memory: Tensor
    weight: Tensor
    rows: Rows
    bounds: Tensor
    real: Tensor | None
    sizes: tuple[int, int]
    parallel: ContextPlan | None

    @classmethod
    def of(cls, order_BTK: Tensor, weight_BTK: Tensor, memories: int, context: Context) -> Self:
        """Sort the assignments. Args: order: the memories of each token. memories: M."""
        B, T, k = order_BTK.shape
        M, A, plan = memories, B * T * k, context.parallel
        if context.cu_seqlens is None:
            N, real_BT = B, context.mask
            sequence_BT = torch.arange(B, device=order_BTK.device)[:, None].expand(B, T)
        else:
            N = context.cu_seqlens.shape[0] - 1
            sequence_BT = sequence_index(context.cu_seqlens, T)[None]
            real_BT = sequence_BT < N if plan is None else None  # every token of a plan belongs to a segment
        index_BTK = order_BTK * N + sequence_BT[..., None]
        if real_BT is not None:
            index_BTK = torch.where(real_BT[..., None], index_BTK, M * N)
        count = M * N + int(real_BT is not None)  # torch 2.11 cannot add a bool to a symbolic size
        index_A, order_A = index_BTK.flatten().sort(stable=True)
        bounds = torch.searchsorted(index_A, torch.arange(count + 1, device=index_A.device)).to(torch.int32)
        ends_M = torch.cat([bounds[torch.arange(1, M, device=bounds.device) * N], bounds.new_full((1,), A)])
        rows = Rows(group_of_row(ends_M, A), ends_M)
        sizes = (M, N if plan is None else plan.documents)
        plan = None if plan is None else plan_of_memories(plan, bounds, M, A)
        return cls(order_A, order_A.argsort(), order_BTK, weight_BTK, rows, bounds, real_BT, sizes, plan)

    @property
    def context(self) -> Context:
        """The context of the pack."""
        return Context(cu_seqlens=self.bounds, parallel=self.parallel)

    @property
    def copies(self) -> Copies:
        """The copies of the tokens in the rows of the pack."""
        return Copies(self.order, self.inverse, self.weight.shape[2])

    def tokens(self, x_BTC: Tensor) -> Tensor:
        """Copy the tokens to the rows of their assignments: [1, A, C]."""
        return copy_rows(x_BTC.flatten(0, 1), *self.copies)[None]

    def chosen(self, x_BTMC: Tensor) -> Tensor:
        """Return the values of the memory of each row, [1, A, C], from those of each token for every memory."""
        is_chosen_BTKM = self.memory[..., None] == torch.arange(self.sizes[0], device=x_BTMC.device)
        x_BTKC = torch.where(is_chosen_BTKM[..., None], x_BTMC[:, :, None], 0.0).sum(3)
        return gather_rows(x_BTKC.flatten(0, 2), self.order, self.inverse)[None]

    def mix(self, y_1AC: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token, [B, T, C], 0 at padded tokens."""
        B, T, k = self.weight.shape
        y_BTKC = gather_rows(y_1AC[0], self.inverse, self.order).view(B, T, k, y_1AC.shape[2])
        if self.real is not None:
            y_BTKC = torch.where(self.real[..., None, None], y_BTKC, 0.0)
        return (self.weight[..., None] * y_BTKC).sum(2).to(y_1AC.dtype)

    def with_extra(self, states: Tensor) -> Tensor:
        """Copy states [M N, ...], and append that of the sequence of padded tokens if there is one."""
        return torch.cat([states, states.new_zeros(int(self.real is not None), *states.shape[1:])])


def with_memory_of_all(order_BTK: Tensor, weight_BTK: Tensor, memory: int) -> tuple[Tensor, Tensor]:
    """Send every token also to `memory`, with weight 1."""
    return F.pad(order_BTK, (0, 1), value=memory), F.pad(weight_BTK, (0, 1), value=1.0)
