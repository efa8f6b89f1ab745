"""Products of the few rows of a decode step, on a GPU: weights are read once, with the operations around the product.

    products        y_i = W_i x                 or W_i norm(x), of several maps by one kernel
    add_product     y = residual + W x          or residual + W norm(x)
    hidden          y = phi(W x)                or phi(W_gate x) * (W_up x), or of norm(x)

with norm(x) = weight * x / sqrt(mean(x^2) + eps), which is rounded with more than two rows only. Sums are in float32; a
row's result does not depend on the other rows. Nothing here records gradients.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.symbolic_sizes import is_known
from deltazoo.backends.triton.gemv.op import MAX_MAPS, MAX_ROWS, MAX_STREAMED_ROWS, MAX_WIDTH, gemv, streams
from deltazoo.backends.triton.limits import kernel_refusals
from deltazoo.backends.triton.norm.op import rms_norm

Activation = Literal["silu", "gelu", "relu2"]


class Norm(NamedTuple):
    """An RMS norm of the input: its weight [D] and epsilon."""

    weight: Tensor
    eps: float


def refusals(x: Tensor) -> list[str]:
    """Return why the kernels do not compute products of x [..., D], one sentence each; [] if they do."""
    if torch.is_grad_enabled() or (not x.is_meta and torch.is_autocast_enabled(x.device.type)):
        return ["it needs a call without gradients and autocast."]
    most = MAX_STREAMED_ROWS if streams(x) else MAX_ROWS
    if not is_known(x.shape[:-1].numel() <= most):
        return [f"with more than {most} rows separate products are faster."]
    if not is_known(x.shape[-1] <= MAX_WIDTH):
        return [f"rows must have at most {MAX_WIDTH} numbers, got {x.shape[-1]}."]
    return kernel_refusals(x)


def products(x: Tensor, weights: Sequence[Tensor], norm: Norm | None = None) -> list[Tensor]:
    """Compute W x, or W norm(x), for each weight [N, D]. Args: x: [..., D], without `refusals`."""
    x, norm = _prepared(x, norm)
    results: list[Tensor] = []
    for first in range(0, len(weights), MAX_MAPS):
        group = list(weights[first : first + MAX_MAPS])
        results += _call(x, group, norm).split([weight.shape[0] for weight in group], -1)
    return results


class Shift(NamedTuple):
    """A token shift of the normed input n: map i reads n + (previous - n) mix[rows[i]].

    Args: previous: [..., D], as n; mix: [.., D]; rows: for each map.
    """

    previous: Tensor
    mix: Tensor
    rows: tuple[int, ...]


def shifted_products(x: Tensor, weights: Sequence[Tensor], norm: Norm, shift: Shift) -> list[Tensor]:
    """Compute W_i (n + (previous - n) mix_i) with n = norm(x), for each weight W_i [N, D]."""
    normed, later = _prepared(x, norm)
    mixed: Tensor | None = None
    if later is None:
        mixed = torch.lerp(normed.flatten(0, -2), shift.previous.flatten(0, -2), shift.mix[:, None].to(x.dtype))
    results: list[Tensor] = []
    for first in range(0, len(weights), MAX_MAPS):
        group, rows = list(weights[first : first + MAX_MAPS]), [*shift.rows[first : first + MAX_MAPS]]
        if mixed is None:
            y = _call(x, group, norm, shift=shift._replace(rows=(*rows,)))
        else:
            y = torch.unflatten(gemv(mixed, None, 0.0, group, None, "", False, None, None, rows), 0, x.shape[:-1])
        results += y.split([weight.shape[0] for weight in group], -1)
    return results


def add_product(residual: Tensor, x: Tensor, weight: Tensor, norm: Norm | None = None) -> Tensor:
    """Compute residual + W x, or residual + W norm(x), rounded once. Args: residual: [..., N]; weight: [N, D]."""
    x, norm = _prepared(x, norm)
    return _call(x, [weight], norm, residual=residual)


def hidden(x: Tensor, weight: Tensor, norm: Norm | None, activation: Activation, gated: bool) -> Tensor:
    """Compute the hidden channels of an MLP from x or norm(x). Args: weight: [F, D], or if gated [2 F, D]."""
    x, norm = _prepared(x, norm)
    return _call(x, [weight], norm, activation=activation, gated=gated)


def _prepared(x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
    """Apply a norm that the kernel of more than two rows does not contain. Return x, and the norm that is left."""
    if norm is None or is_known(x.shape[:-1].numel() <= MAX_ROWS):
        return x, norm
    return rms_norm(x.flatten(0, -2), None, None, norm.weight, norm.eps, "none")[1].view(x.shape), None


def _call(
    x: Tensor, weights: list[Tensor], norm: Norm | None, *, residual: Tensor | None = None, activation: str = "",
    gated: bool = False, shift: Shift | None = None,
) -> Tensor:  # fmt: skip
    weight, eps = (None, 0.0) if norm is None else norm
    flat_residual = None if residual is None else residual.flatten(0, -2)
    previous, mix, rows = (None, None, ()) if shift is None else shift
    flat_previous = None if previous is None else previous.flatten(0, -2)
    y: Tensor = gemv(
        x.flatten(0, -2), weight, eps, weights, flat_residual, activation, gated, flat_previous, mix, [*rows]
    )
    return torch.unflatten(y, 0, x.shape[:-1])
