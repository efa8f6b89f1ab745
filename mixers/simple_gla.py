"""Simple GLA: gated linear attention with a decay per head instead of per key channel."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.shared_keys import SharedKeysConfig
from deltazoo.mixers.parts.feature_maps import Feature, LearnedFeature, feature_maps
from deltazoo.mixers.parts.gates.decays import SigmoidDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection, Streams


class SimpleGLA(SharedKeysConfig):
    """S_t = a_t S_(t-1) + k_t v_t^T with a_t = sigmoid(w x_t + b)^(1 / temperature), a number per head.

    An RMS norm per head and a swish gate follow the update. A short convolution includes a SiLU of q, k and v.
    """

    name: ClassVar[str] = "simple_gla"
    family: ClassVar[str] = "linear attention"
    purpose: ClassVar[str] = "GLA with one decay per head"
    source: ClassVar[str] = "Yang 2024, arXiv 2312.06635, with a decay per head as in fla's SimpleGatedLinearAttention"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    temperature: float = Field(default=16.0, gt=0, description="root of the sigmoid; a higher value decays more slowly")
    conv_width: int = Field(default=0, ge=0, description="taps of the short convolution of q, k and v; 0: none")
    feature: Feature | LearnedFeature = Field(default="identity", description="feature map of q and k")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", transition="additive", scale=self.scale)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        keys = self.key_value_shape(shape)
        silu: Streams = "qkv" if self.conv_width else ""
        projection = QKVProjection(keys, self.conv_width, silu=silu, query_heads=shape.heads)
        decay = SigmoidDecay(shape, "head", None, self.temperature)
        operands = {**feature_maps(self.feature, shape), **self.sharing(shape), "decay": decay}
        outputs = {"norm": HeadNorm(shape, self.norm_eps), "gate": OutputGate(shape)}
        return Parts(projection, operands, outputs)
