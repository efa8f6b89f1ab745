"""Collectives of a context plan with their gradients. All are one node of a graph and need no host synchronisation.

The loss is the sum of the losses of all ranks. A gradient on a rank is therefore that rank's share: summed over the
ranks, the shares are the gradient, as for parameters under DDP and FSDP2.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.context_parallel.plan import ContextPlan, Links

_ops = torch.ops._c10d_functional


class _Gather(torch.autograd.Function):
    """Gather equal tensors of all ranks along dimension 0; the gradient is summed and scattered."""

    @staticmethod
    def forward(x: Tensor, group: str, ranks: int) -> Tensor:
        return _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), ranks, group))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.group, ctx.ranks = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _ops.wait_tensor(_ops.reduce_scatter_tensor(grad.contiguous(), "sum", ctx.ranks, ctx.group)), None, None


class _Sum(torch.autograd.Function):
    """Sum the tensors of all ranks on every rank; the gradient is summed alike."""

    @staticmethod
    def forward(x: Tensor, group: str) -> Tensor:
        return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.group), None


def begin_gather(x: Tensor, links: Links) -> Tensor:
    """Start to gather tensors of equal shape along dimension 0, without a gradient; `end_gather` waits for them."""
    pending: Tensor = _ops.all_gather_into_tensor(x.contiguous(), links.ranks, links.group)
    return pending


def end_gather(pending: Tensor) -> Tensor:
    """Make the current stream wait for gathered tensors, and return them."""
    gathered: Tensor = _ops.wait_tensor(pending)
    return gathered


def gather_ranks(x: Tensor, plan: ContextPlan) -> Tensor:
    """Return x [P, ...] of all ranks, [n P, ...]."""
    gathered: Tensor = _Gather.apply(x, plan.group, plan.ranks)
    return gathered


def gather_pieces(x: Tensor, plan: ContextPlan) -> Tensor:
    """Return x [P, ...] of all ranks in the order of the line, [G, ...]."""
    gathered = gather_ranks(x, plan)
    return reordered(gathered, plan.order)


def reordered(pieces: Tensor, order: Sequence[int]) -> Tensor:
    """Return pieces[order], without a copy if that is their order."""
    return pieces if list(order) == list(range(len(order))) else torch.stack([pieces[i] for i in order])


def gather_line(x_1TC: Tensor, plan: ContextPlan) -> Tensor:
    """Return the tokens x [1, T, ...] of all ranks in the order of the line, [1, tokens of all documents, ...]."""
    return joined_pieces(gather_pieces(padded_pieces(x_1TC, plan.local_sizes, plan), plan), plan.sizes)


def padded_pieces(x_1TC: Tensor, sizes: Sequence[int], plan: ContextPlan) -> Tensor:
    """Return tokens [1, sum of sizes, ...] as pieces [len(sizes), longest piece of all ranks, ...], padded with 0."""
    longest, x = max(plan.sizes), x_1TC[0]
    if all(size == longest for size in sizes):
        return torch.unflatten(x, 0, (len(sizes), longest))
    return torch.stack([F.pad(piece, [0, 0] * (x.dim() - 1) + [0, longest - len(piece)]) for piece in x.split(sizes)])


def joined_pieces(pieces: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the tokens [1, sum of sizes, ...] of padded pieces: the inverse of `padded_pieces`."""
    if all(size == pieces.shape[1] for size in sizes):
        return pieces.flatten(0, 1)[None]
    return torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])[None]


def take_local(line_1LC: Tensor, plan: ContextPlan) -> Tensor:
    """Return this rank's tokens [1, T, ...] of those of all documents [1, L, ...]."""
    starts = [0, *itertools.accumulate(plan.sizes)]
    return torch.cat([line_1LC[:, starts[g] : starts[g + 1]] for g in plan.local], 1)


def document_bounds(plan: ContextPlan) -> Tensor:
    """Return the bounds of the documents in the line, [D + 1] int32."""
    ends = plan.document_lengths.cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)


def sum_over_ranks(x: Tensor, plan: ContextPlan) -> Tensor:
    """Return the sum of x over the ranks, on every rank."""
    total: Tensor = _Sum.apply(x, plan.group)
    return total


def connected(result: Tensor, *sources: Tensor | None) -> Tensor:
    """Return the result, which in autograd's graph depends on the sources also on a rank without tokens.

    Every rank must take part in the backward of an exchange. So the operand of the exchange must depend on the rank's
    tokens, and the rank's results must depend on the result of the exchange.
    """
    floats = [x for x in sources if x is not None and x.is_floating_point()]
    if all(x.numel() for x in (result, *floats)):
        return result
    for x in floats:
        result = result + x.flatten()[:0].sum().to(result.dtype)
    return result


def states_of_documents(values: Tensor, plan: ContextPlan) -> Tensor:
    """Return the final states of the documents [D, ...] on every rank, from those of the local segments [N, ...]."""
    is_last = plan.ends.view(-1, *[1] * (values.dim() - 1))
    shares = torch.where(is_last, values, torch.zeros_like(values))
    empty = values.new_zeros(plan.documents, *values.shape[1:])
    return sum_over_ranks(empty.index_add(0, plan.document, shares), plan)
