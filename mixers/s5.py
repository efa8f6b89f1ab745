"""S5: one state space with vector input and output, diagonal and complex."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import ChannelConfig
from deltazoo.mixers.parts.projections import ChannelProjection
from deltazoo.mixers.parts.skips import Feedthrough
from deltazoo.mixers.parts.ssm.complex_decays import S5Decay
from deltazoo.mixers.parts.ssm.complex_states import ComplexConjugate, FromRotatingFrame, ToRotatingFrame
from deltazoo.mixers.parts.ssm.discretisation import Discretisation


class S5(ChannelConfig):
    """s_t = a * s_(t-1) + b * (B x_t) and y_t = Re(C s_t) + D * x_t, where a and b discretise lambda.

    Initialisation: real and imaginary parts of B N(0, 1 / (4 channels)), those of C N(0, 2 / channels), where the 2
    accounts for the conjugate pairs.
    """

    name: ClassVar[str] = "s5"
    family: ClassVar[str] = "state space"
    purpose: ClassVar[str] = "one state space for all channels"
    source: ClassVar[str] = "Smith 2022, arXiv 2208.04933"
    oracle: ClassVar[str] = "its equation in complex float64; scipy.signal's discretisations"
    blocks: int = Field(default=1, ge=1, description="HiPPO matrices whose eigenvalues initialise lambda")
    discretisation: Discretisation = Field(default="zoh", description="zoh: zero-order hold; bilinear")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="fixed", transition="additive", scale=1.0)

    def shape(self, width: int) -> HeadShape:
        return self.channel_shape(width, width, value_width=2)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = ChannelProjection(shape, 0, silu=False, std=(4 * shape.value_heads) ** -0.5)
        operands = {"decay": S5Decay(shape, self.blocks, self.discretisation), "turn_in": ToRotatingFrame(shape)}
        outputs = {"turn_out": FromRotatingFrame(), "read": ComplexConjugate()}
        return Parts(projection, operands, outputs, Feedthrough(shape.width), (2 / shape.value_heads) ** 0.5)
