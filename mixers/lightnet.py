"""LightNet: linear attention whose keys are a softmax over time, computed as a recurrence."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.gates.softmax_keys import SoftmaxKeys
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection


class LightNet(HeadConfig):
    """S_t = Diag(exp(z_(t-1) - z_t)) S_(t-1) + exp(k_t - z_t) v_t^T with z_t = log sum_(i <= t) exp(k_i) per channel.

    Each row of S is thus a mean of all values, weighted by a softmax of k over time. q passes through SiLU; an RMS norm
    over all heads and a swish gate of low rank follow the update.
    """

    name: ClassVar[str] = "lightnet"
    family: ClassVar[str] = "linear attention"
    purpose: ClassVar[str] = "keys are a softmax over time; no gate to learn"
    source: ClassVar[str] = "Qin 2024, arXiv 2405.21022"
    oracle: ClassVar[str] = "a softmax over time for every prefix, in float64"
    gate_rank: int = Field(default=128, ge=1, description="rank of the output gate")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="channel", transition="additive", scale=self.scale)

    def shape(self, width: int) -> HeadShape:
        return self.with_ungrouped_keys(self.head_shape(width))

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        outputs = {"norm": HeadNorm(shape, self.norm_eps, over="all"), "gate": OutputGate(shape, rank=self.gate_rank)}
        return Parts(QKVProjection(shape, silu="q"), {"softmax": SoftmaxKeys(shape)}, outputs)
