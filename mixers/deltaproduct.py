"""DeltaProduct: several delta steps a token, whose product turns and permutes the state."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.spec import NegativeEigenvalues, UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.delta_rule import DeltaRuleConfig
from deltazoo.mixers.parts.norms import HeadNorm


class DeltaProduct(DeltaRuleConfig):
    """S_t is S_(t-1) after n steps (I - 2 beta k k^T) S + 2 beta k v^T a token, eigenvalues in [-1, 1]."""

    name: ClassVar[str] = "deltaproduct"
    source: ClassVar[str] = "Siems 2025, arXiv 2502.10297"
    householders: int = Field(default=2, ge=1, description="delta steps a token")
    negative_eigenvalues: NegativeEigenvalues = Field(
        default="both", description="both: erase and write doubled; erase: only the erase doubled; off"
    )

    def spec(self) -> UpdateSpec:
        return self.delta_rule("none")

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        operands, outputs = self.beta(shape), {"norm": HeadNorm(shape, self.norm_eps)}
        return Parts(self.qkv_projection(shape), operands, outputs)
