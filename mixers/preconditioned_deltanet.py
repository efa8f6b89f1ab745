"""Preconditioned delta rules: Gated DeltaNet and Kimi Delta Attention with a diagonal preconditioner of the key."""

from abc import ABC
from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, OperandPart, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.gates.beta import Beta
from deltazoo.mixers.parts.gates.decays import SoftplusDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.memory.preconditioner import Preconditioner
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection


class PreconditionedConfig(HeadConfig, ABC):
    """Delta rule that erases with the key, and writes with the key times a preconditioner."""

    source: ClassVar[str] = "Tumma, Loo, Rus 2026, arXiv 2604.21100"
    conv_width: int = Field(default=4, ge=0, description="taps of the short convolution of q, k and v; 0: none")
    bound: float = Field(default=1.5, gt=1, le=2, description="largest factor on a key; the smallest is its inverse")

    def qkv_projection(self, shape: HeadShape) -> QKVProjection:
        """Create the projection with a short convolution, SiLU, and L2 norms of q and k."""
        return QKVProjection(shape, self.conv_width, silu="qkv", unit="qk")


class PreconditionedDeltaNet(PreconditionedConfig):
    """S_t = a_t (I - beta_t p_t k_t^T) S_(t-1) + beta_t p_t v_t^T with p_t = k_t * M(A_t): the gated variant.

    A_t = b_t A_(t-1) + c_t k_t^2 per channel, and M decreases in A between `bound` and 1 / `bound`.
    """

    name: ClassVar[str] = "preconditioned_deltanet"
    family: ClassVar[str] = "delta rule"
    purpose: ClassVar[str] = "Gated DeltaNet with preconditioned keys"
    oracle: ClassVar[str] = "its equation, token by token in float64"

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", beta="head", erase_key="own", scale=self.scale)

    def shape(self, width: int) -> HeadShape:
        return self.head_shape(width, key_share=0.75, value_share=1.5)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = self.qkv_projection(shape)
        operands: dict[str, OperandPart] = {"beta": Beta(shape, self.spec()), "decay": SoftplusDecay(shape)}
        operands["preconditioner"] = Preconditioner(shape, self.bound, rates=(0.01, 16))
        return Parts(projection, operands, {"norm": HeadNorm(shape, self.norm_eps), "gate": OutputGate(shape)})


class PreconditionedKDA(PreconditionedConfig):
    """S_t = (I - beta_t p_t k_t^T) Diag(a_t) S_(t-1) + beta_t p_t v_t^T with p_t = k_t * M(A_t).

    A_t = b_t A_(t-1) + c_t k_t^2 per channel, and M decreases in A between `bound` and 1 / `bound`. A belongs to a key
    head, which the authors' code repeats for each value head.
    """

    name: ClassVar[str] = "preconditioned_kda"
    family: ClassVar[str] = "delta rule"
    purpose: ClassVar[str] = "KDA with preconditioned keys"
    oracle: ClassVar[str] = "its equation, token by token in float64"

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="channel", beta="head", erase_key="own", scale=self.scale)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection, rank = self.qkv_projection(shape), shape.value_width
        operands: dict[str, OperandPart] = {"beta": Beta(shape, self.spec())}
        operands["decay"] = SoftplusDecay(shape, "channel", rank, rates=(1, 16))
        operands["preconditioner"] = Preconditioner(shape, self.bound, rates=(1, 16))
        outputs = {"norm": HeadNorm(shape, self.norm_eps), "gate": OutputGate(shape, "sigmoid", rank, bias=True)}
        return Parts(projection, operands, outputs)
