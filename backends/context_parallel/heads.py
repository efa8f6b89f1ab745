"""Exchange tokens for heads: each rank gets all tokens of its share of the heads.

For operators whose state is not combined from the maps of pieces: they run on the whole sequences of a rank's heads.
H heads, n ranks, H' = ceil(H / n) heads of a rank, T tokens of this rank, L tokens of all documents
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.context_parallel.exchange import gather_ranks
from deltazoo.backends.context_parallel.plan import ContextPlan

_ops = torch.ops._c10d_functional


class _AllToAll(torch.autograd.Function):
    """Send x[r] to rank r, and return what rank r has sent as y[r]; so is the gradient."""

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


def scatter_heads(x_1THC: Tensor, plan: ContextPlan, groups: int = 1) -> Tensor:
    """Return all tokens of this rank's heads, [1, L, H', ...], from all heads of this rank's tokens [1, T, H, ...].

    Where n does not divide H, the last heads are 0 on some ranks.

    Args: groups: consecutive heads that stay together; H' is a multiple of it.
    """
    pieces_PTHC = _padded_pieces(x_1THC[0], plan.local_sizes, plan)
    shares = _padded_heads(pieces_PTHC, 2, plan, groups).unflatten(2, (plan.ranks, -1)).movedim(2, 0)
    received: Tensor = _AllToAll.apply(shares, plan.group)
    pieces = received.flatten(0, 1)
    return torch.cat([pieces[i, :size] for i, size in zip(plan.order, plan.sizes, strict=True)])[None]


def gather_heads(y_1LHC: Tensor, plan: ContextPlan, heads: int) -> Tensor:
    """Return all heads of this rank's tokens, [1, T, H, ...]: the inverse of `scatter_heads`. Args: heads: H."""
    in_line = _padded_pieces(y_1LHC[0], plan.sizes, plan)
    pieces = torch.stack([in_line[plan.order.index(i)] for i in range(len(plan.order))])
    received: Tensor = _AllToAll.apply(pieces.unflatten(0, (plan.ranks, -1)), plan.group)
    pieces_PTHC = received.movedim(0, 2).flatten(2, 3)
    return torch.cat([piece[:size, :heads] for piece, size in zip(pieces_PTHC, plan.local_sizes, strict=True)])[None]


def own_heads(x: Tensor, dim: int, plan: ContextPlan, groups: int = 1) -> Tensor:
    """Return this rank's heads of a parameter or a state with all heads in dimension `dim`; see `scatter_heads`."""
    rank = plan.order[plan.local[0]] // len(plan.local)
    return _padded_heads(x, dim, plan, groups).chunk(plan.ranks, dim)[rank]


def all_heads(x: Tensor, dim: int, plan: ContextPlan, heads: int) -> Tensor:
    """Return the heads of all ranks in dimension `dim`, on every rank: the inverse of `own_heads`. Args: heads: H."""
    return gather_ranks(x.movedim(dim, 0), plan)[:heads].movedim(0, dim)


def _padded_pieces(x: Tensor, sizes: Sequence[int], plan: ContextPlan) -> Tensor:
    """Return tokens [sum of sizes, ...] as pieces [len(sizes), longest piece of all ranks, ...], padded with zeros."""
    longest = max(plan.sizes)
    if all(size == longest for size in sizes):
        return x.unflatten(0, (len(sizes), longest))
    return torch.stack([F.pad(piece, [0, 0] * (x.dim() - 1) + [0, longest - len(piece)]) for piece in x.split(sizes)])


def _padded_heads(x: Tensor, dim: int, plan: ContextPlan, groups: int) -> Tensor:
    """Return x with heads that are 0 after the others, so that all ranks have equally many."""
    missing = -x.shape[dim] % (plan.ranks * groups)
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else x
