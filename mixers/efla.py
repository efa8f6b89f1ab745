"""EFLA: the delta rule stepped exactly, so that keys of any length are safe and their length counts."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.delta_rule import DeltaConfig
from deltazoo.mixers.parts.beta import Beta
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection


class EFLA(DeltaConfig):
    """S_t = (I - f_t k_t k_t^T) S_(t-1) + f_t k_t v_t^T, f_t = (1 - exp(-beta_t |k_t|^2)) / |k_t|^2.

    q is a unit vector, k is not. With a decay it is `GatedDeltaNet(reparam="efla")` or `KDA(reparam="efla")`.
    """

    name: ClassVar[str] = "efla"
    source: ClassVar[str] = "Lei, Zhang, Poria 2025, arXiv 2512.12602"

    conv_width: int = Field(default=4, ge=0, description="taps of the short convolution of q, k, v; 0: none")
    householders: int = Field(default=1, ge=1, description="delta steps a token")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(beta="head", reparam="efla", householders=self.householders, scale=self.scale)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        operands = {"beta": Beta(shape, self.spec())}
        outputs = {"norm": HeadNorm(shape, self.norm_eps)}
        return Parts(QKVProjection(shape, self.conv_width, silu="qkv", unit="q"), operands, outputs)
