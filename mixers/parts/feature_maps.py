"""What is done to q and k channel by channel: feature maps, and the normaliser that goes with positive ones.

B batch, T time, H heads, K key width, V value width
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.backends.base import UpdateInputs, state_dtype, without_autocast
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HasFlops, HeadShape, OperandPart, OutputArguments, OutputPart, ResizesHeads

Feature = Literal["identity", "silu", "relu", "elu+1", "softmax", "dpfp"]
POSITIVE: tuple[Feature, ...] = ("relu", "elu+1", "softmax", "dpfp")
DPFP_ROLLS = 3


class FeatureMap(OperandPart, ResizesHeads):
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

    def resize_heads(self, shape: HeadShape) -> HeadShape:
        return shape._replace(key_width=shape.key_width * (2 * DPFP_ROLLS if self.feature == "dpfp" else 1))

    def extra_repr(self) -> str:
        return repr(self.feature)


class NormaliserColumn(OperandPart, ResizesHeads):
    """v <- [v, 1]: the state's last column then sums the keys, z_t = z_(t-1) + k_t."""

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        return inputs._replace(v=F.pad(inputs.v, (0, 1), value=1.0)), None

    def resize_heads(self, shape: HeadShape) -> HeadShape:
        return shape._replace(value_width=shape.value_width + 1)


class Normalise(OutputPart):
    """o <- o_(1..V) / (o_(V+1) + eps), where the last column is z^T q.

    Args: floor: divide by max(|z^T q|, floor) + eps instead, where z^T q may be small or negative: a number, or the
        name of a note [B, T, HV].
    Source: Katharopoulos 2020, 2006.16236; xLSTM 2405.04517, equation 21 (floor).
    """

    def __init__(self, eps: float, floor: float | str | None = None) -> None:
        super().__init__()
        self.eps, self.floor = eps, floor

    def forward(
        self, o: Tensor, flow: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        if self.floor is None:
            return (o[..., :-1] / (o[..., -1:] + self.eps)).to(flow.projected.v.dtype), None
        wide = o.to(state_dtype(o.dtype))
        if isinstance(self.floor, str):
            size = torch.maximum(wide[..., -1:].abs(), context.intermediate(self.floor)[..., None])
        else:
            size = wide[..., -1:].abs().clamp(min=self.floor)
        return (wide[..., :-1] / (size + self.eps)).to(flow.projected.v.dtype), None

    def extra_repr(self) -> str:
        return f"eps={self.eps:g}, floor={self.floor!r}"


class RandomFourierFeatures(OperandPart, ResizesHeads, HasFlops):
    """q, k <- phi(q), phi(k); phi(x) = [sin(W x), cos(W x)] / sqrt(R), with W = sigma * G of each key head.

    phi(q)^T phi(k) approximates the Gaussian kernel exp(-|sigma * (q - k)|^2 / 2).

    Args: features: R, random directions a head; K becomes 2 R.
    Initialisation: G is standard normal and stays as drawn; sigma, learned for each channel, is 1.
    Source: RFA, Peng 2021, 2103.02143, sections 2.2 and 3.1.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("sigma",)

    def __init__(self, shape: HeadShape, features: int) -> None:
        super().__init__()
        self.features = features
        self.G = nn.Buffer(torch.randn(shape.heads, shape.key_width, features))
        self.sigma = nn.Parameter(torch.ones(shape.heads, shape.key_width))

    def flops(self) -> int:
        return 2 * 2 * self.G.numel()  # of q and k

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        return inputs._replace(q=self._phi(inputs.q), k=self._phi(inputs.k)), None

    def resize_heads(self, shape: HeadShape) -> HeadShape:
        return shape._replace(key_width=2 * self.features)

    def _phi(self, x: Tensor) -> Tensor:
        dtype = state_dtype(x.dtype)
        with without_autocast(x):
            angle = torch.einsum("bthk,hkr->bthr", x.to(dtype) * self.sigma.to(dtype), self.G.to(dtype))
        return (torch.cat([angle.sin(), angle.cos()], -1) * self.features**-0.5).to(x.dtype)

    def extra_repr(self) -> str:
        return f"features={self.features}"


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
