"""Rodimus: linear attention of one head whose decay also sets the strength of the write."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import UpdateConfig
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.gates.tempered_gates import ConvolvedSkip, TemperedProjection
from deltazoo.mixers.parts.norms import HeadNorm


class Rodimus(UpdateConfig):
    """S_t = Diag(exp(-g_t tau_t)) S_(t-1) + (g_t^(tau_t) * k_t / |k_t|) v_t^T, o_t = K^-1/2 S_t^T q_t + D c_t.

    u = W x, c = silu(conv(u)); q, k, g = softplus(W c + b) and tau = sigmoid(W c + b) are maps of c,
    and v = sigmoid(W_2 W_1 u + b) * u. A swish gate, then an RMS norm, follow. The mixer includes a gate and an
    expansion, so published models have no MLP.
    """

    name: ClassVar[str] = "rodimus"
    family: ClassVar[str] = "linear attention"
    purpose: ClassVar[str] = "one head; the decay sets the write strength"
    source: ClassVar[str] = "He 2025, arXiv 2410.06577"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    key_width: int = Field(default=64, ge=1, description="K, width of the one key head")
    expand: int = Field(default=2, ge=1, description="channels of the value divided by the width")
    gate_rank: int | None = Field(
        default=None, ge=1, description="rank of the value's gate; None: width // 64, at least 16"
    )
    conv_width: int = Field(default=4, ge=1, description="taps of the short convolution")
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of the output norm")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="channel", transition="additive")

    def shape(self, width: int) -> HeadShape:
        return HeadShape(width, 1, 1, self.key_width, self.expand * width)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = TemperedProjection(shape, self.gate_rank or max(shape.width // 64, 16), self.conv_width)
        outputs = {
            "skip": ConvolvedSkip(shape), "gate": OutputGate(shape), "norm": HeadNorm(shape, self.norm_eps, over="all"),
        }  # fmt: skip
        return Parts(projection, {}, outputs)
