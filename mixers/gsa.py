"""GSA: gated slot attention, a softmax over a fixed number of slots with decay."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.shared_keys import SharedKeysConfig
from deltazoo.mixers.parts.attention.slot_attention import GatedSlots, SlotValuePass
from deltazoo.mixers.parts.feature_maps import Feature, LearnedFeature, ValueSilu, feature_maps
from deltazoo.mixers.parts.gates.output_gates import OutputSilu
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection, Streams


class GSA(SharedKeysConfig):
    """o_t = V_t^T softmax(K_t q_t) with K_t = Diag(a_t) K_(t-1) + (1 - a_t) k_t^T over M slots, and V_t likewise.

    a_t = sigmoid(W x_t)^(1 / temperature) per slot. A short convolution includes a SiLU of q, k and v, which the
    feature map of q and k and the SiLU of v follow.
    """

    name: ClassVar[str] = "gsa"
    family: ClassVar[str] = "memory slots"
    purpose: ClassVar[str] = "slots with a forget gate each"
    source: ClassVar[str] = "Zhang 2024, arXiv 2409.07146"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    slots: int = Field(default=64, ge=1, description="M, slots per head")
    temperature: float = Field(default=8.0, gt=0, description="root of the sigmoid; a higher value decays more slowly")
    conv_width: int = Field(default=0, ge=0, description="taps of the short convolution of q, k and v; 0: none")
    feature: Feature | LearnedFeature = Field(default="silu", description="feature map of q and k")
    scale: float | None = Field(default=1.0, allow_inf_nan=False, description="factor on K q; None: K ** -0.5")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", transition="additive", scale=self.scale)

    def shape(self, width: int) -> HeadShape:
        return self.with_ungrouped_keys(self.head_shape(width))

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        keys, H = self.key_value_shape(shape), shape.heads
        fused = self.feature == "silu" and not self.conv_width  # the projection then computes all activations
        silu: Streams = "qkv" if fused or self.conv_width else "v"
        operands = {} if fused else feature_maps(self.feature, shape, tied=True)
        if self.conv_width:
            operands["value_silu"] = ValueSilu()
        projection = QKVProjection(keys, self.conv_width, silu=silu, query_heads=H)
        slots = GatedSlots(keys, self.slots, self.temperature, query_heads=H)
        operands |= {**self.sharing(shape), "slots": slots}
        norm = HeadNorm(shape, self.norm_eps, over="all")
        outputs = {"second": SlotValuePass(shape, self.slots), "silu": OutputSilu(), "norm": norm}
        return Parts(projection, operands, outputs)
