"""Gated DeltaProduct: several delta steps a token after a forgetting factor for each head."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.spec import NegativeEigenvalues
from deltazoo.mixers.families.delta_rule import GatedDeltaRuleConfig


class GatedDeltaProduct(GatedDeltaRuleConfig):
    """S_t is a_t S_(t-1) after n steps (I - 2 beta k k^T) S + 2 beta k v^T a token.

    Decay, norm and gate are Gated DeltaNet's.
    """

    name: ClassVar[str] = "gated_deltaproduct"
    source: ClassVar[str] = "Siems 2025, arXiv 2502.10297"
    householders: int = Field(default=2, ge=1, description="delta steps a token")
    negative_eigenvalues: NegativeEigenvalues = Field(
        default="both", description="both: erase and write doubled; erase: only the erase doubled; off"
    )
