"""Packed sequences aligned to chunk boundaries: index tables from chunk slots to tokens and back.

The tables are computed on the device, without a host synchronisation.

T time, N chunks (an upper bound), C tokens per chunk, Y sequences
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.gather import gather_rows
from deltazoo.backends.update.varlen import valid_sequence_index


class Packing(NamedTuple):
    """Index tables of packed sequences.

    Args:
        token_of_slot: [N C] int64, T for an empty slot.
        slot_of_token: [T] int64, N C for a row after the last sequence.
        sequence: [N] int64, the sequence of each chunk.
        sequences, chunk: Y and C.
    """

    token_of_slot: Tensor
    slot_of_token: Tensor
    sequence: Tensor
    sequences: int
    chunk: int


def packing(cu_seqlens: Tensor, T: int, C: int) -> Packing:
    """Assign whole chunks to every sequence: at most ceil(T / C) + Y chunks, of which the surplus ones are empty.

    Args: cu_seqlens: [Y + 1] int32, Y >= 1, non-decreasing from 0 to at most T. Rows after cu_seqlens[-1] have no slot.
    """
    sequences = cu_seqlens.shape[0] - 1
    bounds = cu_seqlens.long()
    starts, stops = bounds[:-1], bounds[1:]
    chunks = (stops - starts + C - 1) // C
    last_chunk = chunks.cumsum(0)
    first_chunk = last_chunk - chunks
    N = (T + C - 1) // C + sequences
    chunk = torch.arange(N, device=bounds.device)
    sequence = torch.searchsorted(last_chunk, chunk, right=True).clamp(max=sequences - 1)
    offset = (chunk - first_chunk[sequence])[:, None] * C + torch.arange(C, device=bounds.device)
    token = starts[sequence][:, None] + offset
    is_token = (token < stops[sequence][:, None]) & (chunk < last_chunk[-1])[:, None]
    time = torch.arange(T, device=bounds.device)
    owner = valid_sequence_index(cu_seqlens, T)
    slot = first_chunk[owner] * C + time - starts[owner]
    slot_of_token = torch.where(time < stops[-1], slot, N * C)
    return Packing(torch.where(is_token, token, T).flatten(), slot_of_token, sequence, sequences, C)


def pack(x: Tensor, table: Packing) -> Tensor:
    """[1, T, ...] -> [1, N, C, ...], zeros in empty slots."""
    slots = gather_rows(x[0], table.token_of_slot, table.slot_of_token, has_gaps=True)
    return torch.unflatten(slots, 0, (-1, table.chunk)).unsqueeze(0)


def unpack(x: Tensor, table: Packing) -> Tensor:
    """[1, N, C, ...] -> [1, T, ...]."""
    return gather_rows(x.flatten(0, 2), table.slot_of_token, table.token_of_slot, has_gaps=True).unsqueeze(0)
