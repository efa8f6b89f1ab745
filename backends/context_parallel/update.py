"""The update of a rank's segments, whose first ones start from the states of the ranks before.

    o_t = o'_t + S^T r_t

o' is the output with a zero state before the piece, S that state, and r_t what q_t reads of it after the transitions of
the piece up to t. One pass of the backend gives o', r, and what the other ranks need:

- Additive updates: r_t is scale q_t times the product of the decays, and the map of a piece a vector of decays.
- Updates with an erase term: the pass has K more value columns, in which v is 0 and the initial state the identity.
  Their outputs are r, and their final state is the map of the piece, K x K.
- Decay by rate: r would have K times as many elements as v, so that a first pass gives the contribution of a piece, and
  a second one starts from the true state.

The second pass of the general form would cost as much as the first without the read: with V values and the K columns of
the map, (V + K) + V columns instead of V + K and a product of K x V per token.

T tokens, N segments, P local pieces, H key heads, HV value heads, K key width, V value width
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from deltazoo.backends.context_parallel.carry import first_states, incoming, scale_state, with_incoming
from deltazoo.backends.context_parallel.exchange import connected
from deltazoo.backends.context_parallel.plan import ContextPlan
from deltazoo.backends.update.base import UpdateInputs, UpdateOutput, state_dtype, without_autocast
from deltazoo.backends.update.dispatch import BoundUpdate


def carried_update(bound: BoundUpdate, inputs: UpdateInputs, plan: ContextPlan) -> UpdateOutput:
    """Compute the update of the local segments.

    Args: inputs: those of the local tokens, B = 1; `state` holds that before each document [D, HV, K, V].
    Returns: o [1, T, HV, V] and the final state of each segment [N, HV, K, V].
    """
    with without_autocast(inputs.q):
        return _carried_update(bound, inputs, plan)


def _carried_update(bound: BoundUpdate, inputs: UpdateInputs, plan: ContextPlan) -> UpdateOutput:
    state = inputs.state
    inputs = inputs._replace(cu_seqlens=plan.operator_bounds)
    if bound.spec.decay == "rate":
        second = bound(inputs._replace(state=carried_states(bound, inputs._replace(state=state), plan)))
        return second._replace(o=connected(second.o, second.state))
    like = _no_states(inputs, plan)
    first = first_states(state, like, plan)
    out = bound.carried(inputs._replace(state=first), plan.links)
    if out is not None:
        return out
    if bound.spec.transition == "additive":
        return _read_with_decays(bound, inputs._replace(state=None if state is None else first), plan)
    return _read_with_maps(bound, inputs._replace(state=first), plan)


def carried_states(bound: BoundUpdate, inputs: UpdateInputs, plan: ContextPlan) -> Tensor:
    """Return the state before each local segment of an additive update [N, HV, K, V]. Args: as for `carried_update`."""
    assert bound.spec.transition == "additive"
    first = first_states(inputs.state, _no_states(inputs, plan), plan)
    out = bound(inputs._replace(state=first, cu_seqlens=plan.operator_bounds))
    decays = torch.stack([d.end.exp() for d in _decays(bound, inputs, plan)])
    return with_incoming(first, incoming(_tails(out, inputs, plan), decays, scale_state, plan), plan)


def _no_states(inputs: UpdateInputs, plan: ContextPlan) -> Tensor:
    """Return a tensor with the shape of the states before the local pieces."""
    HV, V = inputs.v.shape[-2:]
    return inputs.q.new_empty(len(plan.local), HV, inputs.q.shape[-1], V, dtype=state_dtype(inputs.q.dtype))


class _Decays(NamedTuple):
    """Cumulative log decays of a piece. read: [T, HV, 1 or K], up to what q_t reads. end: [HV, 1 or K, 1]."""

    read: Tensor
    end: Tensor


def _decays(bound: BoundUpdate, inputs: UpdateInputs, plan: ContextPlan) -> list[_Decays]:
    """Return the cumulative log decays of each local piece from its start, as if it were one segment."""
    spec, sizes = bound.spec, plan.local_sizes
    dtype, HV = state_dtype(inputs.q.dtype), inputs.v.shape[-2]
    if spec.decay == "rate":
        assert inputs.step is not None and inputs.rate is not None
        ends = [piece.sum(0)[:, None] * inputs.rate for piece in inputs.step[0].split(sizes)]
        return [_Decays(end, end[..., None]) for end in ends]
    pieces = []
    for size in sizes:
        time = torch.arange(1, size + 1, device=inputs.q.device, dtype=dtype)[:, None, None]
        if spec.decay == "fixed":
            assert inputs.log_decay is not None
            per_token = inputs.log_decay.view(HV, -1)
            pieces.append((time * per_token, size * per_token, per_token))
        else:
            zero = time.new_zeros(HV, 1)
            pieces.append((time * zero, zero, zero))
    if spec.decay in ("head", "channel"):
        assert inputs.log_decay is not None
        log_decays = [x if x.dim() == 3 else x[..., None] for x in inputs.log_decay[0].split(sizes)]
        pieces = [(x.cumsum(0), x.sum(0), x) for x in log_decays]
    before = spec.read == "before"
    return [_Decays(total - last if before else total, end[..., None]) for total, end, last in pieces]


def _read_with_decays(bound: BoundUpdate, inputs: UpdateInputs, plan: ContextPlan) -> UpdateOutput:
    out = bound(inputs)
    decays = _decays(bound, inputs, plan)
    ends = torch.stack([d.end.exp() for d in decays])
    S = incoming(_tails(out, inputs, plan), ends, scale_state, plan)
    S = torch.where(plan.receives.view(-1, 1, 1, 1), S, 0.0)
    scale, sizes, dtype = bound.spec.scale_of(inputs.q.shape[-1]), plan.local_sizes, inputs.q.dtype
    reads, finals = [], []
    for p, (q, o, decay) in enumerate(zip(inputs.q[0].split(sizes), out.o[0].split(sizes), decays, strict=True)):
        head, S_p = plan.heads[p], S[p]
        length = plan.cu_seqlens[head + 1] - plan.cu_seqlens[head]
        inside = torch.arange(q.shape[0], device=q.device) < length
        factor = scale * torch.where(inside[:, None, None], decay.read.exp(), 0.0)
        by_head = rearrange(S_p.to(dtype), "(h g) k v -> h g k v", h=q.shape[1])
        if factor.shape[-1] == 1:
            read = factor * torch.einsum("thk,hgkv->thgv", q, by_head).flatten(1, 2)
        else:
            scaled = q.repeat_interleave(by_head.shape[1], 1) * factor
            read = torch.einsum("thk,hkv->thv", scaled.to(dtype), S_p.to(dtype))
        reads.append((o + read).to(o.dtype))
        finals.append(_head_decay(bound, inputs, p, length, plan) * S_p)
    o = connected(torch.cat(reads)[None], S, inputs.q)
    return UpdateOutput(o, _add_to_heads(out.state, torch.stack(finals), plan))


def _head_decay(bound: BoundUpdate, inputs: UpdateInputs, p: int, length: Tensor, plan: ContextPlan) -> Tensor:
    """Return the product of the decays of the first segment of local piece p, [HV, 1 or K, 1]."""
    spec, HV = bound.spec, inputs.v.shape[-2]
    if spec.decay == "none":
        return inputs.q.new_ones(HV, 1, 1, dtype=state_dtype(inputs.q.dtype))
    assert inputs.log_decay is not None
    if spec.decay == "fixed":
        return (inputs.log_decay.view(HV, -1) * length).exp()[..., None]
    x = inputs.log_decay[0].split(plan.local_sizes)[p]
    inside = torch.arange(x.shape[0], device=x.device) < length
    return torch.where(inside.view(-1, *[1] * (x.dim() - 1)), x, 0.0).sum(0).view(HV, -1).exp()[..., None]


def _read_with_maps(bound: BoundUpdate, inputs: UpdateInputs, plan: ContextPlan) -> UpdateOutput:
    assert inputs.state is not None
    (K, V), sizes = inputs.state.shape[2:], plan.local_sizes
    eye = torch.eye(K, device=inputs.q.device, dtype=inputs.state.dtype)
    identity = eye.expand(len(sizes), 1, inputs.state.shape[1], K, K)
    others = identity.new_zeros(len(sizes), plan.segments - 1, *identity.shape[2:])
    state = torch.cat([inputs.state, torch.cat([identity, others], 1).flatten(0, 1)], -1)
    wide = inputs._replace(v=F.pad(inputs.v, (0, K)), state=state)
    if bound.spec.beta == "channel" and inputs.write is not None:
        wide = wide._replace(write=F.pad(inputs.write, (0, K), value=1.0))
    out = bound(wide)
    o, r = out.o.split([V, K], -1)
    final, maps = out.state.split([V, K], -1)
    last, last_maps = _tails(out, inputs, plan).split([V, K], -1)
    S = incoming(last, last_maps, torch.matmul, plan)
    S = torch.where(plan.receives.view(-1, 1, 1, 1), S, 0.0)
    reads = [torch.einsum("thk,hkv->thv", r_p, S_p.to(r.dtype)) for r_p, S_p in zip(r[0].split(sizes), S, strict=True)]
    heads = torch.unflatten(maps, 0, (len(sizes), -1))[:, 0]
    return UpdateOutput(connected(o + torch.cat(reads)[None], S, inputs.q), _add_to_heads(final, heads @ S, plan))


def _tails(out: UpdateOutput, inputs: UpdateInputs, plan: ContextPlan) -> Tensor:
    """Return the final state of the last segment of each local piece, [P, HV, K, V]."""
    return connected(out.state[plan.tails], *inputs)


def _add_to_heads(states: Tensor, added: Tensor, plan: ContextPlan) -> Tensor:
    """Add to the states [N, ...] of the first segment of each local piece."""
    by_piece = torch.unflatten(states, 0, (-1, plan.segments))
    return torch.cat([by_piece[:, :1] + added[:, None], by_piece[:, 1:]], 1).flatten(0, 1)
