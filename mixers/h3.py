"""H3: a shift filter and a diagonal state space, combined by elementwise products."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from deltazoo.backends.update.base import Backend
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.decode_maps import apply_output
from deltazoo.mixers.core.initialization import fills_values
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Place
from deltazoo.mixers.core.token_step import Around
from deltazoo.mixers.families.filter import FilterConfig, FilterMixer
from deltazoo.mixers.parts.convolution import ShortConv
from deltazoo.mixers.parts.ssm.diagonal_ssm import DIAGONAL_SSM_SPEC, DiagonalSSM
from deltazoo.mixers.parts.ssm.discretisation import Discretisation


class H3(FilterConfig):
    """y = W (q * ssm(shift(k) * v)) with q, k, v = W x.

    The shift is a causal convolution over `shift` tokens, and ssm a diagonal state space; both act per channel.
    """

    name: ClassVar[str] = "h3"
    family: ClassVar[str] = "state space"
    purpose: ClassVar[str] = "shift and diagonal state spaces, gated"
    source: ClassVar[str] = "Fu 2022, arXiv 2212.14052"
    oracle: ClassVar[str] = "its equation in complex float64"
    states: int = Field(default=32, ge=1, description="N, complex states per channel of the diagonal state space")
    shift: int = Field(default=64, ge=1, description="taps of the shift filter")
    discretisation: Discretisation = Field(default="bilinear", description="bilinear; zoh: zero-order hold")
    convolution: bool = Field(
        default=True, description="compute whole sequences without a state by FFT; False: always as a recurrence"
    )

    def spec(self) -> UpdateSpec:
        return DIAGONAL_SSM_SPEC

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> "H3Mixer":
        return H3Mixer(self, width, backend)


class H3Mixer(FilterMixer):
    """Module of `H3`.

    Initialisation: taps of the shift uniform in +-1 / sqrt(shift); N(0, 1) is added to the tap of the current token.
    State: the last inputs of the shift, and the state of `DiagonalSSM`.
    Source: section 3.1 and algorithm 1, with d_h = 1.
    """

    splits_routed: ClassVar[bool] = True

    def __init__(self, config: H3, width: int, backend: str | Backend | None) -> None:
        super().__init__(width)
        self.filters["shift"] = ShortConv(width, config.shift, backend=backend)
        self.filters["diagonal"] = DiagonalSSM(
            width, config.states, "lin", config.discretisation, config.convolution, backend
        )
        self.to_qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.reset_parameters()

    @fills_values
    def reset_parameters(self) -> None:
        weight = self.filters["shift"].get_parameter("weight")
        weight[:, -1] += torch.randn_like(weight[:, -1])

    def split_refusal(self) -> None:
        return None

    def mix(self, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context) -> Tensor:
        q, k, v = self.to_qkv(x).chunk(3, -1)
        if context.mask is not None:  # the bias of the map makes padded tokens nonzero
            k, v = k * context.mask[..., None], v * context.mask[..., None]
        shifted = self.apply_filter("shift", k, state, new, context)
        y = self.apply_around("diagonal", shifted, state, new, context, Around(factor=v, gate=q))
        return apply_output(y, self.out)
