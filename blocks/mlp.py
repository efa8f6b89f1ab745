"""The MLP of a layer: the interface of its module, and SwiGLU.

B batch, T time, D width, F hidden width
"""

import math
from abc import ABC, abstractmethod
from typing import Literal, Self

import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from deltazoo.mixers.core.mixer import Context


class Mlp(nn.Module, ABC):
    """MLP of a layer: `(x [B, T, D], context) -> y [B, T, D]`, each token by itself.

    A `LanguageModel` initialises the weights of every submodule's `to_hidden` and `out`.
    """

    @property
    @abstractmethod
    def flops(self) -> int:
        """Floating-point operations per token in the forward pass; a multiply-add counts as two."""

    @abstractmethod
    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        """Compute y, and append auxiliary losses to `context.losses`."""


class HiddenWidth(BaseModel, ABC):
    """The hidden width F of an MLP: `width`, or `ratio` times the width of the layer."""

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

    @abstractmethod
    def build(self, width: int) -> Mlp:
        """Build the module for a layer of this width."""


class SwiGLU(HiddenWidth):
    """y = W_out (silu(W_gate x) * W_up x), without biases.

    With neither width nor ratio the ratio is 8/3, which gives as many parameters as a two-matrix MLP of ratio 4.

    Args:
        width: hidden width F.
        ratio: F over the width of the layer, instead of `width`; F is rounded up to a multiple of 64.
    Source: Shazeer 2020, arXiv 2002.05202.
    """

    type: Literal["swiglu"] = "swiglu"

    def build(self, width: int) -> "SwiGLUMlp":
        return SwiGLUMlp(width, self.hidden(width))


class SwiGLUMlp(Mlp):
    """Module of `SwiGLU`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.to_hidden = nn.Linear(width, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    @property
    def flops(self) -> int:
        return 2 * (self.to_hidden.weight.numel() + self.out.weight.numel())

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        gate_BTF, up_BTF = self.to_hidden(x_BTD).chunk(2, dim=-1)
        return self.out(F.silu(gate_BTF) * up_BTF)
