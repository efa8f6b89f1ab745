"""Caches of past tokens: a buffer with one slot per token, or a ring buffer of the last tokens.

B batch, T time, S slots, H key-value heads, E head width
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.io.errors import StateError
from deltazoo.backends.torch_ext.symbolic_sizes import is_known
from deltazoo.mixers.core.state import write_back

_FEW_TOKENS = 16  # up to which single slots are written, and not all of the buffer


class KVCache(NamedTuple):
    """Keys and values of past tokens. Padding takes no slot: each row stores its real tokens contiguously.

    k, v: [B, S, H, E]; token p of a row is in slot p mod S.
    position: [B] int64, the number of tokens that each row has appended.
    """

    k: Tensor
    v: Tensor
    position: Tensor


def empty_cache(batch: int, slots: int, heads: int, width: int, like: Tensor) -> KVCache:
    """Return an empty cache in the dtype and on the device of `like`."""
    k = like.new_zeros(batch, slots, heads, width)
    return KVCache(k, torch.zeros_like(k), like.new_zeros(batch, dtype=torch.int64))


def append_to_cache(cache: KVCache, k: Tensor, v: Tensor, count_B: Tensor, first_B: Tensor | None = None) -> KVCache:
    """Append the first `count_B` tokens of each row, and overwrite the oldest ones; in place without gradients.

    Args:
        k, v: [B, T, H, E], or packed sequences [1, T, H, E].
        count_B, first_B: as for `append_tokens`.
    """
    (k, v), position = append_tokens((cache.k, cache.v), cache.position, (k, v), count_B, first_B)
    return KVCache(k, v, position)


def append_tokens(
    buffers: Sequence[Tensor],
    position_B: Tensor,
    tokens: Sequence[Tensor],
    count_B: Tensor,
    first_B: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Append the first `count_B` tokens of each row to each buffer; in place without gradients.

    Args:
        buffers: [B, S, ...] each; token p of a row is in slot p mod S.
        position_B: [B] int64, the number of tokens that each row has appended.
        tokens: for each buffer [B, T, ...], or packed sequences [1, T, ...].
        count_B: [B] int64, the number of real tokens in each row.
        first_B: [B] int64, for packed sequences only: the index of each sequence's first token.
    Returns: the buffers and the position after the new tokens.
    """
    S, T = buffers[0].shape[1], tokens[0].shape[1]
    is_short = is_known(T <= _FEW_TOKENS) and (T == 1 or is_known(T <= S))
    if is_short and first_B is None and not torch.is_grad_enabled():
        time_T = torch.arange(T, device=position_B.device)
        slot_BT = (position_B[:, None] + time_T) % S
        row_B1 = torch.arange(slot_BT.shape[0], device=slot_BT.device)[:, None]
        real_BT = time_T < count_B[:, None]
        for buffer, new in zip(buffers, tokens, strict=True):
            real = real_BT.view(*real_BT.shape, *[1] * (buffer.dim() - 2))
            buffer[row_B1, slot_BT] = torch.where(real, new.to(buffer.dtype), buffer[row_B1, slot_BT])
        return list(buffers), position_B.add_(count_B)
    # The last new token that maps to each slot; negative if there is none.
    slot_S = torch.arange(S, device=position_B.device)
    end_B1 = (position_B + count_B)[:, None]
    token_BS = count_B[:, None] - 1 - (end_B1 - 1 - slot_S) % S
    merged = [_merge(old, new, token_BS, first_B) for old, new in zip(buffers, tokens, strict=True)]
    new_buffers = [write_back(old, new) for old, new in zip(buffers, merged, strict=True)]
    return new_buffers, write_back(position_B, end_B1[:, 0])


def required_capacity(capacity: int | None) -> int:
    """Return the capacity. Raises: StateError, if it is missing or less than 1."""
    if capacity is None or capacity < 1:
        raise StateError(
            "the mixer keeps every token: init_state(batch, capacity=n) needs the maximum length of a sequence, at "
            f"least 1, got capacity={capacity}"
        )
    return capacity


def check_capacity(position_B: Tensor, count_B: Tensor, slots: int) -> None:
    """Check that a cache without a window has a slot for every new token. Values on a GPU are not inspected.

    Raises: StateError.
    """
    if position_B.device.type == "cpu" and not torch.compiler.is_compiling():
        longest = int((position_B + count_B).amax()) if len(position_B) else 0
        if longest > slots:
            raise StateError(f"the cache is full: its capacity is {slots} tokens, but a sequence has {longest}")


def token_in_slot(cache: KVCache) -> Tensor:
    """Return the position within its row of the token in each slot, [B, S]; negative for an empty slot."""
    S = cache.k.shape[1]
    slot_S = torch.arange(S, device=cache.k.device)
    last_B1 = cache.position[:, None] - 1
    return last_B1 - (last_B1 - slot_S) % S


def _merge(old: Tensor, new: Tensor, token_BS: Tensor, first_B: Tensor | None) -> Tensor:
    if not new.shape[1]:
        return old.clone()
    token = token_BS.view(*token_BS.shape, *[1] * (old.dim() - 2))
    if first_B is None:
        gathered = new.gather(1, token.clamp(min=0).expand(-1, -1, *new.shape[2:]))
    else:
        gathered = new[0, (first_B[:, None] + token_BS.clamp(min=0)).clamp(max=new.shape[1] - 1)]
    return torch.where(token >= 0, gathered.to(old.dtype), old)
