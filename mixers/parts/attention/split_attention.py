"""Causal softmax attention of the tokens that a rank holds, to the keys of all ranks (context parallelism).

A window exchanges the last W - 1 keys and values of each piece. Full attention gathers all keys and values; where torch
has no flash attention it needs a mask of this rank's tokens by all tokens.

T tokens of this rank, L tokens of all documents, D documents, H heads, G key-value heads, E head width, S slots,
W window
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.context_parallel.carry import previous_tokens
from deltazoo.backends.context_parallel.exchange import connected, gather_line
from deltazoo.backends.context_parallel.plan import ContextPlan
from deltazoo.mixers.parts.attention.caches import KVCache, token_in_slot
from deltazoo.mixers.parts.attention.softmax_attention import (
    attend,
    flash_packed,
    has_flash_attention,
    sdpa,
)


def attend_split(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, plan: ContextPlan) -> Tensor:
    """Attend within each document. Args: q, k, v: [1, T, H or G, E]. Returns: [1, T, H, E]."""
    if window is not None and 1 < window <= max(plan.sizes):
        return _attend_window(q, k, v, scale, window, plan)
    k_line, v_line = gather_keys_and_values(k, v, plan)
    return attend_line(q, k_line, v_line, scale, window, plan)


def gather_keys_and_values(k: Tensor, v: Tensor, plan: ContextPlan) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all ranks in one exchange, [1, L, G, E] each."""
    if k.shape[2] != v.shape[2]:
        return gather_line(k, plan), gather_line(v, plan)
    k_line, v_line = gather_line(torch.cat([k, v], -1), plan).split([k.shape[-1], v.shape[-1]], -1)
    return k_line, v_line


def attend_line(
    q: Tensor, k_line: Tensor, v_line: Tensor, scale: float, window: int | None, plan: ContextPlan
) -> Tensor:
    """Attend to the keys of all ranks. Args: q: [1, T, H, E]; k_line, v_line: [1, L, G, E]."""
    if has_flash_attention(q, v_line) and k_line.shape[-1] == v_line.shape[-1]:
        return _flash_attend_line(q, k_line, v_line, scale, window, plan)
    return connected(sdpa(q, k_line, v_line, scale, _visible_in_line(window, plan)), k_line, v_line)


def attend_cached_split(
    q: Tensor, k_line: Tensor, v_line: Tensor, scale: float, window: int | None, cache: KVCache, plan: ContextPlan
) -> Tensor:
    """Attend to the cached tokens of each document and to the new ones. Args: cache: row d holds document d."""
    D, S = cache.k.shape[:2]
    document_T = _document_of_token(plan)
    position_T1 = (plan.positions[0] + cache.position[document_T])[:, None]
    position_J = token_in_slot(cache).flatten()
    row_J = torch.arange(D, device=q.device).repeat_interleave(S)
    visible = (row_J == document_T[:, None]) & (position_J >= 0)
    if window is not None:
        visible = visible & (position_T1 - position_J < window)
    visible = torch.cat([visible, _visible_in_line(window, plan)], 1)
    keys, values = (
        torch.cat([old.flatten(0, 1)[None].to(new.dtype), new], 1)
        for old, new in ((cache.k, k_line), (cache.v, v_line))
    )
    return connected(sdpa(q, keys, values, scale, visible), keys, values)


def document_starts(plan: ContextPlan) -> Tensor:
    """Return the index in the line of each document's first token, [D]."""
    return plan.document_lengths.cumsum(0) - plan.document_lengths


def _document_of_token(plan: ContextPlan) -> Tensor:
    bounds = plan.cu_seqlens.long()
    time_T = torch.arange(plan.positions.shape[1], device=bounds.device)
    return plan.document[torch.searchsorted(bounds, time_T, right=True) - 1]


