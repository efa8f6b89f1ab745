"""Gated RetNet: RetNet with a decay that depends on the token."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.gates.decays import SigmoidDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm, NormKind
from deltazoo.mixers.parts.projections import QKVProjection
from deltazoo.mixers.parts.rotary import Rotary


class GatedRetNet(HeadConfig):
    """S_t = a_t S_(t-1) + k_t v_t^T with a_t = sigmoid(w x_t)^(1 / temperature).

    Rotary position embeddings are applied to q and k; a norm per head and a swish gate follow the update. The code of
    the paper has norm="rms" and norm_weight=False; for its rotary embeddings see `RetNet`.
    """

    name: ClassVar[str] = "gated_retnet"
    family: ClassVar[str] = "linear attention"
    purpose: ClassVar[str] = "a learned decay per head (YOCO)"
    source: ClassVar[str] = "Sun 2024 (YOCO), arXiv 2405.05254"
    oracle: ClassVar[str] = "its equation and that of YOCO's code in float64"
    temperature: float = Field(default=16.0, gt=0, description="root of the sigmoid; a higher value decays more slowly")
    rotary_theta: float = Field(default=10000.0, gt=1, description="base of the rotary angles")
    norm: NormKind = Field(default="layer", description="norm of each head's output; rms in the paper's code")
    norm_weight: bool = Field(default=True, description="whether that norm has a weight; False in the paper's code")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", transition="additive", scale=self.scale)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = QKVProjection(shape)
        decay = SigmoidDecay(shape, "head", None, self.temperature, bias=False)
        operands = {"rotary": Rotary(self.rotary_theta), "decay": decay}
        norm = HeadNorm(shape, self.norm_eps, self.norm, weighted=self.norm_weight)
        return Parts(projection, operands, {"norm": norm, "gate": OutputGate(shape)})
