"""Linear attention: attention with a kernel phi(q)^T phi(k), computed as a recurrence."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from deltazoo.backends.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.feature_maps import POSITIVE, Feature, FeatureMap
from deltazoo.mixers.parts.normaliser import Normalise, NormaliserColumn
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection


class LinearAttention(HeadConfig):
    """S_t = S_(t-1) + phi(k_t) v_t^T and o_t = S_t^T phi(q_t) / phi(q_t)^T sum_(s <= t) phi(k_s).

    Without the normaliser, o_t = S_t^T phi(q_t) followed by an RMS norm per head.
    """

    name: ClassVar[str] = "linear_attention"
    source: ClassVar[str] = "Katharopoulos 2020, arXiv 2006.16236; dpfp: Schlag 2021, arXiv 2102.11174"
    feature: Feature = Field(default="elu+1", description="feature map phi of q and k")
    normaliser: bool = Field(default=True, description="divide by the sum of the weights; False: RMS norm per head")

    @model_validator(mode="after")
    def _normaliser_is_positive(self) -> Self:
        if self.normaliser and self.feature not in POSITIVE:
            raise ValueError(f"normaliser=True needs a positive feature ({', '.join(POSITIVE)}), got {self.feature!r}")
        return self

    def spec(self) -> UpdateSpec:
        return UpdateSpec(transition="additive", scale=self.scale)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        ones = {"ones": NormaliserColumn()} if self.normaliser else {}
        norm = Normalise(self.norm_eps) if self.normaliser else HeadNorm(shape, self.norm_eps)
        return Parts(QKVProjection(shape), {"feature": FeatureMap(self.feature), **ones}, {"norm": norm})
