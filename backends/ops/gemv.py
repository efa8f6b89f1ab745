"""Products of the few rows of a decode step, on a GPU: weights are read once, with the operations around the product.

    products        y_i = W_i x                 or W_i norm(x), of several maps by one kernel
    add_product     y = residual + W x          or residual + W norm(x)
    hidden          y = phi(W x)                or phi(W_gate x) * (W_up x), or of norm(x)

with norm(x) = weight * x / sqrt(mean(x^2) + eps), which is not rounded. Sums are in float32; a row's result does not
depend on the other rows. Nothing here records gradients.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.torch_ext.symbolic_sizes import is_known
from deltazoo.backends.triton.gemv.op import MAX_DOT_ROWS, MAX_MAPS, MAX_ROWS, gemv
from deltazoo.backends.triton.gemv.op import MAX_WIDTH as MAX_WIDTH
from deltazoo.backends.triton.glu.op import glu
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
    most = MAX_ROWS if x.dtype == torch.float32 else MAX_DOT_ROWS
    if not is_known(x.shape[:-1].numel() <= most):
        return [f"with more than {most} rows separate products are faster."]
    if not is_known(x.shape[-1] <= MAX_WIDTH):
        return [f"rows must have at most {MAX_WIDTH} numbers, got {x.shape[-1]}."]
    return kernel_refusals(x)


def products(x: Tensor, weights: Sequence[Tensor], norm: Norm | None = None) -> list[Tensor]:
    """Compute W x, or W norm(x), for each weight [N, D]. Args: x: [..., D], without `refusals`."""
    if norm is None and len(weights) == 1 and _is_for_torch(x):
        return [F.linear(x, weights[0])]
    results: list[Tensor] = []
    for first in range(0, len(weights), MAX_MAPS):
        group = list(weights[first : first + MAX_MAPS])
        y = _call(x, group, norm)
        results += y.split([weight.shape[0] for weight in group], -1)
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
    results: list[Tensor] = []
    for first in range(0, len(weights), MAX_MAPS):
        group = list(weights[first : first + MAX_MAPS])
        y = _call(x, group, norm, shift=shift._replace(rows=shift.rows[first : first + MAX_MAPS]))
        results += y.split([weight.shape[0] for weight in group], -1)
    return results


def add_product(residual: Tensor, x: Tensor, weight: Tensor, norm: Norm | None = None) -> Tensor:
    """Compute residual + W x, or residual + W norm(x), rounded once. Args: residual: [..., N]; weight: [N, D]."""
    if norm is None and _is_for_torch(x):
        y = torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), weight.t())
        return torch.unflatten(y, 0, x.shape[:-1])
    return _call(x, [weight], norm, residual=residual)


def hidden(x: Tensor, weight: Tensor, norm: Norm | None, activation: Activation, gated: bool) -> Tensor:
    """Compute the hidden channels of an MLP from x or norm(x). Args: weight: [F, D], or if gated [2 F, D]."""
    if gated and _is_for_torch(x):
        flat = x.flatten(0, -2)
        normed = flat if norm is None else rms_norm(flat, None, None, norm.weight, norm.eps, "none")[1]
        return torch.unflatten(glu(F.linear(normed, weight), activation), 0, x.shape[:-1])
    return _call(x, [weight], norm, activation=activation, gated=gated)


def _is_for_torch(x: Tensor) -> bool:
    """Whether torch's products and separate kernels are faster, with more rows than a matrix-vector kernel takes.

    H200, 32 rows, microseconds: 2400 to 2 x 5888 outputs 18, and 29 by our kernel with its norm and activation; 5888 to
    2400 12 and 18; 3600 to 2400 10 and 14; 2400 to 32,000 43 and 49. Several maps are faster by ours: 64
    rows, 2048 to 6144, 16, 16 and 2048 outputs 27.5 by torch and 14.6 by ours.
    """
    return x.dtype != torch.float32 and not is_known(x.shape[:-1].numel() <= MAX_ROWS)


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
