"""Feature maps of q and k: activations, learned maps, DPFP, Taylor and random Fourier features.

B batch, T time, H heads, K key width, R random features
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.backends.update.base import UpdateInputs, state_dtype, without_autocast
from deltazoo.mixers.core.initialization import fill_normal
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HasFlops, HeadShape, OperandPart, ResizesHeads

Feature = Literal["identity", "silu", "relu", "elu+1", "softmax", "dpfp", "taylor", "quadratic"]
Elementwise = Literal["identity", "silu", "relu", "elu+1"]  # keep K, as a decay per channel needs
LearnedFeature = Literal["t2r", "hedgehog", "hadamard"]
# Features with phi(q)^T phi(k) >= 0
POSITIVE = ("relu", "elu+1", "softmax", "dpfp", "taylor", "quadratic", "t2r", "hedgehog")
DPFP_ROLLS = 3


class FeatureMap(OperandPart, ResizesHeads):
    """q, k <- phi(q), phi(k).

    elu+1 is from Katharopoulos 2006.16236; softmax is over the channels. dpfp multiplies [relu(x), relu(-x)] by its
    first `DPFP_ROLLS` cyclic shifts (Schlag 2102.11174), so that K becomes 2 * DPFP_ROLLS * K. taylor approximates
    exp(a) for a = q^T k / sqrt(K): phi(q)^T phi(k) = 1 + a + a^2 / 2 (Based 2402.18668). As a^2 is symmetric in pairs
    of channels, K becomes 1 + K + K (K + 1) / 2. quadratic has phi(q)^T phi(k) = a^2 (ReBased 2402.10644), so that K
    becomes K (K + 1) / 2.
    """

    def __init__(self, feature: Feature) -> None:
        super().__init__()
        self.feature = feature

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        q, k = (phi(self.feature, x).to(x.dtype) for x in (inputs.q, inputs.k))  # autocast computes some in float32
        return inputs._replace(q=q, k=k), None

    def resize_heads(self, shape: HeadShape) -> HeadShape:
        return shape._replace(key_width=feature_width(self.feature, shape.key_width))

    def extra_repr(self) -> str:
        return repr(self.feature)


class LearnedFeatureMap(OperandPart, ResizesHeads):
    """q, k <- phi_q(q), phi_k(k) with linear maps [K, K] that all heads share.

    t2r: relu(W x) (Kasai 2103.13076). hedgehog: softmax([2 y, -2 y]) with y = W x + b, so that K becomes 2 K (Zhang
    2402.04347). hadamard: (W x + b) * (W' x + b').

    Args: tied: whether q and k have the same maps.
    Initialisation: torch's for a linear map; hedgehog: W the identity and b = 0.
    """

    def __init__(self, feature: LearnedFeature, shape: HeadShape, tied: bool) -> None:
        super().__init__()
        self.feature: LearnedFeature = feature
        maps, bias = 2 if feature == "hadamard" else 1, feature != "t2r"
        names = "q" if tied else "qk"
        self.maps = nn.ModuleDict({n: nn.Linear(shape.key_width, maps * shape.key_width, bias) for n in names})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Override torch's initialisation of the linear maps of hedgehog."""
        for layer in self.maps.values():
            if self.feature == "hedgehog":
                assert isinstance(layer, nn.Linear)
                nn.init.eye_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        q, k = self._phi("q", inputs.q), self._phi("k" if "k" in self.maps else "q", inputs.k)
        return inputs._replace(q=q, k=k), None

    def resize_heads(self, shape: HeadShape) -> HeadShape:
        return shape._replace(key_width=2 * shape.key_width) if self.feature == "hedgehog" else shape

    def _phi(self, name: str, x: Tensor) -> Tensor:
        y = self.maps[name](x)
        if self.feature == "t2r":
            return y.relu().to(x.dtype)
        if self.feature == "hedgehog":
            return torch.cat([2 * y, -2 * y], -1).softmax(-1).to(x.dtype)
        first, second = y.chunk(2, -1)
        return (first * second).to(x.dtype)

    def extra_repr(self) -> str:
        return repr(self.feature)


class ValueSilu(OperandPart):
    """v <- silu(v)."""

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        return inputs._replace(v=F.silu(inputs.v)), None


