"""RWKV-4: a weighted mean of values per channel, with a bonus for the current token."""

from typing import ClassVar

from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Place
from deltazoo.mixers.core.part import HeadShape, Parts
from deltazoo.mixers.families.update import ChannelConfig
from deltazoo.mixers.parts.gates.output_gates import PrecomputedGate
from deltazoo.mixers.parts.normaliser import Normalise, NormaliserColumn
from deltazoo.mixers.parts.rwkv.rwkv4 import RWKV4Projection, WKVBonus, WKVGate


class RWKV4(ChannelConfig):
    """[s, z]_t = e^(-w) [s, z]_(t-1) + e^(k_t) [v_t, 1] per channel, and
    o_t = sigmoid(r_t) (s_(t-1) + e^(u + k_t) v_t) / (z_(t-1) + e^(u + k_t)).

    As an update, each channel is a head with K = 1 and V = 2 (value and normaliser), read before its write.
    """

    name: ClassVar[str] = "rwkv4"
    family: ClassVar[str] = "RWKV"
    purpose: ClassVar[str] = "a fixed decay per channel; vector states"
    source: ClassVar[str] = "Peng 2023, arXiv 2305.13048"
    oracle: ClassVar[str] = "transformers `rwkv`, forward"

    def spec(self) -> UpdateSpec:
        return UpdateSpec(decay="head", transition="additive", read="before", scale=1.0)

    def shape(self, width: int) -> HeadShape:
        channels = self.channels or width
        return HeadShape(width, channels, channels, 1, 1)

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        projection = RWKV4Projection(shape, place)
        operands = {"ones": NormaliserColumn(), "key": WKVGate(shape, place.layer / max(1, place.depth - 1))}
        outputs = {"bonus": WKVBonus(shape), "divide": Normalise(0.0), "gate": PrecomputedGate("sigmoid")}
        return Parts(projection, operands, outputs)
