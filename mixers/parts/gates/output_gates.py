"""Gates and activations on the output of the update.

B batch, T time, D width, HV value heads, V value width
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.backends.ops.decode_step import FusedDecodeStep
from deltazoo.backends.ops.rms_norm import apply_gate
from deltazoo.mixers.core.grouped import Groupable, Rows
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import (
    Fusible,
    HeadShape,
    MappedOutputPart,
    OutputArguments,
    OutputPart,
    StatelessOutputPart,
    init_normal,
    projection,
)

Activation = Literal["silu", "sigmoid", "gelu", "none"]


class OutputGate(MappedOutputPart, Groupable, Fusible):
    """o <- o * activation(W x), a gate for each channel of each value head.

    Args:
        activation: "silu", "sigmoid", or "gelu" (tanh approximation).
        rank: rank of W; None: full rank.
        bias: whether W has a bias.
        std: standard deviation of the initial W of full rank, whose bias is then 0; None: torch's initialisation.
    """

    def __init__(
        self,
        shape: HeadShape,
        activation: Activation = "silu",
        rank: int | None = None,
        bias: bool = False,
        std: float | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.std = activation, std
        self.proj = projection(shape.width, shape.value_heads * shape.value_width, rank, bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Override torch's initialisation of the linear map if there is a `std`."""
        if self.std is not None:
            assert isinstance(self.proj, nn.Linear)  # a config gives either a rank or a std
            init_normal(self.proj, self.std)

    def input_map(self) -> nn.Module:
        return self.proj

    def transform_by(self, o: Tensor, product: Tensor) -> Tensor:
        return apply_gate(o, torch.unflatten(product, -1, o.shape[2:]), self.activation)

    def forward_grouped(
        self,
        parts: Sequence["OutputGate"],
        rows: Rows,
        o: Tensor,
        arguments: OutputArguments,
        state: Tensor | None,
        context: Context,
    ) -> tuple[Tensor, Tensor | None]:
        raw = rows.linear(arguments.x, [part.proj for part in parts])
        return apply_gate(o, raw.view(o.shape), self.activation), None

    def fuse_into(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        return step._replace(gate=self.activation, gate_first=not step.norm) if not step.gate else None

    def fused_maps(self) -> dict[str, nn.Module]:
        return {"gate": self.proj}

    def extra_repr(self) -> str:
        return repr(self.activation)


class PrecomputedGate(OutputPart):
    """o <- o * activation(g), for the intermediate "gate" of the projection, g [B, T, HV V]."""

    def __init__(self, activation: Activation = "none") -> None:
        super().__init__()
        self.activation: Activation = activation

    def forward(
        self, o: Tensor, arguments: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        return apply_gate(o, context.intermediate("gate").view(o.shape), self.activation), None

    def extra_repr(self) -> str:
        return repr(self.activation)


class OutputSilu(StatelessOutputPart):
    """o <- silu(o)."""

    def transform(self, o: Tensor, x: Tensor) -> Tensor:
        return F.silu(o)
