"""Mamba-2: a scalar decay and step size per head, with keys and queries shared by groups of heads."""

from typing import ClassVar, NamedTuple, Self

from pydantic import Field, model_validator
from torch import nn

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, OutputPart, Parts
from deltazoo.mixers.core.scaled_linear import scaled
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.convolution import CONV_BIAS_START, BiasStart
from deltazoo.mixers.parts.gates.decays import SoftplusDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection
from deltazoo.mixers.parts.skips import Skip


class Factors(NamedTuple):
    """Constant factors of the streams of a Mamba-2, of their initial maps' outputs."""

    gate: float = 1.0
    x: float = 1.0
    B: float = 1.0
    C: float = 1.0
    dt: float = 1.0


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
    norm: bool = Field(default=True, description="RMS norm after the gate; Falcon-H1 has none")
    norm_first: bool = Field(default=False, description="the norm is before the gate (norm_before_gate)")
    step_min: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="lower limit of dt")
    step_max: float | None = Field(default=None, gt=0, allow_inf_nan=False, description="upper limit of dt; None: none")
    factors: Factors = Field(
        default=Factors(), description="factors of gate, x, B, C and dt after their maps, as in Falcon-H1"
    )

    @model_validator(mode="after")
    def _check_norm(self) -> Self:
        if self.norm_first and not self.norm:
            raise ValueError("norm_first needs norm=True, got no norm")
        return self

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", transition="additive", scale=self.scale)

    def shape(self, width: int) -> HeadShape:
        return self.head_shape(width, value_heads=2 * width // (self.value_width or 64))

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = QKVProjection(shape, self.conv_width, silu="qkv", conv_bias=self.conv_bias_start)
        limits = (self.step_min, self.step_max)
        decay = SoftplusDecay(shape, rates=(1, 16), writes=True, limits=limits)
        gate, factors = OutputGate(shape), self.factors
        keys, inner = shape.heads * shape.key_width, shape.value_heads * shape.value_width
        projection.to_qkv = scaled(projection.to_qkv, (keys, factors.C), (keys, factors.B), (inner, factors.x))
        for part, size, factor in ((decay, shape.value_heads, factors.dt), (gate, inner, factors.gate)):
            assert isinstance(part.proj, nn.Linear)
            part.proj = scaled(part.proj, (size, factor))
        outputs: dict[str, OutputPart] = {"skip": Skip(shape), "gate": gate}
        if self.norm:
            outputs["norm"] = HeadNorm(shape, self.norm_eps, over="group")
        if self.norm_first:
            outputs["gate"] = outputs.pop("gate")
        return Parts(projection, {"decay": decay}, outputs)
