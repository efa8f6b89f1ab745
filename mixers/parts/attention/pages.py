"""Paged caches: the keys and values of all rows in one pool, and a table of the pages of each row.

B batch, P pages, S slots of a page, M pages of a row, G key-value heads, E key width, V value width
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.io.errors import StateError
from deltazoo.backends.ops.paged_attention import Pages, attend_pages_
from deltazoo.mixers.core.mixer import Context, PageTable
from deltazoo.mixers.core.sequences import token_counts


class CachePages:
    """The pages of one layer, k [P, S, G, E] and v [P, S, G, V].

    Not a pytree: copying or selecting rows of a state leaves the pages as they are, because they belong to all rows.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v


class PagedCache(NamedTuple):
    """A paged cache of every token.

    pages: of all rows; page 0 belongs to none.
    table: [B, M] int32; token p of row b is in page table[b, p // S], slot p % S. 0: no page.
    position: [B] int64, the number of tokens that each row has appended.
    """

    pages: CachePages
    table: Tensor
    position: Tensor

    @property
    def capacity(self) -> int:
        """The number of tokens that a row can have."""
        return self.table.shape[1] * self.pages.k.shape[1]


def empty_pages(pages: PageTable, heads: int, width: int, like: Tensor) -> PagedCache:
    """Return a cache whose rows have the pages of the table, in the dtype and on the device of `like`."""
    k = like.new_zeros(pages.pages + 1, pages.slots, heads, width)
    position = pages.table.new_zeros(len(pages.table), dtype=torch.int64)
    return PagedCache(CachePages(k, torch.zeros_like(k)), pages.table, position)


def attend_paged(q: Tensor, k: Tensor, v: Tensor, scale: float, cache: PagedCache, context: Context) -> Tensor:
    """Store new tokens in the cache without counting them, and attend to all tokens up to each. Returns: [B, T, H, V].

    Drafted tokens are stored, too: those after the position of a row are not read, and later ones replace them.

    Raises: StateError: gradients are enabled, or tokens are split over ranks.
    """
    if torch.is_grad_enabled() or context.parallel is not None:
        got = "gradients" if context.parallel is None else "context.parallel"
        raise StateError(f"a paged cache needs calls without gradients on one rank, got {got}")
    counts = token_counts(q, context) if context.mask is not None else None
    pages, dtype = Pages(cache.pages.k, cache.pages.v, cache.table), cache.pages.k.dtype
    before, bounds = cache.position, context.cu_seqlens
    o = attend_pages_(q.to(dtype), k.to(dtype), v.to(dtype), pages, before, scale, counts, bounds)
    return o.to(q.dtype)
