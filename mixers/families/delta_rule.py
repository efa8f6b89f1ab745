"""Base class of the configs of mixers with a delta rule."""

from abc import ABC
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from deltazoo.backends.update.spec import Decay, NegativeEigenvalues, Reparam, UpdateSpec
from deltazoo.mixers.core.part import HeadShape, OperandPart, OutputPart
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.gates.beta import Beta
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection, Streams

NEGATIVE_EIGENVALUES = "off; both: double the erase and write strengths; erase: double only the erase strength"
REPARAM = "step of the delta rule: none: explicit Euler; efla: exact; longhorn: implicit Euler"
DELTA_STEPS = "delta steps per token"
DECAY_BOUND = (
    "log_decay = decay_bound sigmoid(exp(A_log) (W x + dt_bias)), -5 in Ling 3.0 and GLM-5.3; None: "
    "-exp(A_log) softplus(W x + dt_bias)"
)
OUTPUT_GATE = "output gate after the norm: o <- o * silu(W x)"
CONV_BIAS = "bias of the short convolution"


class DeltaRuleConfig(HeadConfig, ABC):
    """Config of a mixer whose update erases before it writes."""

    family: ClassVar[str] = "delta rule"
    conv_width: int = Field(default=4, ge=0, description="taps of the short convolution of q, k and v; 0: none")
    conv_bias: bool = Field(default=False, description=CONV_BIAS)
    negative_eigenvalues: NegativeEigenvalues = Field(default="off", description=NEGATIVE_EIGENVALUES)
    reparam: Reparam = Field(default="none", description=REPARAM)
    householders: int = Field(default=1, ge=1, description=DELTA_STEPS)

    @model_validator(mode="after")
    def _bias_has_a_convolution(self) -> Self:
        if self.conv_bias and not self.conv_width:
            raise ValueError("conv_bias=True needs a conv_width of at least 1, got 0")
        return self

    def unit(self, key_norm: bool | None = None) -> Literal["q", "qk"]:
        """Return the streams that are divided by their L2 norm.

        Args: key_norm: whether k is; None: unless `reparam` needs the length of k for its step.
        """
        return "qk" if (self.reparam == "none" if key_norm is None else key_norm) else "q"

    def qkv_projection(self, shape: HeadShape, query_norm: bool = True, key_norm: bool | None = None) -> QKVProjection:
        """Create the projection to q, k and v with a short convolution, SiLU, and L2 norms of the streams in `unit`.

        Args: query_norm: False leaves q as it is; key_norm: as for `unit`.
        """
        unit: Streams = self.unit(key_norm)
        if not query_norm:
            unit = "k" if "k" in unit else ""
        return QKVProjection(shape, self.conv_width, silu="qkv", unit=unit, conv_bias=self.conv_bias)

    def beta(self, shape: HeadShape, bias: bool = False) -> dict[str, OperandPart]:
        """Create the part that computes the erase and write strengths per head. Args: bias: whether its map has one."""
        return {"beta": Beta(shape, bias)}

    def norm_and_gate(
        self, shape: HeadShape, gate: bool, activation: Literal["silu", "sigmoid"] = "silu"
    ) -> dict[str, OutputPart]:
        """Create the RMS norm per head and, if `gate`, the gate after it."""
        norm: dict[str, OutputPart] = {"norm": HeadNorm(shape, self.norm_eps)}
        return {**norm, "gate": OutputGate(shape, activation)} if gate else norm

    def delta_rule_spec(self, decay: Decay, beta: Literal["head", "separate", "channel"] = "head") -> UpdateSpec:
        """Return the delta rule with this decay and the options of the fields."""
        return UpdateSpec(
            decay=decay,
            beta=beta,
            negative_eigenvalues=self.negative_eigenvalues,
            reparam=self.reparam,
            householders=self.householders,
            scale=self.scale,
        )
