"""The normaliser of linear attention as an additional column of the state: o_t = S_t^T q_t / (z_t^T q_t).

B batch, T time, HV value heads, V value width
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HeadShape, OperandPart, OutputArguments, OutputPart, ResizesHeads


class NormaliserColumn(OperandPart, ResizesHeads):
    """v <- [v, 1], so that the last column of the state is the normaliser z, the decayed sum of the keys."""

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        return inputs._replace(v=F.pad(inputs.v, (0, 1), value=1.0)), None

    def resize_heads(self, shape: HeadShape) -> HeadShape:
        return shape._replace(value_width=shape.value_width + 1)


class Normalise(OutputPart):
    """o <- o_(1..V) / (o_(V+1) + eps), where the last column is z^T q.

    Args:
        floor: if given, divide by max(|z^T q|, floor) + eps, because z^T q may be small or negative. A number, or the
            name of an intermediate [B, T, HV].
    Source: Katharopoulos 2020, 2006.16236; xLSTM 2405.04517, equation 21 (floor).
    """

    def __init__(self, eps: float, floor: float | str | None = None) -> None:
        super().__init__()
        self.eps, self.floor = eps, floor

    def forward(
        self, o: Tensor, arguments: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        if self.floor is None:
            return (o[..., :-1] / (o[..., -1:] + self.eps)).to(arguments.projected.v.dtype), None
        wide = o.to(state_dtype(o.dtype))
        if isinstance(self.floor, str):
            normaliser = torch.maximum(wide[..., -1:].abs(), context.intermediate(self.floor)[..., None])
        else:
            normaliser = wide[..., -1:].abs().clamp(min=self.floor)
        return (wide[..., :-1] / (normaliser + self.eps)).to(arguments.projected.v.dtype), None

    def extra_repr(self) -> str:
        return f"eps={self.eps:g}, floor={self.floor!r}"
