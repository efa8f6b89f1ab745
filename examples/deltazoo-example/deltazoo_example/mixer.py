"""A mixer: DeltaNet whose heads also fade at a fixed pace each, as RetNet's do."""

from typing import ClassVar

from deltazoo import Place, UpdateSpec
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.delta_rule import DeltaRuleConfig
from deltazoo.mixers.parts.decays import FixedDecay
from deltazoo.mixers.parts.norms import HeadNorm


class FadingDeltaNet(DeltaRuleConfig):
    """S_t = g_h (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T, g_h = 1 - 2^(-5-h)."""

    name: ClassVar[str] = "fading_deltanet"
    source: ClassVar[str] = "an example: DeltaNet 2406.06484 with the decay of RetNet 2307.08621"

    def spec(self) -> UpdateSpec:
        return self.delta_rule_spec("fixed")

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        operands = {**self.beta(shape), "decay": FixedDecay(shape)}
        return Parts(self.qkv_projection(shape), operands, {"norm": HeadNorm(shape, self.norm_eps)})
