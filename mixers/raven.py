"""Raven: slot attention that writes each token to a few slots only, which a router selects."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.shared_keys import SharedKeysConfig
from deltazoo.mixers.parts.attention.slot_attention import RoutedSlots, RouterScore, SlotValuePass
from deltazoo.mixers.parts.feature_maps import Feature, LearnedFeature, feature_maps
from deltazoo.mixers.parts.gates.decays import SoftplusDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate, OutputSilu
from deltazoo.mixers.parts.norms import HeadNorm, KeyNorm
from deltazoo.mixers.parts.projections import QKVProjection


class Raven(SharedKeysConfig):
    """o_t = V_t^T softmax(K_t q_t) with K_t = Diag(a_t) K_(t-1) + (1 - a_t) k_t^T over M slots, and V_t likewise.

    log a_t = r_t g_t: g_t as in Mamba-2, r_t of the router. q and k have a feature map and an RMS norm, v a SiLU.
    """

    name: ClassVar[str] = "raven"
    family: ClassVar[str] = "memory slots"
    purpose: ClassVar[str] = "GSA that writes to the slots of a sparse router"
    source: ClassVar[str] = "Afzal & Bick 2026, goombalab/raven"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    slots: int = Field(default=64, ge=1, description="M, slots per head")
    active: int = Field(default=32, ge=1, description="slots that a token writes to, at most slots")
    router: RouterScore = Field(default="sigmoid", description="sigmoid, normalised over the active slots; or softmax")
    feature: Feature | LearnedFeature = Field(default="silu", description="feature map of q and k")
    gate: bool = Field(default=False, description="norm of each head and a swish gate, instead of a norm of all heads")
    scale: float | None = Field(default=1.0, allow_inf_nan=False, description="factor on K q; None: K ** -0.5")

    @model_validator(mode="after")
    def _active_slots_exist(self) -> Self:
        if self.active > self.slots:
            raise ValueError(f"active must be at most slots = {self.slots}, got {self.active}")
        return self

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", transition="additive", scale=self.scale)

    def shape(self, width: int) -> HeadShape:
        return self.with_ungrouped_keys(self.head_shape(width))

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        keys = self.key_value_shape(shape)
        projection = QKVProjection(keys, silu="v", query_heads=shape.heads)
        operands = feature_maps(self.feature, shape, tied=True)
        operands["qk_norm"] = KeyNorm(Parts(projection, operands).update_shape(shape), self.norm_eps)
        operands |= {**self.sharing(shape), "decay": SoftplusDecay(keys, rates=(1e-4, 16))}
        operands["slots"] = RoutedSlots(keys, self.slots, self.active, self.router, shape.heads)
        outputs = {"second": SlotValuePass(shape, self.slots), "silu": OutputSilu()}
        outputs["norm"] = HeadNorm(shape, self.norm_eps, over="head" if self.gate else "all")
        return Parts(projection, operands, outputs | ({"gate": OutputGate(shape)} if self.gate else {}))
