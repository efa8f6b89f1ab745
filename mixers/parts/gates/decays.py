"""Decay gates, computed in float32 (float64 for float64 inputs) for any dtype of x.

B batch, T time, D width, HV value heads, K key width, V value width
"""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from deltazoo.backends.ops.decode_step import FusedDecodeStep
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.mixers.core.grouped import Groupable, Rows
from deltazoo.mixers.core.initialization import fill_log_range, fill_log_uniform
from deltazoo.mixers.core.mixer import Context, Place
from deltazoo.mixers.core.part import Fusible, HeadShape, LinearPart, MapsInput, OperandPart, Stateful, projection
from deltazoo.mixers.parts.convolution import ShortConv

DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 1e-1, 1e-4
Slopes = Literal["alibi", "power"]
A_INIT_RANGE = "interval from which exp(A_log) is drawn; low values forget slowly"


def _ordered(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] > interval[1]:
        raise ValueError(f"must be (low, high) with low <= high, got {interval}")
    return interval


_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
RateRange = Annotated[tuple[_Rate, _Rate], AfterValidator(_ordered)]


class SoftplusDecay(LinearPart, Groupable, Fusible):
    """log_decay = -exp(A_log) dt with dt = softplus(W x + dt_bias), Mamba-2's decay.

    Args:
        per: "head", log_decay is [B, T, HV]; "channel", [B, T, HV, K], with W of rank `rank` (KDA).
        rates: interval that exp(A_log) is drawn from uniformly, once per value head; None: 1 to HV in order. Not used
            with a `bound`.
        writes: also scale v <- dt v (Mamba-2's discretisation of the input); needs per="head".
        bound: if given, log_decay = bound * sigmoid(exp(A_log) (W x + dt_bias)), which is never below `bound`
            (the "safe gate" of KDA in flash-linear-attention, Ling 3.0 and GLM-5.3).
        limits: dt is clamped to this interval (Nemotron-H); None as the upper limit: infinity. Not used with a `bound`.
    Initialisation: dt_bias such that dt is log-uniform in [1e-3, 1e-1], clamped at 1e-4 from below. With a bound A_log
        is 0, so that log_decay starts near bound dt: the exp(A_log) of `rates` would multiply the negative dt_bias and
        saturate the sigmoid.
    Source: Mamba-2 2405.21060; Gated DeltaNet 2412.06464, section 3; Kimi Linear 2510.26692.
    """

    def __init__(
        self,
        shape: HeadShape,
        per: Literal["head", "channel"] = "head",
        rank: int | None = None,
        rates: tuple[float, float] | None = (0.01, 16.0),
        writes: bool = False,
        bound: float | None = None,
        limits: tuple[float, float | None] = (0.0, None),
    ) -> None:
        super().__init__()
        self.per, self.rates, self.writes, self.bound, self.limits = per, rates, writes, bound, limits
        size = shape.value_heads * (shape.key_width if per == "channel" else 1)
        self.proj = projection(shape.width, size, rank)
        self.A_log = nn.Parameter(torch.empty(shape.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.bound is not None:
            self.A_log.zero_()
        elif self.rates is None:
            fill_log_range(self.A_log)
        else:
            fill_log_uniform(self.A_log, *self.rates)
        init_dt_bias(self.dt_bias)

    def prepare(self, raw: Tensor, inputs: UpdateInputs) -> UpdateInputs:
        return self._prepare(raw, inputs, self.dt_bias, self.A_log)

    def forward_grouped(
        self,
        parts: Sequence["SoftplusDecay"],
        rows: Rows,
        x: Tensor,
        inputs: UpdateInputs,
        state: Tensor | None,
        context: Context,
    ) -> tuple[UpdateInputs, Tensor | None]:
        raw = rows.linear(x, [part.proj for part in parts])
        dt_bias, A_log = (rows.expand([getattr(part, name) for part in parts]) for name in ("dt_bias", "A_log"))
        return self._prepare(raw, inputs, dt_bias, A_log), None

    def _prepare(self, raw: Tensor, inputs: UpdateInputs, dt_bias: Tensor, A_log: Tensor) -> UpdateInputs:
        """Compute the decay. Args: dt_bias, A_log: the parameters, or their values at each row [1, A, ...]."""
        dtype = state_dtype(raw.dtype)
        biased = raw.to(dtype) + dt_bias.to(dtype)
        rate = -A_log.to(dtype).exp()
        if self.per == "channel":
            biased, rate = rearrange(biased, "b t (h k) -> b t h k", h=rate.shape[-1]), rate[..., None]
        if self.bound is not None:
            return inputs._replace(log_decay=self.bound * (-rate * biased).sigmoid())
        dt = softplus(biased)
        if self.limits != (0.0, None):
            dt = dt.clamp(*self.limits)
        if self.per == "channel":
            return inputs._replace(log_decay=dt * rate)
        v = (inputs.v * dt[..., None]).to(inputs.v.dtype) if self.writes else inputs.v
        return inputs._replace(log_decay=dt * rate, v=v)

    def fuse_into(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        if step.spec.decay != self.per or self.limits != (0.0, None):
            return None
        return step._replace(decay_bound=self.bound, scale_v_by_dt=self.writes and self.bound is None)

    def fused_maps(self) -> dict[str, nn.Module]:
        return {"decay": self.proj}

    def fused_parameters(self, x: Tensor) -> dict[str, Tensor]:
        return {"A_log": self.A_log, "dt_bias": self.dt_bias}

    def extra_repr(self) -> str:
        return f"per={self.per!r}, writes={self.writes}"


class SigmoidDecay(OperandPart, Fusible, Stateful, MapsInput):
    """log_decay = log(f) / temperature with f = sigmoid(W x + b), the decay of GLA.

    Args:
        per: as for `SoftplusDecay`.
        rank: rank of W; None: full rank.
        temperature: a higher value decays more slowly.
        floor: initial value of a learned lower bound g per channel, f = g + (1 - g) sigmoid(W x + b) (HGRN, where it
            rises from layer to layer); 0: no bound. The papers tie the bounds of all layers by a cumulative softmax.
            Here each layer learns its own, starting from the value of that softmax at initialisation.
        bias: whether the map has a bias b; gated RetNet has none.
        conv_width: taps of a short convolution of W x + b (HGRN-2 in fla); 0: none.
    State: the convolution's, [B, conv_width - 1, channels]; none without a convolution.
    Initialisation: torch's for a linear map.
    Source: GLA 2312.06635 (channel, rank 16, temperature 16); HGRN 2311.04823, HGRN-2 2404.07904 (floor).
    """

    splits: ClassVar[bool] = True
    keeps_inputs: ClassVar[bool] = True

    def __init__(
        self,
        shape: HeadShape,
        per: Literal["head", "channel"] = "channel",
        rank: int | None = 16,
        temperature: float = 16.0,
        floor: float = 0.0,
        bias: bool = True,
        conv_width: int = 0,
    ) -> None:
        super().__init__()
        self.heads, self.per, self.temperature, self.initial_floor = shape.value_heads, per, temperature, floor
        size = shape.value_heads * (shape.key_width if per == "channel" else 1)
        self.proj = projection(shape.width, size, rank, bias)
        self.conv = ShortConv(size, conv_width) if conv_width else None
        self.floor = nn.Parameter(torch.empty(size)) if floor else None  # the logit of g
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.floor is not None:
            nn.init.constant_(self.floor, math.log(self.initial_floor / (1 - self.initial_floor)))

    def init_state(self, batch: int, like: Tensor) -> Tensor | None:
        return None if self.conv is None else self.conv.init_state(batch, like)

    def input_map(self) -> nn.Module:
        return self.proj

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        raw = context.apply(self.proj, x)
        if self.conv is not None:
            (raw,), state = self.conv(raw, state, context)
        log_decay = F.logsigmoid(raw.to(state_dtype(raw.dtype)))
        if self.floor is not None:
            floor = self.floor.to(log_decay.dtype)
            log_decay = clamp_nonpositive(torch.logaddexp(F.logsigmoid(floor), F.logsigmoid(-floor) + log_decay))
        log_decay = log_decay / self.temperature
        if self.per == "channel":
            log_decay = rearrange(log_decay, "b t (h k) -> b t h k", h=self.heads)
        return inputs._replace(log_decay=log_decay), state

    def fuse_into(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        if step.spec.decay != self.per or self.floor is not None or self.conv is not None:
            return None
        return step._replace(temperature=self.temperature)

    def fused_maps(self) -> dict[str, nn.Module]:
        return {"decay": self.proj}

    def extra_repr(self) -> str:
        return f"per={self.per!r}, temperature={self.temperature:g}"


class FixedDecay(OperandPart, Fusible):
    """log_decay_h = log(1 - 2^(-5 - h)) for value head h, constant in time.

    Source: RetNet 2307.08621, equation 8.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.heads = shape.value_heads

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        return inputs._replace(log_decay=self._log_decay(inputs.q)), None

    def fuse_into(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        return step if step.spec.decay == "fixed" else None

    def fused_parameters(self, x: Tensor) -> dict[str, Tensor]:
        return {"log_decay": self._log_decay(x)}

    def _log_decay(self, like: Tensor) -> Tensor:
        head_HV = torch.arange(self.heads, device=like.device, dtype=state_dtype(like.dtype))
        return torch.log1p(-torch.exp2(-5 - head_HV))


class SlopeDecay(OperandPart, Fusible):
    """log_decay_h = -s_h (1 - l / (L - 1) + 1e-5) for value head h in layer l of L, with l / (L - 1) = 0 if L = 1.

    Args: slopes: "power": s_h = 2^(-8 (h + 1) / HV). "alibi": the same if HV is a power of two; otherwise, with P the
        next lower power of two, the first P heads have the slopes of P heads, and the others the first, third, fifth...
        slope of 2 P heads.
    Source: Lightning Attention-2 2401.04658 (the slopes of ALiBi, 2108.12409) and its code; the layer's factor,
        MiniMax-01 2501.08313.
    """

    def __init__(self, shape: HeadShape, place: Place, slopes: Slopes) -> None:
        super().__init__()
        self.heads, self.slopes = shape.value_heads, slopes
        self.factor = 1 - place.layer / max(place.depth - 1, 1) + 1e-5

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        return inputs._replace(log_decay=self._log_decay(inputs.q)), None

    def fuse_into(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        return step if step.spec.decay == "fixed" else None

    def fused_parameters(self, x: Tensor) -> dict[str, Tensor]:
        return {"log_decay": self._log_decay(x)}

    def _log_decay(self, like: Tensor) -> Tensor:
        head_HV = torch.arange(1, self.heads + 1, device=like.device, dtype=state_dtype(like.dtype))
        first = self.heads if self.slopes == "power" else 2 ** (self.heads.bit_length() - 1)
        exponent_HV = torch.where(head_HV > first, (8 * (head_HV - first) - 4) / first, 8 * head_HV / first)
        return -self.factor * torch.exp2(-exponent_HV)

    def extra_repr(self) -> str:
        return f"factor={self.factor:g}, slopes={self.slopes!r}"


class TiedInputGate(OperandPart):
    """An input gate of 1 - a, for the decay a: k <- 1 - a per channel (HGRN-2), or v <- (1 - a) v per head.

    The parts before this one must set the decay.

    Source: HGRN 2311.04823, section 3; HGRN-2 2404.07904; the gate of RFA 2103.02143, section 3.2.
    """

    def __init__(self, into: Literal["key", "value"]) -> None:
        super().__init__()
        self.into = into

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        assert inputs.log_decay is not None
        input_gate = -torch.expm1(inputs.log_decay)
        if self.into == "key":
            return inputs._replace(k=input_gate.to(inputs.q.dtype)), None
        return inputs._replace(v=(input_gate[..., None] * inputs.v).to(inputs.v.dtype)), None

    def extra_repr(self) -> str:
        return repr(self.into)


@torch.no_grad()
def init_dt_bias(bias: Tensor) -> None:
    """Fill `bias` with softplus^-1(dt), dt log-uniform in [1e-3, 1e-1] and clamped at 1e-4 from below (Mamba)."""
    if bias.is_meta:  # as `fill_normal`
        return
    dt = torch.empty_like(bias).uniform_(math.log(DT_MIN), math.log(DT_MAX)).exp().clamp(min=DT_FLOOR)
    bias.copy_(dt + torch.log(-torch.expm1(-dt)))


def clamp_nonpositive(x: Tensor) -> Tensor:
    """Clamp x at 0 from above with a gradient of 1 everywhere, for an x that exceeds 0 by rounding only."""
    return x - x.detach().clamp(min=0)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)). Not F.softplus: tracing gives its gradient the wrong strides."""
    return torch.logaddexp(x, x.new_zeros(()))
