"""Lightning Attention: linear attention with a constant decay per head and layer."""

from typing import ClassVar

from pydantic import Field

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.gates.decays import SlopeDecay, Slopes
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection


class LightningAttention(HeadConfig):
    """S_t = a_hl S_(t-1) + k_t v_t^T for head h in layer l, with SiLU on q, k and v.

    a_hl = exp(-s_h (1 - l / (layers - 1) + 1e-5)) with ALiBi's slopes, s_h = 2^(-8 (h + 1) / heads) if the number of
    heads is a power of two; decays are slower in later layers. An RMS norm over all heads and a sigmoid gate follow.
    """

    name: ClassVar[str] = "lightning_attention"
    family: ClassVar[str] = "linear attention"
    purpose: ClassVar[str] = "a fixed decay per head and layer (MiniMax-01)"
    source: ClassVar[str] = "Qin 2024, arXiv 2401.04658; MiniMax-01, arXiv 2501.08313"
    oracle: ClassVar[str] = "transformers `minimax`; the slopes of OpenNLPLab's code"
    scale: float | None = Field(default=1.0, allow_inf_nan=False, description="factor on the output; None: K ** -0.5")
    norm_eps: float = Field(default=1e-6, gt=0, description="epsilon of the output norm")

    slopes: Slopes = Field(
        default="alibi",
        description="s_h if heads is no power of two: alibi: as in the paper's code; power: as if it were one",
    )

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="fixed", transition="additive", scale=self.scale)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = QKVProjection(shape, silu="qkv")
        outputs = {"norm": HeadNorm(shape, self.norm_eps, over="all"), "gate": OutputGate(shape, "sigmoid")}
        return Parts(projection, {"decay": SlopeDecay(shape, place, self.slopes)}, outputs)
