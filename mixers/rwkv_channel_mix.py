"""RWKV's channel mix: an MLP with squared ReLU after the token shift. It stands in a layer without an MLP."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from deltazoo.backends.update.base import Backend
from deltazoo.mixers.core.calls import call_part
from deltazoo.mixers.core.initialization import fills_values
from deltazoo.mixers.core.mixer import FIRST_PLACE, CommitForm, Context, Place
from deltazoo.mixers.families.filter import FilterConfig, FilterMixer
from deltazoo.mixers.parts.convolution import TokenShift


class RWKVChannelMix(FilterConfig):
    """o_t = W_o max(W_k x_k, 0)^2 with x_i = x_t + (x_(t-1) - x_t) mu_i; with a gate, o_t <- sigmoid(W_r x_r) * o_t.

    RWKV-7 has no gate. In RWKV-4 mu multiplies the current token instead: x_i = x_(t-1) + (x_t - x_(t-1)) mu_i. A
    model has it in a layer with `mlp="none"` after each layer with a time mix: `rwkv7 + rwkv_channel_mix`.
    """

    name: ClassVar[str] = "rwkv_channel_mix"
    family: ClassVar[str] = "RWKV"
    purpose: ClassVar[str] = "RWKV's MLP, which sees the previous token"
    source: ClassVar[str] = "Peng 2023, arXiv 2305.13048; RWKV-7: 2503.14456"
    oracle: ClassVar[str] = "transformers `rwkv`; its equation in float64"
    hidden: int | None = Field(default=None, ge=1, description="hidden width; None: 4 * width")
    gate: bool = Field(default=False, description="output gate of RWKV-4 and RWKV-6")
    mix: Literal["previous", "current"] = Field(default="previous", description="the token that mu multiplies")

    def equation(self) -> str:
        gate = "sigmoid(W_r x_r) * " if self.gate else ""
        tokens = "x_t", "x_(t-1)"
        base, other = tokens if self.mix == "previous" else tokens[::-1]
        return f"o_t = {gate}W_o max(W_k x_k, 0)^2, x_i = {base} + ({other} - {base}) mu_i"

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> "ChannelMixer":
        return ChannelMixer(self, width, place)


class ChannelMixer(FilterMixer):
    """Module of `RWKVChannelMix`. State: the token shift's, [B, 1, D].

    Initialisation: mu of channel i in layer l of L is 1 - (i / D)^((1 - l / L)^4), as in RWKV-7's code; with "current",
    (i / D)^(1 - l / L), as in RWKV-4's.
    """

    commit_form: ClassVar[CommitForm] = "cache"
    splits_routed: ClassVar[bool] = True

    def __init__(self, config: RWKVChannelMix, width: int, place: Place) -> None:
        super().__init__(width)
        hidden = config.hidden or 4 * width
        self.from_current, self.place = config.mix == "current", place
        self.shift = TokenShift()
        self.mix_weight = nn.Parameter(torch.empty(2 if config.gate else 1, width))  # k, r
        self.to_k = nn.Linear(width, hidden, bias=False)
        self.to_r = nn.Linear(width, width, bias=False) if config.gate else None
        self.out = nn.Linear(hidden, width, bias=False)
        self.reset_parameters()

    @fills_values
    def reset_parameters(self) -> None:
        """Set the weights of the token shift."""
        channel, ratio = torch.arange(self.width) / self.width, 1 - self.place.layer / self.place.depth
        values = channel**ratio if self.from_current else 1 - channel**ratio**4
        self.mix_weight.copy_(values.expand_as(self.mix_weight))

    def split_refusal(self) -> None:
        return None

    def initial_state(self, batch: int, capacity: int | None, like: Tensor) -> dict[str, Tensor]:
        state = super().initial_state(batch, capacity, like)
        return state | {"shift": self.shift.init_state(batch, self.width, like)}

    def mix(self, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context) -> Tensor:
        previous, new_state = call_part(self.shift, x, None if state is None else state["shift"], context)
        if new_state is not None:
            new["shift"] = new_state
        base, other = (previous, x) if self.from_current else (x, previous)
        mixed = [base + (other - base) * weight.to(x.dtype) for weight in self.mix_weight]
        y = self.out(self.to_k(mixed[0]).relu().square())
        return y if self.to_r is None else self.to_r(mixed[1]).sigmoid() * y
