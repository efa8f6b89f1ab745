"""Gated DeltaNet: the delta rule with a forgetting factor for each head."""

from typing import ClassVar

from deltazoo.backends.spec import UpdateSpec
from deltazoo.mixers.base import Place
from deltazoo.mixers.decays import SoftplusDecay
from deltazoo.mixers.gates import OutputGate
from deltazoo.mixers.norms import HeadNorm
from deltazoo.mixers.parts import HeadShape, Parts
from deltazoo.mixers.project import Project
from deltazoo.mixers.variant import DeltaRuleConfig


class GatedDeltaNet(DeltaRuleConfig):
    """S_t = a_t (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T, with Mamba-2's decay a_t and a gated RMS norm.

    With `reparam` this is gated EFLA or gated Longhorn. Published models have K = 3/4 width / heads and V = 2 K.
    """

    name: ClassVar[str] = "gated_deltanet"
    source: ClassVar[str] = "Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464"

    def spec(self) -> UpdateSpec:
        return self.delta_rule("head")

    def shape(self, width: int) -> HeadShape:
        return self.sizes(width)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        operands = {**self.key_operands(shape), "decay": SoftplusDecay(shape)}
        outputs = {"norm": HeadNorm(shape, self.norm_eps), "gate": OutputGate(shape)}
        return Parts(Project(shape, self.conv_width, silu=True), operands, outputs)
