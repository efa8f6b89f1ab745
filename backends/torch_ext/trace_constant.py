"""Functions that torch.compile evaluates while tracing, marked without importing its compiler.

`torch.compiler.assume_constant_result` sets one attribute on a function. It imports torch._dynamo to do so, which takes
0.8 s, more than the rest of `import deltazoo` (limit 0.3 s). Setting the attribute here is tested with torch 2.11 and
2.13. With `IMPORT_COMPILER = True` the public function is called instead.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

IMPORT_COMPILER = False

P = ParamSpec("P")
R = TypeVar("R")


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: torch.compile calls the function during tracing and treats its result as a constant."""
    if IMPORT_COMPILER:
        marked: Callable[P, R] = torch.compiler.assume_constant_result(function)
        return marked
    vars(function)["_dynamo_marked_constant"] = True
    return function
