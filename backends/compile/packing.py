"""Packed sequences on chunk bounds: a table from token slots to tokens and back, made without a host sync.

T time, N chunks (an upper bound), C tokens a chunk, Y sequences
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import differentiable_once


class Packing(NamedTuple):
    """slots: [N C] int64, the token in each slot, T where there is none; homes: [T] int64, the slot of each token;
    sequence: [N] int64, the sequence that each chunk belongs to; sequences: Y; tokens: C."""

    slots: Tensor
    homes: Tensor
    sequence: Tensor
    sequences: int
    tokens: int


def packing(cu_seqlens: Tensor, T: int, tokens: int) -> Packing:
    """Give every sequence chunks of its own. At most ceil(T / C) + Y chunks; the spare ones hold no token.

    Args: cu_seqlens: [Y + 1] int32, rising from 0 to T.
    """
    sequences = cu_seqlens.shape[0] - 1
    bounds = cu_seqlens.long()
    chunks = (bounds[1:] - bounds[:-1] + tokens - 1) // tokens
    ends = chunks.cumsum(0)
    N = (T + tokens - 1) // tokens + sequences
    chunk = torch.arange(N, device=bounds.device)
    sequence = torch.searchsorted(ends, chunk, right=True).clamp(max=max(sequences - 1, 0))
    first = ends - chunks
    slot = (chunk - first[sequence])[:, None] * tokens + torch.arange(tokens, device=bounds.device)
    token = bounds[:-1][sequence][:, None] + slot
    real = (token < bounds[1:][sequence][:, None]) & (chunk < ends[-1])[:, None]
    time = torch.arange(T, device=bounds.device)
    home = torch.searchsorted(bounds[1:], time, right=True)
    homes = first[home] * tokens + time - bounds[:-1][home]
    return Packing(torch.where(real, token, T).flatten(), homes, sequence, sequences, tokens)


def pack(x: Tensor, table: Packing) -> Tensor:
    """[1, T, ...] -> [1, N, C, ...], zeros in the slots that hold no token."""
    return _Gather.apply(x[0], table.slots, table.homes).unflatten(0, (-1, table.tokens)).unsqueeze(0)


def unpack(x: Tensor, table: Packing) -> Tensor:
    """[1, N, C, ...] -> [1, T, ...]."""
    return _Gather.apply(x.flatten(0, 2), table.homes, table.slots).unsqueeze(0)


class _Gather(torch.autograd.Function):
    """Gather rows, zeros for the index one past the last row.

    As each row is taken at most once, the gradient is a gather too: deterministic, without atomics.
    """

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        return _gather(x, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return _gather(grad, inverse), None, None


def _gather(x: Tensor, index: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, index)
