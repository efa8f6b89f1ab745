"""Causal softmax attention by torch: full, sliding window, packed sequences, key-value caches.

B batch, T time, H heads, G key-value heads, E head width, S slots, W window, N packed sequences,
J keys, L queries of the first block, M blocks
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.ops import forgetting_attention as decode_kernel
from deltazoo.backends.torch_ext.modes import functorch_is_active, values_are_readable
from deltazoo.backends.torch_ext.symbolic_sizes import is_known
from deltazoo.backends.torch_ext.trace_constant import constant_in_graphs
from deltazoo.backends.update.varlen import sequence_index
from deltazoo.mixers.parts.attention.caches import KVCache, token_in_slot


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, cu_seqlens: Tensor | None) -> Tensor:
    """Attend among the tokens of the call, without a cache.

    A window takes memory and time linear in T. On a GPU, torch's flash attention (`varlen_attn`) computes windows and
    packs of 16-bit operands. Elsewhere each block of W tokens attends to itself and to the previous block. Eager calls
    on a CPU run the packed sequences one by one. Other packs without a window need a mask of T x T.

    Args: q: [B, T, H, E]; k, v: [B, T, G, E]; window: W, None: full attention.
    Returns: [B, T, H, E].
    """
    T = q.shape[1]
    has_bounds = cu_seqlens is not None or (window is not None and not is_known(window >= T))
    if has_bounds and has_flash_attention(q, v):
        return flash_attend(q, k, v, scale, window, cu_seqlens)
    if cu_seqlens is not None and values_are_readable(cu_seqlens):
        pieces = _split_packed((q, k, v), cu_seqlens)
        return torch.cat([attend(q_n, k_n, v_n, scale, window, None) for q_n, k_n, v_n in pieces], 1)
    sequence_T = None if cu_seqlens is None else sequence_index(cu_seqlens, T)
    if window is not None and not is_known(window < T) and not is_known(window >= T):
        # A dynamic T on either side of the window: padded to three blocks, so that the graph depends on neither side.
        padding = torch.sym_max(3 * window - T, 0)
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, k, v))
        sequence_T = None if sequence_T is None else F.pad(sequence_T, (0, padding), value=-1)
        return F.pad(_attend_in_blocks(q, k, v, scale, window, sequence_T), (0, 0, 0, 0, 0, -padding))
    if window is None or window >= T:
        return _sdpa_of_pack(q, k, v, scale, None if sequence_T is None else _causal(T, sequence_T))
    return _attend_in_blocks(q, k, v, scale, window, sequence_T)


def attend_ring_buffer(q: Tensor, k: Tensor, v: Tensor, scale: float, cache: KVCache) -> Tensor:
    """Attend to the last W tokens, among the cached ones and the new ones.

    Args: q, k, v: of the new tokens, T >= 1; cache: a ring buffer of S = W slots, without the new tokens.
    """
    W, T = cache.k.shape[1], q.shape[1]
    slot_BW = (cache.position[:, None] + torch.arange(W, device=q.device)) % W  # oldest first
    index = slot_BW[..., None, None].expand(-1, -1, *k.shape[2:])
    L = min(T, W)
    keys, values = (
        torch.cat([old.gather(1, index).to(new.dtype), new[:, :L]], 1) for old, new in ((cache.k, k), (cache.v, v))
    )
    key_J, query_L1 = torch.arange(W + L, device=q.device), torch.arange(L, device=q.device)[:, None]
    in_window = (key_J > query_L1) & (key_J <= query_L1 + W)
    filled_B1J = (key_J >= W - cache.position[:, None])[:, None]
    first = sdpa(q[:, :L], keys, values, scale, (in_window & filled_B1J)[:, None])
    return first if T <= W else torch.cat([first, _later_blocks(q, k, v, scale, W, None)], 1)


def attend_cache(q: Tensor, cache: KVCache, scale: float, position_BT: Tensor, window: int | None = None) -> Tensor:
    """Attend to the cached tokens up to each query's position; the cache already includes the new tokens.

    Args: window: tokens to attend to, the query's own included; None: all.
    """
    position_BS = token_in_slot(cache)
    visible_BTS = (position_BS >= 0)[:, None] & (position_BS[:, None] <= position_BT[..., None])
    if window is not None:
        visible_BTS = visible_BTS & (position_BS[:, None] > position_BT[..., None] - window)
    return sdpa(q, cache.k.to(q.dtype), cache.v.to(q.dtype), scale, visible_BTS[:, None])


def decode_refusals(q: Tensor, cache: KVCache) -> list[str]:
    """Return why `attend_last` does not compute the attention of queries [B, 1, H, E], one sentence each."""
    if torch.is_grad_enabled():
        return ["it has no gradients with a cache."]
    if q.dtype != cache.k.dtype:
        return [f"it needs a cache in {q.dtype}, the dtype of q, got {cache.k.dtype}."]
    return decode_kernel.refusals(q)


def attend_last(q: Tensor, cache: KVCache, scale: float) -> Tensor:
    """Attend from the last token of each row to its cached tokens, by a kernel that reads the filled slots alone.

    Args: q: [B, 1, H, E], without `decode_refusals`; cache: it includes the token.
    Returns: [B, 1, H, E].
    """
    return decode_kernel.decode_attention(q, cache.k, cache.v, cache.position.clamp(max=cache.k.shape[1]), scale)


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, cache: KVCache, cu_seqlens: Tensor
) -> Tensor:
    """Attend within each packed sequence, to its cached tokens and its new ones.

    Torch's flash attention reads a copy of the filled slots and the new keys, with 16-bit operands on a GPU. Otherwise
    the mask has T x (N S + T) elements, except in eager calls on a CPU, which run the sequences one by one.

    Args: cache: row n holds sequence n, without the new tokens.
    """
    T, (N, S) = q.shape[1], cache.k.shape[:2]
    if N and k.shape[-1] == v.shape[-1] and has_flash_attention(q, v):
        keys, values, key_bounds = packed_keys(k, v, cache, cu_seqlens)
        query_bounds = torch.cat([cu_seqlens, cu_seqlens.new_full((1,), T)])
        return flash_packed(q, keys, values, scale, window, (query_bounds, key_bounds), S + T)
    if N > 1 and values_are_readable(cu_seqlens):
        pieces = []
        for n, (q_n, k_n, v_n) in enumerate(_split_packed((q, k, v), cu_seqlens)):
            if n < N:
                row, bounds = KVCache(*(x[n : n + 1] for x in cache)), cu_seqlens.new_tensor([0, q_n.shape[1]])
                pieces.append(attend_packed(q_n, k_n, v_n, scale, window, row, bounds))
            else:
                pieces.append(attend(q_n, k_n, v_n, scale, window, None))
        return torch.cat(pieces, 1)
    sequence_T = sequence_index(cu_seqlens, T)
    time_T = torch.arange(T, device=q.device)
    position_T = time_T - cu_seqlens.long()[sequence_T] + cache.position[sequence_T.clamp(max=max(N - 1, 0))]
    sequence_J = torch.cat([torch.arange(N, device=q.device).repeat_interleave(S), sequence_T])
    position_J = torch.cat([token_in_slot(cache).flatten(), position_T])
    age_TJ = position_T[:, None] - position_J
    visible_TJ = (sequence_J == sequence_T[:, None]) & (position_J >= 0) & (age_TJ >= 0)
    if window is not None:
        visible_TJ = visible_TJ & (age_TJ < window)
    keys, values = (
        torch.cat([old.flatten(0, 1)[None].to(new.dtype), new], 1) for old, new in ((cache.k, k), (cache.v, v))
    )
    return (sdpa if N == 1 else _sdpa_of_pack)(q, keys, values, scale, visible_TJ)


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Call torch's scaled_dot_product_attention on q, k [B, T, H, E] and v [B, T, H, V]; causal if there is no mask.

    Without a mask all widths are padded to the largest one, because flash attention requires equal widths.
    """
    V = v.shape[-1]
    if mask is None and q.shape[-1] != V:
        width = max(q.shape[-1], V)
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)
    return o.transpose(1, 2)[..., :V]


