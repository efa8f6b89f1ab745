"""HGRN: a gated recurrence per channel, complex or real, whose forget gate has a lower bound per layer."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, OutputPart, Parts
from deltazoo.mixers.families.update import ChannelConfig
from deltazoo.mixers.parts.gates.decays import SigmoidDecay, TiedInputGate
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import ChannelProjection
from deltazoo.mixers.parts.ssm.complex_states import FromRotatingFrame, ToRotatingFrame


class HGRN(ChannelConfig):
    """h_t = f_t exp(i w) h_(t-1) + (1 - f_t) c_t with c = silu(W x), f = g + (1 - g) sigmoid(W x + b).

    w is a learned angle per channel. g is a learned lower bound, whose initial value rises with the layer. A sigmoid
    gate and then a layer norm follow the update, in the order that the README of OpenNLPLab/HGRN states; their package
    hgru-pytorch applies the norm first.
    """

    name: ClassVar[str] = "hgrn"
    family: ClassVar[str] = "diagonal RNN"
    purpose: ClassVar[str] = "gated linear RNN with a lower bound per layer"
    source: ClassVar[str] = "Qin 2023, arXiv 2311.04823"
    oracle: ClassVar[str] = "its equation in complex float64"
    turning: bool = Field(
        default=True, description="complex states that rotate by a learned angle w per token; False: real"
    )
    theta: float = Field(default=10000.0, gt=1, description="base of the initial angles w")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", transition="additive", scale=1.0)

    def shape(self, width: int) -> HeadShape:
        return self.channel_shape(width, width, value_width=2 if self.turning else 1)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = ChannelProjection(shape, 0, silu=True)
        decay = SigmoidDecay(shape, "head", None, 1.0, floor=place.layer / place.depth)
        operands = {"decay": decay, "tied": TiedInputGate("value")}
        gate = OutputGate(shape, "sigmoid", bias=True)
        outputs: dict[str, OutputPart] = {"gate": gate, "norm": HeadNorm(shape, self.norm_eps, "layer", "all")}
        if self.turning:
            operands |= {"turn_in": ToRotatingFrame(shape, self.theta)}
            outputs = {"turn_out": FromRotatingFrame(), **outputs}
        return Parts(projection, operands, outputs)
