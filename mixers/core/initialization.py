"""Initialisation of every parameter and buffer of a module, also after `torch.device("meta")` and `to_empty`.

Weights of 16 bits are drawn in float32 and then rounded, in an ordinary build and by `init_weights`. The logarithm of a
number that was rounded to bfloat16 or float16 may be infinite, and some draws exist in float32 alone.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from deltazoo.backends.io.errors import PluginError, cut

Built = TypeVar("Built", bound=nn.Module)
Module_ = TypeVar("Module_", bound=nn.Module)
Arguments = ParamSpec("Arguments")


@torch.no_grad()
def init_weights(module: nn.Module) -> None:
    """Call `reset_parameters` of every submodule: children before their parent, siblings in the order of registration.

    A constructor that creates its submodules in the order in which it registers them, and then calls
    `self.reset_parameters()`, draws random numbers in the same order. The same seed then gives the same weights as
    building the module does. Tensors of 16 bits get the float32 draw of that seed, rounded.

    Raises: TypeError, if a submodule registers parameters or buffers but has no `reset_parameters`.
    """
    with _wide_default_dtype(), _in_float32(module):
        for submodule in _children_first(module, set()):
            reset = getattr(submodule, "reset_parameters", None)
            if reset is not None:
                reset()
            elif [*submodule.parameters(recurse=False), *submodule.buffers(recurse=False)]:
                raise TypeError(
                    f"{type(submodule).__name__} has parameters or buffers, so it needs a method reset_parameters() "
                    "that initialises all of them"
                )


@torch.no_grad()
def fill_normal(x: Tensor, std: float = 1.0) -> None:
    """Fill x with draws from N(0, std^2).

    A meta tensor has no values and is left alone: filling it would make torch import its compiler, which takes 2 s.
    """
    if not x.is_meta:
        x.normal_(std=std)


def fills_values(reset_parameters: Callable[[Module_], None]) -> Callable[[Module_], None]:
    """Decorate a `reset_parameters` so that it leaves a module on the meta device alone, as `fill_normal` does."""

    @functools.wraps(reset_parameters)
    @torch.no_grad()
    def reset_unless_meta(module: Module_) -> None:
        if not any(parameter.is_meta for parameter in module.parameters()):
            reset_parameters(module)

    return reset_unless_meta


@torch.no_grad()
def fill_log_uniform(x: Tensor, low: float, high: float) -> None:
    """Fill x with log u, u uniform in [low, high] and at least 2^-24, because a draw may be 0. Skips meta tensors."""
    if not x.is_meta:
        x.uniform_(low, high).clamp_(min=2**-24).log_()


@torch.no_grad()
def fill_log_range(x: Tensor) -> None:
    """Fill the last dimension of x with log 1, log 2, ... Skips meta tensors."""
    if not x.is_meta:
        x.copy_(torch.arange(1.0, x.shape[-1] + 1).log())


def drawn_in_float32(build: Callable[Arguments, Built]) -> Callable[Arguments, Built]:
    """Decorate a function that builds a module: under a default dtype of 16 bits, build in float32, then round."""

    @functools.wraps(build)
    def build_and_round(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Built:
        dtype = torch.get_default_dtype()
        with _wide_default_dtype():
            built = build(*args, **kwargs)
        return built.to(dtype) if dtype.itemsize < 4 else built

    return build_and_round


def no_weight_decay(module: nn.Module) -> Sequence[str]:
    """Return the parameters of a module that weight decay must skip. Raises: PluginError: they are not a tuple."""
    names = getattr(module, "no_weight_decay", ())
    if not isinstance(names, tuple | list):
        raise PluginError(f"{type(module).__name__}.no_weight_decay must be a tuple of names, got {cut(names)}")
    return names


def build_in_any_order(build: Callable[[], Built]) -> Built:
    """Build a module whose weights do not depend on the order in which its submodules are created.

    If that order is not the one in which `init_weights` draws, the weights are drawn again by `init_weights`, from the
    random state before the build. Then too the same seed gives the weights of a build and of `init_weights`.

    Raises: TypeError, as for `init_weights`.
    """
    created: dict[nn.Module, None] = {}

    def record(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        created[module] = None

    random_state = torch.get_rng_state()
    cuda_random_state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    hook = register_module_parameter_registration_hook(record)
    try:
        built = build()
    finally:
        hook.remove()
    order = [module for module in _children_first(built, set()) if module in created]
    if order != [module for module in created if module in set(order)]:
        torch.set_rng_state(random_state)
        if cuda_random_state is not None:
            torch.cuda.set_rng_state(cuda_random_state)
        init_weights(built)
    return built


@contextlib.contextmanager
def _wide_default_dtype() -> Iterator[None]:
    """Replace a default dtype of 16 bits by float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if before.itemsize < 4 else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _in_float32(module: nn.Module) -> Iterator[None]:
    """Replace the parameters and buffers of less than 32 bits by float32 tensors, and round these into them."""
    wide: dict[Tensor, Tensor] = {}  # shared tensors occur once
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for submodule in module.modules():
        for own in (submodule._parameters, submodule._buffers):
            for name, tensor in own.items():
                if tensor is not None and tensor.is_floating_point() and tensor.dtype.itemsize < 4:
                    places.append((own, name, tensor))
                    if tensor not in wide:
                        values = torch.empty_like(tensor, dtype=torch.float32)
                        wide[tensor] = nn.Parameter(values) if isinstance(tensor, nn.Parameter) else values
    try:
        for tensors, name, tensor in places:
            tensors[name] = wide[tensor]
        yield
    finally:
        for tensors, name, tensor in places:
            tensors[name] = tensor
    for tensor, values in wide.items():
        tensor.copy_(values)


def _children_first(module: nn.Module, visited: set[nn.Module]) -> Iterator[nn.Module]:
    if module in visited:
        return
    visited.add(module)
    for child in module.children():
        yield from _children_first(child, visited)
    yield module
