"""RWKV-6: a decay per key channel, data-dependent token shift, and a bonus for the current token."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.gates.output_gates import PrecomputedGate
from deltazoo.mixers.parts.low_rank import Ranks
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.rwkv.rwkv6 import RWKV6Projection, initial_bonus
from deltazoo.mixers.parts.skips import Bonus


class RWKV6(HeadConfig):
    """o_t = (S_(t-1) + Diag(u) k_t v_t^T)^T r_t and S_t = Diag(a_t) S_(t-1) + k_t v_t^T.

    A layer norm per head and a SiLU gate follow the update.
    """

    name: ClassVar[str] = "rwkv6"
    family: ClassVar[str] = "RWKV"
    purpose: ClassVar[str] = "data-dependent decay; matrix states"
    source: ClassVar[str] = "Peng 2024, arXiv 2404.05892"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    heads: int | None = Field(default=None, ge=1, description="key heads; None: width // 64, at least 1")
    mix_rank: int = Field(default=32, ge=1, description="rank of the maps of the token shift")
    decay_rank: int = Field(default=64, ge=1, description="rank of the decay's map")
    norm_eps: float = Field(default=64e-5, gt=0, description="epsilon of the output norm")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="channel", transition="additive", read="before", scale=1.0)

    def shape(self, width: int) -> HeadShape:
        return self.with_ungrouped_keys(self.head_shape(width, default_heads=max(1, width // 64)))

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = RWKV6Projection(shape, place, Ranks(self.decay_rank, self.mix_rank))
        bonus = Bonus(shape, initial_bonus(shape, place))
        initial_weight = ((place.layer + 1) / place.depth) ** 0.7
        norm = HeadNorm(shape, self.norm_eps, "layer", "each", bias=True, initial_weight=initial_weight)
        return Parts(projection, {}, {"bonus": bonus, "norm": norm, "gate": PrecomputedGate("silu")})
