"""Gates on what is written and on what comes out.

B batch, T time, D width, HV value heads, V value width, n householders
"""

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from deltazoo.backends.base import UpdateInputs, state_dtype
from deltazoo.backends.spec import UpdateSpec
from deltazoo.mixers.base import Context
from deltazoo.mixers.parts import Flow, HeadShape, OperandPart, OutputPart, projection

# Doubled for negative eigenvalues this is 2 - 2^-6: an orthogonal transition drifts past -1 in bf16.
TOP = 1 - 2**-7


class Beta(OperandPart):
    """beta = sigmoid(W x) for each value head (and micro-step), float32; at most `TOP` where the spec doubles it.

    Source: DeltaNet 2406.06484, equation 5; negative eigenvalues, Grazzi 2411.12537.
    """

    def __init__(self, shape: HeadShape, spec: UpdateSpec) -> None:
        super().__init__()
        self.n = shape.householders
        self.top = 1.0 if spec.negative_eigenvalues == "off" else TOP
        self.proj = projection(shape.width, self.n * shape.value_heads)

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        raw = self.proj(x)
        beta = raw.to(state_dtype(raw.dtype)).sigmoid()
        if self.top < 1:
            beta = beta.clamp(max=self.top)
        if self.n > 1:
            beta = rearrange(beta, "b t (n h) -> b t n h", n=self.n)
        return inputs._replace(beta=beta), None

    def extra_repr(self) -> str:
        return f"top={self.top}"


class OutputGate(OutputPart):
    """o <- o * activation(W x), a gate for each channel of each value head.

    Args: activation: "silu" or "sigmoid"; rank: of the map W, None for full.
    """

    def __init__(
        self,
        shape: HeadShape,
        activation: Literal["silu", "sigmoid"] = "silu",
        rank: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.proj = projection(shape.width, shape.value_heads * shape.value_width, rank, bias)

    def forward(self, o: Tensor, flow: Flow, state: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        raw = self.proj(flow.x).view(o.shape)
        wide = raw.to(state_dtype(raw.dtype))
        gate = F.silu(wide) if self.activation == "silu" else wide.sigmoid()
        return (o * gate).to(o.dtype), None

    def extra_repr(self) -> str:
        return repr(self.activation)


class Skip(OutputPart):
    """o_h <- o_h + D_h v_h, with v as projected.

    Initialisation: D = 1. Source: Mamba 2312.00752, Mamba-2 2405.21060.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.D = nn.Parameter(torch.ones(shape.value_heads))

    def forward(self, o: Tensor, flow: Flow, state: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        return (o + self.D[:, None] * flow.projected.v).to(o.dtype), None
