"""Mamba (S6): a state space per channel whose step, input and output depend on the token."""

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
from deltazoo.mixers.parts.ssm.selective import InnerNorm, SelectiveOperands


class Mamba(ChannelConfig):
    """h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t and y_t = C_t^T h_t + D x_t per channel, with a SiLU gate.

    As an update: k = B, q = C, v = dt x, and log_decay = step rate with step = dt and rate = A. The mixer includes a
    gate and an expansion to 2 x width, so published models have no MLP.
    """

    name: ClassVar[str] = "mamba"
    family: ClassVar[str] = "state space"
    purpose: ClassVar[str] = "state space whose step depends on the token"
    source: ClassVar[str] = "Gu & Dao 2023, arXiv 2312.00752"
    oracle: ClassVar[str] = "transformers `mamba`, `falcon_mamba`"
    state_size: int = Field(default=16, ge=1, description="N, size of the state per channel")
    step_rank: int | None = Field(default=None, ge=1, description="rank of the step's map; None: ceil(width / 16)")
    conv_width: int = Field(default=4, ge=0, description="taps of the short convolution; 0: none")
    conv_bias_start: BiasStart = Field(default="uniform", description=CONV_BIAS_START)
    inner_norm: InnerNorm | None = Field(
        default=None,
        description="RMS norms of B, C and the step's input; plain: without weights (Falcon Mamba); weighted (Jamba)",
    )

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="rate", transition="additive", scale=1.0)

    def shape(self, width: int) -> HeadShape:
        return self.channel_shape(2 * width, width, self.state_size)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = ChannelProjection(shape, self.conv_width, silu=True, conv_bias=self.conv_bias_start)
        rank = self.step_rank or -(-shape.width // 16)
        operands = {"selective": SelectiveOperands(shape, rank, "mamba", self.inner_norm, self.norm_eps)}
        return Parts(projection, operands, {"skip": Skip(shape), "gate": OutputGate(shape)})
