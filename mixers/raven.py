"""Raven: slot attention that writes each token to a few slots only, which a router selects."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, OperandPart, OutputPart, Parts
from deltazoo.mixers.families.shared_keys import SharedKeysConfig
from deltazoo.mixers.parts.attention.slot_attention import RoutedSlots, RouterScore, SlotValuePass
from deltazoo.mixers.parts.feature_maps import Feature, LearnedFeature, feature_maps
from deltazoo.mixers.parts.gates.decays import SigmoidDecay, SoftplusDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate, OutputSilu
from deltazoo.mixers.parts.norms import HeadNorm, KeyNorm
from deltazoo.mixers.parts.projections import QKVProjection
from deltazoo.mixers.parts.rotary import Rotary


class Raven(SharedKeysConfig):
    """o_t = V_t^T softmax(K_t q_t) with K_t = Diag(a_t) K_(t-1) + (1 - a_t) k_t^T over M slots, and V_t likewise.

    log a_t = r_t g_t, where g_t is Mamba-2's log decay of the head. r_t = s / sum(s) over the `active` largest scores
    s = sigmoid(W x_t), and 0 elsewhere: the other slots keep their content. q and k have an RMS norm after the feature
    map, v a SiLU.
    """

    name: ClassVar[str] = "raven"
    family: ClassVar[str] = "memory slots"
    purpose: ClassVar[str] = "GSA that writes to the slots of a sparse router"
    source: ClassVar[str] = "Afzal & Bick 2026, goombalab/raven"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    slots: int = Field(default=64, ge=1, description="M, slots per head")
    active: int = Field(default=32, ge=1, description="slots that a token writes to, at most slots")
    decay: Literal["head", "slot"] = Field(
        default="head", description="g: head: Mamba-2's decay; slot: log(sigmoid(W x)) / temperature"
    )
    temperature: float = Field(default=8.0, gt=0, description="divisor of g with decay='slot'")
    router: RouterScore = Field(
        default="sigmoid", description="scores: sigmoid, normalised over the active slots; softmax over all slots"
    )
    noise: bool = Field(
        default=False, description="Gumbel noise on W x in training, as in the authors' code; outputs are then random"
    )
    feature: Feature | LearnedFeature = Field(default="silu", description="feature map of q and k")
    rotary_theta: float | None = Field(
        default=None, gt=1, allow_inf_nan=False, description="base of the rotary angles of q and k; None: no rotation"
    )
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
        keys, fused = self.key_value_shape(shape), self.feature == "silu"
        projection = QKVProjection(keys, silu="qkv" if fused else "v", query_heads=shape.heads)
        operands = {} if fused else feature_maps(self.feature, shape, tied=True)
        operands["qk_norm"] = KeyNorm(shape, self.norm_eps)
        if self.rotary_theta is not None:
            operands["rotary"] = Rotary(self.rotary_theta)
        operands |= {**self.sharing(shape), "decay": self._decay(keys)}
        operands["slots"] = RoutedSlots(keys, self.slots, self.active, self.router, self.noise, shape.heads)
        outputs: dict[str, OutputPart] = {"second": SlotValuePass(shape, self.slots), "silu": OutputSilu()}
        outputs["norm"] = HeadNorm(shape, self.norm_eps, over="head" if self.gate else "all")
        return Parts(projection, operands, outputs | {"gate": OutputGate(shape)} if self.gate else outputs)

    def _decay(self, keys: HeadShape) -> OperandPart:
        if self.decay == "head":
            return SoftplusDecay(keys, rates=(1e-4, 16))
        per_slot = keys._replace(key_width=self.slots)
        return SigmoidDecay(per_slot, "channel", None, self.temperature, bias=False)
