"""MesaNet: a memory that solves a regularised least-squares problem for every token."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, OperandPart, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.gates.beta import Beta
from deltazoo.mixers.parts.gates.decays import SigmoidDecay
from deltazoo.mixers.parts.memory.conjugate_gradient import ConjugateGradientSolve
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection


class Mesa(HeadConfig):
    """o_t = G_t^T (H_t + Diag(lambda))^-1 q_t with [G, H]_t = a_t [G, H]_(t-1) + beta_t k_t [v_t, k_t]^T.

    The inverse is applied by conjugate gradients.
    """

    name: ClassVar[str] = "mesa"
    family: ClassVar[str] = "test-time training"
    purpose: ClassVar[str] = "least squares over all previous tokens"
    source: ClassVar[str] = "von Oswald 2025, arXiv 2506.05233"
    oracle: ClassVar[str] = "an exact solve for every token in float64"
    steps: int = Field(default=30, ge=1, description="steps of conjugate gradients; K steps are exact")
    bound: float = Field(default=0.25, gt=0, lt=1, description="lower bound of lambda")
    conv_width: int = Field(default=4, ge=0, description="taps of the short convolution of q and k; 0: none")
    scale: float | None = Field(default=1.0, allow_inf_nan=False, description="factor on the output; None: K ** -0.5")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", transition="additive", beta="head", scale=self.scale)

    def shape(self, width: int) -> HeadShape:
        return self.with_ungrouped_keys(self.head_shape(width))

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = QKVProjection(shape, self.conv_width, silu="qk", unit="qk", conv_of="qk")
        operands: dict[str, OperandPart] = {
            "beta": Beta(shape, bias=True),
            "decay": SigmoidDecay(shape, "head", None, 1.0),
            "solve": ConjugateGradientSolve(shape, self.steps, self.bound),
        }
        return Parts(projection, operands, {"norm": HeadNorm(shape, self.norm_eps)})
