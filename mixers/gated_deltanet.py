"""Gated DeltaNet, the delta rule with a decay per head, and its variants with other steps."""

from abc import ABC
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from deltazoo.backends.update.spec import NegativeEigenvalues, Reparam, UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.delta_rule import (
    DELTA_STEPS,
    NEGATIVE_EIGENVALUES,
    REPARAM,
    DeltaRuleConfig,
)
from deltazoo.mixers.parts.gates.decays import A_INIT_RANGE, RateRange, SoftplusDecay

BETA_BIAS = "bias of the map to beta; True in NVlabs' code"
QUERY_NORM = "divide q by its L2 norm; False in NVlabs' gated Longhorn"


class GatedDeltaNetConfig(DeltaRuleConfig, ABC):
    """Delta rule with Mamba-2's decay per head, an RMS norm per head and a gate."""

    gate: bool = Field(default=True, description="output gate after the norm: o <- o * gate_activation(W x)")
    gate_activation: Literal["silu", "sigmoid"] = Field(
        default="silu", description="activation of the output gate; sigmoid in Qwen4-Exp"
    )
    beta_bias: bool = Field(default=False, description=BETA_BIAS)
    query_norm: bool = Field(default=True, description=QUERY_NORM)
    A_init_range: RateRange = Field(default=(0.01, 16.0), description=A_INIT_RANGE)

    @model_validator(mode="after")
    def _activation_has_a_gate(self) -> Self:
        if not self.gate and self.gate_activation != "silu":
            raise ValueError(f"gate_activation={self.gate_activation!r} needs gate=True, got gate=False")
        return self

    def spec(self) -> UpdateSpec:
        return self.delta_rule_spec("head")

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = self.qkv_projection(shape, self.query_norm)
        operands = {**self.beta(shape, self.beta_bias), "decay": SoftplusDecay(shape, rates=self.A_init_range)}
        return Parts(projection, operands, self.norm_and_gate(shape, self.gate, self.gate_activation))


class GatedDeltaNet(GatedDeltaNetConfig):
    """S_t = a_t (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T.

    The published models have K = 3/4 width / heads and V = 2 K.
    """

    name: ClassVar[str] = "gated_deltanet"
    purpose: ClassVar[str] = "delta rule with a decay per head"
    source: ClassVar[str] = "Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464"
    oracle: ClassVar[str] = "transformers `qwen3_next`, `qwen3_5`, `olmo_hybrid`"


class GatedEFLA(GatedDeltaNetConfig):
    """S_t = (I - f_t k_t k_t^T) a_t S_(t-1) + f_t k_t v_t^T, f_t = (1 - exp(-beta_t |k_t|^2)) / |k_t|^2.

    k is not normalised: its length affects the step.
    """

    name: ClassVar[str] = "gated_efla"
    purpose: ClassVar[str] = "EFLA with a decay per head"
    source: ClassVar[str] = "EFLA, arXiv 2512.12602, with the decay of arXiv 2412.06464; new here"
    oracle: ClassVar[str] = "matrix exponential in float64"
    reparam: Reparam = Field(default="efla", description=REPARAM)


class GatedLonghorn(GatedDeltaNetConfig):
    """S_t = (I - f_t k_t k_t^T) a_t S_(t-1) + f_t k_t v_t^T, f_t = beta_t / (1 + beta_t |k_t|^2).

    k is not normalised: its length affects the step. Nor is q, as in the layer of NVlabs/GatedDeltaNet with
    qk_norm="longhorn", whose map to beta also has a bias.
    """

    name: ClassVar[str] = "gated_longhorn"
    purpose: ClassVar[str] = "Longhorn with a decay per head"
    source: ClassVar[str] = "NVlabs/GatedDeltaNet, of arXiv 2412.06464; Longhorn, Liu et al. 2024, arXiv 2407.14207"
    oracle: ClassVar[str] = "the implicit step, solved in float64"
    reparam: Reparam = Field(default="longhorn", description=REPARAM)
    query_norm: bool = Field(default=False, description=QUERY_NORM)
    beta_bias: bool = Field(default=True, description=BETA_BIAS)


class GatedDeltaProduct(GatedDeltaNetConfig):
    """S_t = a_t S_(t-1) after n steps S <- (I - 2 beta k k^T) S + 2 beta k v^T per token.

    fla's layer has K = 3/4 width / heads and V = 2 K by default.
    """

    name: ClassVar[str] = "gated_deltaproduct"
    purpose: ClassVar[str] = "DeltaProduct with a decay per head"
    source: ClassVar[str] = "Siems 2025, arXiv 2502.10297"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    householders: int = Field(default=2, ge=1, description=DELTA_STEPS)
    negative_eigenvalues: NegativeEigenvalues = Field(default="both", description=NEGATIVE_EIGENVALUES)
