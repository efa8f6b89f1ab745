"""Second derivatives of hand-written backwards: a decorator for those without one, and gradients of plain code."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

Backward = Callable[..., tuple[Any, ...]]


def differentiable_once(backward: Backward) -> Backward:
    """Decorate the backward of an autograd.Function so that a second derivative raises.

    The backward itself runs without a graph. If the caller keeps a graph (create_graph=True, torch.func), every
    gradient is connected to all tensors that it was computed from through a node whose backward raises. torch's
    `once_differentiable` does not support torch.func, and it returns silently wrong second derivatives for operands
    that are reachable by another path.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return backward(ctx, *grads)
        ctx = _SavedTensorsRead(ctx)
        with torch.no_grad():
            results = backward(ctx, *grads)
        sources = [x for x in (*ctx.saved_tensors, *grads) if isinstance(x, Tensor) and x.requires_grad]
        if not sources:
            return results
        return tuple(_NoSecondDerivative.apply(x, *sources) if isinstance(x, Tensor) else x for x in results)

    return wrapper


def plain_gradients(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], gradient: Tensor
) -> list[Tensor | None]:
    """Return differentiable gradients of plain torch code, for the backward of an autograd.Function with create_graph.

    One of the tensors may depend on another, or be a result of the node whose backward this is.

    Args: function: of the tensors; gradient: of its result. Returns: None for a tensor that needs no gradient.
    """
    views = [x.view_as(x) for x in tensors]  # so that the gradient stops at them
    needed = [x for x in views if x.requires_grad]
    gradients = iter(torch.autograd.grad(function(*views), needed, gradient, create_graph=True))
    return [next(gradients) if x.requires_grad else None for x in views]


def distinct(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return views for tensors that occur before in the sequence, so that an autograd.Function can be traced.

    In a traced function one of two equal inputs loses its gradient on torch 2.11, without an error; 2.13 refuses them.
    """
    results: list[Tensor | None] = []
    for x in tensors:
        is_repeated = x is not None and any(x is other for other in results)
        results.append(x.view_as(x) if x is not None and is_repeated else x)
    return results


class _SavedTensorsRead:
    """A context whose saved tensors have been read. Activation checkpointing allows that only once."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self.saved_tensors: tuple[Any, ...] = ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _NoSecondDerivative(torch.autograd.Function):
    """Identity on a gradient, connected to the tensors it was computed from. Its backward raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(
            "the operators of deltazoo cannot be differentiated twice; backend 'reference' has second derivatives"
        )
