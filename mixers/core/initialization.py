"""Initialisation of every parameter and buffer of a module, also after `torch.device("meta")` and `to_empty`."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

Built = TypeVar("Built", bound=nn.Module)


@torch.no_grad()
def init_weights(module: nn.Module) -> None:
    """Call `reset_parameters` of every submodule: children before their parent, siblings in the order of registration.

    A constructor that creates its submodules in the order in which it registers them, and then calls
    `self.reset_parameters()`, draws random numbers in the same order. The same seed then gives the same weights as
    building the module does.

    Raises: TypeError, if a submodule registers parameters or buffers but has no `reset_parameters`.
    """
    for submodule in _children_first(module, set()):
        reset = getattr(submodule, "reset_parameters", None)
        if reset is not None:
            reset()
        elif [*submodule.parameters(recurse=False), *submodule.buffers(recurse=False)]:
            raise TypeError(
                f"{type(submodule).__name__} has parameters or buffers, so it needs a method reset_parameters() that "
                "initialises all of them"
            )


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


def _children_first(module: nn.Module, visited: set[nn.Module]) -> Iterator[nn.Module]:
    if module in visited:
        return
    visited.add(module)
    for child in module.children():
        yield from _children_first(child, visited)
    yield module
