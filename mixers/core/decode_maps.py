"""Linear maps of the input of a decode step, computed together where a kernel can read their weights.

B batch, D width
"""

from collections.abc import Mapping
from typing import TypeGuard

from torch import Tensor, nn

from deltazoo.backends.ops import gemv
from deltazoo.backends.ops.gemv import Norm
from deltazoo.backends.ops.rms_norm import rms_norm
from deltazoo.backends.torch_ext.plain_module import is_plain, is_plain_linear


def apply_maps(x_B1D: Tensor, maps: Mapping[str, nn.Module], norm: Norm | None = None) -> dict[str, Tensor]:
    """Apply each map to x, or to its norm.

    Plain linear maps without bias, and the first ones of maps of low rank, are one product on a GPU. Other modules are
    called.
    """
    first: dict[str, nn.Linear] = {}
    for name, module in maps.items():
        linear = _first_map(module, x_B1D)
        if linear is not None:
            first[name] = linear
    results: dict[str, Tensor] = {}
    if first and not gemv.refusals(x_B1D):
        products = gemv.products(x_B1D, [linear.weight for linear in first.values()], norm)
        for name, product in zip(first, products, strict=True):
            module = maps[name]
            results[name] = product if module is first[name] else apply_map(product, module[1])  # type: ignore[index]
    if len(results) < len(maps):
        normed_B1D = x_B1D if norm is None else rms_norm(x_B1D, norm.weight, norm.eps)
        for name, module in maps.items():
            if name not in results:
                results[name] = module(normed_B1D)
    return results


def apply_map(x: Tensor, module: nn.Module) -> Tensor:
    """Apply one map."""
    if reads_weight(module, x) and not gemv.refusals(x):
        return gemv.products(x, [module.weight])[0]
    y: Tensor = module(x)
    return y


def reads_weight(module: nn.Module, x: Tensor) -> TypeGuard[nn.Linear]:
    """Whether the product of a row of x with the module's weight is what a call of the module computes."""
    if not is_plain_linear(module) or module.bias is not None or module.weight.dtype != x.dtype:
        return False
    return module.weight.shape[1] <= gemv.MAX_WIDTH


def _first_map(module: nn.Module, x: Tensor) -> nn.Linear | None:
    if type(module) is nn.Sequential and len(module) == 2 and is_plain(module) and is_plain_linear(module[1]):
        module = module[0]
    return module if reads_weight(module, x) else None
