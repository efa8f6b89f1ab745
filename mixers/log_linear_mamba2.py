"""Log-linear Mamba-2: Mamba-2 with a state for each level of a Fenwick tree over the past."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.log_linear import LogLinearConfig
from deltazoo.mixers.parts.convolution import CONV_BIAS_START, BiasStart
from deltazoo.mixers.parts.gates.decays import SoftplusDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection
from deltazoo.mixers.parts.skips import Skip


class LogLinearMamba2(LogLinearConfig):
    """o_t = sum_l lambda_t^(l) (S_t^(l))^T q_t, where the states S^(l) of L levels add up to that of Mamba-2.

    Level l holds 2^(l - 1) tokens, fewer tokens the more recent they are. A skip connection D v, a SiLU gate and an RMS
    norm per group follow.
    """

    name: ClassVar[str] = "log_linear_mamba2"
    family: ClassVar[str] = "state space"
    purpose: ClassVar[str] = "Mamba-2 with log T levels of states"
    source: ClassVar[str] = "Guo 2025, arXiv 2506.04761"
    oracle: ClassVar[str] = "its definition in float64, with a state for every token"
    heads: int = Field(default=1, ge=1, description="groups with shared q and k")
    key_width: int = Field(default=128, ge=1, description="K, the state size N in the paper")
    value_width: int = Field(default=64, ge=1, description="V per head; value_heads defaults to 2 width / V")
    conv_bias_start: BiasStart = Field(default="uniform", description=CONV_BIAS_START)

    def level_spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", transition="additive", scale=1.0)

    def shape(self, width: int) -> HeadShape:
        value_heads = self.value_heads or 2 * width // self.value_width
        return HeadShape(width, self.heads, value_heads, self.key_width, self.value_width)

    def parts(self, shape: HeadShape) -> Parts:
        projection = QKVProjection(shape, self.conv_width, silu="qkv", conv_bias=self.conv_bias_start)
        operands = {"decay": SoftplusDecay(shape, rates=None, writes=True)}
        norm = HeadNorm(shape, self.norm_eps, over="group")
        return Parts(projection, operands, {"skip": Skip(shape), "gate": OutputGate(shape), "norm": norm})
