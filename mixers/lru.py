"""LRU: the linear recurrent unit, a complex diagonal recurrence initialised on a ring."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import ChannelConfig
from deltazoo.mixers.parts.projections import ChannelProjection
from deltazoo.mixers.parts.skips import Feedthrough
from deltazoo.mixers.parts.ssm.complex_decays import LRUDecay
from deltazoo.mixers.parts.ssm.complex_states import ComplexConjugate, FromRotatingFrame, ToRotatingFrame


class LRU(ChannelConfig):
    """s_t = a * s_(t-1) + gamma * (B x_t), y_t = Re(C s_t) + D * x_t with a = exp(-exp(nu) + i exp(theta)).

    Initialisation: real and imaginary parts of B N(0, 1 / (2 width)), those of C N(0, 1 / channels).
    """

    name: ClassVar[str] = "lru"
    family: ClassVar[str] = "diagonal RNN"
    purpose: ClassVar[str] = "complex linear RNN, initialised on a ring"
    source: ClassVar[str] = "Orvieto 2023, arXiv 2303.06349"
    oracle: ClassVar[str] = "its equation in complex float64"
    ring: tuple[float, float] = Field(default=(0.0, 1.0), description="minimum and maximum of the initial |a|")
    phase: float = Field(default=6.28, gt=0, allow_inf_nan=False, description="maximum of the initial angle of a")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="fixed", transition="additive", scale=1.0)

    def shape(self, width: int) -> HeadShape:
        return self.channel_shape(width, width, value_width=2)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = ChannelProjection(shape, 0, silu=False, std=(2 * shape.width) ** -0.5)
        operands = {"decay": LRUDecay(shape, self.ring, self.phase), "turn_in": ToRotatingFrame(shape)}
        outputs = {"turn_out": FromRotatingFrame(), "read": ComplexConjugate()}
        return Parts(projection, operands, outputs, Feedthrough(shape.width), shape.value_heads**-0.5)
