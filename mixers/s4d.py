"""S4D: a time-invariant diagonal state space for each channel."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor, nn

from deltazoo.backends.update.base import Backend
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.decode_maps import apply_to_input
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Place
from deltazoo.mixers.core.token_step import Around
from deltazoo.mixers.families.filter import FilterConfig, FilterMixer
from deltazoo.mixers.parts.ssm.diagonal_ssm import DIAGONAL_SSM_SPEC, DiagonalSSM, StateInit
from deltazoo.mixers.parts.ssm.discretisation import Discretisation


class S4D(FilterConfig):
    """y = GLU(W gelu(ssm(x))) with, per channel, h_t = a h_(t-1) + b x_t and ssm(x)_t = Re(C h_t) + D x_t."""

    name: ClassVar[str] = "s4d"
    family: ClassVar[str] = "state space"
    purpose: ClassVar[str] = "diagonal state space, the same for every token"
    source: ClassVar[str] = "Gu 2022, arXiv 2206.11893"
    oracle: ClassVar[str] = "its equation in complex float64; scipy.signal's discretisations"
    states: int = Field(default=32, ge=1, description="N, states per channel; complex unless start is real")
    start: StateInit = Field(default="lin", description="lin: S4D-Lin; inv: S4D-Inv; real: S4D-Real, real states")
    discretisation: Discretisation = Field(default="zoh", description="zoh: zero-order hold; bilinear")
    convolution: bool = Field(
        default=True, description="compute whole sequences without a state by FFT; False: always as a recurrence"
    )

    def spec(self) -> UpdateSpec:
        return DIAGONAL_SSM_SPEC

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> "S4DMixer":
        return S4DMixer(self, width, backend)


class S4DMixer(FilterMixer):
    """Module of `S4D`. State: that of `DiagonalSSM`."""

    splits_routed: ClassVar[bool] = True

    def __init__(self, config: S4D, width: int, backend: str | Backend | None) -> None:
        super().__init__(width)
        self.filters["ssm"] = DiagonalSSM(
            width, config.states, config.start, config.discretisation, config.convolution, backend
        )
        self.out, self.gate = (nn.Linear(width, width) for _ in range(2))

    def split_refusal(self) -> None:
        return None

    def mix(self, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context) -> Tensor:
        y = self.apply_around("ssm", x, state, new, context, Around(gelu=True))
        maps = apply_to_input(y, {"out": self.out, "gate": self.gate}, state)
        return maps["out"] * maps["gate"].sigmoid()
