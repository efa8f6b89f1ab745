"""The parameters of a chunk kernel: pointers and compile-time traits as NamedTuples, beside numbers."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any


def takes(pointers: str, traits: str) -> Callable[[Any], Any]:
    """Declare the fields of a kernel's parameters `gmem`, its pointers, and `traits`, its compile-time constants.

    `launcher.group` fills both by name; for the update `Tensors` and `_traits` in execute.py define the names.
    """

    def declare(kernel: Any) -> Any:
        kernel.Pointers = namedtuple("Pointers", pointers)
        kernel.Traits = namedtuple("Traits", traits)
        for fields in (kernel.Pointers, kernel.Traits):  # pickle finds a class by its module and qualified name
            fields.__module__, fields.__qualname__ = kernel.__module__, f"{kernel.__name__}.{fields.__name__}"
        return kernel

    return declare
