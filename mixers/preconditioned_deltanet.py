"""Preconditioned delta rules: Gated DeltaNet and Kimi Delta Attention with a diagonal preconditioner of the key."""

from abc import ABC
from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import Decay, NegativeEigenvalues, UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, OperandPart, OutputPart, Parts
from deltazoo.mixers.families.delta_rule import DECAY_BOUND, NEGATIVE_EIGENVALUES, OUTPUT_GATE
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.gates.beta import Beta
from deltazoo.mixers.parts.gates.decays import SoftplusDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.gates.per_value_head import HeadKind, RepeatForValueHeads
from deltazoo.mixers.parts.memory.preconditioner import EraseAsPair, Preconditioner
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection


class PreconditionedConfig(HeadConfig, ABC):
    """Delta rule that erases with the key, and writes with the key times a preconditioner."""

    source: ClassVar[str] = "Tumma, Loo, Rus 2026, arXiv 2604.21100"
    conv_width: int = Field(default=4, ge=0, description="taps of the short convolution of q, k and v; 0: none")
    negative_eigenvalues: NegativeEigenvalues = Field(default="off", description=NEGATIVE_EIGENVALUES)
    bound: float = Field(default=1.5, gt=1, le=2, description="largest factor on a key; the smallest is its inverse")

    def preconditioned_spec(self, decay: Decay) -> UpdateSpec:
        """Return the delta rule with an erase key of its own, this decay and the options of the fields."""
        negative = self.negative_eigenvalues
        return UpdateSpec(decay=decay, beta="head", erase_key="own", negative_eigenvalues=negative, scale=self.scale)

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
    gate: bool = Field(default=True, description=OUTPUT_GATE)

    def spec(self) -> UpdateSpec:
        return self.preconditioned_spec("head")

    def shape(self, width: int) -> HeadShape:
        return self.head_shape(width, key_share=0.75, value_share=1.5)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = self.qkv_projection(shape)
        operands: dict[str, OperandPart] = {"beta": Beta(shape), "decay": SoftplusDecay(shape)}
        operands["preconditioner"] = Preconditioner(shape, self.bound, self.spec(), rates=(0.01, 16))
        outputs: dict[str, OutputPart] = {"norm": HeadNorm(shape, self.norm_eps)}
        return Parts(projection, operands, outputs | {"gate": OutputGate(shape)} if self.gate else outputs)


class PreconditionedKDA(PreconditionedConfig):
    """S_t = (I - beta_t p_t k_t^T) Diag(a_t) S_(t-1) + beta_t p_t v_t^T with p_t = k_t * M(A_t).

    A_t = b_t A_(t-1) + c_t k_t^2 per channel, and M decreases in A between `bound` and 1 / `bound`. With several
    value heads per head, A belongs to a value head and beta to a key head, unless the fields say otherwise.
    """

    name: ClassVar[str] = "preconditioned_kda"
    family: ClassVar[str] = "delta rule"
    purpose: ClassVar[str] = "KDA with preconditioned keys"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    decay_bound: float | None = Field(default=None, lt=0, description=DECAY_BOUND)
    preconditioner_per: HeadKind = Field(default="value", description="heads that have an A: key or value")
    beta_per: HeadKind = Field(default="key", description="heads that have a beta: key or value")

    def spec(self) -> UpdateSpec:
        if self.negative_eigenvalues == "off":  # by `EraseAsPair`
            return UpdateSpec(decay="channel", transition="dplr", scale=self.scale)
        return self.preconditioned_spec("channel")

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection, rank = self.qkv_projection(shape), shape.value_width
        shared = self.beta_per == "key" and shape.heads < shape.value_heads
        beta_shape = shape._replace(value_heads=shape.heads) if shared else shape
        operands: dict[str, OperandPart] = {"beta": Beta(beta_shape)}
        operands["decay"] = SoftplusDecay(shape, "channel", rank, rates=(1, 16), bound=self.decay_bound)
        spec, per = self.spec(), self.preconditioner_per
        operands["preconditioner"] = Preconditioner(shape, self.bound, spec, (1, 16), per)
        if shared:
            operands["repeat"] = RepeatForValueHeads(shape)
        if self.negative_eigenvalues == "off":
            operands["pair"] = EraseAsPair()
        outputs = {"norm": HeadNorm(shape, self.norm_eps), "gate": OutputGate(shape, "sigmoid", rank, bias=True)}
        return Parts(projection, operands, outputs)
