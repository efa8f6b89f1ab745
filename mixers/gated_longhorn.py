"""Gated Longhorn: the implicitly stepped delta rule with a forgetting factor for each head."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.spec import Reparam
from deltazoo.mixers.families.delta_rule import GatedDeltaRuleConfig


class GatedLonghorn(GatedDeltaRuleConfig):
    """S_t = (I - f_t k_t k_t^T) a_t S_(t-1) + f_t k_t v_t^T, f_t = beta_t / (1 + beta_t |k_t|^2).

    Keys keep their length, which counts.
    """

    name: ClassVar[str] = "gated_longhorn"
    source: ClassVar[str] = "Longhorn, arXiv 2407.14207, with the decay of arXiv 2412.06464; new here"
    reparam: Reparam = Field(
        default="longhorn", description="none: explicit Euler; efla: exact; longhorn: implicit Euler"
    )
