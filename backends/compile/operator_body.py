"""What the scans' operators share: how their bodies are called."""

from typing import Any

from torch import Tensor

from deltazoo.backends.base import without_autocast


def body(function: Any, as_it_lies: int = 0) -> Any:
    """An operator's body: without autocast, which would leak into it, and on contiguous operands.

    Args: as_it_lies: this many leading operands are handed over as they lie; the function copies what it wants of them.
    """

    def run(*arguments: Any) -> Any:
        with without_autocast(arguments[0]):
            rest = (x.contiguous() if isinstance(x, Tensor) else x for x in arguments[as_it_lies:])
            return function(*arguments[:as_it_lies], *rest)

    return run