def feature_maps(feature: Feature | LearnedFeature, shape: HeadShape, tied: bool = False) -> dict[str, OperandPart]:
    """Create the part "feature"; none for the identity. Args: tied: as for `LearnedFeatureMap`."""
    if feature == "t2r" or feature == "hedgehog" or feature == "hadamard":
        return {"feature": LearnedFeatureMap(feature, shape, tied)}
    return {} if feature == "identity" else {"feature": FeatureMap(feature)}


class RandomFourierFeatures(OperandPart, ResizesHeads, HasFlops):
    """q, k <- phi(q), phi(k) with phi(x) = [sin(W x), cos(W x)] / sqrt(R) and W = sigma * G for each key head.

    phi(q)^T phi(k) approximates the Gaussian kernel exp(-|sigma * (q - k)|^2 / 2).

    Args: features: R, the number of random directions per head; K becomes 2 R.
    Initialisation: G is standard normal and not learned; sigma, learned for each channel, is 1.
    Source: RFA, Peng 2021, 2103.02143, sections 2.2 and 3.1.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("sigma",)

    def __init__(self, shape: HeadShape, features: int) -> None:
        super().__init__()
        self.features = features
        self.G = nn.Buffer(torch.empty(shape.heads, shape.key_width, features))
        self.sigma = nn.Parameter(torch.empty(shape.heads, shape.key_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        fill_normal(self.G)
        nn.init.ones_(self.sigma)

    def flops(self) -> int:
        return 2 * 2 * self.G.numel()  # for q and k

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        if inputs.q.shape[1] == 1 and inputs.k.shape == inputs.q.shape:  # a decode step launches one product for both
            q, k = self._phi(torch.cat([inputs.q, inputs.k], 1)).split(1, 1)
        else:
            q, k = self._phi(inputs.q), self._phi(inputs.k)
        return inputs._replace(q=q, k=k), None

    def resize_heads(self, shape: HeadShape) -> HeadShape:
        return shape._replace(key_width=2 * self.features)

    def _phi(self, x: Tensor) -> Tensor:
        dtype = state_dtype(x.dtype)
        with without_autocast(x):
            angle = torch.einsum("bthk,hkr->bthr", x.to(dtype) * self.sigma.to(dtype), self.G.to(dtype))
        return (torch.cat([angle.sin(), angle.cos()], -1) * self.features**-0.5).to(x.dtype)

    def extra_repr(self) -> str:
        return f"features={self.features}"


def feature_width(feature: Feature, key_width: int) -> int:
    """Return the number of features of a key of width K."""
    if feature == "dpfp":
        return 2 * DPFP_ROLLS * key_width
    pairs = key_width * (key_width + 1) // 2
    return {"taylor": 1 + key_width + pairs, "quadratic": pairs}.get(feature, key_width)


def phi(feature: Feature, x: Tensor) -> Tensor:
    """Apply the feature map: [..., K] -> [..., feature_width(feature, K)]."""
    if feature == "silu":
        return F.silu(x)
    if feature == "relu":
        return F.relu(x)
    if feature == "elu+1":
        # Not F.elu: tracing gives its gradient the wrong strides.
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    if feature == "softmax":
        return x.softmax(-1).to(x.dtype)
    if feature == "dpfp":
        both = torch.cat([x.relu(), (-x).relu()], -1)
        return torch.cat([both * both.roll(j, -1) for j in range(1, DPFP_ROLLS + 1)], -1)
    if feature == "taylor":
        x = x * x.shape[-1] ** -0.25
        return F.pad(torch.cat([x, 0.5**0.5 * _pairs(x)], -1), (1, 0), value=1.0)
    if feature == "quadratic":
        return _pairs(x * x.shape[-1] ** -0.25)
    return x


def _pairs(x: Tensor) -> Tensor:
    """Return [x_i^2, sqrt(2) x_i x_j for i < j], whose product with that of y is (x^T y)^2."""
    K = x.shape[-1]
    # Cyclic shifts by up to K / 2 give each pair of channels once; that by K / 2 gives it twice, so half of it is kept.
    pairs = [x * x.roll(shift, -1) for shift in range(1, (K + 1) // 2)]
    half = [x[..., : K // 2] * x[..., K // 2 :]] if K % 2 == 0 else []
    return torch.cat([x * x, 2**0.5 * torch.cat([*pairs, *half], -1)] if K > 1 else [x * x], -1)
