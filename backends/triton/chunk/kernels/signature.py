"""The parameters of a chunk kernel: pointers and compile-time traits as NamedTuples, beside numbers."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any


def takes(pointers: str, traits: str) -> Callable[[Any], Any]:
    """Declare the fields of a kernel's parameters `gmem`, its pointers, and `traits`, its compile-time constants.

    arguments.py fills both by name. Their fields have the meaning that `Tensors` and `traits_of` give there.
    """

    def declare(kernel: Any) -> Any:
        kernel.Pointers = namedtuple("Pointers", pointers)
        kernel.Traits = namedtuple("Traits", traits)
        return kernel

    return declare
