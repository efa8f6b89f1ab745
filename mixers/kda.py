"""Kimi Delta Attention: the delta rule with a decay per key channel."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.delta_rule import DECAY_BOUND, DeltaRuleConfig
from deltazoo.mixers.parts.gates.decays import SoftplusDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm


class KDA(DeltaRuleConfig):
    """S_t = (I - beta_t k_t k_t^T) Diag(a_t) S_(t-1) + beta_t k_t v_t^T, with a low-rank decay and a sigmoid gate.

    `reparam="efla"` or "longhorn" makes this EFLA or Longhorn with a decay per channel.
    """

    name: ClassVar[str] = "kda"
    purpose: ClassVar[str] = "a decay per channel (Kimi Linear)"
    source: ClassVar[str] = "Kimi Team 2025, arXiv 2510.26692"
    oracle: ClassVar[str] = "transformers `kimi_linear`, `bailing_hybrid`, `glm5_next`"
    gate_rank: Annotated[int, Field(ge=1)] | Literal["full"] | None = Field(
        default=None,
        description="rank of the projections of decay and output gate; full: one map each (Ling 3.0); None: K and V",
    )
    gate_bias: bool = Field(default=False, description="bias of the output gate; True in flash-linear-attention")
    decay_bound: float | None = Field(
        default=None,
        lt=0,
        description=DECAY_BOUND,
    )

    def spec(self) -> UpdateSpec:
        return self.delta_rule_spec("channel")

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = self.qkv_projection(shape)
        operands = self.beta(shape)
        widths = shape.key_width, shape.value_width
        key_rank, value_rank = (None if self.gate_rank == "full" else self.gate_rank or width for width in widths)
        operands["decay"] = SoftplusDecay(shape, "channel", key_rank, rates=(1, 16), bound=self.decay_bound)
        norm = HeadNorm(shape, self.norm_eps)
        gate = OutputGate(shape, "sigmoid", value_rank, self.gate_bias)
        return Parts(projection, operands, {"norm": norm, "gate": gate})
