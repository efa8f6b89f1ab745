"""The paged caches of an engine: an allocator with a reference count per page, and the initial state of rows."""

import logging
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from deltazoo.backends.io.errors import StateError, ValueRangeError
from deltazoo.blocks.model.interface import StackState, TokenModel
from deltazoo.mixers.core.mixer import PageTable
from deltazoo.mixers.parts.attention.pages import CachePages

PAGE_TOKENS = 64  # tokens of a page: the largest tile of the kernels, so that no tile crosses pages


def whole_pages(length: int) -> int:
    """Return the number of tokens in the pages of a sequence of `length` tokens."""
    return -(-length // PAGE_TOKENS) * PAGE_TOKENS


class PageAllocator:
    """Allocator of pages 1 to `count`, with the number of users of each.

    Only the request that took a page writes it, at positions after those that other users read.
    """

    def __init__(self, count: int, tokens: int) -> None:
        self.count, self.tokens = count, tokens
        self._free = list(range(count, 0, -1))
        self._users = [0] * (count + 1)

    @property
    def free(self) -> int:
        """The number of pages without users."""
        return len(self._free)

    def pages_of(self, length: int) -> int:
        """Return the number of pages of a sequence."""
        return -(-length // self.tokens)

    def full(self, length: int) -> int:
        """Return the number of full pages of a sequence."""
        return length // self.tokens

    def users(self, page: int) -> int:
        """Return the number of users of a page."""
        return self._users[page]

    def take(self, count: int) -> list[int]:
        """Take `count` pages. At least `count` must be free."""
        assert count <= self.free
        pages = [self._free.pop() for _ in range(count)]
        self.share(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a user to each page."""
        for page in pages:
            self._users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a user from each page; a page without users is free."""
        for page in pages:
            assert self._users[page]
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)


class RowStates(NamedTuple):
    """The parts from which the states of rows are built.

    initial: the state of one row before the first token; its pages are those of all rows.
    table: the page table of `initial`; each pool has its own. None without pages.
    is_cache: for each tensor of the state whether it is a cache of every token that is not in pages.
    pages: the allocator; None: no cache is paged.
    longest: maximum number of tokens of a request; None: no limit.
    """

    initial: StackState
    table: Tensor | None
    is_cache: list[bool]
    pages: PageAllocator | None
    longest: int | None

    def spread(self, rows: int) -> tuple[StackState, Tensor | None]:
        """Return the initial state of some rows without pages, and its table."""
        table = None if self.table is None else self.table.repeat(rows, 1)

        def copy(x: object) -> object:
            if x is self.table:
                return table
            return x.repeat_interleave(rows, 0) if isinstance(x, Tensor) else x

        return tree_map(copy, self.initial), table

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page of each layer."""
        tensors = [x for cache in self.caches for x in (cache.k, cache.v)]
        torch._foreach_copy_([x[target] for x in tensors], [x[source] for x in tensors])

    @property
    def caches(self) -> list[CachePages]:
        """The pages of each layer that has them."""
        return [x for x in tree_leaves(self.initial) if isinstance(x, CachePages)]

    @property
    def page_bytes(self) -> int:
        """The size of a page in all layers."""
        return sum(x[0].numel() * x.element_size() for cache in self.caches for x in (cache.k, cache.v))


_UNBOUNDED = 2**30  # tokens; no window is longer
_log = logging.getLogger("deltazoo")


@torch.no_grad()
def row_states(model: TokenModel, cache_tokens: int | None, slots: int) -> RowStates:
    """Allocate the pages of an engine's caches, for at least `cache_tokens` tokens.

    A mixer that caches every token and does not support pages gets a cache of cache_tokens / slots tokens per row,
    which then limits every request.

    Raises: ValueRangeError: `cache_tokens` is less than `slots`; StateError: the model needs `cache_tokens`.
    """
    if cache_tokens is not None and cache_tokens < slots:
        raise ValueRangeError(f"cache_tokens must be at least slots = {slots}, got {cache_tokens}")
    if cache_tokens is None:
        try:
            initial = model.init_state(1, None)
        except StateError as error:
            raise StateError(
                "the model keeps every token: give cache_tokens, the tokens that its caches hold"
            ) from error
        return RowStates(initial, None, [False] * len(tensors_of(initial)), None, None)
    pages = PageAllocator(-(-cache_tokens // PAGE_TOKENS), PAGE_TOKENS)
    is_cache, names = _without_pages(model)
    longest = cache_tokens // slots if names else pages.count * pages.tokens
    if names:
        text = "the caches of %s are not in pages: each of %d slots keeps %d tokens, the longest request"
        _log.warning(text, ", ".join(names), slots, longest)
    table = torch.zeros(1, min(pages.count, pages.pages_of(longest)), dtype=torch.int32, device=model.device)
    # one more: if the host runs ahead, the device also reads a pass with drafts after the last token of a request
    initial = _initial_state(model, longest + 1, PageTable(table, pages.count, pages.tokens))
    if any(isinstance(x, CachePages) for x in tree_leaves(initial)):
        return RowStates(initial, table, is_cache, pages, longest)
    return RowStates(initial, None, is_cache, None, longest if names else None)


def _initial_state(model: TokenModel, capacity: int, pages: PageTable) -> StackState:
    return StackState(tuple(layer.init_paged_state(capacity, pages) for layer in model.stack.layers))


def _without_pages(model: TokenModel) -> tuple[list[bool], list[str]]:
    """Return which tensors of the state have a slot for each token, and the names of the mixers that they belong to."""
    table = torch.zeros(0, 1, dtype=torch.int32, device=model.device)
    pages = PageTable(table, 0, PAGE_TOKENS)
    shorter, longer = (_initial_state(model, n, pages) for n in (_UNBOUNDED, _UNBOUNDED + 1))
    names: dict[str, None] = {}
    is_cache: list[bool] = []
    for layer, *states in zip(model.stack.layers, shorter.layers, longer.layers, strict=True):
        for mixer, *pair in zip(layer.mixers, *states, strict=True):
            sizes = ([x.shape for x in tensors_of(state, table)] for state in pair)
            grows = [a != b for a, b in zip(*sizes, strict=True)]
            is_cache += grows
            if any(grows):
                names[type(mixer).__name__] = None
    return is_cache, list(names)


def tensors_of(state: object, table: Tensor | None = None) -> list[Tensor]:
    """Return the tensors of a state without a table."""
    return [x for x in tree_leaves(state) if isinstance(x, Tensor) and x is not table]
