"""Mamba-3: a state space with trapezoidal discretisation and data-dependent rotations (single input, single output)."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, OperandPart, OutputPart, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection
from deltazoo.mixers.parts.skips import Skip
from deltazoo.mixers.parts.ssm.mamba3 import (
    AccumulatedRotary,
    BiasedNorm,
    Rate,
    TrapezoidalGates,
    TrapezoidalRead,
    TrapezoidalWrite,
)


class Mamba3(HeadConfig):
    """h_t = a_t h_(t-1) + (1 - lambda_t) dt_t a_t k_(t-1) v_(t-1)^T + lambda_t dt_t k_t v_t^T, o_t = h_t^T q_t.

    q and k, C and B in the paper, are normalised, get a bias per head and are rotated by angles that accumulate over
    the tokens. a, dt, lambda and the angles depend on the input. A skip connection D v and a SiLU gate follow.
    """

    name: ClassVar[str] = "mamba3"
    family: ClassVar[str] = "state space"
    purpose: ClassVar[str] = "Mamba-2 with trapezoidal steps and rotations"
    source: ClassVar[str] = "Lahoti 2026, arXiv 2603.15569"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    heads: int | None = Field(default=1, ge=1, description="groups with shared q and k; None: width // 128")
    value_heads: int | None = Field(default=None, ge=1, description="heads of the paper; None: 2 width / value_width")
    key_width: int | None = Field(default=128, ge=1, description="K, the state size N in the paper")
    value_width: int | None = Field(default=64, ge=1, description="V per head; None: width / heads")
    scale: float | None = Field(default=1.0, allow_inf_nan=False, description="factor on the output; None: K ** -0.5")
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of the norms")
    rotary_fraction: float = Field(default=0.5, gt=0, le=1, description="share of the K channels that rotate")
    rate: Rate = Field(default="heavy_tail", description="A: heavy_tail, or softplus as in the authors' first release")
    output_norm: bool = Field(default=False, description="RMS norm of each head before the gate")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", transition="additive", beta="head", read="before", scale=self.scale)

    def shape(self, width: int) -> HeadShape:
        return self.head_shape(width, value_heads=2 * width // (self.value_width or 64))

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        operands: dict[str, OperandPart] = {
            "norm": BiasedNorm(shape, self.norm_eps),
            "gates": TrapezoidalGates(shape, self.rate),
            "rotary": AccumulatedRotary(shape, self.rotary_fraction),
            "trapezoid": TrapezoidalWrite(shape, self.spec().scale_of(shape.key_width)),
        }
        outputs: dict[str, OutputPart] = {"present": TrapezoidalRead(), "skip": Skip(shape)}
        if self.output_norm:
            outputs["output_norm"] = HeadNorm(shape, self.norm_eps, over="each")
        return Parts(QKVProjection(shape), operands, outputs | {"gate": OutputGate(shape)})
