"""Longhorn: the delta rule stepped implicitly, the closed form of an online regression."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.gates import Beta, OutputGate
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection


class Longhorn(HeadConfig):
    """S_t = (I - f_t k_t k_t^T) S_(t-1) + f_t k_t v_t^T, f_t = beta_t / (1 + beta_t |k_t|^2); q and k as projected.

    The exact form, not the diagonal one that the paper trains. With a decay: `GatedDeltaNet(reparam="longhorn")`.
    """

    name: ClassVar[str] = "longhorn"
    source: ClassVar[str] = "Liu 2024, arXiv 2407.14207"

    conv_width: int = Field(default=4, ge=0, description="taps of the short convolution of q, k, v; 0: none")
    householders: int = Field(default=1, ge=1, description="delta steps a token")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(beta="head", reparam="longhorn", householders=self.householders, scale=self.scale)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        outputs = {"norm": HeadNorm(shape, self.norm_eps), "gate": OutputGate(shape)}
        return Parts(QKVProjection(shape, self.conv_width, silu="v"), {"beta": Beta(shape, self.spec())}, outputs)
