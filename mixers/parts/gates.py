"""Gates on what is written and on what comes out.

B batch, T time, D width, HV value heads, V value width, n householders
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from deltazoo.backends.base import UpdateInputs, state_dtype
from deltazoo.backends.decode_step import FusedDecodeStep
from deltazoo.backends.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import (
    Fusible,
    HeadShape,
    LinearPart,
    OperandPart,
    OutputArguments,
    OutputPart,
    StatelessOutputPart,
    projection,
)

# Doubled for negative eigenvalues this is 2 - 2^-6: an orthogonal transition drifts past -1 in bf16.
TOP = 1 - 2**-7

Activation = Literal["silu", "sigmoid", "gelu", "none"]


class Beta(LinearPart, Fusible):
    """beta = sigmoid(W x) for each value head (and micro-step), float32; at most `TOP` where the spec doubles it.

    Args: bias: of the map W (MesaNet).
    Source: DeltaNet 2406.06484; negative eigenvalues, Grazzi 2411.12537.
    """

    def __init__(self, shape: HeadShape, spec: UpdateSpec, bias: bool = False) -> None:
        super().__init__()
        self.n = shape.householders
        self.top = 1.0 if spec.negative_eigenvalues == "off" else TOP
        self.proj = projection(shape.width, self.n * shape.value_heads, bias=bias)

    def prepare(self, raw: Tensor, inputs: UpdateInputs) -> UpdateInputs:
        beta = raw.to(state_dtype(raw.dtype)).sigmoid()
        if self.top < 1:
            beta = beta.clamp(max=self.top)
        if self.n > 1:
            beta = rearrange(beta, "b t (n h) -> b t n h", n=self.n)
        return inputs._replace(beta=beta)

    def fused(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        return step._replace(top=self.top) if step.spec.beta == "head" else None

    def fused_inputs(self, x: Tensor) -> dict[str, Tensor]:
        return {"beta": self.proj(x)}

    def extra_repr(self) -> str:
        return f"top={self.top}"


class ChannelBeta(OperandPart):
    """erase = sigmoid(W_b x) for each key channel, write = sigmoid(W_w x) for each value channel; float32.

    Where the spec doubles them, at most `TOP`. Source: Gated DeltaNet-2 2605.22791.
    """

    def __init__(self, shape: HeadShape, spec: UpdateSpec) -> None:
        super().__init__()
        self.n, self.heads = shape.householders, shape.value_heads
        self.top = 1.0 if spec.negative_eigenvalues == "off" else TOP
        self.to_erase = projection(shape.width, self.n * shape.value_heads * shape.key_width)
        self.to_write = projection(shape.width, self.n * shape.value_heads * shape.value_width)

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        return inputs._replace(erase=self._strength(self.to_erase(x)), write=self._strength(self.to_write(x))), None

    def _strength(self, raw: Tensor) -> Tensor:
        strength = raw.to(state_dtype(raw.dtype)).sigmoid()
        if self.top < 1:
            strength = strength.clamp(max=self.top)
        if self.n > 1:
            return rearrange(strength, "b t (n h c) -> b t n h c", n=self.n, h=self.heads)
        return rearrange(strength, "b t (h c) -> b t h c", h=self.heads)

    def extra_repr(self) -> str:
        return f"top={self.top}"


class Feedback(OperandPart, Fusible):
    """e <- sigmoid(b_h) k, the key that erases, and q <- q - d_h k, for each key head.

    Initialisation: b = 1; d = `correction`.
    Source: Comba 2506.02475: closed-loop control of the state by its feedback, and of the output.
    """

    def __init__(self, shape: HeadShape, correction: float) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.ones(shape.heads))
        self.d = nn.Parameter(torch.full((shape.heads,), correction))

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        q, k = inputs.q, inputs.k
        own = k if k.dim() == 4 else k[:, :, -1]  # of several keys a token the last is read against
        q = (q - self.d[:, None] * own).to(q.dtype)
        return inputs._replace(q=q, erase_key=(self.b.sigmoid()[:, None] * k).to(k.dtype)), None

    def fused(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        return step if step.spec.erase_key == "own" else None

    def fused_inputs(self, x: Tensor) -> dict[str, Tensor]:
        return {"feedback": self.b, "correction": self.d}


class OutputGate(StatelessOutputPart, Fusible):
    """o <- o * activation(W x), a gate for each channel of each value head.

    Args: activation: "silu", "sigmoid" or "gelu" (by tanh); rank: of the map W, None for full.
    """

    def __init__(
        self,
        shape: HeadShape,
        activation: Activation = "silu",
        rank: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.proj = projection(shape.width, shape.value_heads * shape.value_width, rank, bias)

    def transform(self, o: Tensor, x: Tensor) -> Tensor:
        return gated(o, self.proj(x).view(o.shape), self.activation)

    def fused(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        return step._replace(gate=self.activation, gate_first=not step.norm) if not step.gate else None

    def fused_inputs(self, x: Tensor) -> dict[str, Tensor]:
        return {"gate": self.proj(x)}

    def extra_repr(self) -> str:
        return repr(self.activation)


class Skip(OutputPart, Fusible):
    """o_h <- o_h + D_h v_h, with v as projected.

    Initialisation: D = 1. Source: Mamba 2312.00752, Mamba-2 2405.21060.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.D = nn.Parameter(torch.ones(shape.value_heads))

    def forward(
        self, o: Tensor, flow: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        return (o + self.D[:, None] * flow.projected.v).to(o.dtype), None

    def fused(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        return step if not step.norm and not step.gate and step.spec.householders == 1 else None

    def fused_inputs(self, x: Tensor) -> dict[str, Tensor]:
        return {"skip": self.D}


class OutputSilu(StatelessOutputPart):
    """o <- silu(o)."""

    def transform(self, o: Tensor, x: Tensor) -> Tensor:
        return F.silu(o)


class PrecomputedGate(OutputPart):
    """o <- o * activation(g), with what the projection left as the note "gate": [B, T, HV V]."""

    def __init__(self, activation: Activation = "none") -> None:
        super().__init__()
        self.activation: Activation = activation

    def forward(
        self, o: Tensor, flow: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        return gated(o, context.intermediate("gate").view(o.shape), self.activation), None

    def extra_repr(self) -> str:
        return repr(self.activation)


class Bonus(OutputPart):
    """o_h <- o_h + (q^T (u_h * k)) v_h: the token itself, beside what the state holds of it.

    Initialisation: `start`, [H, K] or a number. Source: RWKV-6 2404.05892, RWKV-7 2503.14456.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("u",)

    def __init__(self, shape: HeadShape, start: Tensor | float) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.zeros(shape.heads, shape.key_width) + start)

    def forward(
        self, o: Tensor, flow: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        wide = state_dtype(o.dtype)
        q, k, v = (x.to(wide) for x in (flow.inputs.q, flow.inputs.k, flow.inputs.v))
        own = (q * self.u * k).sum(-1, keepdim=True)
        return (o + own * v).to(o.dtype), None


def gated(o: Tensor, raw: Tensor, activation: Activation) -> Tensor:
    """o * activation(raw), the activation in float32 (float64 in float64)."""
    wide = raw.to(state_dtype(raw.dtype))
    if activation == "silu":
        wide = F.silu(wide)
    elif activation == "sigmoid":
        wide = wide.sigmoid()
    elif activation == "gelu":
        wide = F.gelu(wide, approximate="tanh")
    return (o * wide).to(o.dtype)
