"""Exponential gates with a running maximum stabiliser: the state is stored divided by exp(m) to avoid overflow.

B batch, T time, D width, HV value heads, V value width, N sequences
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.backends.context_parallel.carry import first_states, incoming, span_sums, with_incoming
from deltazoo.backends.context_parallel.plan import ContextPlan
from deltazoo.backends.torch_ext.materialize import materialize
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.backends.update.varlen import valid_sequence_index
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import GateLinear, HeadShape, MapsInput, OperandPart, OperandResult, Stateful
from deltazoo.mixers.core.sequences import last_of_each_sequence, segment_cumsum
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.parts.gates.decays import clamp_nonpositive

# Running maximum of an empty state: below every gate's exponent, also RWKV-4's keys, which have no bound.
INITIAL_MAX = -1e30
SOFT_CAP = 15.0
INPUT_BIAS, FORGET_BIAS = -10.0, (3.0, 6.0)


class ExponentialGate(OperandPart, Stateful, MapsInput):
    """mLSTM's gates, a_t = sigmoid(f_t) and v_t <- exp(i_t) v_t with i, f = cap(W x + b), in stabilised form.

    With m_t = max(m_(t-1) + log a_t, i_t), the state is stored divided by exp(m_t). The stored decay
    exp(log a_t + m_(t-1) - m_t) and the stored input gate exp(i_t - m_t) are then at most 1. cap(x) = 15 tanh(x / 15).

    Returns the intermediate "one": exp(-m), the value 1 in the scale of the stored state.

    State: m, [B, HV]. m cancels in the result, so it gets no gradient.
    Initialisation: W = 0; b is -10 for i, and rises from 3 to 6 over the heads for f.
    Source: xLSTM 2405.04517, equations 15 to 17 and 19 to 27; cap and biases, xLSTM 7B 2503.13427.
    """

    splits: ClassVar[bool] = True

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.heads = shape.value_heads
        self.proj = GateLinear(shape.width, 2 * self.heads)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Override torch's initialisation of the linear map."""
        self.proj.weight.zero_()
        self.proj.bias[: self.heads] = INPUT_BIAS
        self.proj.bias[self.heads :] = torch.linspace(*FORGET_BIAS, self.heads)

    def input_map(self) -> nn.Module:
        return self.proj

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return initial_max(batch, self.heads, like)

    def forward(self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context) -> OperandResult:
        raw = context.apply(self.proj, x)
        if torch.compiler.is_compiling() and raw.shape[1] != 1:
            # Inductor of torch 2.11 would load the bias in the sum over tokens below, and fail for CUDA.
            raw = materialize(raw)
        capped = SOFT_CAP * torch.tanh(raw.to(state_dtype(raw.dtype)) / SOFT_CAP)
        log_input, log_decay = capped[..., : self.heads], F.logsigmoid(capped[..., self.heads :])
        m, previous_m, new_state = running_max(log_decay, log_input, state, context)
        return stabilised(inputs, log_decay, log_input, m, previous_m), new_state, {"one": (-m).exp()}


def stabilised(
    inputs: UpdateInputs, log_decay: Tensor, log_input: Tensor, m: Tensor, previous_m: Tensor
) -> UpdateInputs:
    """Return the operands of the update whose state is stored divided by exp(m). All gates: [B, T, HV]."""
    v = inputs.v * clamp_nonpositive(log_input - m).exp()[..., None]
    return inputs._replace(log_decay=clamp_nonpositive(log_decay + previous_m - m), v=v.to(inputs.v.dtype))


