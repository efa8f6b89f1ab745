"""Gated EFLA: the exactly stepped delta rule with a forgetting factor for each head."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.spec import Reparam
from deltazoo.mixers.families.delta_rule import GatedDeltaRuleConfig


class GatedEFLA(GatedDeltaRuleConfig):
    """S_t = (I - f_t k_t k_t^T) a_t S_(t-1) + f_t k_t v_t^T, f_t = (1 - exp(-beta_t |k_t|^2)) / |k_t|^2.

    Keys keep their length, which counts.
    """

    name: ClassVar[str] = "gated_efla"
    source: ClassVar[str] = "EFLA, arXiv 2512.12602, with the decay of arXiv 2412.06464; new here"
    reparam: Reparam = Field(default="efla", description="none: explicit Euler; efla: exact; longhorn: implicit Euler")
