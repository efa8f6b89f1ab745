"""Gated linear attention: linear attention with a decay per key channel."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.gates.decays import SigmoidDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection


class GLA(HeadConfig):
    """S_t = Diag(a_t) S_(t-1) + k_t v_t^T with a_t = sigmoid(W_2 W_1 x_t + b)^(1 / temperature).

    An RMS norm per head and a swish gate follow the update.
    """

    name: ClassVar[str] = "gla"
    family: ClassVar[str] = "linear attention"
    purpose: ClassVar[str] = "a learned decay per channel"
    source: ClassVar[str] = "Yang 2024, arXiv 2312.06635"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    gate_rank: int = Field(default=16, ge=1, description="rank of the decay's map W_2 W_1")
    temperature: float = Field(default=16.0, gt=0, description="root of the sigmoid; a higher value decays more slowly")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="channel", transition="additive", scale=self.scale)

    def shape(self, width: int) -> HeadShape:
        return self.head_shape(width, key_share=0.5)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = QKVProjection(shape)
        decay = SigmoidDecay(shape, "channel", self.gate_rank, self.temperature)
        outputs = {"norm": HeadNorm(shape, self.norm_eps), "gate": OutputGate(shape, bias=True)}
        return Parts(projection, {"decay": decay}, outputs)
