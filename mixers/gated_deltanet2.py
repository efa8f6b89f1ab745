"""Gated DeltaNet-2: a delta rule with separate erase and write gates per channel."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, OperandPart, Parts
from deltazoo.mixers.families.delta_rule import DeltaRuleConfig
from deltazoo.mixers.parts.gates.beta import ChannelBeta
from deltazoo.mixers.parts.gates.decays import SoftplusDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.gates.per_value_head import HeadKind, RepeatForValueHeads
from deltazoo.mixers.parts.norms import HeadNorm


class GatedDeltaNet2(DeltaRuleConfig):
    """S_t = (I - k_t (b_t * k_t)^T) Diag(a_t) S_(t-1) + k_t (w_t * v_t)^T with b, w = sigmoid(W x) per channel.

    The low-rank decay and the sigmoid gate are those of Kimi Delta Attention; the gate has a bias here. With b = w =
    beta per head it is KDA. Value heads that share a key share its decay and erase strength, unless
    `gates_per` is "value".
    """

    name: ClassVar[str] = "gated_deltanet2"
    purpose: ClassVar[str] = "erase and write strengths per channel"
    source: ClassVar[str] = "Hatamizadeh, Choi, Kautz 2026, arXiv 2605.22791"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    gates_per: HeadKind = Field(
        default="key", description="heads that have a decay and an erase strength: key or value"
    )

    def spec(self) -> UpdateSpec:
        return self.delta_rule_spec("channel", "channel")

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = self.qkv_projection(shape)
        shared = self.gates_per == "key" and shape.heads < shape.value_heads
        gated = shape._replace(value_heads=shape.heads) if shared else shape
        operands: dict[str, OperandPart] = {
            "beta": ChannelBeta(shape, gated.value_heads),
            "decay": SoftplusDecay(gated, "channel", shape.value_width, rates=(1, 16)),
        }
        if shared:
            operands["repeat"] = RepeatForValueHeads(shape)
        norm = HeadNorm(shape, self.norm_eps)
        gate = OutputGate(shape, "sigmoid", shape.value_width, bias=True)
        return Parts(projection, operands, {"norm": norm, "gate": gate})
