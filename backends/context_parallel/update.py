"""The update of a rank's segments, whose first ones start from the states of the ranks before.

    o_t = o'_t + S^T r_t

o' is the output with a zero state before the piece, S that state, and r_t what q_t reads of it after the transitions of
the piece up to t. One pass of the backend gives o', r, and what the other ranks need:

- Additive updates: r_t is scale q_t times the product of the decays, and the map of a piece a vector of decays.
- Updates with an erase term: the pass has K more value columns, in which v is 0 and the initial state the identity.
  Their outputs are r, and their final state is the map of the piece, K x K.
- Decay by rate: r would have K times as many elements as v, so that a first pass gives the contribution of a piece, and
  a second one starts from the true state. So do memories, whose pieces are not slices of the tokens.

The second pass of the general form would cost as much as the first without the read: with V values and the K columns of
the map, (V + K) + V columns instead of V + K and a product of K x V per token.

T tokens, N segments, P local pieces, H key heads, HV value heads, K key width, V value width
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from deltazoo.backends.context_parallel.carry import first_states, incoming, scale_state, span_sums, with_incoming
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
    first = first_states(state, _no_states(inputs, plan), plan)
    out = bound.carried(inputs._replace(state=first), plan.links)
    if out is not None:
        return out
    if bound.spec.decay == "rate" or not plan.sizes:
        second = bound(inputs._replace(state=_carried_states(bound, inputs._replace(state=first), plan)))
        return second._replace(o=connected(second.o, second.state, inputs.q))
    if bound.spec.transition == "additive":
        return _read_with_decays(bound, inputs._replace(state=None if state is None else first), plan)
    return _read_with_maps(bound, inputs._replace(state=first), plan)


def carried_states(bound: BoundUpdate, inputs: UpdateInputs, plan: ContextPlan) -> Tensor:
    """Return the state before each local segment [N, HV, K, V]. Args: as for `carried_update`."""
    first = first_states(inputs.state, _no_states(inputs, plan), plan)
    return _carried_states(bound, inputs._replace(state=first, cu_seqlens=plan.operator_bounds), plan)


def _carried_states(bound: BoundUpdate, inputs: UpdateInputs, plan: ContextPlan) -> Tensor:
    """As `carried_states`. Args: inputs: with the bounds of the segments, and their states if no rank precedes."""
    first = inputs.state
    assert first is not None
    if bound.spec.transition == "additive":
        decays = _span_decays(bound, inputs, plan.tail_spans)
        states = incoming(_tails(bound(inputs), inputs, plan), decays, scale_state, plan)
    else:
        K, V = first.shape[2:]
        last, maps = _tails(bound(_with_maps(bound, inputs, plan)), inputs, plan).split([V, K], -1)
        states = incoming(last, maps, torch.matmul, plan)
    return with_incoming(first, states, plan)


def _no_states(inputs: UpdateInputs, plan: ContextPlan) -> Tensor:
    """Return a tensor with the shape of the states before the local pieces."""
    HV, V = inputs.v.shape[-2:]
    return inputs.q.new_empty(len(plan.local), HV, inputs.q.shape[-1], V, dtype=state_dtype(inputs.q.dtype))


def _span_decays(bound: BoundUpdate, inputs: UpdateInputs, spans: tuple[Tensor, Tensor]) -> Tensor:
    """Return the products of the decays between two bounds [P] each: [P, HV, 1 or K, 1]."""
    spec, HV = bound.spec, inputs.v.shape[-2]
    P, dtype = spans[0].shape[0], state_dtype(inputs.q.dtype)
    if spec.decay == "none":
        return inputs.q.new_ones(P, HV, 1, 1, dtype=dtype)
    if spec.decay == "rate":
        assert inputs.step is not None and inputs.rate is not None
        total = span_sums(inputs.step[0], spans)[..., None] * inputs.rate
    else:
        assert inputs.log_decay is not None
        if spec.decay == "fixed":
            total = (spans[1] - spans[0]).view(-1, 1, 1) * inputs.log_decay.view(HV, -1)
        else:
            total = span_sums(inputs.log_decay[0], spans)
    return total.view(P, HV, -1, 1).exp()


def _read_decays(bound: BoundUpdate, inputs: UpdateInputs, plan: ContextPlan) -> list[Tensor]:
    """Return the product of the decays from the start of each local piece up to what q_t reads, [T, HV, 1 or K]."""
    spec, sizes = bound.spec, plan.local_sizes
    dtype, HV = state_dtype(inputs.q.dtype), inputs.v.shape[-2]
    is_before = spec.read == "before"
    if spec.decay in ("head", "channel"):
        assert inputs.log_decay is not None
        log_decays = [x if x.dim() == 3 else x[..., None] for x in inputs.log_decay[0].split(sizes)]
        return [(x.cumsum(0) - x if is_before else x.cumsum(0)).exp() for x in log_decays]
    per_token = inputs.q.new_zeros(HV, 1, dtype=dtype)
    if spec.decay == "fixed":
        assert inputs.log_decay is not None
        per_token = inputs.log_decay.view(HV, -1)
    times = [torch.arange(n, device=inputs.q.device, dtype=dtype)[:, None, None] for n in sizes]
    return [((time if is_before else time + 1) * per_token).exp() for time in times]


def _read_with_decays(bound: BoundUpdate, inputs: UpdateInputs, plan: ContextPlan) -> UpdateOutput:
    out = bound(inputs)
    decays = _read_decays(bound, inputs, plan)
    S = incoming(_tails(out, inputs, plan), _span_decays(bound, inputs, plan.tail_spans), scale_state, plan)
    S = torch.where(plan.receives.view(-1, 1, 1, 1), S, 0.0)
    scale, sizes, dtype = bound.spec.scale_of(inputs.q.shape[-1]), plan.local_sizes, inputs.q.dtype
    reads = []
    starts, ends = plan.head_spans
    for p, (q, o, decay) in enumerate(zip(inputs.q[0].split(sizes), out.o[0].split(sizes), decays, strict=True)):
        inside = torch.arange(q.shape[0], device=q.device) < ends[p] - starts[p]
        factor = scale * torch.where(inside[:, None, None], decay, 0.0)
        by_head = rearrange(S[p].to(dtype), "(h g) k v -> h g k v", h=q.shape[1])
        if factor.shape[-1] == 1:
            read = factor * torch.einsum("thk,hgkv->thgv", q, by_head).flatten(1, 2)
        else:
            scaled = q.repeat_interleave(by_head.shape[1], 1) * factor
            read = torch.einsum("thk,hkv->thv", scaled.to(dtype), S[p].to(dtype))
        reads.append((o + read).to(o.dtype))
    o = connected(torch.cat(reads)[None], S, inputs.q)
    return UpdateOutput(o, _add_to_heads(out.state, _span_decays(bound, inputs, plan.head_spans) * S, plan))


def _with_maps(bound: BoundUpdate, inputs: UpdateInputs, plan: ContextPlan) -> UpdateInputs:
    """Append K values that start from the identity in the first segment of each local piece."""
    assert inputs.state is not None
    K, P = inputs.state.shape[2], len(plan.local)
    eye = torch.eye(K, device=inputs.q.device, dtype=inputs.state.dtype)
    identity = eye.expand(P, 1, inputs.state.shape[1], K, K)
    others = identity.new_zeros(P, plan.segments - 1, *identity.shape[2:])
    state = torch.cat([inputs.state, torch.cat([identity, others], 1).flatten(0, 1)], -1)
    wide = inputs._replace(v=F.pad(inputs.v, (0, K)), state=state)
    if bound.spec.beta == "channel" and inputs.write is not None:
        wide = wide._replace(write=F.pad(inputs.write, (0, K), value=1.0))
    return wide


def _read_with_maps(bound: BoundUpdate, inputs: UpdateInputs, plan: ContextPlan) -> UpdateOutput:
    assert inputs.state is not None
    (K, V), sizes = inputs.state.shape[2:], plan.local_sizes
    out = bound(_with_maps(bound, inputs, plan))
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
    return connected(out.state[plan.tails], *inputs._replace(q=None))  # type: ignore[arg-type]  # no state depends on q


def _add_to_heads(states: Tensor, added: Tensor, plan: ContextPlan) -> Tensor:
    """Add to the states [N, ...] of the first segment of each local piece."""
    by_piece = torch.unflatten(states, 0, (-1, plan.segments))
    return torch.cat([by_piece[:, :1] + added[:, None], by_piece[:, 1:]], 1).flatten(0, 1)
