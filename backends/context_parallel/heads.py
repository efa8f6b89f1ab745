"""Exchange tokens for heads: each rank gets all tokens of its share of the heads.

For operators whose state is not combined from the maps of pieces: they run on the whole sequences of a rank's heads.
H heads, n ranks, H' = ceil(H / n) heads of a rank, T tokens of this rank, L tokens of all documents
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.context_parallel.exchange import gather_ranks, joined_pieces, padded_pieces, reordered
from deltazoo.backends.context_parallel.plan import ContextPlan

_ops = torch.ops._c10d_functional


class _AllToAll(torch.autograd.Function):
    """Send x[r] to rank r, and return what rank r has sent as y[r]; the gradient is exchanged alike."""

    @staticmethod
    def forward(x: Tensor, group: str) -> Tensor:
        ones = [1] * x.shape[0]
        return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), ones, ones, group))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad, ctx.group), None


class HeadShare(NamedTuple):
    """The share of H heads that this rank computes at the tokens of all ranks. Without a plan it has all heads.

    A tensor may have g H heads, as queries that share keys: consecutive g heads then stay together. Where n does not
    divide H, the last heads of some ranks are 0.
    """

    heads: int
    plan: ContextPlan | None

    def scatter(self, operands: Iterable[Tensor | None]) -> list[Any]:
        """Return operands at all tokens for this rank's heads, [1, L, g H', ...], from [1, T, g H, ...].

        Operands of one dtype share an all-to-all.
        """
        result: list[Any] = list(operands)
        if self.plan is None:
            return result
        for dtype in dict.fromkeys(x.dtype for x in result if x is not None):
            given = {i: x for i, x in enumerate(result) if x is not None and x.dtype == dtype}
            by_head = [torch.unflatten(x, 2, (self.heads, -1)).flatten(3) for x in given.values()]
            pieces = self._exchange(torch.cat(by_head, 3), self.plan)
            parts = pieces.split([x.shape[3] for x in by_head], 3)
            for (i, x), part in zip(given.items(), parts, strict=True):
                line = joined_pieces(part, self.plan.sizes)
                result[i] = torch.unflatten(line, 3, (x.shape[2] // self.heads, *x.shape[3:])).flatten(2, 3)
        return result

    def _exchange(self, x_1THC: Tensor, plan: ContextPlan) -> Tensor:
        """Return this rank's heads of all pieces in the order of the line, [G, tokens of the longest piece, H', C]."""
        pieces_PTHC = self._padded(padded_pieces(x_1THC, plan.local_sizes, plan), 2, plan)
        shares = torch.unflatten(pieces_PTHC, 2, (plan.ranks, -1)).movedim(2, 0)
        received: Tensor = _AllToAll.apply(shares, plan.group)
        return reordered(received.flatten(0, 1), plan.order)

    def gather(self, y: Tensor) -> Tensor:
        """Return all heads of this rank's tokens, [1, T, g H, ...], from this rank's heads [1, L, g H', ...]."""
        plan = self.plan
        if plan is None:
            return y
        by_rank = [plan.order.index(i) for i in range(len(plan.order))]
        pieces = reordered(padded_pieces(y, plan.sizes, plan), by_rank)
        received: Tensor = _AllToAll.apply(torch.unflatten(pieces, 0, (plan.ranks, -1)), plan.group)
        pieces_PTHC = received.movedim(0, 2).flatten(2, 3)[:, :, : self._real(y.shape[2], plan)]
        return joined_pieces(pieces_PTHC, plan.local_sizes)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's heads of a parameter or a state that has all heads in dimension `dim`."""
        if self.plan is None:
            return x
        rank = self.plan.order[self.plan.local[0]] // len(self.plan.local)
        return self._padded(x, dim, self.plan).chunk(self.plan.ranks, dim)[rank].contiguous()

    def all(self, x: Tensor, dim: int) -> Tensor:
        """Return the heads of all ranks in dimension `dim`, on every rank: the inverse of `own`."""
        if self.plan is None:
            return x
        real = self._real(x.shape[dim], self.plan)
        return gather_ranks(x.movedim(dim, 0), self.plan)[:real].movedim(0, dim).contiguous()

    def _padded(self, x: Tensor, dim: int, plan: ContextPlan) -> Tensor:
        """Return x with heads that are 0 after the others, so that all ranks have equally many."""
        missing = -self.heads % plan.ranks * (x.shape[dim] // self.heads)
        return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else x

    def _real(self, own: int, plan: ContextPlan) -> int:
        """Return g H. Args: own: g H'."""
        return own // -(-self.heads // plan.ranks) * self.heads