def _visible_in_line(window: int | None, plan: ContextPlan) -> Tensor:
    """Return which tokens of the line each local token attends to, [T, L] bool.

    A document is contiguous in the line: a key belongs to it if its distance is at most the position of the query.
    """
    starts, device = [0, *itertools.accumulate(plan.sizes)], plan.positions.device
    line_T = torch.cat([torch.arange(starts[g], starts[g + 1], device=device) for g in plan.local])
    age_TL = line_T[:, None] - torch.arange(starts[-1], device=device)
    visible = (age_TL >= 0) & (age_TL <= plan.positions[0][:, None])
    return visible if window is None else visible & (age_TL < window)


def _flash_attend_line(
    q: Tensor, k_line: Tensor, v_line: Tensor, scale: float, window: int | None, plan: ContextPlan
) -> Tensor:
    """Call torch's varlen_attn for each local piece, whose queries are the last tokens of their keys.

    The keys before the piece's first document are a sequence without queries: only the gradients of keys that belong to
    a sequence are written.
    """
    from torch.nn.attention.varlen import varlen_attn  # imports Triton

    groups = q.shape[2] // k_line.shape[2]
    ends = list(itertools.accumulate(plan.sizes))
    before = -1 if window is None else window - 1
    outputs = []
    for p, (g, q_p) in enumerate(zip(plan.local, q[0].split(plan.local_sizes), strict=True)):
        k, v = (x[0, : ends[g]].repeat_interleave(groups, 1) for x in (k_line, v_line))
        bounds = plan.cu_seqlens[p * plan.segments : (p + 1) * plan.segments + 1]
        bounds, keys = (F.pad(x, (1, 0)) for x in (bounds - bounds[:1], plan.key_bounds[p].int()))
        o = varlen_attn(
            q_p.contiguous(), k, v, bounds, keys, max(q_p.shape[0], 1), ends[g], scale=scale, window_size=(before, 0)
        )
        assert isinstance(o, Tensor)  # without the logsumexp
        outputs.append(o)
    return connected(torch.cat(outputs)[None], k_line, v_line)


def _attend_window(q: Tensor, k: Tensor, v: Tensor, scale: float, W: int, plan: ContextPlan) -> Tensor:
    """Attend within a window, to the halo before each piece and to the piece's own keys.

    A document that began less than W - 1 tokens before the piece leaves rows of the halo unused: they are a sequence of
    their own, without queries. Without flash attention the halo's rows have queries of 0, whose outputs are dropped.
    """
    past, sizes, S = W - 1, plan.local_sizes, plan.segments
    E, kv = k.shape[-1], torch.cat([k, v], -1)
    line, halos = previous_tokens(kv.flatten(2), None, past, plan)
    kv, halo = (torch.unflatten(x, -1, kv.shape[2:]) for x in (line, halos[::S]))
    rows = torch.cat([torch.cat([h, x]) for h, x in zip(halo, kv[0].split(sizes), strict=True)])[None]
    reach = torch.where(plan.distance >= 0, plan.distance + plan.lengths, 0).amax(1)  # tokens of the document before
    known = torch.where(plan.receives, reach.clamp(max=past), 0)
    shift = past * torch.arange(1, len(sizes) + 1, device=q.device)
    bounds = plan.cu_seqlens.long()
    starts = torch.unflatten(bounds[:-1], 0, (-1, S))
    inner = starts + shift[:, None]  # the first segment of a piece takes in the halo
    unused = inner[:, :1] - past
    heads = inner[:, :1] - known[:, None]
    key_bounds = torch.cat([torch.cat([unused, heads, inner[:, 1:]], 1).flatten(), bounds[-1:] + shift[-1:]]).int()
    if has_flash_attention(q, v):
        query_bounds = torch.cat([torch.cat([starts[:, :1], starts], 1).flatten(), bounds[-1:]]).int()
        o = flash_packed(q, rows[..., :E], rows[..., E:], scale, W, (query_bounds, key_bounds), past + max(sizes))
        return connected(o, rows)
    padded_q = torch.cat([torch.cat([x.new_zeros(past, *x.shape[1:]), x]) for x in q[0].split(sizes)])[None]
    o = attend(padded_q, rows[..., :E], rows[..., E:], scale, W, key_bounds)
    pieces = o[0].split([past + size for size in sizes])
    return connected(torch.cat([piece[past:] for piece in pieces])[None], rows)
