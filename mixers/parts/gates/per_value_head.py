"""Gates of key heads, repeated for the value heads that share the key head.

H key heads, HV value heads
"""

from typing import Literal

from torch import Tensor

from deltazoo.backends.update.base import UpdateInputs
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HeadShape, OperandPart

HeadKind = Literal["key", "value"]


class RepeatForValueHeads(OperandPart):
    """Repeat log_decay, beta and erase of key heads, [B, T, H, ...] or [B, T, n, H, ...], for HV value heads."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.value_heads, self.householders = shape.value_heads, shape.householders

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        step_axis = 2 if self.householders == 1 else 3  # the axis of heads after that of the Householder steps
        axes = {"log_decay": 2, "beta": step_axis, "erase": step_axis}
        gates = {name: getattr(inputs, name) for name in axes}
        repeated = {name: self._repeat(y, axes[name]) for name, y in gates.items() if y is not None}
        return inputs._replace(**repeated), None

    def _repeat(self, gate: Tensor, axis: int) -> Tensor:
        return gate.repeat_interleave(self.value_heads // gate.shape[axis], axis)
