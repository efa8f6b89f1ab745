"""HGRN2: gated linear attention with k = 1 - a, so that the decay also sets the strength of the write."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.gates.decays import SigmoidDecay, TiedInputGate
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection


class HGRN2(HeadConfig):
    """S_t = Diag(a_t) S_(t-1) + (1 - a_t) v_t^T, with an RMS norm over all heads.

    a_t has a learned lower bound per channel, whose initial value rises with the layer.
    """

    name: ClassVar[str] = "hgrn2"
    family: ClassVar[str] = "linear attention"
    purpose: ClassVar[str] = "HGRN with a matrix state; keys are 1 - decay"
    source: ClassVar[str] = "Qin 2024, arXiv 2404.07904"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    conv_width: int = Field(
        default=0, ge=0, description="taps of the short convolutions of q, v and the map to a; 0: none"
    )
    scale: float | None = Field(default=1.0, allow_inf_nan=False, description="factor on the output; None: K ** -0.5")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="channel", transition="additive", scale=self.scale)

    def shape(self, width: int) -> HeadShape:
        return self.with_ungrouped_keys(self.head_shape(width))

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = QKVProjection(shape, self.conv_width, silu="q", keys=False)
        decay = SigmoidDecay(shape, "channel", None, 1.0, floor=place.layer / place.depth, conv_width=self.conv_width)
        operands = {"decay": decay, "tied": TiedInputGate("key")}
        return Parts(projection, operands, {"norm": HeadNorm(shape, self.norm_eps, over="all")})
