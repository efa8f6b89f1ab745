"""RetNet: linear attention with a constant decay per head."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.gates.decays import FixedDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm, NormKind
from deltazoo.mixers.parts.projections import QKVProjection
from deltazoo.mixers.parts.rotary import Rotary


class RetNet(HeadConfig):
    """S_t = g_h S_(t-1) + k_t v_t^T with g_h = 1 - 2^(-5-h) for head h.

    Rotary position embeddings are applied to q and k; together with the decay these are xPos. A norm per head and a
    swish gate follow the update. The paper's code (torchscale) has norm="rms", norm_weight=False and norm_eps=1e-6; it
    rotates adjacent channels, by angles of the base rotary_theta=10000 ** (n / (n - 1)) with n = K / 2.
    """

    name: ClassVar[str] = "retnet"
    family: ClassVar[str] = "linear attention"
    purpose: ClassVar[str] = "a fixed decay per head"
    source: ClassVar[str] = "Sun 2023, arXiv 2307.08621"
    oracle: ClassVar[str] = "its equation and that of torchscale in float64"
    rotary_theta: float = Field(default=10000.0, gt=1, description="base of the rotary angles")
    norm: NormKind = Field(default="layer", description="norm of each head's output; rms in the paper's code")
    norm_weight: bool = Field(default=True, description="whether that norm has a weight; False in the paper's code")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="fixed", transition="additive", scale=self.scale)

    def shape(self, width: int) -> HeadShape:
        return self.head_shape(width, value_share=2.0)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = QKVProjection(shape)
        operands = {"rotary": Rotary(self.rotary_theta), "decay": FixedDecay(shape)}
        norm = HeadNorm(shape, self.norm_eps, self.norm, weighted=self.norm_weight)
        return Parts(projection, operands, {"norm": norm, "gate": OutputGate(shape)})
