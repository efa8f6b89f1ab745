"""What is done to q and k channel by channel: feature maps, and the normaliser that goes with positive ones.

B batch, T time, H heads, K key width, V value width
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.base import UpdateInputs
from deltazoo.mixers.base import Context
from deltazoo.mixers.parts import Flow, HeadShape, OperandPart, OutputPart, Resizing

Feature = Literal["identity", "silu", "relu", "elu+1", "softmax", "dpfp"]
POSITIVE: tuple[Feature, ...] = ("relu", "elu+1", "softmax", "dpfp")
DPFP_ROLLS = 3


class FeatureMap(OperandPart, Resizing):
    """q, k <- phi(q), phi(k).

    elu+1 (Katharopoulos 2006.16236); softmax over the channels; dpfp, the products of [relu(x), relu(-x)] with its
    first `DPFP_ROLLS` rotations (Schlag 2102.11174), which makes K into 2 * DPFP_ROLLS * K.
    """

    def __init__(self, feature: Feature) -> None:
        super().__init__()
        self.feature = feature

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        return inputs._replace(q=phi(self.feature, inputs.q), k=phi(self.feature, inputs.k)), None

    def resized(self, shape: HeadShape) -> HeadShape:
        return shape._replace(key_width=shape.key_width * (2 * DPFP_ROLLS if self.feature == "dpfp" else 1))

    def extra_repr(self) -> str:
        return repr(self.feature)


class NormaliserColumn(OperandPart, Resizing):
    """v <- [v, 1]: the state's last column then sums the keys, z_t = z_(t-1) + k_t."""

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        return inputs._replace(v=F.pad(inputs.v, (0, 1), value=1.0)), None

    def resized(self, shape: HeadShape) -> HeadShape:
        return shape._replace(value_width=shape.value_width + 1)


class Normalise(OutputPart):
    """o <- o_(1..V) / (o_(V+1) + eps), where the last column is z^T q.

    Source: Katharopoulos 2020, 2006.16236, equation 9.
    """

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, o: Tensor, flow: Flow, state: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        return o[..., :-1] / (o[..., -1:] + self.eps), None


def phi(feature: Feature, x: Tensor) -> Tensor:
    """Map channels: [..., K] -> [..., K], or [..., 2 DPFP_ROLLS K] with dpfp."""
    if feature == "silu":
        return F.silu(x)
    if feature == "relu":
        return F.relu(x)
    if feature == "elu+1":
        # in two steps, for torch's elu is told the wrong strides of its gradient when it is traced
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    if feature == "softmax":
        return x.softmax(-1).to(x.dtype)
    if feature == "dpfp":
        both = torch.cat([x.relu(), (-x).relu()], -1)
        return torch.cat([both * both.roll(j, -1) for j in range(1, DPFP_ROLLS + 1)], -1)
    return x
