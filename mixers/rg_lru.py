"""RG-LRU, the recurrence of Griffin: a gated vector that keeps its length."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import ChannelConfig
from deltazoo.mixers.parts.gates import OutputGate
from deltazoo.mixers.parts.selective import ChannelProjection, RGLRUGate


class RGLRU(ChannelConfig):
    """h_t = a_t h_(t-1) + sqrt(1 - a_t^2) (i_t x_t), a_t = exp(-8 softplus(L) r_t), r and i = sigmoid(W x + b).

    Griffin's recurrent block: a convolution before, and a GELU gate after.
    """

    name: ClassVar[str] = "rg_lru"
    source: ClassVar[str] = "De 2024 (Griffin), arXiv 2402.19427"
    blocks: int | None = Field(default=None, ge=1, description="of the gates' maps; None: width // 256, or next below")
    conv_width: int = Field(default=4, ge=0, description="taps of the short convolution; 0: none")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", transition="additive", scale=1.0)

    def shape(self, width: int) -> HeadShape:
        return self.channel_shape(width, width)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        gate = RGLRUGate(shape, self.blocks)
        return Parts(
            ChannelProjection(shape, self.conv_width, False), {"real": gate}, {"gate": OutputGate(shape, "gelu")}
        )
