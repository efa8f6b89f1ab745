"""Gated Longhorn: the implicitly stepped delta rule with a forgetting factor for each head."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.spec import Reparam, UpdateSpec
from deltazoo.mixers.base import Place
from deltazoo.mixers.decays import SoftplusDecay
from deltazoo.mixers.gates import OutputGate
from deltazoo.mixers.norms import HeadNorm
from deltazoo.mixers.parts import HeadShape, Parts
from deltazoo.mixers.project import Project
from deltazoo.mixers.variant import DeltaRuleConfig


class GatedLonghorn(DeltaRuleConfig):
    """S_t = (I - f_t k_t k_t^T) a_t S_(t-1) + f_t k_t v_t^T, f_t = beta_t / (1 + beta_t |k_t|^2).

    Keys keep their length, which counts.
    """

    name: ClassVar[str] = "gated_longhorn"
    source: ClassVar[str] = "Longhorn, arXiv 2407.14207, with the decay of arXiv 2412.06464; new here"
    reparam: Reparam = Field(
        default="longhorn", description="none: explicit Euler; efla: exact; longhorn: implicit Euler"
    )

    def spec(self) -> UpdateSpec:
        return self.delta_rule("head")

    def shape(self, width: int) -> HeadShape:
        return self.sizes(width)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        operands = {**self.key_operands(shape), "decay": SoftplusDecay(shape)}
        outputs = {"norm": HeadNorm(shape, self.norm_eps), "gate": OutputGate(shape)}
        return Parts(Project(shape, self.conv_width, silu=True), operands, outputs)
