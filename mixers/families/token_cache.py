"""Base class of mixers that cache tensors of every token: MLA, FoX, PaTH.

B batch, S slots
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.io.errors import StateError
from deltazoo.mixers.core.mixer import Context, PageTable
from deltazoo.mixers.core.named_tensors import NamedTensors
from deltazoo.mixers.core.sequences import token_counts
from deltazoo.mixers.families.filter import FilterMixer
from deltazoo.mixers.parts.attention.caches import KVCache, append_tokens, check_capacity, required_capacity
from deltazoo.mixers.parts.attention.pages import CachePages, PagedCache, attend_paged
from deltazoo.mixers.parts.attention.softmax_attention import attend_cache, attend_packed
from deltazoo.mixers.parts.attention.split_attention import (
    attend_cached_split,
    document_starts,
    gather_keys_and_values,
)


class QKV(NamedTuple):
    """Queries, keys and values of the new tokens, [B, T, heads, channels]."""

    q: Tensor
    k: Tensor
    v: Tensor


class TokenCacheMixer(FilterMixer, ABC):
    """Mixer around a softmax over all previous tokens.

    State: the tensors of the filters; those of `empty_cache`, [B, S, ...] each, with token p of a row in slot p; the
    number of tokens so far, "seen" [B] int64. In place of the cached tensors "k" and "v" a paged state has "pages",
    `CachePages`, and their "table" [B, M] int32.
    """

    rewrites_cache: ClassVar[bool] = False  # whether new tokens change the cached tensors of earlier ones

    def draft_state(self, state: NamedTensors) -> NamedTensors:
        """Return a state with the same cache, whose slots after the last token hold no tokens, and copies of the rest.

        The cache is copied if new tokens change it.
        """
        shared = {"pages", "table"}
        if not self.rewrites_cache:
            shared.update(self.empty_cache(0, 1, state["seen"]))
        return NamedTensors({name: tensor if name in shared else tensor.clone() for name, tensor in state.items()})

    @abstractmethod
    def empty_cache(self, batch: int, slots: int, like: Tensor) -> dict[str, Tensor]:
        """Return the cached tensors before the first token, in the dtype and on the device of `like`."""

    def initial_state(self, batch: int, capacity: int | None, like: Tensor) -> dict[str, Tensor]:
        """Return an empty cache of `capacity` tokens per sequence.

        Raises: StateError without a capacity.
        """
        cache = self.empty_cache(batch, required_capacity(capacity), like)
        filters = super().initial_state(batch, capacity, like)
        return filters | cache | {"seen": like.new_zeros(batch, dtype=torch.int64)}

    def paged_state(self, pages: PageTable, like: Tensor) -> NamedTensors:
        """Return an empty state whose cached tensors "k" and "v" are in pages."""
        cache = self.empty_cache(pages.pages + 1, pages.slots, like)
        state = self.initial_state(len(pages.table), 1, like)
        of_rows = {name: tensor for name, tensor in state.items() if name not in cache}
        return NamedTensors({"pages": CachePages(cache["k"], cache["v"]), "table": pages.table, **of_rows})

    def expected_state(self, state: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
        expected = super().expected_state(state, like)
        if not isinstance(state, Mapping) or "pages" not in state:
            return expected
        cache = self.empty_cache(0, 1, like)
        of_rows = {name: tensor for name, tensor in expected.items() if name not in cache}
        return {"pages": None, "table": expected["seen"], **of_rows}

    def check_cache(self, state: dict[str, Any], x: Tensor, context: Context) -> None:
        """Check the sizes of the cache, and that it has a slot for every token of x. Raises: StateError."""
        expected, pages = self.empty_cache(0, 1, x), state.get("pages")
        buffers = state if pages is None else {"k": pages.k, "v": pages.v}
        for name, tensor in expected.items():
            if buffers[name].shape[2:] != tensor.shape[2:]:
                raise StateError(
                    f"state {name!r} must have shape [B, S, {', '.join(map(str, tensor.shape[2:]))}], "
                    f"got {list(buffers[name].shape)}"
                )
        slots = buffers[next(iter(expected))].shape[1] * (1 if pages is None else state["table"].shape[1])
        check_capacity(state["seen"], token_counts(x, context), slots)

    def append(
        self,
        tokens: dict[str, Tensor],
        state: dict[str, Tensor],
        new: dict[str, Tensor],
        x: Tensor,
        context: Context,
    ) -> None:
        """Append tensors of the new tokens, with context parallelism those of all ranks, to the cache in `new`."""
        first = None if context.cu_seqlens is None else context.cu_seqlens[:-1].long()
        if context.parallel is not None:
            first = document_starts(context.parallel)
        buffers = [state[name] for name in tokens]
        merged, seen = append_tokens(buffers, state["seen"], list(tokens.values()), token_counts(x, context), first)
        new.update(zip(tokens, merged, strict=True))
        new["seen"] = seen

    def attend_paged(
        self, tokens: QKV, scale: float, state: dict[str, Any], new: dict[str, Any], context: Context
    ) -> Tensor:
        """Store k and v in the pages of the state, and attend to all tokens. Returns: [B, T, H, V]."""
        o = attend_paged(*tokens, scale, PagedCache(state["pages"], state["table"], state["seen"]), context)
        seen = state["seen"].add_(token_counts(tokens.q, context))
        new.update(pages=state["pages"], table=state["table"], seen=seen)
        return o

    def attend_cached(
        self, tokens: QKV, scale: float, state: dict[str, Tensor], new: dict[str, Tensor], context: Context
    ) -> Tensor:
        """Append k and v to the cached tensors of these names, and attend to all of them. Returns: [B, T, H, V]."""
        q, k, v = tokens
        cache = KVCache(state["k"], state["v"], state["seen"])
        if context.parallel is not None:
            k, v = gather_keys_and_values(k, v, context.parallel)
            o = attend_cached_split(q, k, v, scale, None, cache, context.parallel)
            self.append({"k": k, "v": v}, state, new, q, context)
            return o
        if context.cu_seqlens is not None:
            o = attend_packed(q, k, v, scale, None, cache, context.cu_seqlens)
            self.append({"k": k, "v": v}, state, new, q, context)
            return o
        position_BT = cache.position[:, None] + torch.arange(q.shape[1], device=q.device)
        self.append({"k": k, "v": v}, state, new, q, context)
        return attend_cache(q, KVCache(new["k"], new["v"], new["seen"]), scale, position_BT)
