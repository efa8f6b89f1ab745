"""SwiGLU, the feed-forward half of a layer, as a config that builds itself.

B batch, T time, D width, F hidden width
"""

import math
from typing import Self

import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn


class SwiGLU(BaseModel):
    """y = W_out (silu(W_gate x) * W_up x), without biases.

    Args:
        width: the hidden width; or
        ratio: the hidden width over the layer's, rounded up to a multiple of 64. 8/3 where neither is given, which
            makes as many parameters as a plain MLP of ratio 4.
    Source: Shazeer 2020, arXiv 2002.05202.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int | None = Field(default=None, ge=1)
    ratio: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.width is not None and self.ratio is not None:
            raise ValueError(f"give width or ratio, not both: got width={self.width} and ratio={self.ratio}")
        return self

    def hidden(self, width: int) -> int:
        """The hidden width F in a layer of this width."""
        if self.width is not None:
            return self.width
        return 64 * math.ceil((self.ratio or 8 / 3) * width / 64)

    def build(self, width: int) -> "Mlp":
        """Make the module for a layer of this width."""
        return Mlp(width, self.hidden(width))


class Mlp(nn.Module):
    """Compute SwiGLU: x [B, T, D] to [B, T, D]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.to_hidden = nn.Linear(width, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    @property
    def flops(self) -> int:
        """Floating-point operations a token, forward; a multiply-add counts as two."""
        return 2 * (self.to_hidden.weight.numel() + self.out.weight.numel())

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.to_hidden(x_BTD).chunk(2, dim=-1)
        return self.out(F.silu(gate_BTF) * up_BTF)
