"""The key-value cache of attention: a buffer with one slot per token, or a ring buffer of the last tokens.

B batch, T time, S slots, H key-value heads, E head width
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.mixers.core.state import write_back


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
        count_B: [B] int64, the number of real tokens in each row.
        first_B: [B] int64, for packed sequences only: the index of each sequence's first token.
    """
    S, T = cache.k.shape[1], k.shape[1]
    if T == 1 and first_B is None and not torch.is_grad_enabled():
        slot_B = cache.position % S
        row_B = torch.arange(slot_B.shape[0], device=slot_B.device)
        real_B11 = (count_B > 0)[:, None, None]
        for buffer, new in ((cache.k, k), (cache.v, v)):
            buffer[row_B, slot_B] = torch.where(real_B11, new[:, 0].to(buffer.dtype), buffer[row_B, slot_B])
        return KVCache(cache.k, cache.v, cache.position.add_(count_B))
    # The last new token that maps to each slot; negative if there is none.
    slot_S = torch.arange(S, device=k.device)
    end_B1 = (cache.position + count_B)[:, None]
    token_BS = count_B[:, None] - 1 - (end_B1 - 1 - slot_S) % S
    new_k, new_v = (_merge(old, new, token_BS, first_B) for old, new in ((cache.k, k), (cache.v, v)))
    return KVCache(write_back(cache.k, new_k), write_back(cache.v, new_v), write_back(cache.position, end_B1[:, 0]))


def token_in_slot(cache: KVCache) -> Tensor:
    """Return the position within its row of the token in each slot, [B, S]; negative for an empty slot."""
    S = cache.k.shape[1]
    slot_S = torch.arange(S, device=cache.k.device)
    last_B1 = cache.position[:, None] - 1
    return last_B1 - (last_B1 - slot_S) % S


def _merge(old_BSHE: Tensor, new: Tensor, token_BS: Tensor, first_B: Tensor | None) -> Tensor:
    if not new.shape[1]:
        return old_BSHE.clone()
    index_BS = token_BS.clamp(min=0)
    if first_B is None:
        gathered = new.gather(1, index_BS[..., None, None].expand(-1, -1, *new.shape[2:]))
    else:
        gathered = new[0, (first_B[:, None] + index_BS).clamp(max=new.shape[1] - 1)]
    return torch.where((token_BS >= 0)[..., None, None], gathered.to(old_BSHE.dtype), old_BSHE)
