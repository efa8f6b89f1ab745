"""Longhorn: the delta rule with an implicit Euler step, the closed-form solution of an online regression."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.gates.beta import Beta
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection


class Longhorn(HeadConfig):
    """S_t = (I - f_t k_t k_t^T) S_(t-1) + f_t k_t v_t^T with f_t = beta_t / (1 + beta_t |k_t|^2).

    q and k are not normalised. This is the exact step; the paper trains its diagonal approximation, `LonghornDiagonal`.
    `GatedLonghorn` adds a decay.
    """

    name: ClassVar[str] = "longhorn"
    family: ClassVar[str] = "delta rule"
    purpose: ClassVar[str] = "implicit, stable step of the delta rule"
    source: ClassVar[str] = "Longhorn, Liu et al. 2024, arXiv 2407.14207"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    conv_width: int = Field(default=4, ge=0, description="taps of the short convolution of q, k and v; 0: none")
    householders: int = Field(default=1, ge=1, description="delta steps per token")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(beta="head", reparam="longhorn", householders=self.householders, scale=self.scale)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = QKVProjection(shape, self.conv_width, silu="v")
        operands = {"beta": Beta(shape)}
        outputs = {"norm": HeadNorm(shape, self.norm_eps), "gate": OutputGate(shape)}
        return Parts(projection, operands, outputs)
