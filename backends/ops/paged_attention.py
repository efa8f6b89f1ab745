"""Causal softmax attention of new tokens over a paged cache, which stores their keys and values.

    the key of position p of sequence n is in page table[n, p // S], slot p % S
    o_t = sum_(s <= t) softmax_s(scale q_t . k_s) v_s

Pages belong to sequences by the table alone: several may list the same page. Page 0 belongs to none: a token whose
position has no page is not stored, and its output is undefined. Nothing here records gradients.

B batch, T time, H query heads, G key-value heads, E key width, V value width, N sequences, M pages of a sequence,
S slots of a page
"""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.ops import forgetting_attention
from deltazoo.backends.torch_ext.custom_op import mark_written, operator
from deltazoo.backends.triton.attention import paged_op
from deltazoo.backends.triton.attention.paged_op import PagedCall
from deltazoo.backends.update.watch import runs_by_kernel

LEAST_SLOTS = 16  # slots of the smallest page that the kernels support


class Pages(NamedTuple):
    """Pages of one cache, k [P, S, G, E] and v [P, S, G, V], and the table [N, M] int32 of a batch."""

    k: Tensor
    v: Tensor
    table: Tensor


def page_refusals(q: Tensor, slots: int) -> list[str]:
    """Return why neither the kernels nor plain torch support queries [B, T, H, E], one sentence each; [] if one does.

    Plain torch reads the lengths of the sequences on the host, which on other devices than a CPU would synchronise.
    """
    return [] if q.device.type == "cpu" else _kernel_refusals(q, slots)


def attend_pages_(
    q: Tensor, k: Tensor, v: Tensor, pages: Pages, before: Tensor, scale: float,
    counts: Tensor | None = None, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Store keys and values of new tokens in their pages, in place, and attend to all tokens up to each.

    Args:
        q: [B, T, H, E], for which `page_refusals` is empty.
        k: [B, T, G, E], v: [B, T, G, V], in the dtype of the pages; V is at most E.
        before: [N] int64, the tokens of each sequence that the pages hold already.
        scale: factor on the scores.
        counts: [N] int64, the real tokens of each row, which are its first ones; None: all. The others are not stored.
        cu_seqlens: [N + 1] int32, bounds of packed sequences; then B = 1, else B = N.
    Returns: [B, T, H, V], 0 for tokens after the last packed sequence; undefined for padded tokens.
    """
    by_kernel = runs_by_kernel("attention over pages", _kernel_refusals(q, pages.k.shape[1]))
    attend = paged_op.attend_pages if by_kernel else _attend_pages
    o: Tensor = attend(q, k, v, *pages, before, counts, cu_seqlens, scale)
    return o


def _kernel_refusals(q: Tensor, slots: int) -> list[str]:
    if slots < LEAST_SLOTS:
        return [f"pages must have at least {LEAST_SLOTS} slots, got {slots}."]
    return forgetting_attention.refusals(q)


def _plain(*arguments: object) -> Tensor:
    """Compute the operator on a CPU, by the lengths of the sequences."""
    call = PagedCall(*arguments)  # type: ignore[arg-type]
    if not call.q.numel():
        return paged_op.fake(*arguments)
    if call.cu_seqlens is None:
        o = _attend_rows(call)
    else:
        o, bounds = paged_op.fake(*arguments).zero_(), call.cu_seqlens.tolist()
        for n, (start, end) in enumerate(itertools.pairwise(bounds)):
            if start == end:
                continue
            q, k, v = (x[:, start:end] for x in (call.q, call.k, call.v))
            row = call._replace(q=q, k=k, v=v, table=call.table[n : n + 1], before=call.before[n : n + 1], counts=None)
            o[:, start:end] = _attend_rows(row)
    for pages in (call.k_pages, call.v_pages):
        mark_written(pages, pages)
    return o


def _attend_rows(call: PagedCall) -> Tensor:
    """Attend with one sequence per row."""
    (N, T), S, M = call.q.shape[:2], call.k_pages.shape[1], call.table.shape[1]
    has_pages = call.table[:, 0] > 0
    before = torch.where(has_pages, call.before, 0)
    time_T = torch.arange(T)
    position_NT = before[:, None] + time_T
    page_NT = call.table.gather(1, (position_NT // S).clamp(max=M - 1)).long()
    stored = (page_NT > 0) & (position_NT < M * S)
    counts = torch.full_like(before, T) if call.counts is None else call.counts
    stored &= time_T < counts[:, None]
    slot = (page_NT * S + position_NT % S)[stored]
    for pages, new in ((call.k_pages, call.k), (call.v_pages, call.v)):
        pages.view(-1, *pages.shape[2:])[slot] = new[stored].to(pages.dtype)
    longest = min(int(before.amax()) + T, M * S) if N else 0
    used = call.table[:, : -(-longest // S)].long()
    k, v = (pages[used].flatten(1, 2)[:, :longest].to(call.q.dtype) for pages in (call.k_pages, call.v_pages))
    slot_J = torch.arange(longest)
    filled_NJ = (slot_J < (before + counts)[:, None]) & used.bool().repeat_interleave(S, 1)[:, :longest]
    for x in (k, v):
        x.masked_fill_(~filled_NJ[..., None, None], 0.0)  # the rest may be NaN, which a mask does not remove
    visible = filled_NJ[:, None] & (slot_J <= position_NT[..., None])
    q, k, v = (x.transpose(1, 2) for x in (call.q, k, v))
    grouped = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, visible[:, None], scale=call.scale, enable_gqa=grouped)
    return o.transpose(1, 2).contiguous()


_attend_pages = operator(paged_op.schema_of("attend_pages_"), _plain, paged_op.fake)
