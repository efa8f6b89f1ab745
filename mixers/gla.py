"""Gated linear attention: linear attention with a decay per key channel."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.shared_keys import SharedKeysConfig
from deltazoo.mixers.parts.feature_maps import Elementwise, feature_maps
from deltazoo.mixers.parts.gates.decays import SigmoidDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection, Streams


class GLA(SharedKeysConfig):
    """S_t = Diag(a_t) S_(t-1) + k_t v_t^T with a_t = sigmoid(W_2 W_1 x_t + b)^(1 / temperature).

    An RMS norm per head and a swish gate follow the update. A short convolution includes a SiLU of q, k and v.
    """

    name: ClassVar[str] = "gla"
    family: ClassVar[str] = "linear attention"
    purpose: ClassVar[str] = "a learned decay per channel"
    source: ClassVar[str] = "Yang 2024, arXiv 2312.06635"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    gate_rank: int = Field(default=16, ge=1, description="rank of the decay's map W_2 W_1")
    temperature: float = Field(default=16.0, gt=0, description="root of the sigmoid; a higher value decays more slowly")
    conv_width: int = Field(default=0, ge=0, description="taps of the short convolution of q, k and v; 0: none")
    gate_bias: bool = Field(default=True, description="bias of the output gate; False in flash-linear-attention")
    feature: Elementwise = Field(default="identity", description="feature map of q and k")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="channel", transition="additive", scale=self.scale)

    def shape(self, width: int) -> HeadShape:
        return self.head_shape(width, key_share=0.5)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        keys = self.key_value_shape(shape)
        silu: Streams = "qkv" if self.conv_width else ""
        projection = QKVProjection(keys, self.conv_width, silu=silu, query_heads=shape.heads)
        decay = SigmoidDecay(keys, "channel", self.gate_rank, self.temperature)
        operands = {**feature_maps(self.feature, shape), "decay": decay, **self.sharing(shape)}
        outputs = {"norm": HeadNorm(shape, self.norm_eps), "gate": OutputGate(shape, bias=self.gate_bias)}
        return Parts(projection, operands, outputs)
