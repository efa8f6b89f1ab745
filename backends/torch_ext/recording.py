"""Record the allocations and the in-place torch operations of a function that runs on meta tensors."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ALLOCATIONS = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)


class NotReplayableError(Exception):
    """The function does something that cannot be replayed from a recording."""


class BufferNumber(int):
    """The number of a buffer: first the arguments are numbered, then the allocations, each in order."""


class Operation(NamedTuple):
    """A torch operation that writes to a tensor. Its tensor arguments are replaced by the numbers of their buffers."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def renumbered(self, number_of: Callable[[int], int]) -> "Operation":
        """Return the operation with other numbers of the buffers."""
        new = lambda x: BufferNumber(number_of(x)) if isinstance(x, BufferNumber) else x  # noqa: E731
        keywords = {name: new(x) for name, x in self.keywords.items()}
        return Operation(self.function, tuple(map(new, self.arguments)), keywords)

    def run(self, buffers: Sequence[Tensor]) -> None:
        """Run the operation on other buffers."""
        keywords = {name: buffers[x] if isinstance(x, BufferNumber) else x for name, x in self.keywords.items()}
        self.function(*(buffers[x] if isinstance(x, BufferNumber) else x for x in self.arguments), **keywords)


class RecordingMode(TorchDispatchMode):
    """Records the buffers of a function (its arguments and allocations) and the operations that write to them.

    Views of buffers are not recorded: `locate` finds their buffer by its storage.

    Args: arguments: the meta tensors with which the function is called, each with its own storage.
    """

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.buffers: list[Tensor] = []
        self.steps: list[Any] = []  # the operations in order; a subclass may record other steps
        self.standalone: set[int] = set()  # buffers that must be tensors when replayed, not only addresses
        self._numbers: dict[int, int] = {}  # from storages to buffers; `buffers` keeps the storages alive
        for x in arguments:
            self._add(x)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # otherwise the first call imports torch._dynamo, which takes seconds; the function is never compiled
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            if not (out.is_meta and out.is_contiguous()):
                raise NotReplayableError("an allocation is on another device or not contiguous")
            self._add(out)
        elif func._schema.is_mutable:
            keywords = {name: self._number_if_tensor(x) for name, x in (kwargs or {}).items()}
            self.steps.append(Operation(func, tuple(map(self._number_if_tensor, args)), keywords))
        else:
            for x in out if isinstance(out, list | tuple) else [out]:
                self.locate(x)  # raises unless it is a view of a buffer: computed values would not be replayed
        return out

    def locate(self, x: Tensor) -> tuple[int, int]:
        """Return the number of a tensor's buffer and the tensor's offset in it in bytes.

        Raises: NotReplayableError if the tensor is in no buffer.
        """
        number = self._numbers.get(x.untyped_storage()._cdata)
        if number is None:
            raise NotReplayableError("a tensor is neither an argument nor allocated by the function")
        return number, int(x.storage_offset()) * x.itemsize

    def number(self, x: Tensor) -> BufferNumber:
        """Return the number of the buffer that this tensor equals, and note that its tensor is needed.

        Raises: NotReplayableError for a view of another shape, dtype or layout.
        """
        number = self.locate(x)[0]
        buffer = self.buffers[number]
        if x.dtype != buffer.dtype or x.shape != buffer.shape or x.stride() != buffer.stride():
            raise NotReplayableError("a view is used as a tensor")
        self.standalone.add(number)
        return BufferNumber(number)

    def _number_if_tensor(self, x: Any) -> Any:
        if isinstance(x, list | tuple) and any(isinstance(y, Tensor) for y in x):
            raise NotReplayableError("an operation takes a list of tensors")
        if isinstance(x, torch.Stream | torch.Generator):
            raise NotReplayableError(f"an operation takes a {type(x).__name__}")
        return self.number(x) if isinstance(x, Tensor) else x

    def _add(self, x: Tensor) -> None:
        self._numbers[x.untyped_storage()._cdata] = len(self.buffers)
        self.buffers.append(x)
