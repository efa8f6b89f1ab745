"""Initialisation of every parameter and buffer of a module, also after `torch.device("meta")` and `to_empty`."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from deltazoo.backends.errors import PluginError, cut


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


def no_weight_decay(module: nn.Module) -> Sequence[str]:
    """Return the parameters of a module that weight decay must skip. Raises: PluginError: they are not a tuple."""
    names = getattr(module, "no_weight_decay", ())
    if not isinstance(names, tuple | list):
        raise PluginError(f"{type(module).__name__}.no_weight_decay must be a tuple of names, got {cut(names)}")
    return names


def _children_first(module: nn.Module, visited: set[nn.Module]) -> Iterator[nn.Module]:
    if module in visited:
        return
    visited.add(module)
    for child in module.children():
        yield from _children_first(child, visited)
    yield module
