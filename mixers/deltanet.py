"""DeltaNet: linear attention that erases what a key held before it writes."""

from typing import ClassVar, Literal

from pydantic import Field

from deltazoo.backends.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.delta_rule import DeltaRuleConfig
from deltazoo.mixers.parts.feature_maps import Feature, FeatureMap
from deltazoo.mixers.parts.norms import HeadNorm, UnitNorm
from deltazoo.mixers.parts.projections import QKVProjection


class DeltaNet(DeltaRuleConfig):
    """S_t = (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T, with |k_t| = 1 and an RMS norm in each head.

    With negative_eigenvalues="both" the eigenvalues lie in [-1, 1]; with householders=n it is DeltaProduct.
    """

    name: ClassVar[str] = "deltanet"
    source: ClassVar[str] = "Schlag 2021, arXiv 2102.11174; Yang 2024, arXiv 2406.06484"

    feature: Feature = Field(default="silu", description="the map of q and k before their norm")
    qk_norm: Literal["l2", "l1"] = Field(default="l2", description="the norm that makes q and k unit vectors")

    def spec(self) -> UpdateSpec:
        return self.delta_rule("none")

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        operands, outputs = self.beta(shape), {"norm": HeadNorm(shape, self.norm_eps)}
        if (self.feature, self.qk_norm) == ("silu", "l2"):
            return Parts(self.qkv_projection(shape), operands, outputs)
        keys = {"feature": FeatureMap(self.feature), "unit": UnitNorm(self.qk_norm, self.unit)}
        return Parts(QKVProjection(shape, self.conv_width, silu="v"), {**keys, **operands}, outputs)