def _sdpa_of_pack(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    """Compute `sdpa` so that values that are not finite reach only the queries that see them. Args: None: no pack.

    0 times NaN is NaN, so such operands are replaced by 0, which gives them no gradient, and their outputs by NaN.
    """
    if visible is None:
        return sdpa(q, k, v, scale)
    bad_q, bad_k = ~q.isfinite().all(-1), ~(k.isfinite().all(-1) & v.isfinite().all(-1))
    k, v = (torch.where(bad_k[..., None], 0.0, x) for x in (k, v))
    o = sdpa(torch.where(bad_q[..., None], 0.0, q), k, v, scale, visible)
    seen = visible if visible.dim() == 2 else visible[:, 0]
    sees_bad = (seen.float() @ bad_k.float() > 0).repeat_interleave(q.shape[2] // k.shape[2], 2)
    return torch.where((bad_q | sees_bad)[..., None], torch.nan, o)


def has_flash_attention(q: Tensor, v: Tensor) -> bool:
    """Whether `flash_attend` can compute queries q and values v [B, T, H, E], on an NVIDIA GPU."""
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    if not torch.compiler.is_compiling() and functorch_is_active():
        return False
    E = q.shape[-1]
    has_width = v.shape[-1] == E and E % 8 == 0 and E <= 256
    return has_width and q.numel() > 0 and _device_has_flash_attention(q.device.index)


@constant_in_graphs
def _device_has_flash_attention(index: int | None) -> bool:
    is_built = torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
    return is_built and torch.cuda.get_device_capability(index) >= (8, 0)


def flash_attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, cu_seqlens: Tensor | None
) -> Tensor:
    """Compute `attend` by torch's varlen_attn. Args: as for `attend`, with operands that `has_flash_attention` allows.

    The tokens after the last packed sequence are a further sequence.
    """
    B, T = q.shape[:2]
    if cu_seqlens is None:
        bounds = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=q.device)
    else:
        bounds = torch.cat([cu_seqlens.int(), cu_seqlens.new_full((1,), T, dtype=torch.int32)])
    return flash_packed(q, k, v, scale, window, (bounds, bounds), T)


