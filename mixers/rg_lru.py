"""RG-LRU, the recurrence of Griffin: a gated real recurrence per channel with normalised input."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import ChannelConfig
from deltazoo.mixers.parts.output_gates import OutputGate
from deltazoo.mixers.parts.projections import ChannelProjection
from deltazoo.mixers.parts.rg_lru import RGLRUGate


class RGLRU(ChannelConfig):
    """h_t = a_t h_(t-1) + sqrt(1 - a_t^2) (i_t x_t) with a_t = exp(-8 softplus(L) r_t) and r, i = sigmoid(W x + b).

    As in Griffin's recurrent block, x passes a short convolution, and the output a GELU gate.
    """

    name: ClassVar[str] = "rg_lru"
    source: ClassVar[str] = "De 2024 (Griffin), arXiv 2402.19427"
    blocks: int | None = Field(default=None, ge=1, description="blocks of the gates' maps; None: at most width // 256")
    conv_width: int = Field(default=4, ge=0, description="taps of the short convolution; 0: none")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", transition="additive", scale=1.0)

    def shape(self, width: int) -> HeadShape:
        return self.channel_shape(width, width)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = ChannelProjection(shape, self.conv_width, silu=False)
        return Parts(projection, {"real": RGLRUGate(shape, self.blocks)}, {"gate": OutputGate(shape, "gelu")})
