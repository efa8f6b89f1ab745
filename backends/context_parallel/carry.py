"""States at the start of a rank's segments, from summaries of the pieces of all ranks.

A recurrence takes the state before a piece to the state after it by a map that does not depend on that state. Each rank
computes for its pieces the map M_g of the last segment and its contribution n_g, the final state from a zero state. The
ranks gather these summaries once, and combine them in order, with h_g the state before piece g:

    h_(g+1) = n_g + M_g h_g    if the last segment of piece g continues a document, else n_g

G pieces of all ranks, P of this rank, N segments, D documents, C channels
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.context_parallel.exchange import gather_pieces
from deltazoo.backends.context_parallel.plan import ContextPlan

Apply = Callable[[Tensor, Tensor], Tensor]


def incoming(
    contribution: Tensor,
    maps: Tensor,
    apply: Apply,
    plan: ContextPlan,
    add: Apply = torch.add,
    zero: float = 0.0,
) -> Tensor:
    """Return the state before each local piece, [P, ...]; `zero` before the first piece of the line.

    Args:
        contribution, maps: [P, ...].
        apply: (the map of one piece, a state) -> the state after it.
        add, zero: the sum of N_g and M_g C_g, and its neutral element.
    """
    P = contribution.shape[0]
    dtype = torch.promote_types(contribution.dtype, maps.dtype)
    flat = torch.cat([contribution.reshape(P, -1).to(dtype), maps.reshape(P, -1).to(dtype)], 1)
    size = contribution[:1].numel()
    gathered = gather_pieces(flat, plan)
    contributions = gathered[:, :size].view(-1, *contribution.shape[1:])
    all_maps = gathered[:, size:].view(-1, *maps.shape[1:])
    # In autograd's graph also the first state depends on the exchange: every rank must take part in its backward.
    state = torch.full_like(contributions[0], zero) + gathered.flatten()[:0].sum()
    states = [state]
    for g in range(max(plan.local)):
        carried = apply(all_maps[g], state)
        state = add(contributions[g], torch.where(plan.joins[g], carried, zero))
        states.append(state)
    return torch.stack([states[g] for g in plan.local])


def scale_state(decay: Tensor, state: Tensor) -> Tensor:
    """Apply a map that is a factor per element."""
    return decay * state


def first_states(state: Tensor | None, like: Tensor, plan: ContextPlan, zero: float = 0.0) -> Tensor:
    """Return the states of segments [N, ...] that begin a document, from those of the documents; `zero` elsewhere.

    Args: state: [D, ...]; None: `zero`. like: [P, ...], whose other axes the result has.
    """
    if state is None:
        return like.new_full((plan.document.shape[0], *like.shape[1:]), zero)
    own = state.index_select(0, plan.document)
    return torch.where(plan.begins.view(-1, *[1] * (own.dim() - 1)), own, zero)


def with_incoming(first: Tensor, carried: Tensor, plan: ContextPlan) -> Tensor:
    """Put the states before the local pieces [P, ...] into the states of their first segments, [N, ...]."""
    S = plan.segments
    by_piece = torch.unflatten(first, 0, (-1, S))
    receives = plan.receives.view(-1, *[1] * (carried.dim() - 1))
    heads = torch.where(receives, carried.to(first.dtype), by_piece[:, 0])
    return torch.cat([heads[:, None], by_piece[:, 1:]], 1).flatten(0, 1)


def local_sums(x: Tensor, before: Tensor | None, plan: ContextPlan) -> Tensor:
    """Return the sum of x [1, T, ...] over a document before each local segment, [N, ...].

    Args: before: [D, ...], the sum before each document; None: zero.
    """
    totals = span_sums(x[0], plan.tail_spans)
    first = first_states(before, totals, plan).to(totals.dtype)
    contribution = totals + first.index_select(0, plan.tails)
    one = totals.new_ones(len(plan.local), *[1] * (totals.dim() - 1))
    return with_incoming(first, incoming(contribution, one, scale_state, plan), plan)


def span_sums(x: Tensor, spans: tuple[Tensor, Tensor]) -> Tensor:
    """Sum x [T, ...] over the tokens between two bounds [P] each: [P, ...]."""
    index = torch.arange(x.shape[0], device=x.device).view(-1, *[1] * (x.dim() - 1))
    inside = [(index >= start) & (index < end) for start, end in zip(*spans, strict=True)]
    return torch.stack([torch.where(i, x, torch.zeros_like(x)).sum(0) for i in inside])


class _Rows(torch.autograd.Function):
    """x and some of its rows [R], whose gradient is added to a copy of that of x. Negative rows are arbitrary."""

    @staticmethod
    def forward(x_1TC: Tensor, rows_R: Tensor) -> tuple[Tensor, Tensor]:
        if not x_1TC.shape[1]:
            return x_1TC.view_as(x_1TC), x_1TC.new_zeros(rows_R.shape[0], x_1TC.shape[2])
        return x_1TC.view_as(x_1TC), x_1TC[0].index_select(0, rows_R.clamp(min=0))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, d_x: Tensor, d_rows: Tensor) -> tuple[Tensor, None]:
        (rows_R,) = ctx.saved_tensors
        if not d_x.shape[1]:
            return d_x, None
        d_rows = torch.where(rows_R[:, None] >= 0, d_rows, 0.0)
        return d_x.index_add(1, rows_R.clamp(min=0), d_rows[None]), None


def previous_tokens(x_1TC: Tensor, state: Tensor | None, past: int, plan: ContextPlan) -> tuple[Tensor, Tensor]:
    """Return x, and the tokens before each local segment in its document, [N, past, C]: a halo exchange.

    Each piece sends its last tokens. Tokens before the start of the document come from `state`.

    Args: state: [D, past, C], the tokens before each document; None: zeros.
    Returns: x, whose gradient includes that of the halos if x is read from here on; the halos.
    """
    back = torch.arange(past, 0, -1, device=x_1TC.device)  # steps back from the first token
    rows = plan.tail_spans[1][:, None].long() - back  # of a short piece also rows before it, which no rank reads
    x_1TC, tails = _Rows.apply(x_1TC, rows.flatten())
    tails = torch.unflatten(tails, 0, rows.shape)
    line = gather_pieces(tails, plan).flatten(0, 1)
    from_end = back[:, None] - plan.distance[:, None]  # [P, past, G], 1 for the last token of piece g
    inside = (plan.distance[:, None] >= 0) & (from_end >= 1) & (from_end <= plan.lengths)
    index = (torch.arange(len(plan.order), device=line.device) + 1) * past - from_end
    source = torch.where(inside, index, 0).sum(-1)
    halo = torch.where(inside.any(-1)[..., None], line[source], 0.0)
    first = first_states(state, tails, plan).to(x_1TC.dtype)
    if state is not None:
        heads = state.index_select(0, plan.document[:: plan.segments]).to(x_1TC.dtype)
        known = inside.any(-1).sum(-1, keepdim=True)  # tokens of the document before the piece, at most past
        step = (torch.arange(past, device=line.device) + known).clamp(max=past - 1)
        older = heads.gather(1, step[..., None].expand_as(heads))
        halo = torch.where(inside.any(-1)[..., None], halo, older)
    return x_1TC, with_incoming(first, halo, plan)
