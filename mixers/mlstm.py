"""mLSTM, the matrix memory of xLSTM: linear attention with an exponential input gate and a normaliser."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.gates.exponential_gating import ExponentialGate
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.normaliser import Normalise, NormaliserColumn
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection


class MLSTM(HeadConfig):
    """S_t = f_t S_(t-1) + i_t k_t v_t^T with i = exp(W x), f = sigmoid(W x); o_t = S_t^T q_t / max(|q_t^T n_t|, 1).

    n is the state of an extra value column of ones. As in xLSTM 7B: no convolution, a layer norm per head and a
    sigmoid gate.
    """

    name: ClassVar[str] = "mlstm"
    family: ClassVar[str] = "linear attention"
    purpose: ClassVar[str] = "exponential input gates (xLSTM)"
    source: ClassVar[str] = "Beck 2024, arXiv 2405.04517; xLSTM 7B, arXiv 2503.13427"
    oracle: ClassVar[str] = "transformers `xlstm`; the equation without stabiliser in float64"
    norm_eps: float = Field(default=1e-6, gt=0, description="epsilon of the output norm and of the division")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", transition="additive", scale=self.scale)

    def shape(self, width: int) -> HeadShape:
        return self.head_shape(width, key_share=0.5)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = QKVProjection(shape)
        operands = {"ones": NormaliserColumn(), "gates": ExponentialGate(shape)}
        norm = HeadNorm(shape, self.norm_eps, kind="layer", over="each")
        outputs = {"divide": Normalise(self.norm_eps, "one"), "norm": norm, "gate": OutputGate(shape, "sigmoid")}
        return Parts(projection, operands, outputs)
