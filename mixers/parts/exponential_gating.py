"""Exponential gates that cannot overflow: a running maximum of their logarithms is taken out of the state.

B batch, T time, D width, HV value heads, V value width, N sequences
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.backends.base import UpdateInputs, state_dtype
from deltazoo.backends.varlen import sequence_index
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HeadShape, OperandPart, OutputArguments, OutputPart, Stateful
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.parts.decays import at_most_zero

# The maximum before the first token, of an empty state: low, and exp(-LOWEST) is finite in float32.
LOWEST = -80.0
SOFT_CAP = 15.0
INPUT_BIAS, FORGET_BIAS = -10.0, (3.0, 6.0)


class ExponentialGate(OperandPart, Stateful):
    """a_t = sigmoid(f_t), v_t <- exp(i_t) v_t, with i, f = cap(W x + b) and m_t = max(m_(t-1) + log a_t, i_t).

    The state is held divided by exp(m_t): log_decay = log a_t + m_(t-1) - m_t and the write exp(i_t - m_t) are at most
    0 and 1. Leaves exp(-m_t) as the note "one": what stands for 1 in the divided state.

    Initialisation: W = 0; b of i is -10, that of f from 3 to 6 over the heads. cap(x) = 15 tanh(x / 15).
    State: m, [B, HV]. m cancels in what comes out, so it has no gradient.
    Source: xLSTM 2405.04517, equations 15 to 17 and 19 to 27; cap and biases, xLSTM 7B 2503.13427.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.heads = shape.value_heads
        self.proj = nn.Linear(shape.width, 2 * self.heads)
        nn.init.zeros_(self.proj.weight)
        with torch.no_grad():
            self.proj.bias[: self.heads] = INPUT_BIAS
            self.proj.bias[self.heads :] = torch.linspace(*FORGET_BIAS, self.heads)

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return _lowest(batch, self.heads, like)

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        raw = self.proj(x)
        wide = SOFT_CAP * torch.tanh(raw.to(state_dtype(raw.dtype)) / SOFT_CAP)
        write, forget = wide[..., : self.heads], F.logsigmoid(wide[..., self.heads :])
        m, before, after = running_max(forget, write, state, context)
        context.store(one=(-m).exp())
        v = inputs.v * at_most_zero(write - m).exp()[..., None]
        log_decay = at_most_zero(forget + before - m)
        return inputs._replace(log_decay=log_decay, v=v.to(inputs.v.dtype)), after


class WKVGate(OperandPart, Stateful):
    """log_decay = -exp(w), v_t <- exp(k_t) v_t with the note "key" for k, [B, T, HV]: RWKV-4, stabilised as above.

    Leaves the note "before", m_(t-1). Initialisation: w from -5 to 3 over the channels, bent by the layer.
    Source: RWKV 2305.13048, its appendices (the stabilised form, the initialisation).
    """

    def __init__(self, shape: HeadShape, depth_share: float) -> None:
        super().__init__()
        self.heads = shape.value_heads
        at = torch.arange(self.heads) / max(1, self.heads - 1)
        self.w = nn.Parameter(-5 + 8 * at ** (0.7 + 1.3 * depth_share))

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return _lowest(batch, self.heads, like)

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        raw = context.intermediate("key")
        key = raw.to(state_dtype(raw.dtype))
        forget = (-self.w.to(key.dtype).exp()).expand_as(key)
        m, before, after = running_max(forget, key, state, context)
        context.store(before=before)
        v = inputs.v * at_most_zero(key - m).exp()[..., None]
        log_decay = at_most_zero(forget + before - m)
        return inputs._replace(log_decay=log_decay, v=v.to(inputs.v.dtype)), after


class WKVBonus(OutputPart):
    """o_t <- o_t + exp(u + k_t - m_(t-1)) [v_t, 1], for the token itself, both divided by the greater exponential.

    Initialisation: u = log 0.3, in thirds plus -1/2, 0, 1/2. Source: RWKV 2305.13048.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        zigzag = (torch.arange(shape.value_heads) + 1) % 3 - 1
        self.u = nn.Parameter(torch.full((shape.value_heads,), 0.3).log() + 0.5 * zigzag)

    def forward(
        self, o: Tensor, flow: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        before = context.intermediate("before")
        own = context.intermediate("key").to(before.dtype) + self.u.to(before.dtype)
        top = torch.maximum(before, own.detach())
        value = F.pad(flow.projected.v, (0, 1), value=1.0)
        held = o.to(before.dtype) * (before - top).exp()[..., None]
        return held + (own - top).exp()[..., None] * value, None


def running_max(
    forget: Tensor, write: Tensor, state: Tensor | None, context: Context
) -> tuple[Tensor, Tensor, Tensor | None]:
    """m_t = max(m_(t-1) + forget_t, write_t) for all t at once, by a cumulative maximum of write_t - F_t, F = cumsum.

    What is rounded in m cancels, as long as all who use m use the same; so m_(t-1) is m moved by one.

    Args: forget, write: [B, T, HV]; state: m before, [N, HV].
    Returns: m_t and m_(t-1) [B, T, HV], without gradients; the state after, None where none came in.
    """
    with torch.no_grad():
        B, T, HV = forget.shape
        wide = torch.float32 if forget.device.type == "mps" else torch.float64
        if context.mask is not None:  # padding, at the right: m stays
            forget = torch.where(context.mask[..., None], forget, 0.0)
            write = torch.where(context.mask[..., None], write, -torch.inf)
        total = forget.to(wide).cumsum(1)
        if context.cu_seqlens is None:
            first = _lowest(B, HV, forget) if state is None else state
            first_BTH = first[:, None].to(wide).expand(B, T, HV)
            best = (write - total).cummax(1).values
        else:
            which_T = sequence_index(context.cu_seqlens, T)
            N = context.cu_seqlens.shape[0] - 1
            first = _lowest(N, HV, forget) if state is None else state
            start_T = context.cu_seqlens.long()[which_T]
            total = total - F.pad(total, (0, 0, 1, 0))[:, start_T]
            first_BTH = first[which_T][None].to(wide)
            best = _cummax_within(write - total, which_T)
        m = (total + torch.maximum(best, first_BTH)).to(forget.dtype)
        before = torch.cat([first_BTH[:, :1].to(m.dtype), m[:, :-1]], 1)
        if context.cu_seqlens is not None:
            begins = (torch.arange(T, device=m.device) == start_T)[None, :, None]
            before = torch.where(begins, first_BTH.to(m.dtype), before)
        return m, before, None if state is None else write_back(state, _last(m, state, context))


def _last(m: Tensor, state: Tensor, context: Context) -> Tensor:
    """m after the last token of each sequence; an empty one keeps its own."""
    if context.cu_seqlens is None:
        return m[:, -1] if m.shape[1] else state
    bounds = context.cu_seqlens.long()
    if not m.shape[1]:
        return state
    return torch.where((bounds.diff() > 0)[:, None], m[0, (bounds[1:] - 1).clamp(min=0)], state)


def _cummax_within(x: Tensor, which_T: Tensor) -> Tensor:
    """The cumulative maximum within each sequence of a pack: lifted by more than the whole range at each bound."""
    if not x.shape[1]:
        return x
    lift = (x.amax() - x.amin() + 1) * which_T[None, :, None]
    return x.gather(1, (x + lift).cummax(1).indices)


def _lowest(batch: int, heads: int, like: Tensor) -> Tensor:
    return like.new_full((batch, heads), LOWEST, dtype=state_dtype(like.dtype))
