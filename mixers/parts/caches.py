"""The key-value cache of attention: slots that fill up, or a ring of the last tokens.

B batch, T time, S slots, H key-value heads, E head width
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.mixers.core.state import write_back


class KVCache(NamedTuple):
    """k, v: [B, S, H, E], token p of a row in slot p mod S; position: [B] int64, how many tokens a row has had.

    Without padding between them: real tokens lie compactly.
    """

    k: Tensor
    v: Tensor
    position: Tensor


def empty_cache(batch: int, slots: int, heads: int, width: int, like: Tensor) -> KVCache:
    """A cache with nothing in it, in the dtype and on the device of `like`."""
    k = like.new_zeros(batch, slots, heads, width)
    return KVCache(k, torch.zeros_like(k), like.new_zeros(batch, dtype=torch.int64))


def append_to_cache(cache: KVCache, k: Tensor, v: Tensor, count_B: Tensor, first_B: Tensor | None = None) -> KVCache:
    """Append the first `count_B` tokens of each row; in place without gradients. The oldest tokens give way.

    Args: k, v: [B, T, H, E]; or a pack [1, T, H, E], row b's tokens from `first_B` on.
    """
    S, T = cache.k.shape[1], k.shape[1]
    if T == 1 and first_B is None and not torch.is_grad_enabled():
        slot_B = cache.position % S
        row_B = torch.arange(slot_B.shape[0], device=slot_B.device)
        real_B11 = (count_B > 0)[:, None, None]
        for kept, new in ((cache.k, k), (cache.v, v)):
            kept[row_B, slot_B] = torch.where(real_B11, new[:, 0].to(kept.dtype), kept[row_B, slot_B])
        return KVCache(cache.k, cache.v, cache.position.add_(count_B))
    # The last of the new tokens that belongs in a slot; negative where none does.
    slot_S = torch.arange(S, device=k.device)
    end_B1 = (cache.position + count_B)[:, None]
    token_BS = count_B[:, None] - 1 - (end_B1 - 1 - slot_S) % S
    new_k, new_v = (_merged(old, new, token_BS, first_B) for old, new in ((cache.k, k), (cache.v, v)))
    return KVCache(_kept(cache.k, new_k), _kept(cache.v, new_v), _kept(cache.position, end_B1[:, 0]))


def token_in_slot(cache: KVCache) -> Tensor:
    """The number of the token in each slot, from 0 in its row; negative where the slot is empty: [B, S]."""
    S = cache.k.shape[1]
    slot_S = torch.arange(S, device=cache.k.device)
    last_B1 = cache.position[:, None] - 1
    return last_B1 - (last_B1 - slot_S) % S


def _merged(old_BSHE: Tensor, new: Tensor, token_BS: Tensor, first_B: Tensor | None) -> Tensor:
    if not new.shape[1]:
        return old_BSHE.clone()
    index_BS = token_BS.clamp(min=0)
    if first_B is None:
        chosen = new.gather(1, index_BS[..., None, None].expand(-1, -1, *new.shape[2:]))
    else:
        chosen = new[0, (first_B[:, None] + index_BS).clamp(max=new.shape[1] - 1)]
    return torch.where((token_BS >= 0)[..., None, None], chosen.to(old_BSHE.dtype), old_BSHE)


def _kept(old: Tensor, new: Tensor) -> Tensor:
    kept = write_back(old, new)
    assert kept is not None  # a cache was given
    return kept
