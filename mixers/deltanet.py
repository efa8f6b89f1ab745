"""DeltaNet, which erases the value stored under a key before it writes, and its variants EFLA and DeltaProduct."""

from abc import ABC
from typing import ClassVar, Literal

from pydantic import Field

from deltazoo.backends.update.spec import NegativeEigenvalues, Reparam, UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.delta_rule import (
    DELTA_STEPS,
    NEGATIVE_EIGENVALUES,
    OUTPUT_GATE,
    REPARAM,
    DeltaRuleConfig,
)
from deltazoo.mixers.parts.feature_maps import Feature, FeatureMap
from deltazoo.mixers.parts.norms import UnitNorm
from deltazoo.mixers.parts.projections import QKVProjection

KEY_NORM = "divide k by its norm; None: if reparam is none, because the other steps use the length of k"


class DeltaNetConfig(DeltaRuleConfig, ABC):
    """Delta rule without a decay, with an RMS norm per head and an optional gate."""

    feature: Feature = Field(default="silu", description="feature map of q and k, before they are normalised")
    qk_norm: Literal["l2", "l1"] = Field(default="l2", description="norm that makes q and k unit vectors")
    key_norm: bool | None = Field(default=None, description=KEY_NORM)
    gate: bool = Field(default=False, description=OUTPUT_GATE)

    def spec(self) -> UpdateSpec:
        return self.delta_rule_spec("none")

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        if (self.feature, self.qk_norm) == ("silu", "l2"):
            projection = self.qkv_projection(shape, key_norm=self.key_norm)
            return Parts(projection, self.beta(shape), self.norm_and_gate(shape, self.gate))
        projection = QKVProjection(shape, self.conv_width, silu="v", conv_bias=self.conv_bias)
        keys = {"feature": FeatureMap(self.feature), "unit": UnitNorm(self.qk_norm, self.unit(self.key_norm))}
        return Parts(projection, {**keys, **self.beta(shape)}, self.norm_and_gate(shape, self.gate))


class DeltaNet(DeltaNetConfig):
    """S_t = (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T, with |k_t| = 1.

    With negative_eigenvalues="both" the eigenvalues of the transition lie in [-1, 1].
    """

    name: ClassVar[str] = "deltanet"
    purpose: ClassVar[str] = "replaces the value that a key has stored"
    source: ClassVar[str] = "Schlag 2021, arXiv 2102.11174; Yang 2024, arXiv 2406.06484"
    oracle: ClassVar[str] = "its equation, token by token in float64"


class EFLA(DeltaNetConfig):
    """S_t = (I - f_t k_t k_t^T) S_(t-1) + f_t k_t v_t^T, f_t = (1 - exp(-beta_t |k_t|^2)) / |k_t|^2.

    The exact solution of the continuous delta rule over one step. It is stable for keys of any length, so k is not
    normalised. `GatedEFLA` and `KDA(reparam="efla")` add a decay.
    """

    name: ClassVar[str] = "efla"
    purpose: ClassVar[str] = "delta rule, integrated exactly over a step"
    source: ClassVar[str] = "Lei, Zhang, Poria 2025, arXiv 2512.12602"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    reparam: Reparam = Field(default="efla", description=REPARAM)


class DeltaProduct(DeltaNetConfig):
    """S_t = S_(t-1) after n steps S <- (I - 2 beta k k^T) S + 2 beta k v^T per token, with eigenvalues in [-1, 1].

    The product of several Householder-like steps can rotate and permute the state. The authors' language models have
    K = V = 128 and no gate. fla's layer has a gate, K = 3/4 width / heads and V = 2 K by default.
    """

    name: ClassVar[str] = "deltaproduct"
    purpose: ClassVar[str] = "several delta steps per token; tracks states"
    source: ClassVar[str] = "Siems 2025, arXiv 2502.10297"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    householders: int = Field(default=2, ge=1, description=DELTA_STEPS)
    negative_eigenvalues: NegativeEigenvalues = Field(default="both", description=NEGATIVE_EIGENVALUES)
    gate: bool = Field(default=True, description=OUTPUT_GATE)
