"""Longhorn as trained in its paper: the implicit Euler step with a diagonal approximation of the erase."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import ChannelConfig
from deltazoo.mixers.parts.convolution import CONV_BIAS_START, BiasStart
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.projections import ChannelProjection
from deltazoo.mixers.parts.skips import Skip
from deltazoo.mixers.parts.ssm.selective import SelectiveOperands


class LonghornDiagonal(ChannelConfig):
    """S_t = (1 - d_t k_t^2) * S_(t-1) + d_t k_t x_t per channel, with d = b / (1 + b |k|^2) and b = sigmoid(W x).

    The projections, convolution, skip connection and gate are those of Mamba.
    """

    name: ClassVar[str] = "longhorn_diagonal"
    family: ClassVar[str] = "state space"
    purpose: ClassVar[str] = "Longhorn's implicit step on diagonal states"
    source: ClassVar[str] = "Longhorn, Liu et al. 2024, arXiv 2407.14207"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    state_size: int = Field(default=16, ge=1, description="N, size of the state per channel")
    step_rank: int | None = Field(default=None, ge=1, description="rank of the step's map; None: ceil(width / 16)")
    conv_width: int = Field(default=4, ge=0, description="taps of the short convolution; 0: none")
    conv_bias_start: BiasStart = Field(default="uniform", description=CONV_BIAS_START)

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="channel", transition="additive", scale=1.0)

    def shape(self, width: int) -> HeadShape:
        return self.channel_shape(2 * width, width, self.state_size)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = ChannelProjection(shape, self.conv_width, silu=True, conv_bias=self.conv_bias_start)
        rank = self.step_rank or -(-shape.width // 16)
        operands = {"selective": SelectiveOperands(shape, rank, "longhorn")}
        return Parts(projection, operands, {"skip": Skip(shape), "gate": OutputGate(shape)})
