"""Hyena: a long convolution, whose filter is computed by a network, between two elementwise gates.

B batch, T time, D width, S slots, N packed sequences
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from deltazoo.backends.context_parallel.heads import HeadShare
from deltazoo.backends.ops.long_conv import long_conv, step_refusals
from deltazoo.backends.torch_ext.materialize import materialize
from deltazoo.backends.torch_ext.modes import function_mode_is_active
from deltazoo.backends.torch_ext.plain_module import holds_plain_weights, is_plain_linear
from deltazoo.backends.triton.conv.implicit_filter_op import MAX_HIDDEN, ImplicitFilterCall, implicit_filter_
from deltazoo.backends.triton.conv.long_step_op import LongStepCall, long_conv_step_
from deltazoo.backends.update.base import Backend, state_dtype, without_autocast
from deltazoo.backends.update.varlen import sequence_index
from deltazoo.backends.update.watch import record_call, runs_by_kernel
from deltazoo.mixers.core.decode_maps import apply_output
from deltazoo.mixers.core.initialization import fill_normal
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Place
from deltazoo.mixers.core.sequences import token_counts
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.core.token_step import Around, FilterStep
from deltazoo.mixers.families.filter import CachingFilter, FilterConfig, FilterMixer
from deltazoo.mixers.parts.attention.caches import append_tokens, check_capacity, required_capacity
from deltazoo.mixers.parts.convolution import ShortConv

# The window of the filter decays to TARGET at a distance of SLOWEST x max_length tokens in the first channel, and of
# FASTEST x max_length in the last.
FASTEST, SLOWEST, TARGET = 0.3, 1.5, 1e-2
RATES = -math.log(TARGET) / SLOWEST, -math.log(TARGET) / FASTEST
LOWEST = 1e-4  # frequency of the positional input
PROBE = 4096.0  # a power of two; weights below 16 do not overflow float16


class Hyena(FilterConfig):
    """o_t = W (x1_t * sum_(s <= t) h_(t-s) (x2_s * v_s)) with x1, x2, v = conv(W x); a network computes h_(t-s).

    Hyena of order 2. The state holds every token so far: `init_state` needs a capacity, and the cost of a decoded token
    is linear in that capacity.
    """

    name: ClassVar[str] = "hyena"
    family: ClassVar[str] = "convolution"
    purpose: ClassVar[str] = "long convolutions from a small network, gated"
    source: ClassVar[str] = "Poli 2023, arXiv 2302.10866"
    oracle: ClassVar[str] = "its equation in float64"
    max_length: int = Field(default=2048, ge=2, description="L, the scale of the filter's positions, in tokens")
    filter_width: int = Field(default=64, ge=1, description="width of the network that computes the filter")
    bands: int = Field(default=1, ge=1, description="frequencies in the network's positional input")
    conv_width: int = Field(default=3, ge=1, description="taps of the short convolution")

    def equation(self) -> str:
        return "o_t = W (x1_t * (sum_(s <= t) h_(t-s) (x2_s * v_s) + D x2_t * v_t))"

    def flops_context(self, width: int) -> int:
        return 2 * width

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> "HyenaMixer":
        return HyenaMixer(self, width, backend)


class HyenaMixer(FilterMixer):
    """Module of `Hyena`. State: those of the short convolution and of `LongConv`.

    Source: section 3, definition 3.1 and algorithm 3.
    """

    def __init__(self, config: Hyena, width: int, backend: str | Backend | None) -> None:
        super().__init__(width)
        self.filters["short"] = ShortConv(3 * width, config.conv_width, bias=True, backend=backend)
        self.filters["long"] = LongConv(config, width)
        self.to_streams = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def split_refusal(self) -> None:
        return None

    def mix(self, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context) -> Tensor:
        streams = self.apply_convolved("short", self.to_streams, x, state, new, context)
        x1, x2, v = streams.chunk(3, -1)
        v = v if context.mask is None else v * context.mask[..., None]
        y = self.apply_around("long", v, state, new, context, Around(factor=x2, gate=x1))
        return apply_output(y, self.out)


class LongConv(nn.Module, CachingFilter, FilterStep):
    """y_t = sum_(s <= t) h_(t-s) x_s + bias x_t per channel, with h_t = window(t) * network(positions(t)).

    positions(t): t / (L - 1) and exp(-i f 2 pi t / L), with L = max_length.
    network: three layers with sine activations of learned frequency, and a linear layer.
    window(t): exp(-t d / (L - 1)), with d from log(100) / 1.5 to log(100) / 0.3 over the channels.

    Computed by FFT; a single token by a weighted sum. Packed sequences are unpacked to N rows of T tokens. With context
    parallelism each rank computes a share of the channels.
    Initialisation: frequencies 1, bias N(0, 1), linear maps as in torch.
    State: {"history": [B, S, D], "seen": [B] int64}.
    Source: section 3.3; constants as in the published code.
    """

    def __init__(self, config: Hyena, channels: int) -> None:
        super().__init__()
        self.length, self.bands, size = config.max_length, config.bands, config.filter_width
        self.highest = max(config.bands - 1, LOWEST)
        self.layers = nn.ModuleList(nn.Linear(n, size) for n in (2 * config.bands + 1, size, size))
        self.last = nn.Linear(size, channels, bias=False)
        self.frequency = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.frequency)
        fill_normal(self.bias)

    def init_state(self, batch: int, like: Tensor, capacity: int | None) -> dict[str, Tensor]:
        history = like.new_zeros(batch, required_capacity(capacity), self.bias.shape[0])
        return {"history": history, "seen": like.new_zeros(batch, dtype=torch.int64)}

    def forward(
        self, x: Tensor, state: dict[str, Tensor] | None, context: Context
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        stepped = self.step_(x, state, context, Around())
        if stepped is not None:
            return stepped
        share = HeadShare(x.shape[2], context.parallel)
        (x,), context = share.scatter([x]), context.of_line()
        if state is None and context.cu_seqlens is None:
            return self._with_bias(long_conv(x, self.kernel(x.shape[1], x, share)), x, share), None
        old = self._unpacked_state(x, context) if state is None else state | {"history": share.own(state["history"], 2)}
        count = token_counts(x, context)
        check_capacity(old["seen"], count, old["history"].shape[1])
        offset = old["seen"].clone()
        starts = None if context.cu_seqlens is None else context.cu_seqlens[:-1].long()
        (history,), seen = append_tokens([old["history"]], old["seen"], [x], count, starts)
        y = share.gather(self._with_bias(self._read(history, offset, x, context, share), x, share))
        if state is None:
            return y, None
        return y, {"history": write_back(state["history"], share.all(history, 2)), "seen": seen}

    def step_(
        self, x: Tensor, state: dict[str, Tensor] | None, context: Context, around: Around
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        is_token = x.shape[1] == 1 and context.mask is None and context.cu_seqlens is None and context.parallel is None
        if state is None or not is_token or around.gelu or step_refusals(x, state["history"]):
            return None
        history, seen = state["history"], state["seen"]
        record_call("triton", "long convolution of one token")
        if runs_by_kernel("filter of a long convolution", self._network_refusals()):
            one, two, three = self.layers
            assert isinstance(one, nn.Linear) and isinstance(two, nn.Linear) and isinstance(three, nn.Linear)
            call = ImplicitFilterCall(
                one.weight, one.bias, two.weight, two.bias, three.weight, three.bias, self.last.weight, self.frequency,
                seen, history, self.length, LOWEST, self.highest, *RATES,
            )  # fmt: skip
            kernel = implicit_filter_(call)
        else:
            kernel = self.kernel(history.shape[1], x, HeadShare(x.shape[2], None))
            seen.add_(1)
        factor, gate = (None if y is None else y[:, 0] for y in around[:2])
        y = long_conv_step_(LongStepCall(x[:, 0], factor, gate, history, seen, kernel, self.bias))
        return y[:, None], {"history": history, "seen": seen}

    def _network_refusals(self) -> list[str]:
        """Return why no kernel computes the filter, one sentence each; [] if it does."""
        if function_mode_is_active():
            return ["a torch function mode is active, which must see the products."]
        maps = [*self.layers, self.last]
        if len(maps) != 4 or not all(map(is_plain_linear, maps)) or not holds_plain_weights(self):
            return ["it needs four plain linear maps."]
        if any((layer.bias is None) != (layer is self.last) for layer in maps):
            return ["it needs biases of all maps but the last."]
        if self.frequency.shape[0] > MAX_HIDDEN:
            return [f"filter_width must be at most {MAX_HIDDEN}, got {self.frequency.shape[0]}."]
        return []

    def kernel(self, T: int, like: Tensor, share: HeadShare) -> Tensor:
        """Compute h_0 to h_(T-1) for a share of the channels: [T, D], float32 (float64 in float64)."""
        dtype = state_dtype(like.dtype)
        distance = torch.arange(T, device=like.device, dtype=dtype)[:, None]
        position = distance / (self.length - 1)
        band = torch.linspace(LOWEST, self.highest, self.bands, device=like.device, dtype=dtype)
        angle = band * 2 * math.pi * (distance / self.length)
        inner = torch.cat([position, angle.cos(), -angle.sin()], 1)
        *layers, (last, _) = [_weight_and_bias(layer, like) for layer in (*self.layers, self.last)]
        with without_autocast(like):
            for weight, bias in layers:
                inner = (self.frequency.to(dtype) * F.linear(inner, weight, bias)).sin()
            rate = torch.linspace(*RATES, self.bias.shape[0], device=like.device, dtype=dtype)
            return F.linear(inner, share.own(last, 0)) * (-position * share.own(rate, 0)).exp()

    def _read(self, history: Tensor, offset: Tensor, x: Tensor, context: Context, share: HeadShare) -> Tensor:
        """Convolve the history, which includes x, and return the outputs at the tokens of x: [B, T, D]."""
        S, T = history.shape[1], x.shape[1]
        kernel = self.kernel(S, x, share)
        if T == 1 and context.cu_seqlens is None:
            distance = offset[:, None] - torch.arange(S, device=x.device)
            kernel = materialize(kernel)  # otherwise Inductor computes its window for every row again
            weight = torch.where((distance >= 0)[..., None], kernel[distance.clamp(0, S - 1)], 0.0)
            return (weight * history.to(weight.dtype)).sum(1, keepdim=True)
        y = long_conv(history, kernel)
        time = torch.arange(T, device=x.device)
        if context.cu_seqlens is None:
            index = (offset[:, None] + time).clamp(max=S - 1)[..., None].expand(-1, -1, x.shape[2])
            return y.gather(1, index)
        sequence = sequence_index(context.cu_seqlens, T)
        return y[sequence, offset[sequence] + time - context.cu_seqlens.long()[sequence]][None]

    def _unpacked_state(self, x: Tensor, context: Context) -> dict[str, Tensor]:
        """Empty state for packed sequences; each may be as long as the pack."""
        assert context.cu_seqlens is not None
        N, (_, T, D) = context.cu_seqlens.shape[0] - 1, x.shape
        return {"history": x.new_zeros(N, max(1, T), D), "seen": x.new_zeros(N, dtype=torch.int64)}

    def _with_bias(self, y: Tensor, x: Tensor, share: HeadShare) -> Tensor:
        return (y + share.own(self.bias, 0) * x).to(x.dtype)


def _weight_and_bias(layer: nn.Module, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the weight and bias of a linear map in float32 (float64): the positions need more than 16 bits.

    A map that is not plain (quantised, with LoRA, offloaded) is called with the rows of +-PROBE I and with zero. The
    bias cancels in the difference, and beside PROBE W it does not change the rounding of the result to 16 bits.
    """
    dtype = state_dtype(like.dtype)
    if is_plain_linear(layer):
        return layer.weight.to(dtype), None if layer.bias is None else layer.bias.to(dtype)
    assert isinstance(layer.in_features, int)
    inputs = layer.in_features
    probe = PROBE * torch.eye(inputs, device=like.device, dtype=like.dtype)
    plus, minus, zero = layer(torch.cat([probe, -probe, probe[:1] * 0])).to(dtype).split([inputs, inputs, 1])
    return (plus - minus).mT / (2 * PROBE), zero[0]
