"""SwiGLU: the config and the module of a layer's MLP.

B batch, T time, D width, F hidden width
"""

import math
from typing import Self

import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn


class SwiGLU(BaseModel):
    """y = W_out (silu(W_gate x) * W_up x), without biases.

    With neither field set the ratio is 8/3, which gives as many parameters as a two-matrix MLP of ratio 4.

    Args:
        width: hidden width F.
        ratio: F over the width of the layer, instead of `width`; F is rounded up to a multiple of 64.
    Source: Shazeer 2020, arXiv 2002.05202.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int | None = Field(default=None, ge=1)
    ratio: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_only_one_is_set(self) -> Self:
        if self.width is not None and self.ratio is not None:
            raise ValueError(f"give width or ratio, not both: got width={self.width} and ratio={self.ratio}")
        return self

    def hidden(self, width: int) -> int:
        """Return the hidden width F for a layer of this width."""
        if self.width is not None:
            return self.width
        return 64 * math.ceil((self.ratio or 8 / 3) * width / 64)

    def build(self, width: int) -> "Mlp":
        """Build the module for a layer of this width."""
        return Mlp(width, self.hidden(width))


class Mlp(nn.Module):
    """Compute SwiGLU on x [B, T, D]; the result is [B, T, D]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.to_hidden = nn.Linear(width, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    @property
    def flops(self) -> int:
        """Floating-point operations per token in the forward pass; a multiply-add counts as two."""
        return 2 * (self.to_hidden.weight.numel() + self.out.weight.numel())

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.to_hidden(x_BTD).chunk(2, dim=-1)
        return self.out(F.silu(gate_BTF) * up_BTF)
