"""Mamba-2: a scalar decay and step size per head, with keys and queries shared by groups of heads."""

from typing import ClassVar, Literal

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, OutputPart, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.convolution import CONV_BIAS_START, BiasStart
from deltazoo.mixers.parts.gates.decays import A_INIT_RANGE, RateRange, SoftplusDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection
from deltazoo.mixers.parts.skips import Skip
from deltazoo.mixers.parts.ssm.stream_factors import StreamFactors


class Mamba2(HeadConfig):
    """S_t = a_t S_(t-1) + dt_t k_t v_t^T with a_t = exp(-dt_t exp(A_log)); q, k and v are C, B and x in the paper.

    A skip connection D v, a SiLU gate and an RMS norm per group follow the update.
    """

    name: ClassVar[str] = "mamba2"
    family: ClassVar[str] = "state space"
    purpose: ClassVar[str] = "Mamba with one decay per head and large states"
    source: ClassVar[str] = "Dao & Gu 2024, arXiv 2405.21060"
    oracle: ClassVar[str] = "transformers `mamba2`"
    heads: int | None = Field(default=1, ge=1, description="groups with shared q and k; None: width // 128")
    value_heads: int | None = Field(default=None, ge=1, description="heads of the paper; None: 2 width / value_width")
    key_width: int | None = Field(default=128, ge=1, description="K, the state size N in the paper")
    value_width: int | None = Field(default=64, ge=1, description="V per head; None: width / heads")
    scale: float | None = Field(default=1.0, allow_inf_nan=False, description="factor on the output; None: K ** -0.5")
    conv_width: int = Field(default=4, ge=0, description="taps of the short convolution of q, k and v; 0: none")
    conv_bias_start: BiasStart = Field(default="uniform", description=CONV_BIAS_START)
    norm: Literal["first"] | bool = Field(default=True, description="RMS norm after the gate; first: before it")
    A_init_range: RateRange = Field(default=(1.0, 16.0), description=A_INIT_RANGE)
    step_limits: tuple[float, float | None] = Field(default=(0.0, None), description="limits of dt; None: infinity")
    factors: StreamFactors = Field(default=StreamFactors(), description="factors of gate, x, B, C and dt (Falcon-H1)")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", transition="additive", scale=self.scale)

    def shape(self, width: int) -> HeadShape:
        return self.head_shape(width, value_heads=2 * width // (self.value_width or 64))

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = QKVProjection(shape, self.conv_width, silu="qkv", conv_bias=self.conv_bias_start)
        decay = SoftplusDecay(shape, rates=self.A_init_range, writes=True, limits=self.step_limits)
        outputs: dict[str, OutputPart] = {"skip": Skip(shape), "gate": (gate := OutputGate(shape))}
        self.factors.scale(shape, projection, decay, gate)
        if self.norm:
            outputs["norm"] = HeadNorm(shape, self.norm_eps, over="group")
        if self.norm == "first":
            outputs["gate"] = outputs.pop("gate")
        return Parts(projection, {"decay": decay}, outputs)
