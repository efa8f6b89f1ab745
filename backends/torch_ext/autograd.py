"""First derivatives alone: the backwards of our autograd functions, whose own derivatives are not known."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

Backward = Callable[..., tuple[Any, ...]]


def differentiable_once(backward: Backward) -> Backward:
    """Decorate the backward of an autograd.Function that computes without a graph.

    Where a graph is kept (create_graph=True, torch.func) each gradient hangs on all that it was computed from, so that
    a second derivative raises by whatever path it is asked for. torch's `once_differentiable` knows of no torch.func,
    and lets the gradients of operands pass that some other path leads to.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            with torch.no_grad():
                return backward(ctx, *grads)
        ctx = _Read(ctx)
        with torch.no_grad():
            found = backward(ctx, *grads)
        causes = [x for x in (*ctx.saved_tensors, *grads) if isinstance(x, Tensor) and x.requires_grad]
        return tuple(_Final.apply(x, *causes) if isinstance(x, Tensor) and causes else x for x in found)

    return once


class _Read:
    """A context whose saved tensors were read, which checkpointing allows once."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self.saved_tensors: tuple[Any, ...] = ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Final(torch.autograd.Function):
    """A gradient that cannot be differentiated by its causes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, *causes: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(
            "deltazoo's operators are differentiable once: a second derivative was asked for, which only backend "
            "'reference' has; they cannot be differentiated twice"
        )
