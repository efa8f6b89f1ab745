"""The short causal depthwise convolution, and RWKV's token shift, with their states.

B batch, T time, C channels, N packed sequences
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from deltazoo.backends.context_parallel.carry import previous_tokens
from deltazoo.backends.context_parallel.exchange import connected, states_of_documents
from deltazoo.backends.ops.short_conv import ConvInputs, ConvPart, shifted_taps
from deltazoo.backends.update.base import Backend
from deltazoo.backends.update.dispatch import bind_conv
from deltazoo.mixers.core.grouped import Groupable, Rows
from deltazoo.mixers.core.initialization import fill_normal
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HasBackend
from deltazoo.mixers.core.sequences import token_counts
from deltazoo.mixers.core.state import write_back

BiasStart = Literal["zero", "uniform"]
ConvBias = bool | BiasStart
CONV_BIAS_START = "initial bias of the convolution: uniform in +-1 / sqrt(taps) (state-spaces); zero (transformers)"


class ShortConv(Groupable, HasBackend):
    """y_t = sum_i weight_i x_(t - taps + 1 + i) + bias for each channel; x_t is zero before the first token.

    Computed in float32 (float64 for float64 inputs) together with each part's SiLU and norm, by the backend's kernel or
    in plain PyTorch (`deltazoo.backends.ops.short_conv`). The window does not cross the boundaries of packed sequences.

    Args:
        channels: C.
        taps: width of the window, the current token included.
        bias: whether there is a bias, and its initial value: "zero", as for True, or "uniform".
        parts: how to split the channels into output tensors, each with an optional SiLU and norm; empty: one tensor
            with neither.
        backend: as for `deltazoo.bind`.
        std: standard deviation of the initial weight; None: see Initialisation.
    State: [B, taps - 1, C], the last real inputs.
    Initialisation: N(0, std^2), or uniform in +-1 / sqrt(taps), as torch's Conv1d; bias 0, or uniform likewise.
    """

    def __init__(
        self,
        channels: int,
        taps: int,
        bias: ConvBias = False,
        parts: Sequence[ConvPart] = (),
        backend: str | Backend | None = None,
        std: float | None = None,
    ) -> None:
        super().__init__()
        self.std, self.uniform_bias = std, bias == "uniform"
        self.weight = nn.Parameter(torch.empty(channels, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.parts = tuple(parts) or (ConvPart(channels),)
        self.rebind(backend, self.weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.weight.shape[1] ** -0.5
        if self.std is None:
            nn.init.uniform_(self.weight, -bound, bound)
        else:
            fill_normal(self.weight, std=self.std)
        if self.bias is not None:
            if self.uniform_bias:
                nn.init.uniform_(self.bias, -bound, bound)
            else:
                nn.init.zeros_(self.bias)

    def rebind(self, backend: str | Backend | None, like: Tensor) -> None:
        self.bound = bind_conv(self.parts, backend)

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        """Return the zero history before the first token, in the dtype and on the device of `like`."""
        channels, taps = self.weight.shape
        return like.new_zeros(batch, taps - 1, channels)

    def forward(
        self, x_BTC: Tensor, state: Tensor | None, context: Context
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Convolve x. Returns: for each part a tensor [B, T, channels] in the dtype of x; the new state."""
        if state is not None and x_BTC.shape[1] == 1 and is_plain_step(context):
            stepped = self.bound.step_(ConvInputs(x_BTC, self.weight, self.bias, state))
            if stepped is not None:
                return stepped, state
        return self._convolve(ConvInputs(x_BTC, self.weight, self.bias, state, _bounds(context)), context)

    def forward_grouped(
        self, parts: Sequence["ShortConv"], rows: Rows, x_1AC: Tensor, state: Tensor | None, context: Context
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        weight = torch.stack([part.weight for part in parts])
        biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
        bias = torch.stack(biases) if biases else None
        return self._convolve(ConvInputs(x_1AC, weight, bias, state, context.cu_seqlens, rows.ends), context)

    def _convolve(self, inputs: ConvInputs, context: Context) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Convolve x after the inputs before it. Args: inputs: `history` holds the state."""
        state = inputs.history
        x, before = _before_segments(inputs.x, state, self.weight.shape[1] - 1, context)
        history = None if before is None else before.to(x.dtype)
        streams = self.bound(inputs._replace(x=x, history=history))
        if context.parallel is not None:
            streams = tuple(connected(y, before) for y in streams)
        return streams, _next_state(x, state, before, context)

    def extra_repr(self) -> str:
        channels, taps = self.weight.shape
        return f"channels={channels}, taps={taps}, bias={self.bias is not None}, parts={[tuple(p) for p in self.parts]}"


class TokenShift(nn.Module):
    """x_t -> x_(t-1) of the same sequence, zero at its first token: RWKV's token shift.

    State: [B, 1, D], the last real input.
    """

    def init_state(self, batch: int, width: int, like: Tensor) -> Tensor:
        """Return the zero history before the first token, in the dtype and on the device of `like`."""
        return like.new_zeros(batch, 1, width)

    def forward(self, x_BTD: Tensor, state: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        """Return x_(t-1) [B, T, D] and the new state."""
        x_BTD, before = _before_segments(x_BTD, state, 1, context)
        shifted = shifted_taps(x_BTD, before, 1, _bounds(context))[0]
        if context.parallel is not None:
            shifted = connected(shifted, before)
        return shifted, _next_state(x_BTD, state, before, context)


def is_plain_step(context: Context) -> bool:
    """Whether a single token may be convolved, and its state changed, by one kernel."""
    if torch.is_grad_enabled() or context.verify:
        return False
    return context.cu_seqlens is None and context.mask is None and context.parallel is None


def _bounds(context: Context) -> Tensor | None:
    """Return the bounds of packed sequences for an operator."""
    return context.cu_seqlens if context.parallel is None else context.parallel.operator_bounds


def _before_segments(x_BTC: Tensor, state: Tensor | None, past: int, context: Context) -> tuple[Tensor, Tensor | None]:
    """Return x and the inputs before it: the state, or with context parallelism those before each local segment."""
    if context.parallel is None or past == 0:
        return x_BTC, state
    return previous_tokens(x_BTC, state, past, context.parallel)


def _next_state(x_BTC: Tensor, state: Tensor | None, before: Tensor | None, context: Context) -> Tensor | None:
    """Return the last P real inputs of each sequence, for a state [N, P, C]. Args: before: the inputs before x.

    For drafted tokens return x, from which `commit_part_` takes those of the accepted ones.
    """
    if state is None:
        return None
    if context.parallel is not None:
        if before is None or state.shape[1] == 0:
            return state
        last = _next_state(x_BTC, before, before, context._replace(parallel=None))
        assert last is not None
        return write_back(state, states_of_documents(last, context.parallel))
    assert before is not None
    T, past = x_BTC.shape[1], state.shape[1]
    if context.verify:
        return x_BTC
    before = before.to(x_BTC.dtype)
    if context.mask is None and context.cu_seqlens is None:
        recent = x_BTC[:, max(T - past, 0) :]
        return write_back(state, torch.cat([before, recent], 1)[:, recent.shape[1] :])
    if T == 0 or past == 0:
        return write_back(state, before)
    # The last P indices of each sequence; negative ones point into its history.
    index_NP = token_counts(x_BTC, context)[:, None] + torch.arange(-past, 0, device=x_BTC.device)
    if context.cu_seqlens is None:
        latest = _gather_tokens(x_BTC, index_NP.clamp(min=0))
    else:
        latest = x_BTC[0, (context.cu_seqlens[:-1, None] + index_NP.clamp(min=0)).clamp(max=T - 1)]
    earlier = _gather_tokens(before, (index_NP + past).clamp(max=past - 1))
    return write_back(state, torch.where((index_NP >= 0)[..., None], latest, earlier))


def _gather_tokens(x_BTC: Tensor, index_BP: Tensor) -> Tensor:
    return x_BTC.gather(1, index_BP[..., None].expand(-1, -1, x_BTC.shape[2]))
