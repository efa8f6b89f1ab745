"""Constant factors of the streams of Mamba-2, after their maps, which the stored weights do not contain (Falcon-H1)."""

from typing import NamedTuple

from torch import nn

from deltazoo.mixers.core.part import HeadShape
from deltazoo.mixers.core.scaled_linear import scaled
from deltazoo.mixers.parts.gates.decays import SoftplusDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.projections import QKVProjection


class StreamFactors(NamedTuple):
    """Factors of the gate, x, B, C and the step before its bias."""

    gate: float = 1.0
    x: float = 1.0
    B: float = 1.0
    C: float = 1.0
    dt: float = 1.0

    def scale(self, shape: HeadShape, project: QKVProjection, decay: SoftplusDecay, gate: OutputGate) -> None:
        """Replace the maps of these parts by maps with the factors."""
        keys, inner = shape.heads * shape.key_width, shape.value_heads * shape.value_width
        project.to_qkv = scaled(project.to_qkv, (keys, self.C), (keys, self.B), (inner, self.x))
        for part, size, factor in ((decay, shape.value_heads, self.dt), (gate, inner, self.gate)):
            assert isinstance(part.proj, nn.Linear)
            part.proj = scaled(part.proj, (size, factor))
