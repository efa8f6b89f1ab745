"""Least-recently-used cache of tensors, bounded by their size in bytes."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_leaves

Value = TypeVar("Value")


class TensorCache:
    """Cache results that hold tensors; callers must not modify them.

    Args: max_bytes: the least recently used results are dropped beyond this size; the latest result always stays.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._bytes = 0
        self._results: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """Return the result stored under a key, or compute and store it."""
        if key in self._results:
            self._results.move_to_end(key)
            return self._results[key][0]
        result = compute()
        size = sum(x.nbytes for x in tree_leaves(result) if isinstance(x, Tensor))
        self._results[key] = result, size
        self._bytes += size
        while self._bytes > self.max_bytes and len(self._results) > 1:
            _, (_, dropped) = self._results.popitem(last=False)
            self._bytes -= dropped
        return result


REFERENCES = TensorCache(max_bytes=128 * 2**20)
