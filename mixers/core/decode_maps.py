"""Linear maps of the input of a decode step, computed together where a kernel can read their weights.

B batch, D width
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from deltazoo.backends.ops import gemv
from deltazoo.backends.ops.gemv import Convolution, Norm
from deltazoo.backends.ops.rms_norm import rms_norm
from deltazoo.backends.torch_ext.plain_module import is_plain, is_plain_linear
from deltazoo.backends.update.base import state_dtype
from deltazoo.mixers.core.part import GateLinear


def apply_maps(
    x_B1D: Tensor, maps: Mapping[str, nn.Module], norm: Norm | None = None, convolution: Convolution | None = None
) -> dict[str, Tensor]:
    """Apply each map to x, or to its norm.

    Plain linear maps, and the first ones of maps of low rank, are one product with their biases on a GPU. Other
    modules are called.

    Args: convolution: of the output of the first map, for which `convolves` holds; None: none.
    """
    first: dict[str, nn.Linear] = {}
    for name, module in maps.items():
        linear = _first_map(module, x_B1D)
        if linear is not None:
            first[name] = linear
    results: dict[str, Tensor] = {}
    if first and not gemv.refusals(x_B1D):
        second = {name: maps[name][1] for name, linear in first.items() if maps[name] is not linear}  # type: ignore[index]
        joint = {
            name: linear.weight
            for name, linear in second.items()
            if adds_to_product(linear, x_B1D) and reads_weight(first[name], x_B1D)
        }
        weights = [linear.weight for linear in first.values()]
        last = {name: second[name] if name in joint else linear for name, linear in first.items()}
        biases = [None if isinstance(linear, GateLinear) else linear.bias for linear in last.values()]
        ups = [joint.get(name) for name in first]
        for name, y in zip(first, gemv.products(x_B1D, weights, norm, ups, convolution, biases), strict=True):
            if isinstance(last[name], GateLinear):
                y = _with_bias(y, last[name])
            results[name] = apply_map(y, second[name]) if name in second and name not in joint else y
    if len(results) < len(maps):
        normed_B1D = x_B1D if norm is None else rms_norm(x_B1D, norm.weight, norm.eps)
        for name, module in maps.items():
            if name not in results:
                results[name] = module(normed_B1D)
    return results


def convolves(x_B1D: Tensor, module: nn.Module, convolution: Convolution) -> bool:
    """Whether `apply_maps` convolves the output of a map together with its product."""
    if not is_plain_linear(module) or not adds_to_product(module, x_B1D) or gemv.refusals(x_B1D):
        return False
    return convolution.history.dtype == x_B1D.dtype and convolution.history.shape[1] > 0


def apply_to_input(x_BTD: Tensor, maps: Mapping[str, nn.Module], state: Any) -> dict[str, Tensor]:
    """Apply each map to the input of a mixer: by `apply_maps` in a decode step. Args: state: of the mixer."""
    if is_step(x_BTD, state):
        return apply_maps(x_BTD, maps)
    return {name: module(x_BTD) for name, module in maps.items()}


def apply_to_each(maps: Sequence[nn.Module], inputs: Sequence[Tensor], state: Any) -> Sequence[Tensor]:
    """Apply each map to an input of its own [B, T, D], in a decode step by one product. Args: state: of the mixer."""
    if is_step(inputs[0], state) and all(reads_weight(linear, inputs[0]) for linear in maps):
        return gemv.products_of_each(torch.stack(list(inputs), -2), [linear.weight for linear in maps])  # type: ignore[misc]
    return [linear(x) for linear, x in zip(maps, inputs, strict=True)]


def is_step(x_BTD: Tensor, state: Any) -> bool:
    """Whether x is a single token per row, of so few rows that products read each weight once."""
    return state is not None and x_BTD.shape[1] == 1 and not gemv.refusals(x_BTD)


def apply_map(x: Tensor, module: nn.Module) -> Tensor:
    """Apply one map."""
    if reads_weight(module, x) and not gemv.refusals(x):
        return gemv.products(x, [module.weight])[0]
    y: Tensor = module(x)
    return y


def apply_output(o_BTC: Tensor, module: nn.Module, norm: Norm | None = None) -> Tensor:
    """Apply the output map of a mixer.

    A single token without gradients takes a product of few rows, which loads weights while the kernel before it runs.

    Args: norm: of the inputs, of a single token; None: there is none.
    """
    if norm is not None or o_BTC.shape[1] == 1:
        return apply_maps(o_BTC, {"out": module}, norm)["out"]
    y: Tensor = module(o_BTC)
    return y


def reads_weight(module: nn.Module, x: Tensor) -> TypeGuard[nn.Linear]:
    """Whether the product of a row of x with the module's weight is what a call of the module computes."""
    return is_plain_linear(module) and adds_to_product(module, x) and module.bias is None


def adds_to_product(module: nn.Module, x: Tensor) -> TypeGuard[nn.Linear]:
    """Whether a call of the module computes that product, plus the bias if there is one."""
    if type(module) not in (nn.Linear, GateLinear) or not is_plain(module):
        return False
    assert isinstance(module, nn.Linear)
    return module.weight.dtype == x.dtype and module.weight.shape[1] <= gemv.MAX_WIDTH


def _with_bias(product: Tensor, linear: nn.Linear) -> Tensor:
    """Return what a call of a `GateLinear` returns, from the product rounded to its dtype."""
    y = product.to(state_dtype(product.dtype))
    return y if linear.bias is None else y + linear.bias.to(y.dtype)


def _first_map(module: nn.Module, x: Tensor) -> nn.Linear | None:
    if type(module) is nn.Sequential and len(module) == 2 and is_plain(module) and is_plain_linear(module[1]):
        module = module[0]
    return module if adds_to_product(module, x) else None
