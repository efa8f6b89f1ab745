"""Products of the few rows of a decode step, on a GPU: weights are read once, with the operations around the product.

    products        y_i = W_i x + b_i, or W_i x_i     or W_i norm(x) + b_i, of several maps by one kernel
    add_product     y = residual + W x          or residual + W norm(x)
    hidden          y = phi(W x)                or phi(W_gate x) * (W_up x), or of norm(x)

The first of several maps may have a short convolution of the token, conv(W_1 x).

with norm(x) = weight * x / sqrt(mean(x^2) + eps), which is rounded to the dtype of x only with several rows in 16 bits.
Sums are in float32; a row's result does not depend on the other rows. Nothing here records gradients.
"""

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.modes import function_mode_is_active
from deltazoo.backends.torch_ext.symbolic_sizes import is_known
from deltazoo.backends.triton.gemv.op import MAX_DOT_ROWS, MAX_MAPS, MAX_ROWS, gemv, gemv_convolved_
from deltazoo.backends.triton.gemv.op import MAX_WIDTH as MAX_WIDTH
from deltazoo.backends.triton.gemv.op import Convolution as Convolution
from deltazoo.backends.triton.limits import kernel_refusals

Activation = Literal["silu", "gelu", "relu2"]


class Norm(NamedTuple):
    """An RMS norm of the input: its weight [D] and epsilon."""

    weight: Tensor
    eps: float


def refusals(x: Tensor) -> list[str]:
    """Return why the kernels do not compute products of x [..., D], one sentence each; [] if they do."""
    if torch.is_grad_enabled() or (not x.is_meta and torch.is_autocast_enabled(x.device.type)):
        return ["it needs a call without gradients and autocast."]
    if function_mode_is_active():
        return ["a torch function mode is active, which must see the calls of the modules."]
    most = MAX_ROWS if x.dtype == torch.float32 else MAX_DOT_ROWS
    if not is_known(x.shape[:-1].numel() <= most):
        return [f"with more than {most} rows separate products are faster."]
    if not is_known(x.shape[-1] <= MAX_WIDTH):
        return [f"rows must have at most {MAX_WIDTH} numbers, got {x.shape[-1]}."]
    return kernel_refusals(x)


def products(
    x: Tensor, weights: Sequence[Tensor], norm: Norm | None = None, second: Sequence[Tensor | None] = (),
    convolution: Convolution | None = None, biases: Sequence[Tensor | None] = (),
) -> list[Tensor]:  # fmt: skip
    """Compute W x + b, or W norm(x) + b, for each weight [N, D].

    Args:
        x: [..., D], without `refusals`. second: for each map a second weight U [.., N], for U W x + b instead, or None.
        convolution: of the first map, whose history [.., W - 1, N] changes in place; None: none.
        biases: for each map b, or None; empty: none.
    """
    results: list[Tensor] = []
    second, biases = (given or [None] * len(weights) for given in (second, biases))
    for first in range(0, len(weights), MAX_MAPS):
        group = list(weights[first : first + MAX_MAPS])
        ups, added = second[first : first + MAX_MAPS], biases[first : first + MAX_MAPS]
        of_first = [None if up is not None else bias for up, bias in zip(ups, added, strict=True)]
        if first or convolution is None:
            y = _call(x, group, norm, biases=of_first)
        else:
            y = _convolve(x, group, norm, convolution, of_first)
        ends = [*itertools.accumulate(weight.shape[0] for weight in group)]
        parts = [y[..., end - weight.shape[0] : end] for end, weight in zip(ends, group, strict=True)]
        of_rank: dict[int, dict[int, Tensor]] = {}
        for i, weight in enumerate(ups):
            if weight is not None:
                of_rank.setdefault(weight.shape[1], {})[i] = weight
        for rank, up in of_rank.items():
            places = [ends[i] - rank for i in up]
            z = _call(y, list(up.values()), None, reads=places, biases=[added[i] for i in up])
            for i, part in zip(up, z.split([weight.shape[0] for weight in up.values()], -1), strict=True):
                parts[i] = part
        results += parts
    return results


