"""The mixer "decayed_deltanet": DeltaNet with RetNet's fixed decay of each head."""

from typing import ClassVar

from deltazoo import Place, UpdateSpec
from deltazoo.mixers import DeltaRuleConfig
from deltazoo.mixers.parts import FixedDecay, HeadNorm, HeadShape, Parts


class DecayedDeltaNet(DeltaRuleConfig):
    """S_t = g_h (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T with g_h = 1 - 2^(-5-h) for head h.

    The base class has the fields (heads, widths, convolution, ...) and builds the module.
    """

    name: ClassVar[str] = "decayed_deltanet"
    source: ClassVar[str] = "an example: DeltaNet 2406.06484 with the decay of RetNet 2307.08621"

    def spec(self) -> UpdateSpec:
        """Return the recurrence."""
        return self.delta_rule_spec("fixed")

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        """Create the modules around the update."""
        projection = self.qkv_projection(shape)
        operands = {**self.beta(shape), "decay": FixedDecay(shape)}
        return Parts(projection, operands, {"norm": HeadNorm(shape, self.norm_eps)})
