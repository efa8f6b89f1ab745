"""Gated DeltaNet: the delta rule with a forgetting factor for each head."""

from typing import ClassVar

from deltazoo.mixers.families.delta_rule import GatedDeltaRuleConfig


class GatedDeltaNet(GatedDeltaRuleConfig):
    """S_t = a_t (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T, with Mamba-2's decay a_t and a gated RMS norm.

    With `reparam` this is gated EFLA or gated Longhorn. Published models have K = 3/4 width / heads and V = 2 K.
    """

    name: ClassVar[str] = "gated_deltanet"
    source: ClassVar[str] = "Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464"
