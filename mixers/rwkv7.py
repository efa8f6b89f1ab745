"""RWKV-7: a generalised delta rule with a vector-valued decay and learning rate, and a separate removal key."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.gates.output_gates import PrecomputedGate
from deltazoo.mixers.parts.low_rank import Ranks
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.rwkv.rwkv7 import FIRST_VALUE, RWKV7Projection
from deltazoo.mixers.parts.skips import Bonus


class RWKV7(HeadConfig):
    """S_t = (Diag(w_t) - (kappa_t * eta_t) kappa_t^T) S_(t-1) + k_t v_t^T.

    w is the decay, kappa the normalised removal key, eta the in-context learning rate. A layer norm per head, a bonus
    for the current token and a gate follow the update. The values of a layer are interpolated towards those of the
    first RWKV-7 layer, which should be layer 0 of the model: only layer 0 is built without the parameters of that
    interpolation, and they stay unused in any other first RWKV-7 layer.
    """

    name: ClassVar[str] = "rwkv7"
    family: ClassVar[str] = "RWKV"
    purpose: ClassVar[str] = "generalised delta rule; tracks states"
    source: ClassVar[str] = "Peng 2025, arXiv 2503.14456"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    heads: int | None = Field(default=None, ge=1, description="key heads; None: width // 64, at least 1")
    ranks: Ranks | None = Field(
        default=None, description="ranks of the maps of decay, mix (unused), rate, value and gate; None: by width"
    )
    norm_eps: float = Field(default=64e-5, gt=0, description="epsilon of the output norm")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="channel", transition="dplr", scale=1.0)

    def shape(self, width: int) -> HeadShape:
        return self.with_ungrouped_keys(self.head_shape(width, default_heads=max(1, width // 64)))

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = RWKV7Projection(shape, place, self.ranks or Ranks.for_width(shape.width))
        initial_weight = ((place.layer + 1) / place.depth) ** 0.7
        norm = HeadNorm(shape, self.norm_eps, "layer", "each", bias=True, initial_weight=initial_weight)
        outputs = {"norm": norm, "bonus": Bonus(shape, -0.04), "gate": PrecomputedGate()}
        return Parts(projection, outputs=outputs, shared=(FIRST_VALUE,))
