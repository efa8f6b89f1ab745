"""S5: one state space of many inputs and outputs, diagonal and complex."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import ChannelConfig
from deltazoo.mixers.parts.complex_states import (
    ComplexConjugate,
    Discretisation,
    Feedthrough,
    FromRotatingFrame,
    S5Decay,
    ToRotatingFrame,
)
from deltazoo.mixers.parts.selective import ChannelProjection


class S5(ChannelConfig):
    """s_t = a * s_(t-1) + b * (B x_t), y_t = Re(C s_t) + D * x_t, a and b from lambda and dt.

    Initialisation: the parts of B N(0, 1 / 4 channels), those of C N(0, 2 / channels), the 2 of conjugate pairs in C.
    """

    name: ClassVar[str] = "s5"
    source: ClassVar[str] = "Smith 2022, arXiv 2208.04933"
    blocks: int = Field(default=1, ge=1, description="HiPPO matrices that the eigenvalues start from")
    discretisation: Discretisation = Field(default="zoh", description="zoh: zero-order hold; bilinear")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="fixed", transition="additive", scale=1.0)

    def shape(self, width: int) -> HeadShape:
        return self.channel_shape(width, width, value_width=2)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        operands = {"decay": S5Decay(shape, self.blocks, self.discretisation), "turn_in": ToRotatingFrame(shape)}
        outputs = {"turn_out": FromRotatingFrame(), "read": ComplexConjugate()}
        project = ChannelProjection(shape, 0, silu=False, std=(4 * shape.value_heads) ** -0.5)
        return Parts(project, operands, outputs, Feedthrough(shape.width), (2 / shape.value_heads) ** 0.5)
