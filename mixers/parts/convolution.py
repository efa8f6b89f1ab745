"""The short causal depthwise convolution, and RWKV's token shift, with their states.

B batch, T time, C channels, N packed sequences
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deltazoo.backends.base import Backend
from deltazoo.backends.dispatch import bind_conv
from deltazoo.backends.short_conv import ConvInputs, ConvPart, apply_silu_and_norm, shifted_taps
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.varlen import sequence_index
from deltazoo.mixers.core.grouped import Groupable, Rows
from deltazoo.mixers.core.grouped_linear import grouped_sum
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HasBackend
from deltazoo.mixers.core.sequences import token_counts
from deltazoo.mixers.core.state import write_back


class ShortConv(Groupable, HasBackend):
    """y_t = sum_i weight_i x_(t - taps + 1 + i) + bias for each channel; x_t is zero before the first token.

    Computed in float32 (float64 for float64 inputs) together with each part's SiLU and norm, by the backend's kernel or
    in plain PyTorch (`deltazoo.backends.short_conv`). The window does not cross the boundaries of packed sequences.

    Args:
        channels: C.
        taps: width of the window, the current token included.
        parts: how to split the channels into output tensors, each with an optional SiLU and norm; empty: one tensor
            with neither.
        backend: as for `deltazoo.bind`.
        std: standard deviation of the initial weight; None: see Initialisation.
    State: [B, taps - 1, C], the last real inputs.
    Initialisation: N(0, std^2), or uniform in +-1 / sqrt(taps), as torch's Conv1d; bias 0.
    """

    def __init__(
        self,
        channels: int,
        taps: int,
        bias: bool = False,
        parts: Sequence[ConvPart] = (),
        backend: str | Backend | None = None,
        std: float | None = None,
    ) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(channels, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.parts = tuple(parts) or (ConvPart(channels),)
        self.rebind(backend, self.weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.std is None:
            bound = self.weight.shape[1] ** -0.5
            nn.init.uniform_(self.weight, -bound, bound)
        else:
            nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
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
        history = None if state is None else state.to(x_BTC.dtype)
        streams = self.bound(ConvInputs(x_BTC, self.weight, self.bias, history, context.cu_seqlens))
        return streams, _next_state(x_BTC, state, context)

    def forward_grouped(
        self, parts: Sequence["ShortConv"], rows: Rows, x_1AC: Tensor, state: Tensor | None, context: Context
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        assert context.cu_seqlens is not None  # rows are packed
        sequence_A = sequence_index(context.cu_seqlens, x_1AC.shape[1])
        history = None if state is None else state.to(x_1AC.dtype)
        weight = torch.stack([part.weight for part in parts])
        y_AC = _GroupedConv.apply(x_1AC[0], weight, history, *rows, sequence_A, context.cu_seqlens)
        biases = [part.bias for part in parts if part.bias is not None]
        y_1AC = y_AC[None] + rows.expand(biases).to(y_AC.dtype) if biases else y_AC[None]
        streams = tuple(y.to(x_1AC.dtype) for y in apply_silu_and_norm(y_1AC, self.parts))
        return streams, _next_state(x_1AC, state, context)

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
        return shifted_taps(x_BTD, state, 1, context.cu_seqlens)[0], _next_state(x_BTD, state, context)


def _next_state(x_BTC: Tensor, state: Tensor | None, context: Context) -> Tensor | None:
    """Return the last P real inputs of each sequence, for a state [N, P, C]."""
    if state is None:
        return None
    T, past = x_BTC.shape[1], state.shape[1]
    before = state.to(x_BTC.dtype)
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


class _GroupedConv(torch.autograd.Function):
    """Convolve rows x [A, C] with the weight [G, C, W] of their mixer, in float32 or float64.

    Saves x alone: the taps, and the weights at each row, are computed again in the backward.

    Args: history: [N, W - 1, C]; None: zeros. mixer, ends: as in `Rows`. sequence: [A], the sequence of each row.
    """

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        history: Tensor | None,
        mixer: Tensor,
        ends: Tensor,
        sequence: Tensor,
        cu_seqlens: Tensor,
    ) -> Tensor:
        x, weight_WGC = _widened(x), _taps_first(weight)
        before = _with_history(x, history)
        y = x * weight_WGC[-1].index_select(0, mixer)
        for shift in range(1, weight.shape[2]):
            index, _ = _earlier_rows(sequence, cu_seqlens, shift, 0 if history is None else history.shape[1])
            y.addcmul_(before.index_select(0, index), weight_WGC[-1 - shift].index_select(0, mixer))
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, history, mixer, ends, sequence, cu_seqlens = ctx.saved_tensors
        weight_WGC = _taps_first(weight)
        before, after = _with_history(_widened(x), history), _with_history(grad, None)
        A, past = x.shape[0], 0 if history is None else history.shape[1]
        end_A = cu_seqlens.long()[sequence + 1]
        row_A = torch.arange(A, device=x.device)
        grad_x = grad * weight_WGC[-1].index_select(0, mixer)
        grad_weight = [grouped_sum(grad * x, ends)]
        grad_history = None if history is None else grad.new_zeros(history.shape).flatten(0, 1)
        for shift in range(1, weight.shape[2]):
            index, inside = _earlier_rows(sequence, cu_seqlens, shift, past)
            grad_weight.insert(0, grouped_sum(before.index_select(0, index).mul_(grad), ends))
            weight_AC = weight_WGC[-1 - shift].index_select(0, mixer)
            later = torch.where(row_A + shift < end_A, row_A + shift, A)
            grad_x.addcmul_(after.index_select(0, later), weight_AC)
            if grad_history is not None:
                outside = torch.where(inside[:, None], 0.0, grad * weight_AC)
                grad_history = grad_history.index_add(0, torch.where(inside, 0, index - A), outside)
        if history is not None and grad_history is not None:
            grad_history = grad_history.view(history.shape).to(history.dtype)
        return grad_x.to(x.dtype), torch.stack(grad_weight, -1).to(weight.dtype), grad_history, *[None] * 4


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _taps_first(weight_GCW: Tensor) -> Tensor:
    """Return the weights as [W, G, C], contiguous, so that the weights of a row are read as a vector."""
    return _widened(weight_GCW).permute(2, 0, 1).contiguous()


def _with_history(x_AC: Tensor, history_NPC: Tensor | None) -> Tensor:
    """Append the rows of the history, or a row of zeros."""
    rows = x_AC.new_zeros(1, x_AC.shape[1]) if history_NPC is None else history_NPC.flatten(0, 1).to(x_AC.dtype)
    return torch.cat([x_AC, rows])


def _earlier_rows(sequence_A: Tensor, cu_seqlens: Tensor, shift: int, past: int) -> tuple[Tensor, Tensor]:
    """Return the rows of `_with_history` that are `shift` tokens before each row, and whether they are rows of x.

    Args: past: rows of history per sequence; 0: there is only one row of zeros.
    """
    A = sequence_A.shape[0]
    row_A = torch.arange(A, device=sequence_A.device)
    position_A = row_A - cu_seqlens.long()[sequence_A]
    inside_A = position_A >= shift
    history_A = A + sequence_A * past + past - shift + position_A if past else A
    return torch.where(inside_A, row_A - shift, history_A), inside_A
