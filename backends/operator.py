"""How a backend's code becomes an operator of torch."""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("deltazoo", "FRAGMENT")


def operator(schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define torch.ops.deltazoo.NAME, which torch.compile, export and CUDA graphs see as one node.

    Args:
        schema: "NAME(arguments) -> results", as torch.library takes it.
        body: what it does, on any device; autograd does not look into it, so that a gradient is its caller's business.
        fake: the results' shapes and dtypes, from the same arguments.
    Returns: the operator.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"deltazoo::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.deltazoo, name).default
