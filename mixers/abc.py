"""ABC: attention with bounded-memory control, whose memory slots are weighted means of all keys and values."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, OperandPart, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.attention.slot_attention import SlotValuePass, SoftmaxSlots
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection
from deltazoo.mixers.parts.rotary import Rotary


class ABCAttention(HeadConfig):
    """o_t = V_t^T softmax(K_t q_t) with K_t = sum_(i <= t) w_ti k_i^T over M slots, and V_t likewise.

    w_ti = exp(W x_i) / sum_(j <= t) exp(W x_j) per slot. An RMS norm per head and a swish gate follow. A
    short convolution includes a SiLU of q, k and v.
    """

    name: ClassVar[str] = "abc"
    family: ClassVar[str] = "memory slots"
    purpose: ClassVar[str] = "softmax over a fixed number of slots"
    source: ClassVar[str] = "Peng 2021, arXiv 2110.02488"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    slots: int = Field(default=64, ge=1, description="M, slots per head")
    conv_width: int = Field(default=0, ge=0, description="taps of the short convolution of q, k and v; 0: none")
    rotary_theta: float = Field(default=10000.0, gt=1, description="base of the rotary angles of q and k")
    scale: float | None = Field(default=None, allow_inf_nan=False, description="factor on K q; None: K ** -0.5")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", transition="additive", scale=self.scale)

    def shape(self, width: int) -> HeadShape:
        return self.with_ungrouped_keys(self.head_shape(width, key_share=0.5))

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = QKVProjection(shape, self.conv_width, silu="qkv" if self.conv_width else "")
        operands: dict[str, OperandPart] = {
            "rotary": Rotary(self.rotary_theta),
            "slots": SoftmaxSlots(shape, self.slots),
        }
        norm, gate = HeadNorm(shape, self.norm_eps), OutputGate(shape)
        return Parts(projection, operands, {"second": SlotValuePass(shape, self.slots), "norm": norm, "gate": gate})