def products_of_each(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Compute W_i x_i for x [..., P, D], x_i = x[..., i, :], and P weights [N, D]. Args: x_i: without `refusals`."""
    return products_of_some(x, weights, range(len(weights)))


def products_of_some(x: Tensor, weights: Sequence[Tensor], inputs: Sequence[int]) -> list[Tensor]:
    """Compute W_i x[..., inputs[i], :] for x [..., P, D] and weights [N, D]. Args: x: without `refusals`."""
    D = x.shape[-1]
    results: list[Tensor] = []
    for first in range(0, len(weights), MAX_MAPS):
        group = list(weights[first : first + MAX_MAPS])
        y = _call(x.flatten(-2), group, None, reads=[D * n for n in inputs[first : first + MAX_MAPS]])
        results += y.split([weight.shape[0] for weight in group], -1)
    return results


class Shift(NamedTuple):
    """A token shift of the input n, which may be normed: map i reads n + (previous - n) mix[rows[i]].

    Args: previous: [..., D], as n; mix: [.., D]; rows: for each map.
    """

    previous: Tensor
    mix: Tensor
    rows: tuple[int, ...]


def shifted_products(x: Tensor, weights: Sequence[Tensor], norm: Norm | None, shift: Shift) -> list[Tensor]:
    """Compute W_i (n + (previous - n) mix_i) with n = x or norm(x), for each weight W_i [N, D]."""
    results: list[Tensor] = []
    for first in range(0, len(weights), MAX_MAPS):
        group = list(weights[first : first + MAX_MAPS])
        y = _call(x, group, norm, reads=shift._replace(rows=shift.rows[first : first + MAX_MAPS]))
        results += y.split([weight.shape[0] for weight in group], -1)
    return results


def add_product(residual: Tensor, x: Tensor, weight: Tensor, norm: Norm | None = None) -> Tensor:
    """Compute residual + W x, or residual + W norm(x), rounded once. Args: residual: [..., N]; weight: [N, D]."""
    return _call(x, [weight], norm, residual=residual)


def hidden(x: Tensor, weight: Tensor, norm: Norm | None, activation: Activation, gated: bool) -> Tensor:
    """Compute the hidden channels of an MLP from x or norm(x). Args: weight: [F, D], or if gated [2 F, D]."""
    return _call(x, [weight], norm, activation=activation, gated=gated)


def _convolve(
    x: Tensor, weights: list[Tensor], norm: Norm | None, convolution: Convolution, biases: Sequence[Tensor | None]
) -> Tensor:
    weight, eps = (None, 0.0) if norm is None else norm
    y: Tensor = gemv_convolved_(x.flatten(0, -2), weight, eps, weights, *_given(biases), *convolution)
    return torch.unflatten(y, 0, x.shape[:-1])


def _call(
    x: Tensor, weights: list[Tensor], norm: Norm | None, *, residual: Tensor | None = None, activation: str = "",
    gated: bool = False, reads: Shift | Sequence[int] = (), biases: Sequence[Tensor | None] = (),
) -> Tensor:  # fmt: skip
    """Compute products. Args: reads: a token shift of x, or the first column of x that each map reads; (): 0."""
    weight, eps = (None, 0.0) if norm is None else norm
    flat_residual = None if residual is None else residual.flatten(0, -2)
    previous, mix, places = reads if isinstance(reads, Shift) else (None, None, reads)
    flat_previous = None if previous is None else previous.flatten(0, -2)
    y: Tensor = gemv(
        x.flatten(0, -2), weight, eps, weights, flat_residual, activation, gated, flat_previous, mix, [*places],
        *_given(biases),
    )  # fmt: skip
    return torch.unflatten(y, 0, x.shape[:-1])


def _given(biases: Sequence[Tensor | None]) -> tuple[list[Tensor], list[int]]:
    """Return the biases that are given, and the numbers of their maps."""
    given = {i: bias for i, bias in enumerate(biases) if bias is not None}
    return list(given.values()), list(given)
