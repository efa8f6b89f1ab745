"""Causal softmax attention by torch's SDPA: all tokens, a window in blocks, packs, caches.

B batch, T time, H heads, G key-value heads, E head width, S slots, W window, N packed sequences, L block length
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.varlen import sequence_index
from deltazoo.mixers.parts.caches import KVCache, token_in_slot


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, cu_seqlens: Tensor | None) -> Tensor:
    """Attend to the same tokens that come in: [B, T, H, E].

    A window costs memory and time linear in T: each block of W tokens sees itself and the block before. A pack without
    a window makes a mask of T x T.

    Args: q: [B, T, H, E]; k, v: [B, T, G, E].
    """
    T = q.shape[1]
    which_T = None if cu_seqlens is None else sequence_index(cu_seqlens, T)
    if window is None or window >= T:
        return sdpa(q, k, v, scale, None if which_T is None else _causal(T, which_T))
    mask = None if which_T is None else _causal(window, which_T[:window])
    first = sdpa(q[:, :window], k[:, :window], v[:, :window], scale, mask)
    return torch.cat([first, _later_blocks(q, k, v, scale, window, which_T)], 1)


def attend_ring_buffer(q: Tensor, k: Tensor, v: Tensor, scale: float, cache: KVCache) -> Tensor:
    """Attend to the last W tokens, the cache's before the ones that come in; S = W, T >= 1, not yet written."""
    W, T = cache.k.shape[1], q.shape[1]
    old = torch.arange(W, device=q.device)
    order_BW = (cache.position[:, None] + old) % W  # oldest first
    index = order_BW[..., None, None].expand(-1, -1, *k.shape[2:])
    L = min(T, W)
    keys = [torch.cat([x.gather(1, index).to(new.dtype), new[:, :L]], 1) for x, new in ((cache.k, k), (cache.v, v))]
    key_J, query_L1 = torch.arange(W + L, device=q.device), torch.arange(L, device=q.device)[:, None]
    in_window = (key_J > query_L1) & (key_J <= query_L1 + W)
    filled_B1J = (key_J >= W - cache.position[:, None])[:, None]
    first = sdpa(q[:, :L], keys[0], keys[1], scale, (in_window & filled_B1J)[:, None])
    return first if T <= W else torch.cat([first, _later_blocks(q, k, v, scale, W, None)], 1)


def attend_cache(q: Tensor, cache: KVCache, scale: float, position_BT: Tensor) -> Tensor:
    """Attend to what lies in the slots, up to each token's own place in its row; the cache has the tokens already."""
    token_BS = token_in_slot(cache)
    seen_BTS = (token_BS >= 0)[:, None] & (token_BS[:, None] <= position_BT[..., None])
    return sdpa(q, cache.k.to(q.dtype), cache.v.to(q.dtype), scale, seen_BTS[:, None])


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, cache: KVCache, cu_seqlens: Tensor
) -> Tensor:
    """Attend within each sequence of a pack, its row of the cache before the tokens that come in; not yet written.

    The mask is T x (N S + T).
    """
    T, (N, S) = q.shape[1], cache.k.shape[:2]
    which_T = sequence_index(cu_seqlens, T)
    time_T = torch.arange(T, device=q.device)
    place_T = time_T - cu_seqlens.long()[which_T] + cache.position[which_T]
    owner_J = torch.cat([torch.arange(N, device=q.device).repeat_interleave(S), which_T])
    token_J = torch.cat([token_in_slot(cache).flatten(), place_T])
    age_TJ = place_T[:, None] - token_J
    seen_TJ = (owner_J == which_T[:, None]) & (token_J >= 0) & (age_TJ >= 0)
    if window is not None:
        seen_TJ = seen_TJ & (age_TJ < window)
    keys, values = (
        torch.cat([old.flatten(0, 1)[None].to(new.dtype), new], 1) for old, new in ((cache.k, k), (cache.v, v))
    )
    return sdpa(q, keys, values, scale, seen_TJ)


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """One call of torch's scaled_dot_product_attention on [B, T, H, E]; causal where no mask says otherwise."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)
    return o.transpose(1, 2)


def _causal(T: int, which_T: Tensor) -> Tensor:
    time_T = torch.arange(T, device=which_T.device)
    return (time_T <= time_T[:, None]) & (which_T == which_T[:, None])


def _later_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float, W: int, which_T: Tensor | None) -> Tensor:
    """Tokens W and later: those of each block of W see their own block and the one before; [B, T - W, H, E]."""
    B, T = q.shape[:2]
    q_BMWE, k_BMWE, v_BMWE = (_blocks(x, W) for x in (q, k, v))
    k, v = (torch.cat([x[:, :-1], x[:, 1:]], 2) for x in (k_BMWE, v_BMWE))
    key_J = torch.arange(2 * W, device=q.device)
    query_W1 = key_J[:W, None]
    seen = (key_J > query_W1) & (key_J <= query_W1 + W)
    if which_T is not None:  # B = 1: a mask for each block
        which_MW = _blocks(which_T[None], W)[0]
        before_and_own = torch.cat([which_MW[:-1], which_MW[1:]], 1)
        seen = (seen & (before_and_own[:, None] == which_MW[1:, :, None]))[:, None]
    o = sdpa(q_BMWE[:, 1:].flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), scale, seen)
    o = o.unflatten(0, (B, q_BMWE.shape[1] - 1)).flatten(1, 2)
    return F.pad(o, (0, 0, 0, 0, 0, T - W - o.shape[1]))  # cuts; a slice would make the compiler guard its strides


def _blocks(x: Tensor, W: int) -> Tensor:
    """Cut time into blocks of W, the last filled up with zeros: [B, T, ...] -> [B, M, W, ...]."""
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % W)).unflatten(1, (-1, W))
