"""Hyena: an implicit long convolution between gates.

B batch, T time, D width, S slots, N packed sequences
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from deltazoo.backends.base import Backend, state_dtype, without_autocast
from deltazoo.backends.errors import StateError
from deltazoo.backends.varlen import sequence_index
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Place
from deltazoo.mixers.core.sequences import token_counts
from deltazoo.mixers.families.filter import FilterConfig, FilterMixer, Remembering
from deltazoo.mixers.parts.caches import KVCache, append_to_cache
from deltazoo.mixers.parts.convolution import ShortConv
from deltazoo.mixers.parts.diagonal_ssm import fft_convolve

FASTEST, SLOWEST, TARGET = 0.3, 1.5, 1e-2


class Hyena(FilterConfig):
    """o_t = W (x1_t * sum_(s <= t) h_(t-s) (x2_s * v_s)), x1, x2, v = shortconv(W x); h a network of the distance.

    Order 2. Its state is every token so far: `init_state` needs a capacity, and a token costs as much as it looks back.
    """

    name: ClassVar[str] = "hyena"
    source: ClassVar[str] = "Poli 2023, arXiv 2302.10866"
    max_length: int = Field(default=2048, ge=2, description="distance at which the filter's positions reach 1")
    filter_width: int = Field(default=64, ge=1, description="of the network that makes the filter")
    bands: int = Field(default=1, ge=1, description="frequencies of its positions")
    conv_width: int = Field(default=3, ge=1, description="taps of the short convolution")

    def equation(self) -> str:
        return "o_t = W (x1_t * (sum_(s <= t) h_(t-s) (x2_s * v_s) + D x2_t * v_t))"

    def flops_context(self, width: int) -> int:
        return 2 * width

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> "HyenaMixer":
        return HyenaMixer(self, width, backend)


class HyenaMixer(FilterMixer):
    """Source: section 3, definition 3.1 and algorithm 3. State: the short convolution's, and `LongConv`'s."""

    def __init__(self, config: Hyena, width: int, backend: str | Backend | None) -> None:
        super().__init__(width)
        self.to_streams = nn.Linear(width, 3 * width)
        self.filters["short"] = ShortConv(3 * width, config.conv_width, bias=True, backend=backend)
        self.filters["long"] = LongConv(config, width)
        self.out = nn.Linear(width, width)

    def mix(self, x: Tensor, state: dict[str, Tensor] | None, after: dict[str, Tensor], context: Context) -> Tensor:
        streams = self.filtered("short", self.to_streams(x), state, after, context)
        x1, x2, v = streams.chunk(3, -1)
        u = x2 * v if context.mask is None else x2 * v * context.mask[..., None]
        return self.out(x1 * self.filtered("long", u, state, after, context))


class LongConv(nn.Module, Remembering):
    """y_t = sum_(s <= t) h_(t-s) x_s + bias x_t, h_t = window(t) * network(positions(t)), for each channel.

    positions: t / (L - 1) and exp(-i f 2 pi t / L), L = max_length; network: three layers with learned sines and a last
    one; window: exp(-t d / (L - 1)), d from log(100) / 1.5 to log(100) / 0.3 over the channels. By FFT; one token by a
    product. Initialisation: the sines' frequency 1, bias N(0, 1), maps as torch's.
    State: {"history": [B, S, D], "seen": [B] int64}. A pack, and a cache in FFT, take N x T (or S) slots.
    Source: section 3.3; the numbers as in the published code.
    """

    def __init__(self, config: Hyena, channels: int) -> None:
        super().__init__()
        self.length, self.bands, size = config.max_length, config.bands, config.filter_width
        self.layers = nn.ModuleList(nn.Linear(n, size) for n in (2 * config.bands + 1, size, size))
        self.frequency = nn.Parameter(torch.ones(size))
        self.last = nn.Linear(size, channels, bias=False)
        self.bias = nn.Parameter(torch.randn(channels))

    def init_state(self, batch: int, like: Tensor, capacity: int | None) -> dict[str, Tensor]:
        if capacity is None or capacity < 1:
            raise StateError(
                "hyena remembers every token: init_state(batch, capacity=n) needs the most tokens a sequence may "
                f"reach, at least 1, got capacity={capacity}"
            )
        history = like.new_zeros(batch, capacity, self.bias.shape[0])
        return {"history": history, "seen": like.new_zeros(batch, dtype=torch.int64)}

    def forward(
        self, x: Tensor, state: dict[str, Tensor] | None, context: Context
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        if state is None and context.cu_seqlens is None:
            return self._with_bias(fft_convolve(x, self.kernel(x.shape[1], x)), x), None
        before = self._slots(x, context) if state is None else state
        cache, count = KVCache(before["history"][:, :, None], x.new_zeros(*before["history"].shape[:2], 1, 0),
            before["seen"]), token_counts(x, context)  # fmt: skip
        self._check_room(cache, count)
        seen = cache.position.clone()
        first = None if context.cu_seqlens is None else context.cu_seqlens[:-1].long()
        cache = append_to_cache(cache, x[:, :, None], x.new_zeros(*x.shape[:2], 1, 0), count, first)
        history = cache.k[:, :, 0]
        y = self._with_bias(self._read(history, seen, x, context), x)
        return y, None if state is None else {"history": history, "seen": cache.position}

    def kernel(self, T: int, like: Tensor) -> Tensor:
        """h_0 to h_(T-1): [T, D], float32 (float64 in float64)."""
        dtype = state_dtype(like.dtype)
        token = torch.arange(T, device=like.device, dtype=dtype)[:, None]
        at, turn = token / (self.length - 1), token / self.length
        wave = (
            torch.linspace(1e-4, max(self.bands - 1, 1e-4), self.bands, device=like.device, dtype=dtype) * 2 * math.pi
        )
        inner = torch.cat([at, (turn * wave).cos(), -(turn * wave).sin()], 1)
        with without_autocast(like):
            for layer in self.layers:
                assert isinstance(layer, nn.Linear)
                wide = F.linear(inner, layer.weight.to(dtype), layer.bias.to(dtype))
                inner = (self.frequency.to(dtype) * wide).sin()
            slow, fast = -math.log(TARGET) / SLOWEST, -math.log(TARGET) / FASTEST
            pace = torch.linspace(slow, fast, self.bias.shape[0], device=like.device, dtype=dtype)
            return F.linear(inner, self.last.weight.to(dtype)) * (-at * pace).exp()

    def _read(self, history: Tensor, seen: Tensor, x: Tensor, context: Context) -> Tensor:
        """y at the tokens that came in, the history with them in it: [B, T, D]."""
        S, T = history.shape[1], x.shape[1]
        kernel = self.kernel(S, x)
        if T == 1 and context.cu_seqlens is None:
            distance = seen[:, None] - torch.arange(S, device=x.device)
            weight = torch.where((distance >= 0)[..., None], kernel[distance.clamp(min=0)], 0.0)
            return (weight * history.to(weight.dtype)).sum(1, keepdim=True)
        whole = fft_convolve(history, kernel)
        time = torch.arange(T, device=x.device)
        if context.cu_seqlens is None:
            index = (seen[:, None] + time).clamp(max=S - 1)[..., None].expand(-1, -1, x.shape[2])
            return whole.gather(1, index)
        which = sequence_index(context.cu_seqlens, T)
        return whole[which, seen[which] + time - context.cu_seqlens.long()[which]][None]

    def _slots(self, x: Tensor, context: Context) -> dict[str, Tensor]:
        """Room for the sequences of a pack, each as long as all."""
        assert context.cu_seqlens is not None
        return self.init_state(context.cu_seqlens.shape[0] - 1, x, max(1, x.shape[1]))

    def _check_room(self, cache: KVCache, count: Tensor) -> None:
        if cache.position.device.type == "cpu" and not torch.compiler.is_compiling() and len(count):
            longest, slots = int((cache.position + count).amax()), cache.k.shape[1]
            if longest > slots:
                raise StateError(
                    f"the state is full: it has {slots} slots (capacity), and a sequence reaches {longest}"
                )

    def _with_bias(self, y: Tensor, x: Tensor) -> Tensor:
        return (y + self.bias * x).to(x.dtype)
