"""GSA: gated slot attention, a softmax over a fixed number of slots with decay."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.attention.slot_attention import GatedSlots, SlotValuePass
from deltazoo.mixers.parts.gates.output_gates import OutputSilu
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection


class GSA(HeadConfig):
    """o_t = V_t^T softmax(K_t q_t) with K_t = Diag(a_t) K_(t-1) + (1 - a_t) k_t^T over M slots, and V_t likewise.

    a_t = sigmoid(W x_t)^(1 / temperature) per slot.
    """

    name: ClassVar[str] = "gsa"
    family: ClassVar[str] = "memory slots"
    purpose: ClassVar[str] = "slots with a forget gate each"
    source: ClassVar[str] = "Zhang 2024, arXiv 2409.07146"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    slots: int = Field(default=64, ge=1, description="M, slots per head")
    temperature: float = Field(default=8.0, gt=0, description="root of the sigmoid; a higher value decays more slowly")
    scale: float | None = Field(default=1.0, allow_inf_nan=False, description="factor on K q; None: K ** -0.5")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", transition="additive", scale=self.scale)

    def shape(self, width: int) -> HeadShape:
        return self.with_ungrouped_keys(self.head_shape(width))

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = QKVProjection(shape, silu="qkv")
        operands = {"slots": GatedSlots(shape, self.slots, self.temperature)}
        norm = HeadNorm(shape, self.norm_eps, over="all")
        outputs = {"second": SlotValuePass(shape, self.slots), "silu": OutputSilu(), "norm": norm}
        return Parts(projection, operands, outputs)
