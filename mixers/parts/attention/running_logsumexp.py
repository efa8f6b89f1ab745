"""The logarithm of a running sum of exponentials of bounded scores, with a state, for packed and padded sequences.

B batch, T time, C channels, N sequences
"""

import torch
from torch import Tensor

from deltazoo.backends.context_parallel.carry import first_states, incoming, with_incoming
from deltazoo.backends.context_parallel.exchange import connected, states_of_documents
from deltazoo.backends.context_parallel.plan import ContextPlan
from deltazoo.backends.ops.time_softmax import (
    INITIAL,
    SCORE_BOUND,
    TimeSoftmaxCall,
    initial_logsumexp,
    logsumexp_over_time,
    refusals,
    time_softmax,
)
from deltazoo.backends.update.base import state_dtype
from deltazoo.backends.update.watch import runs_by_kernel
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.parts.gates.decays import clamp_nonpositive


def softmax_over_time(raw: Tensor, state: Tensor | None, context: Context) -> tuple[Tensor, Tensor, Tensor | None]:
    """w_t = exp(s_t - z_t) and log a_t = z_(t-1) - z_t with s = raw, clamped to +-`SCORE_BOUND`.

    With these weights and decays the recurrence S_t = a_t S_(t-1) + w_t x_t is the mean of all x, weighted by a softmax
    of s over time.

    Args: raw: [B, T, C]; state: z before the first token, [N, C].
    Returns: log a, [B, T, C] float32 or float64; w, [B, T, C] of the dtype of raw; the new state, None if `state` is
        None.
    """
    if raw.shape[1] == 1:
        reasons = ["Inductor fuses the weights of a single token with neighbouring operations."]
    elif context.parallel is not None:
        reasons = ["the plain form adds the sums of the ranks before."]
    elif context.mask is not None:
        reasons = ["the plain form leaves padding out of the sums."]
    else:
        reasons = refusals(raw)
    if runs_by_kernel("softmax over time", reasons):
        log_decay, w, last = time_softmax(TimeSoftmaxCall(raw, state, context.cu_seqlens))
        return log_decay, w, None if state is None else write_back(state, last)
    score = raw.to(state_dtype(raw.dtype)).clamp(-SCORE_BOUND, SCORE_BOUND)
    z, previous_z, new_state = running_logsumexp(score, state, context)
    return clamp_nonpositive(previous_z - z), (score - z).exp().to(raw.dtype), new_state


def running_logsumexp(score: Tensor, state: Tensor | None, context: Context) -> tuple[Tensor, Tensor, Tensor | None]:
    """z_t = log(exp(z_(t-1)) + exp(score_t)) for all t at once.

    Args: score: [B, T, C], within +-`SCORE_BOUND`; state: z before the first token, [N, C].
    Returns: z_t and z_(t-1), [B, T, C]; the new state, None if `state` is None.
    """
    if context.parallel is not None:
        assert context.cu_seqlens is not None
        z, previous_z, last = _split_over_ranks(score, state, context.cu_seqlens, context.parallel)
        return z, previous_z, None if state is None else write_back(state, states_of_documents(last, context.parallel))
    N = score.shape[0] if context.cu_seqlens is None else context.cu_seqlens.shape[0] - 1
    first = initial_logsumexp(N, score.shape[2], score) if state is None else state
    if context.mask is not None:  # padding leaves z unchanged; it is at the right
        score = score.masked_fill(~context.mask[..., None], -torch.inf)
    if context.cu_seqlens is None and score.shape[1] == 1:
        z, previous_z = torch.logaddexp(first[:, None], score), first[:, None].clone()
        return z, previous_z, None if state is None else write_back(state, z[:, 0])
    z, previous_z, last = logsumexp_over_time(score, first, context.cu_seqlens)
    return z, previous_z, None if state is None else write_back(state, last)


def _split_over_ranks(
    score: Tensor, state: Tensor | None, cu_seqlens: Tensor, plan: ContextPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the sums of this rank's segments: those from `INITIAL`, then those from the sums of the pieces before."""
    if state is None:
        state = initial_logsumexp(plan.documents, score.shape[2], score)
    first = first_states(state, state, plan, INITIAL)
    last = logsumexp_over_time(score, first, cu_seqlens)[2][plan.tails]
    carried = incoming(connected(last, score), torch.zeros_like(last), torch.add, plan, torch.logaddexp, INITIAL)
    before = with_incoming(first, carried, plan)
    z, previous_z, last = logsumexp_over_time(score, before, cu_seqlens)
    return connected(z, before), connected(previous_z, before), last
