"""Whether the weights of a module may be read instead of calling it. torch has no public function that lists hooks."""

from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

_PLAIN = (nn.Parameter, Tensor)  # torch.func.functional_call replaces parameters by tensors


def holds_plain_weights(module: nn.Module) -> bool:
    """Whether the module's parameters hold the values that it uses.

    It is False with a parameter of another class (packed and sharded weights), a forward of the instance (offloaded
    weights), or a parametrisation.
    """
    if "forward" in vars(module) or "parametrizations" in module._modules:
        return False
    return all(parameter is None or type(parameter) in _PLAIN for parameter in module._parameters.values())


def is_plain(module: nn.Module) -> bool:
    """Whether a call of the module runs only the forward of its class, on parameters that hold the values it uses.

    It is False if not `holds_plain_weights`, or with a hook of the module. The class is not checked. Hooks of all
    modules count only while no gradients are recorded: activation checkpointing must recompute the same operations,
    although FlopCounterMode around the backward registers such hooks.
    """
    if module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks:
        return False
    if not torch.is_grad_enabled() and (torch_module._global_forward_pre_hooks or torch_module._global_forward_hooks):
        return False
    return holds_plain_weights(module)


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the module is exactly an nn.Linear whose weight and bias may be read, see `is_plain`."""
    return type(module) is nn.Linear and is_plain(module)
