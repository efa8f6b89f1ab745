"""Comba: a gated delta rule with a scaled erase strength, which subtracts a multiple of the key from the query."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.delta_rule import DeltaRuleConfig
from deltazoo.mixers.parts.gates.decays import SoftplusDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.memory.feedback import Feedback
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection, Streams


class Comba(DeltaRuleConfig):
    """S_t = (a_t - c beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T with c = sigmoid(b), and o_t = S_t^T (q_t - d k_t).

    The erase reads the state before the decay. b and d are learned per head. The paper calls the erase key c k state
    feedback, and the corrected query output feedback. q and k have unit length, before the feedback as in the paper's
    equations. With norm_after=True, the form that the authors train, q - d c k, k and the erase key c k get unit length
    after that; then c cancels in the erase key.
    """

    name: ClassVar[str] = "comba"
    purpose: ClassVar[str] = "own erase and write strengths; output feedback"
    source: ClassVar[str] = "Hu 2025, arXiv 2506.02475"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    correction: float = Field(default=1.0, description="initial d; 0.02 in the paper's small models")
    norm_after: bool = Field(default=False, description="normalise q, k and c k after the feedback: the authors' code")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(**{**self.delta_rule_spec("head", "separate").model_dump(), "erase_from": "previous"})

    def shape(self, width: int) -> HeadShape:
        return self.head_shape(width, key_share=0.75, value_share=1.5)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        unit: Streams = "" if self.norm_after else "qk"
        projection = QKVProjection(shape, self.conv_width, silu="qkv", unit=unit, conv_bias=self.conv_bias)
        feedback = Feedback(shape, self.correction, self.norm_after)
        operands = {**self.beta(shape), "feedback": feedback, "decay": SoftplusDecay(shape)}
        outputs = {"norm": HeadNorm(shape, self.norm_eps), "gate": OutputGate(shape, "sigmoid")}
        return Parts(projection, operands, outputs)
