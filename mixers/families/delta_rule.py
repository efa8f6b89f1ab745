"""What the variants of `DeltaMixer` are configs of: their fields, how they build, what they cost."""

from abc import ABC, abstractmethod
from typing import Literal, Self

import torch
from pydantic import Field, ValidationError, model_validator
from torch import nn

from deltazoo.backends.base import Backend
from deltazoo.backends.spec import Decay, NegativeEigenvalues, Reparam, UpdateSpec
from deltazoo.mixers.core.delta_mixer import DeltaMixer, Update
from deltazoo.mixers.core.mixer import FIRST_PLACE, Cost, MixerConfig, Place
from deltazoo.mixers.core.part import HasFlops, HeadShape, OperandPart, Parts
from deltazoo.mixers.core.state import nbytes
from deltazoo.mixers.parts.convolution import ShortConv
from deltazoo.mixers.parts.decays import SoftplusDecay
from deltazoo.mixers.parts.gates import Beta, ChannelBeta, OutputGate
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection


class UpdateConfig(MixerConfig, ABC):
    """A mixer around one update. A variant states its spec, the sizes of its heads and its parts."""

    @abstractmethod
    def spec(self) -> UpdateSpec:
        """The recurrence."""

    @abstractmethod
    def shape(self, width: int) -> HeadShape:
        """The sizes at this width; `sizes` has the defaults."""

    @abstractmethod
    def parts(self, shape: HeadShape, place: Place) -> Parts:
        """What stands around the update, freshly initialised."""

    @model_validator(mode="after")
    def _spec_means_something(self) -> Self:
        try:
            self.spec()
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
        return self

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> DeltaMixer:
        shape = self.shape(width).validated()
        return DeltaMixer(shape, self.spec(), self.parts(shape, place), backend)

    def cost(self, width: int) -> Cost:
        with torch.device("meta"):
            mixer = self.build(width, backend="reference")
            state = mixer.init_state(1)
        maps = sum(m.weight.numel() for m in mixer.modules() if isinstance(m, nn.Linear | ShortConv))
        updates = sum(update_flops(m.spec, m.shape) for m in mixer.modules() if isinstance(m, Update))
        beside = sum(m.flops() for m in mixer.modules() if isinstance(m, HasFlops))
        return Cost(2 * maps + updates + beside, 0, nbytes(state), 0)


class ChannelConfig(UpdateConfig, ABC):
    """A mixer that treats channels one by one: value heads of width 1 (or 2, complex)."""

    channels: int | None = Field(default=None, ge=1, description="value heads; None: a multiple of the width")
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of the norms inside")

    def by_channel(self, channels: int, width: int, key_width: int = 1, value_width: int = 1) -> HeadShape:
        """The sizes, with `channels` where the field says nothing; one key head for all."""
        return HeadShape(width, 1, self.channels or channels, key_width, value_width)


class DeltaConfig(UpdateConfig, ABC):
    """A mixer with heads of keys and values."""

    heads: int | None = Field(default=None, ge=1, description="key heads; None: width // 128, at least 1")
    value_heads: int | None = Field(default=None, ge=1, description="value heads, a multiple of heads; None: heads")
    key_width: int | None = Field(default=None, ge=1, description="K of a head; None: a share of width / heads")
    value_width: int | None = Field(default=None, ge=1, description="V of a head; None: a share of width / heads")
    scale: float | None = Field(default=None, allow_inf_nan=False, description="factor on the output; None: K ** -0.5")
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of the output's norm")

    def sizes(
        self,
        width: int,
        key_share: float = 1.0,
        value_share: float = 1.0,
        value_heads: int | None = None,
        default_heads: int | None = None,
    ) -> HeadShape:
        """The sizes with their defaults: K = key_share width / heads, V = value_share width / heads."""
        heads = self.heads or default_heads or max(1, width // 128)
        return HeadShape(
            width,
            heads,
            self.value_heads or value_heads or heads,
            self.key_width or int(key_share * width) // heads,
            self.value_width or int(value_share * width) // heads,
            self.spec().householders,
        )

    def shape(self, width: int) -> HeadShape:
        """The sizes, with the defaults of `sizes`; a variant with other shares says so here."""
        return self.sizes(width)

    @staticmethod
    def one_key_each(shape: HeadShape) -> HeadShape:
        """The sizes with a key head for each value head, where a key belongs to its head's decay."""
        return shape._replace(heads=shape.value_heads)


class DeltaRuleConfig(DeltaConfig, ABC):
    """A mixer whose update erases before it writes."""

    conv_width: int = Field(default=4, ge=0, description="taps of the short convolution of q, k, v; 0: none")
    negative_eigenvalues: NegativeEigenvalues = Field(
        default="off", description="both: erase and write doubled; erase: only the erase doubled"
    )
    reparam: Reparam = Field(default="none", description="none: explicit Euler; efla: exact; longhorn: implicit Euler")
    householders: int = Field(default=1, ge=1, description="delta steps a token")

    @property
    def unit(self) -> Literal["q", "qk"]:
        """What is made a unit vector: with a `reparam` k keeps its length, which tells something."""
        return "qk" if self.reparam == "none" else "q"

    def qkv_projection(self, shape: HeadShape) -> QKVProjection:
        """q, k and v after a convolution and SiLU, q and k divided by their L2 norm."""
        return QKVProjection(shape, self.conv_width, silu="qkv", unit=self.unit)

    def beta(self, shape: HeadShape) -> dict[str, OperandPart]:
        """The strengths of erase and write, as the spec wants them."""
        spec = self.spec()
        return {"beta": ChannelBeta(shape, spec) if spec.beta == "channel" else Beta(shape, spec)}

    def delta_rule(self, decay: Decay, beta: Literal["head", "channel"] = "head") -> UpdateSpec:
        """The delta rule with this decay and the fields' other axes."""
        return UpdateSpec(
            decay=decay,
            beta=beta,
            negative_eigenvalues=self.negative_eigenvalues,
            reparam=self.reparam,
            householders=self.householders,
            scale=self.scale,
        )


class GatedDeltaRuleConfig(DeltaRuleConfig, ABC):
    """The delta rule with Mamba-2's decay of each head and a gated RMS norm: Gated DeltaNet, whatever its axes."""

    def spec(self) -> UpdateSpec:
        return self.delta_rule("head")

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        operands = {**self.beta(shape), "decay": SoftplusDecay(shape)}
        outputs = {"norm": HeadNorm(shape, self.norm_eps), "gate": OutputGate(shape)}
        return Parts(self.qkv_projection(shape), operands, outputs)


def update_flops(spec: UpdateSpec, shape: HeadShape) -> int:
    """Floating-point operations of one token of the recurrence: decay, erase, write and read of K x V."""
    writes = 2 * spec.householders * (1 if spec.transition == "additive" else 2)
    return shape.value_heads * shape.key_width * shape.value_width * (writes + 2 + (spec.decay != "none"))
