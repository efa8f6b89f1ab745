"""The parameters of a chunk kernel: pointers and compile-time traits as NamedTuples, beside numbers."""

from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any


def takes(pointers: str, traits: str) -> Callable[[Any], Any]:
    """Declare the fields of a kernel's parameters `gmem`, its pointers, and `traits`, its compile-time constants.

    `group` fills both by name; for the update `Tensors` and `_traits` in execute.py define the names.
    """

    def declare(kernel: Any) -> Any:
        kernel.Pointers = namedtuple("Pointers", pointers)
        kernel.Traits = namedtuple("Traits", traits)
        return kernel

    return declare


def group(kernel: Any, tensors: Mapping[str, Any], traits: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a kernel's parameters `gmem` and `traits`. Each field receives the value of its name."""
    pointers = kernel.Pointers._make([tensors[name] for name in kernel.Pointers._fields])
    return pointers, kernel.Traits._make([traits[name] for name in kernel.Traits._fields])