def running_max(
    log_decay: Tensor, log_input: Tensor, state: Tensor | None, context: Context
) -> tuple[Tensor, Tensor, Tensor | None]:
    """m_t = max(m_(t-1) + log_decay_t, log_input_t) for all t at once: m_t = A_t + cummax(log_input_t - A_t).

    A is the cumulative sum of log_decay. Rounding errors of m cancel only if every use reads the same m, so m_(t-1) is
    m shifted by one token and not recomputed. In a pack, values that are not finite do not enter m, which would pass
    them to later sequences; the caller's gates, computed from them and m, are not finite all the same.

    Args: log_decay, log_input: [B, T, HV]; state: the maximum before the first token, [N, HV].
    Returns: m_t and m_(t-1), [B, T, HV], without gradients; the new state, None if `state` is None.
    """
    if context.parallel is not None:
        local = context._replace(parallel=None)
        with torch.no_grad():
            first = _max_before_segments(log_decay, log_input, state, context.parallel, local)
            m, previous_m, _ = running_max(log_decay, log_input, first, local)
            after = None if state is None else last_of_each_sequence(m, state, context)
        return m, previous_m, None if state is None or after is None else write_back(state, after)
    with torch.no_grad():
        B, T, HV = log_decay.shape
        if context.mask is not None:  # padding leaves m unchanged; it is at the right
            log_decay = torch.where(context.mask[..., None], log_decay, 0.0)
            log_input = torch.where(context.mask[..., None], log_input, -torch.inf)
        if context.cu_seqlens is None:
            total = segment_cumsum(log_decay, None, context)
            first = initial_max(B, HV, log_decay) if state is None else state
            first_BTH = first[:, None].to(total.dtype).expand(B, T, HV)
            largest = log_input - total
            largest = largest if T == 1 else largest.cummax(1).values
        else:
            N = context.cu_seqlens.shape[0] - 1
            sequence_T = valid_sequence_index(context.cu_seqlens, T)
            first = initial_max(N, HV, log_decay) if state is None else state
            start_T = context.cu_seqlens.long()[sequence_T]
            log_decay, log_input = (x.nan_to_num(0.0, 0.0, 0.0) for x in (log_decay, log_input))
            total = segment_cumsum(log_decay, None, context)
            first_BTH = first[sequence_T][None].to(total.dtype)
            largest = _packed_cummax(log_input - total, sequence_T)
        m = (total + torch.maximum(largest, first_BTH)).to(log_decay.dtype)
        previous_m = torch.cat([first_BTH[:, :1].to(m.dtype), m[:, :-1]], 1)
        if context.cu_seqlens is not None:
            is_start = (torch.arange(T, device=m.device) == start_T)[None, :, None]
            previous_m = torch.where(is_start, first_BTH.to(m.dtype), previous_m)
        after = None if state is None else last_of_each_sequence(m, state, context)
    return m, previous_m, None if state is None or after is None else write_back(state, after)


def _max_before_segments(
    log_decay: Tensor, log_input: Tensor, state: Tensor | None, plan: ContextPlan, local: Context
) -> Tensor:
    """Return the maximum before each local segment, [N, HV], from those of the pieces before.

    The map of a piece adds the sum of its log decays, and its contribution is the maximum from -infinity.
    """
    HV = log_decay.shape[2]
    if state is None:
        state = initial_max(plan.documents, HV, log_decay)
    first = first_states(state, state, plan, -torch.inf)
    _, _, last = running_max(log_decay, log_input, first.clone(), local)  # overwrites the state
    assert last is not None
    total = span_sums(log_decay[0], plan.tail_spans)
    carried = incoming(last[plan.tails], total, torch.add, plan, torch.maximum, -torch.inf)
    return with_incoming(first, carried, plan)


def initial_max(batch: int, heads: int, like: Tensor) -> Tensor:
    """Return the running maximum before the first token, [B, HV]."""
    return like.new_full((batch, heads), INITIAL_MAX, dtype=state_dtype(like.dtype))


def _packed_cummax(x: Tensor, sequence_T: Tensor) -> Tensor:
    """Cumulative maximum within each packed sequence.

    An offset that grows by more than the range of x from one sequence to the next makes one cummax over all tokens
    ignore the values of earlier sequences.
    """
    if not x.shape[1]:
        return x
    offset = (x.amax() - x.amin() + 1) * sequence_T[None, :, None]
    return x.gather(1, (x + offset).cummax(1).indices)
