"""Lightning Attention: linear attention with a constant decay per head and layer."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.decays import SlopeDecay
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.output_gates import OutputGate
from deltazoo.mixers.parts.projections import QKVProjection


class LightningAttention(HeadConfig):
    """S_t = a_hl S_(t-1) + k_t v_t^T for head h in layer l, with SiLU on q, k and v.

    a_hl = exp(-2^(-8 (h + 1) / heads) (1 - l / (layers - 1) + 1e-5)): ALiBi's slopes, with slower decays in later
    layers. An RMS norm over all heads and a sigmoid gate follow the update.
    """

    name: ClassVar[str] = "lightning_attention"
    source: ClassVar[str] = "Qin 2024, arXiv 2401.04658; MiniMax-01, arXiv 2501.08313"
    scale: float | None = Field(default=1.0, allow_inf_nan=False, description="factor on the output; None: K ** -0.5")
    norm_eps: float = Field(default=1e-6, gt=0, description="epsilon of the output norm")

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="fixed", transition="additive", scale=self.scale)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = QKVProjection(shape, silu="qkv")
        outputs = {"norm": HeadNorm(shape, self.norm_eps, over="all"), "gate": OutputGate(shape, "sigmoid")}
        return Parts(projection, {"decay": SlopeDecay(shape, place)}, outputs)
