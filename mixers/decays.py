"""Decay gates: how much of the state a token keeps. Computed in float32 (float64 in float64), whatever x's dtype.

B batch, T time, D width, HV value heads, K key width, V value width
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from deltazoo.backends.base import UpdateInputs, state_dtype
from deltazoo.mixers.base import Context
from deltazoo.mixers.parts import HeadShape, OperandPart, projection

DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 1e-1, 1e-4


class SoftplusDecay(OperandPart):
    """log_decay = -exp(A_log) dt,  dt = softplus(W x + dt_bias): Mamba-2's decay, a step dt at the rate exp(A_log).

    Args:
        per: "head", log_decay [B, T, HV]; "channel", [B, T, HV, K], the map through `rank` channels (KDA).
        rates: exp(A_log) is drawn uniformly from this interval, one for each value head.
        writes: v <- dt v too, the zero-order hold of Mamba-2; needs per="head".
    Initialisation: dt_bias so that dt is log-uniform in [1e-3, 1e-1], and at least 1e-4.
    Source: Mamba-2 2405.21060; Gated DeltaNet 2412.06464, section 3; Kimi Linear 2510.26692.
    """

    def __init__(
        self,
        shape: HeadShape,
        per: Literal["head", "channel"] = "head",
        rank: int | None = None,
        rates: tuple[float, float] = (0.01, 16.0),
        writes: bool = False,
    ) -> None:
        super().__init__()
        self.per, self.writes = per, writes
        size = shape.value_heads * (shape.key_width if per == "channel" else 1)
        self.proj = projection(shape.width, size, rank)
        self.A_log = nn.Parameter(torch.empty(shape.value_heads).uniform_(*rates).log_())
        self.dt_bias = nn.Parameter(_dt_bias(size))

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        raw = self.proj(x)
        dtype = state_dtype(raw.dtype)
        wide = raw.to(dtype) + self.dt_bias.to(dtype)
        # softplus; torch's own is told the wrong strides of its gradient when it is traced
        dt = torch.logaddexp(wide, wide.new_zeros(()))
        rate = -self.A_log.to(dtype).exp()
        if self.per == "channel":
            dt = rearrange(dt, "b t (h k) -> b t h k", h=rate.shape[0])
            return inputs._replace(log_decay=dt * rate[:, None]), None
        v = (inputs.v * dt[..., None]).to(inputs.v.dtype) if self.writes else inputs.v
        return inputs._replace(log_decay=dt * rate, v=v), None

    def extra_repr(self) -> str:
        return f"per={self.per!r}, writes={self.writes}"


class SigmoidDecay(OperandPart):
    """log_decay = log sigmoid(W x + b) / temperature: the decay of GLA, slow to forget at a high temperature.

    Args: per: as for `SoftplusDecay`; rank: of the map W, None for full.
    Initialisation: torch's for a linear map with bias.
    Source: GLA 2312.06635, section 4.3 (channel, rank 16, temperature 16).
    """

    def __init__(
        self,
        shape: HeadShape,
        per: Literal["head", "channel"] = "channel",
        rank: int | None = 16,
        temperature: float = 16.0,
    ) -> None:
        super().__init__()
        self.heads, self.per, self.temperature = shape.value_heads, per, temperature
        size = shape.value_heads * (shape.key_width if per == "channel" else 1)
        self.proj = projection(shape.width, size, rank, bias=True)

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        raw = self.proj(x)
        log_decay = F.logsigmoid(raw.to(state_dtype(raw.dtype))) / self.temperature
        if self.per == "channel":
            log_decay = rearrange(log_decay, "b t (h k) -> b t h k", h=self.heads)
        return inputs._replace(log_decay=log_decay), None

    def extra_repr(self) -> str:
        return f"per={self.per!r}, temperature={self.temperature:g}"


class FixedDecay(OperandPart):
    """log_decay_h = log(1 - 2^(-5 - h)) for value head h, constant in time.

    Source: RetNet 2307.08621, equation 8.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.heads = shape.value_heads

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        head_HV = torch.arange(self.heads, device=x.device, dtype=state_dtype(inputs.q.dtype))
        return inputs._replace(log_decay=torch.log1p(-torch.exp2(-5 - head_HV))), None


def _dt_bias(size: int) -> Tensor:
    """The inverse softplus of a log-uniform dt."""
    low, high = math.log(DT_MIN), math.log(DT_MAX)
    dt = torch.empty(size).uniform_(low, high).exp().clamp(min=DT_FLOOR)
    return dt + torch.log(-torch.expm1(-dt))