def packed_keys(k: Tensor, v: Tensor, cache: KVCache, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pack the cached keys and values of each sequence, oldest first, with its new ones after them.

    Args: k, v: [1, T, G, E], the new tokens; cache: row n holds sequence n, without the new tokens.
    Returns: keys and values [1, N S + T, G, E], of which the last ones may mean nothing; the bounds of the sequences,
        [N + 2] int32, the last one of which has the tokens after cu_seqlens[-1].
    """
    T, (N, S) = k.shape[1], cache.k.shape[:2]
    cached_N = cache.position.clamp(max=S)
    before_N1 = F.pad(cached_N.cumsum(0), (1, 0))  # cached tokens of the sequences before each one
    bounds = cu_seqlens.long() + before_N1
    key_J = torch.arange(N * S + T, device=k.device)
    sequence_J = torch.searchsorted(bounds, key_J, right=True) - 1
    row_J = sequence_J.clamp(max=N - 1)
    offset_J = key_J - bounds[row_J]
    is_cached_J = (sequence_J < N) & (offset_J < cached_N[row_J])
    slot_J = row_J * S + (cache.position - cached_N)[row_J].add(offset_J) % S
    token_J = N * S + key_J - before_N1[(sequence_J + 1).clamp(max=N)]
    source_J = torch.where(is_cached_J, slot_J, token_J.clamp(max=N * S + T - 1))
    keys, values = (
        torch.cat([old.flatten(0, 1).to(new.dtype), new[0]]).index_select(0, source_J)[None]
        for old, new in ((cache.k, k), (cache.v, v))
    )
    if torch.is_grad_enabled():  # flash attention writes no gradient of keys that belong to no sequence
        outside_J = (key_J >= T + before_N1[-1])[None, :, None, None]
        keys, values = keys.masked_fill(outside_J, 0), values.masked_fill(outside_J, 0)
    return keys, values, torch.cat([bounds, (T + before_N1[-1:])]).int()


def flash_packed(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, bounds: tuple[Tensor, Tensor], most_keys: int
) -> Tensor:
    """Call torch's varlen_attn on rows of sequences, whose queries are those of the last keys.

    Args: bounds: of the sequences among the queries and the keys, [N + 1] int32. most_keys: of a sequence.
    """
    from torch.nn.attention.varlen import varlen_attn  # imports Triton

    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) if groups > 1 else x for x in (k, v))
    before = -1 if window is None else window - 1  # tokens before the current one
    q_rows, k_rows, v_rows = (x.flatten(0, 1) for x in (q, k, v))
    lengths = *bounds, q.shape[1], most_keys
    o = varlen_attn(q_rows, k_rows, v_rows, *lengths, scale=scale, window_size=(before, 0))
    assert isinstance(o, Tensor)  # without the logsumexp
    return o.view(q.shape)


def _split_packed(tensors: tuple[Tensor, ...], cu_seqlens: Tensor) -> list[tuple[Tensor, ...]]:
    """Split tensors [1, T, ...] into the packed sequences, and the tokens after the last one."""
    counts = cu_seqlens.diff().tolist()
    counts.append(tensors[0].shape[1] - sum(counts))
    # not slices: the gradient of each slice has T tokens
    return list(zip(*(x.split(counts, 1) for x in tensors), strict=True))


def _causal(T: int, sequence_T: Tensor) -> Tensor:
    time_T = torch.arange(T, device=sequence_T.device)
    return (time_T <= time_T[:, None]) & (sequence_T == sequence_T[:, None])


def _attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float, W: int, sequence_T: Tensor | None) -> Tensor:
    """Attend within a window of W < T tokens."""
    mask = None if sequence_T is None else _causal(W, sequence_T[:W])
    first = _sdpa_of_pack(q[:, :W], k[:, :W], v[:, :W], scale, mask)
    return torch.cat([first, _later_blocks(q, k, v, scale, W, sequence_T)], 1)


def _later_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float, W: int, sequence_T: Tensor | None) -> Tensor:
    """Return the output of tokens W and later, [B, T - W, H, E]: each block attends to itself and the previous one."""
    B, T = q.shape[:2]
    q_BMWE, k_BMWE, v_BMWE = (_blocks(x, W) for x in (q, k, v))
    k, v = (torch.cat([x[:, :-1], x[:, 1:]], 2) for x in (k_BMWE, v_BMWE))
    key_J = torch.arange(2 * W, device=q.device)
    query_W1 = key_J[:W, None]
    visible = (key_J > query_W1) & (key_J <= query_W1 + W)
    if sequence_T is not None:  # packed, so B = 1: one mask per block
        sequence_MW = _blocks(sequence_T[None], W)[0]
        sequence_M2W = torch.cat([sequence_MW[:-1], sequence_MW[1:]], 1)
        visible = (visible & (sequence_M2W[:, None] == sequence_MW[1:, :, None]))[:, None]
    blocks = q_BMWE[:, 1:].flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    o = (sdpa if sequence_T is None else _sdpa_of_pack)(*blocks, scale, visible)
    o = torch.unflatten(o, 0, (B, q_BMWE.shape[1] - 1)).flatten(1, 2)
    # Negative padding crops the last block. A slice would make the compiler guard on its strides.
    return F.pad(o, (0, 0, 0, 0, 0, T - W - o.shape[1]))


def _blocks(x: Tensor, W: int) -> Tensor:
    """Split time into blocks of W, padding the last one with zeros: [B, T, ...] -> [B, M, W, ...]."""
    return torch.unflatten(F.pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % W)), 1, (-1, W))
