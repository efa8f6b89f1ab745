"""The MLP of a layer: the interface of its module, and the dense MLP, gated (SwiGLU, GEGLU) or not.

B batch, T time, D width, F hidden width
"""

import math
from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from deltazoo.backends.io.frozen_config import FrozenConfig
from deltazoo.backends.ops import gemv, glu_linear
from deltazoo.backends.ops.gemv import Norm
from deltazoo.backends.ops.glu_linear import Activation, activate
from deltazoo.backends.torch_ext.plain_module import is_plain_linear
from deltazoo.backends.triton.limits import kernel_refusals
from deltazoo.backends.update.watch import runs_by_kernel
from deltazoo.mixers.core.decode_maps import reads_weight
from deltazoo.mixers.core.initialization import drawn_in_float32
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.patterns import Term
from deltazoo.mixers.core.side import Side


class MlpOutput(NamedTuple):
    """Result of an MLP: y [B, T, D], and the auxiliary losses as side outputs or None."""

    y: Tensor
    side: Side | None = None


class Mlp(nn.Module, ABC):
    """MLP of a layer: `(x [B, T, D], context) -> MlpOutput(y [B, T, D], side)`, applied to each token independently.

    A `LanguageModel` initialises the weights of every submodule's `to_hidden` and `out`.
    """

    @property
    @abstractmethod
    def flops(self) -> int:
        """Floating-point operations per token in the forward pass; a multiply-add counts as two."""

    @abstractmethod
    def forward(self, x_BTD: Tensor, context: Context) -> MlpOutput:
        """Compute y, and the auxiliary losses if `context.losses`."""

    def residual_step(self, x_B1D: Tensor, norm: Norm) -> Tensor | None:
        """Compute x + y, with y of `forward(norm(x))`, by the kernels of a decode step; None if there are none for it.

        As `Mixer.residual_step`.
        """
        return None


class HiddenWidth(FrozenConfig, Term, ABC):
    """The hidden width F of an MLP: `width`, or `ratio` times the width of the layer, by default 8/3.

    A ratio of 8/3 with a gate gives as many parameters as a ratio of 4 without one.
    """

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
        return 64 * math.ceil(round((self.ratio or 8 / 3) * width / 64, 6))

    @abstractmethod
    def title(self, width: int) -> str:
        """Return the kind and the sizes, for tables: "SwiGLU 2048". Args: width: of the layer."""

    @abstractmethod
    def build(self, width: int) -> Mlp:
        """Build the module for a layer of this width."""


class Dense(HiddenWidth):
    """y = W_out (phi(W_gate x) * W_up x), or y = W_out phi(W_up x) without the gate.

    The defaults are SwiGLU. A gate with GELU is GEGLU; "relu2" without a gate is the squared ReLU of Primer.

    Args:
        width: hidden width F.
        ratio: F over the width of the layer, instead of `width`; F is rounded up to a multiple of 64.
        activation: phi: "silu", "gelu" (tanh approximation), or "relu2", max(x, 0)^2.
        gated: whether there is a gate.
        bias: whether the maps have biases; they start at 0.
        gate_scale: factor of W_gate x inside phi (Falcon-H1).
        out_scale: factor of y (Falcon-H1).
    Source: Shazeer 2020, arXiv 2002.05202; So 2021, arXiv 2109.08668.
    """

    type: Literal["dense"] = "dense"
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    gate_scale: float = Field(default=1.0, allow_inf_nan=False)
    out_scale: float = Field(default=1.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_gate(self) -> Self:
        if self.gate_scale != 1 and not self.gated:
            raise ValueError(f"gate_scale needs gated=True, got {self.gate_scale} without a gate")
        return self

    def title(self, width: int) -> str:
        gated, plain = {"silu": ("SwiGLU", "SiLU"), "gelu": ("GEGLU", "GELU"), "relu2": ("ReGLU2", "ReLU2")}[
            self.activation
        ]
        return f"{gated if self.gated else plain} {self.hidden(width)}{' bias' if self.bias else ''}"

    @drawn_in_float32
    def build(self, width: int) -> "DenseMlp":
        return DenseMlp(width, self)


class DenseMlp(Mlp):
    """Module of `Dense`."""

    def __init__(self, width: int, config: Dense) -> None:
        super().__init__()
        hidden = config.hidden(width)
        self.config = config
        self.to_hidden = nn.Linear(width, (2 if config.gated else 1) * hidden, bias=config.bias)
        self.out = nn.Linear(hidden, width, bias=config.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the biases to 0."""
        for linear in (self.to_hidden, self.out):
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    @property
    def flops(self) -> int:
        return sum(2 * x.in_features * x.out_features for x in (self.to_hidden, self.out))  # weights may be packed

    def forward(self, x_BTD: Tensor, context: Context) -> MlpOutput:
        y_BTD = self._map_out(self.to_hidden(x_BTD))
        return MlpOutput(y_BTD if self.config.out_scale == 1 else y_BTD * self.config.out_scale)

    def residual_step(self, x_B1D: Tensor, norm: Norm) -> Tensor | None:
        if not reads_weight(self.to_hidden, x_B1D) or not reads_weight(self.out, x_B1D):
            return None
        weight, (activation, gated) = self.to_hidden.weight, (self.config.activation, self.config.gated)
        hidden_B1F = gemv.hidden(x_B1D, weight, norm, activation=activation, gated=gated)
        return gemv.add_product(x_B1D, hidden_B1F, self.out.weight)

    def _map_out(self, hidden_BTF: Tensor) -> Tensor:
        if not self.config.gated:
            return self.out(activate(hidden_BTF, self.config.activation))
        scale = self.config.gate_scale
        if runs_by_kernel("gated MLP", self._kernel_refusals(hidden_BTF)):
            return glu_linear.glu_linear(hidden_BTF, self.out.weight, self.config.activation)
        gate_BTF, up_BTF = hidden_BTF.chunk(2, dim=-1)
        gate_BTF = gate_BTF if scale == 1 else gate_BTF * scale
        return self.out(activate(gate_BTF, self.config.activation) * up_BTF)

    def _kernel_refusals(self, hidden_BTF: Tensor) -> list[str]:
        if not torch.is_grad_enabled() and torch.compiler.is_compiling():
            return ["without gradients Inductor fuses the activation with neighbouring operations."]
        if not is_plain_linear(self.out) or self.out.bias is not None:
            return ["it needs an output map that is a plain nn.Linear without a bias."]
        if self.config.gate_scale != 1:
            return ["it has no factor of the gate."]
        return kernel_refusals(hidden_BTF)

    def extra_repr(self) -> str:
        return f"{self.config.activation!r}, gated={self.config.gated}"
