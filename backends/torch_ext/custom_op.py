"""How a backend's code becomes an operator of torch."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("deltazoo", "FRAGMENT")


def operator(schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define torch.ops.deltazoo.NAME, which torch.compile, export and CUDA graphs see as one node.

    Args:
        schema: "NAME(arguments) -> results", as torch.library takes it.
        body: what it does, on any device; autograd does not look into it, so that a gradient is its caller's business.
        fake: the results' shapes and dtypes, from the same arguments.
    Returns: what calls the operator, or its body at once where nobody looks at operators: that takes the host less.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"deltazoo::{name}", fake, lib=_LIBRARY)
    node = getattr(torch.ops.deltazoo, name).default

    @functools.wraps(body)
    def call(*arguments: Any) -> Any:
        return node(*arguments) if torch.compiler.is_compiling() or _seen(arguments) else body(*arguments)

    return call


def written(tensor: Tensor, result: Tensor) -> None:
    """What a kernel has changed in place, or in a contiguous copy: autograd is told of it, as of torch's own."""
    if result is not tensor:
        tensor.copy_(result)
    elif not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def cache_forward_signature(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """A class decorator: keeps the signature of `forward`, which `apply` would make anew in every call."""
    function.forward.__signature__ = inspect.signature(function.forward)  # type: ignore[attr-defined]
    return function


def _seen(arguments: tuple[Any, ...]) -> bool:
    """Whether a mode, a transform, a tracer, a profiler, or a tensor of a class of its own, wants to see operators."""
    c = torch._C
    if c._len_torch_dispatch_stack() or c._len_torch_function_stack() or c._are_functorch_transforms_active():
        return True
    if c._get_tracing_state() is not None or c._autograd._profiler_enabled():
        return True
    return any(map(_of_its_own_class, arguments))


def _of_its_own_class(x: Any) -> bool:
    if type(x) is list:
        return any(map(_of_its_own_class, x))
    return type(x) not in _PLAIN and isinstance(x, Tensor)


_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int, float, str))
