"""The gated short convolution of LFM2: a causal convolution per channel between two elementwise gates."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor, nn

from deltazoo.backends.update.base import Backend
from deltazoo.mixers.core.decode_maps import apply_output
from deltazoo.mixers.core.mixer import FIRST_PLACE, CommitForm, Context, Place
from deltazoo.mixers.families.filter import FilterConfig, FilterMixer
from deltazoo.mixers.parts.convolution import ShortConv


class LFM2Conv(FilterConfig):
    """o_t = W_o (C_t * conv(B * x)_t) with B, C, x = W x; the convolution acts per channel.

    LFM2 combines it with grouped-query attention. The state holds the last `conv_width` - 1 inputs of the convolution.
    """

    name: ClassVar[str] = "lfm2_conv"
    family: ClassVar[str] = "convolution"
    purpose: ClassVar[str] = "gated short convolution (LFM2)"
    source: ClassVar[str] = "Liquid AI 2025 (LFM2), arXiv 2511.23404"
    oracle: ClassVar[str] = "transformers `lfm2`"
    conv_width: int = Field(default=3, ge=1, description="taps of the convolution")
    conv_std: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="standard deviation of the convolution's initial weight, 0.02 in transformers; None: uniform in "
        "+-1 / sqrt(taps)",
    )
    bias: bool = Field(default=False, description="biases of both linear maps and of the convolution")

    def equation(self) -> str:
        return "o_t = W_o (C_t * sum_(i < taps) w_i (B_(t-i) * x_(t-i)))"

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> "LFM2ConvMixer":
        return LFM2ConvMixer(self, width, backend)


class LFM2ConvMixer(FilterMixer):
    """Module of `LFM2Conv`. State: that of the convolution."""

    commit_form: ClassVar[CommitForm] = "cache"
    splits_routed: ClassVar[bool] = True

    def __init__(self, config: LFM2Conv, width: int, backend: str | Backend | None) -> None:
        super().__init__(width)
        self.filters["conv"] = ShortConv(width, config.conv_width, config.bias, backend=backend, std=config.conv_std)
        self.to_bcx = nn.Linear(width, 3 * width, bias=config.bias)
        self.out = nn.Linear(width, width, bias=config.bias)

    def split_refusal(self) -> None:
        return None

    def mix(self, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context) -> Tensor:
        before, after, value = self.to_bcx(x).chunk(3, -1)
        return apply_output(after * self.apply_filter("conv", before * value, state, new, context), self.out)
