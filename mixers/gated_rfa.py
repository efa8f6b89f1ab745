"""Gated RFA: linear attention with random Fourier features, which approximate a Gaussian kernel, and a gate."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, OperandPart, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.feature_maps import RandomFourierFeatures
from deltazoo.mixers.parts.gates.decays import SigmoidDecay, TiedInputGate
from deltazoo.mixers.parts.normaliser import Normalise, NormaliserColumn
from deltazoo.mixers.parts.norms import UnitNorm
from deltazoo.mixers.parts.projections import QKVProjection


class GatedRFA(HeadConfig):
    """S_t = g_t S_(t-1) + (1 - g_t) phi(k_t) v_t^T and z_t likewise without v, with g_t = sigmoid(w x_t + b).

    o_t = S_t^T phi(q_t) / phi(q_t)^T z_t, a weighted mean of values.
    """

    name: ClassVar[str] = "gated_rfa"
    family: ClassVar[str] = "linear attention"
    purpose: ClassVar[str] = "random features of the softmax, with a gate"
    source: ClassVar[str] = "Peng 2021, arXiv 2103.02143"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    features: int = Field(default=64, ge=1, description="random directions per head; keys get twice that width")
    floor: float = Field(
        default=0.05, gt=0, description="lower bound of |phi(q)^T z|, which random features can make small"
    )
    scale: float | None = Field(default=1.0, allow_inf_nan=False, description="factor on the output; None: K ** -0.5")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", transition="additive", scale=self.scale)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = QKVProjection(shape)
        operands: dict[str, OperandPart] = {
            "unit": UnitNorm(),
            "feature": RandomFourierFeatures(shape, self.features),
            "ones": NormaliserColumn(),
            "decay": SigmoidDecay(shape, "head", None, 1.0),
            "tied": TiedInputGate("value"),
        }
        return Parts(projection, operands, {"norm": Normalise(0.0, self.floor)})
