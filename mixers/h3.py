"""H3: a shift and a diagonal state space, with products between them."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from deltazoo.backends.base import Backend
from deltazoo.backends.spec import UpdateSpec
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Place
from deltazoo.mixers.families.filter import FilterConfig, FilterMixer
from deltazoo.mixers.parts.complex_states import Discretisation
from deltazoo.mixers.parts.convolution import ShortConv
from deltazoo.mixers.parts.diagonal_ssm import DIAGONAL_SSM_SPEC, DiagonalSSM


class H3(FilterConfig):
    """y = W (q * diagonal(shift(k) * v)), q, k, v = W x; shift: a filter over `shift` tokens; heads of width 1."""

    name: ClassVar[str] = "h3"
    source: ClassVar[str] = "Fu 2022, arXiv 2212.14052"
    states: int = Field(default=32, ge=1, description="N of the diagonal state space, complex numbers a channel")
    shift: int = Field(default=64, ge=1, description="states of the shift, the tokens that it looks back on")
    discretisation: Discretisation = Field(default="bilinear", description="bilinear; zoh: zero-order hold")
    convolution: bool = Field(
        default=True, description="whole sequences without a state by FFT; False: as a recurrence"
    )

    def spec(self) -> UpdateSpec:
        return DIAGONAL_SSM_SPEC

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> "H3Mixer":
        return H3Mixer(self, width, backend)


class H3Mixer(FilterMixer):
    """Initialisation: the shift's filter uniform in +-1 / sqrt(shift), plus N(0, 1) on the token itself, its skip.

    State: the shift's last inputs, and `DiagonalSSM`'s. Source: section 3.1 and algorithm 1, with d_h = 1.
    """

    def __init__(self, config: H3, width: int, backend: str | Backend | None) -> None:
        super().__init__(width)
        self.to_qkv = nn.Linear(width, 3 * width)
        shift = ShortConv(width, config.shift, backend=backend)
        with torch.no_grad():
            shift.weight[:, -1] += torch.randn(width)
        self.filters["shift"] = shift
        how = config.discretisation
        self.filters["diagonal"] = DiagonalSSM(width, config.states, "lin", how, config.convolution, backend)
        self.out = nn.Linear(width, width)

    def mix(self, x: Tensor, state: dict[str, Tensor] | None, after: dict[str, Tensor], context: Context) -> Tensor:
        q, k, v = self.to_qkv(x).chunk(3, -1)
        if context.mask is not None:  # the maps have a bias, and padding must stay zero
            k, v = k * context.mask[..., None], v * context.mask[..., None]
        written = self.filtered("shift", k, state, after, context) * v
        return self.out(q * self.filtered("diagonal", written, state, after, context))
