"""RG-LRU, the recurrence of Griffin: a gated real recurrence per channel with normalised input."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import ChannelConfig
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.gates.rg_lru import RGLRUGate
from deltazoo.mixers.parts.projections import ChannelProjection


class RGLRU(ChannelConfig):
    """h_t = a_t h_(t-1) + sqrt(1 - a_t^2) (i_t x_t) with a_t = exp(-8 softplus(L) r_t) and r, i = sigmoid(W x + b).

    As in Griffin's recurrent block, x passes a short convolution, and the output a GELU gate. As in DeepMind's code,
    the input maps start from N(0, 1 / width), the output map from N(0, 2 / (depth channels)), the convolution from
    N(0, 0.01 / taps), and all biases from 0.
    """

    name: ClassVar[str] = "rg_lru"
    family: ClassVar[str] = "diagonal RNN"
    purpose: ClassVar[str] = "gated linear RNN (Griffin, RecurrentGemma)"
    source: ClassVar[str] = "De 2024 (Griffin), arXiv 2402.19427"
    oracle: ClassVar[str] = "transformers `recurrent_gemma`"
    blocks: int | None = Field(default=None, ge=1, description="blocks of the gates' maps; None: at most width // 256")
    conv_width: int = Field(default=4, ge=0, description="taps of the short convolution; 0: none")
    bias: bool = Field(default=True, description="biases of the maps to x, to the gate and to the output")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", transition="additive", scale=1.0)

    def shape(self, width: int) -> HeadShape:
        return self.channel_shape(width, width)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        std, conv_std = shape.width**-0.5, (0.01 / max(1, self.conv_width)) ** 0.5
        projection = ChannelProjection(shape, self.conv_width, False, std, self.bias, conv_std)
        operands = {"real": RGLRUGate(shape, self.blocks)}
        outputs = {"gate": OutputGate(shape, "gelu", bias=self.bias, std=std)}
        output_std = (2 / (place.depth * shape.value_heads)) ** 0.5
        return Parts(projection, operands, outputs, output_std=output_std, output_bias=self.bias)
