"""Log-linear Gated DeltaNet: Gated DeltaNet with a state for each level of a Fenwick tree over the past."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.log_linear import LogLinearConfig
from deltazoo.mixers.parts.gates.beta import Beta
from deltazoo.mixers.parts.gates.decays import SoftplusDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection


class LogLinearGDN(LogLinearConfig):
    """o_t = sum_l lambda_t^(l) (S_t^(l))^T q_t, where the states S^(l) of L levels add up to that of Gated DeltaNet.

    Level l holds 2^(l - 1) tokens, fewer tokens the more recent they are. An RMS norm per head and a SiLU gate follow.
    """

    name: ClassVar[str] = "log_linear_gdn"
    family: ClassVar[str] = "delta rule"
    purpose: ClassVar[str] = "Gated DeltaNet with log T levels of states"
    source: ClassVar[str] = "Guo 2025, arXiv 2506.04761"
    oracle: ClassVar[str] = "its definition in float64, with a state for every token"
    heads: int | None = Field(default=None, ge=1, description="key heads; None: width // 128, at least 1")
    key_width: int | None = Field(default=None, ge=1, description="K per head; None: 3/4 width / heads")
    value_width: int | None = Field(default=None, ge=1, description="V per head; None: 3/2 width / heads")

    def level_spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", beta="head", scale=1.0)

    def shape(self, width: int) -> HeadShape:
        heads = self.heads or max(1, width // 128)
        K, V = self.key_width or 3 * width // (4 * heads), self.value_width or 3 * width // (2 * heads)
        return HeadShape(width, heads, self.value_heads or heads, K, V)

    def parts(self, shape: HeadShape) -> Parts:
        projection = QKVProjection(shape, self.conv_width, silu="qkv", unit="qk")
        operands = {"beta": Beta(shape), "decay": SoftplusDecay(shape)}
        return Parts(projection, operands, {"norm": HeadNorm(shape, self.norm_eps), "gate": OutputGate(shape)})
