"""Wrapper for the bodies of the scan operators."""

from typing import Any

from torch import Tensor

from deltazoo.backends.update.base import without_autocast


def body(function: Any, strided: int = 0) -> Any:
    """Wrap an operator's body: disable autocast, which is otherwise active inside it, and make operands contiguous.

    Args: strided: number of leading operands that keep their strides.
    """

    def run(*arguments: Any) -> Any:
        with without_autocast(arguments[0]):
            rest = (x.contiguous() if isinstance(x, Tensor) else x for x in arguments[strided:])
            return function(*arguments[:strided], *rest)

    return run
