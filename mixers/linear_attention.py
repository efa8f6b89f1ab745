"""Linear attention, attention with a kernel phi(q)^T phi(k) as a recurrence, and its forms Based and ReBased."""

from abc import ABC
from typing import ClassVar, Self

from pydantic import Field, model_validator

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, OperandPart, Parts
from deltazoo.mixers.families.shared_keys import SharedKeysConfig
from deltazoo.mixers.parts.feature_maps import POSITIVE, Feature, LearnedFeature, feature_maps
from deltazoo.mixers.parts.normaliser import Normalise, NormaliserColumn
from deltazoo.mixers.parts.norms import HeadNorm, SharedLayerNorm
from deltazoo.mixers.parts.projections import QKVProjection


class LinearAttentionConfig(SharedKeysConfig, ABC):
    """Sum of phi(k) v^T without a decay, read by phi(q) and normalised."""

    def spec(self) -> UpdateSpec:
        return UpdateSpec(transition="additive", scale=self.scale)

    def projection(self, shape: HeadShape) -> QKVProjection:
        return QKVProjection(self.key_value_shape(shape), query_heads=shape.heads)

    def normalised(
        self, shape: HeadShape, feature: Feature | LearnedFeature, before: dict[str, OperandPart] | None = None
    ) -> Parts:
        """Create the parts of o_t = S_t^T phi(q_t) / phi(q_t)^T sum_(s <= t) phi(k_s). Args: before: phi."""
        operands = (before or {}) | feature_maps(feature, shape) | self.sharing(shape) | {"ones": NormaliserColumn()}
        return Parts(self.projection(shape), operands, {"norm": Normalise(self.norm_eps)})


class LinearAttention(LinearAttentionConfig):
    """S_t = S_(t-1) + phi(k_t) v_t^T and o_t = S_t^T phi(q_t) / phi(q_t)^T sum_(s <= t) phi(k_s).

    Without the normaliser, o_t = S_t^T phi(q_t) followed by an RMS norm per head.
    """

    name: ClassVar[str] = "linear_attention"
    family: ClassVar[str] = "linear attention"
    purpose: ClassVar[str] = "softmax replaced by a feature map; no decay"
    source: ClassVar[str] = "Katharopoulos 2020, arXiv 2006.16236; dpfp: Schlag 2021, arXiv 2102.11174"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    feature: Feature | LearnedFeature = Field(default="elu+1", description="feature map phi of q and k")
    normaliser: bool = Field(default=True, description="divide by the sum of the weights; False: RMS norm per head")

    @model_validator(mode="after")
    def _normaliser_is_positive(self) -> Self:
        if self.normaliser and self.feature not in POSITIVE:
            raise ValueError(f"normaliser=True needs a positive feature ({', '.join(POSITIVE)}), got {self.feature!r}")
        return self

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        if self.normaliser:
            return self.normalised(shape, self.feature)
        norm = HeadNorm(shape, self.norm_eps)
        operands = feature_maps(self.feature, shape) | self.sharing(shape)
        return Parts(self.projection(shape), operands, {"norm": norm})


class Based(LinearAttentionConfig):
    """o_t = sum_(s <= t) p_ts v_s / sum_(s <= t) p_ts with p_ts = 1 + a + a^2 / 2 and a = q_t^T k_s / sqrt(K).

    p is the second-order Taylor approximation of exp(a), and the state sums Taylor features of k. The paper combines
    this mixer with sliding-window attention.
    """

    name: ClassVar[str] = "based"
    family: ClassVar[str] = "linear attention"
    purpose: ClassVar[str] = "second-order Taylor expansion of the softmax"
    source: ClassVar[str] = "Arora 2024, arXiv 2402.18668"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    heads: int | None = Field(default=None, ge=1, description="key heads; None: width // 64, at least 1")
    key_width: int | None = Field(
        default=16, ge=1, description="K per head, before the feature map; None: width / heads"
    )
    scale: float | None = Field(default=1.0, allow_inf_nan=False, description="factor on S^T phi(q); it cancels")
    norm_eps: float = Field(default=1e-12, gt=0, description="epsilon of the normaliser")

    def shape(self, width: int) -> HeadShape:
        return self.head_shape(width, default_heads=max(1, width // 64))

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        return self.normalised(shape, "taylor")


class ReBased(LinearAttentionConfig):
    """o_t = sum_(s <= t) a_ts^2 v_s / sum_(s <= t) a_ts^2 with a_ts = phi(q_t)^T phi(k_s) / sqrt(K).

    phi(x) = gain * layer_norm(x) + bias, shared by q, k and all heads, can shift the parabola so that weights become 0,
    which Based's cannot. The state sums the products of pairs of channels of phi(k).
    """

    name: ClassVar[str] = "rebased"
    family: ClassVar[str] = "linear attention"
    purpose: ClassVar[str] = "Based with a learned quadratic kernel"
    source: ClassVar[str] = "Aksenov 2024, arXiv 2402.10644"
    oracle: ClassVar[str] = "its equation as masked attention in float64"
    heads: int | None = Field(default=None, ge=1, description="key heads; None: width // 64, at least 1")
    key_width: int | None = Field(
        default=16, ge=1, description="K per head, before the feature map; None: width / heads"
    )
    scale: float | None = Field(default=1.0, allow_inf_nan=False, description="factor on S^T phi(q); it cancels")
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of the normaliser and of the layer norm")

    def shape(self, width: int) -> HeadShape:
        return self.head_shape(width, default_heads=max(1, width // 64))

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        return self.normalised(shape, "quadratic", {"qk_norm": SharedLayerNorm(shape, self.norm_eps)})
