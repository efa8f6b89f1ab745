"""What a captured or compiled step assumes about a model: its modules, their settings, and where the weights are.

New values in the same weights do not change a fingerprint. Other modules (LoRA, quantised), hooks, training mode,
dtypes, devices and settings do. It is computed before each call, in about a millisecond for 350 modules.
"""

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from deltazoo.backends.torch_ext.devices import tf32_allowed
from deltazoo.backends.torch_ext.modes import function_mode_is_active
from deltazoo.blocks.model.compilation import is_compiled_forward
from deltazoo.blocks.model.interface import TokenModel

_SCALARS = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))
_CONTAINERS = frozenset((dict, OrderedDict, list, tuple, set, frozenset))
_OWN = frozenset(("_parameters", "_buffers", "_modules"))


class Fingerprint(NamedTuple):
    """Values to compare, and the modules and tensors whose ids are among them; an id counts while its object exists."""

    values: list[object]
    objects: list[weakref.ref[Any]]

    def matches(self, now: "Fingerprint") -> bool:
        """Whether the model has not changed between two fingerprints of it."""
        return self.values == now.values and all(reference() is not None for reference in self.objects)


def fingerprint(model: TokenModel) -> Fingerprint:
    """Return the fingerprint of a model in the present settings of torch: autocast, inference mode, tf32."""
    device = model.device.type
    values: list[object] = [torch.is_inference_mode_enabled(), tf32_allowed(), torch.is_autocast_enabled(device)]
    if values[-1]:
        values.append(torch.get_autocast_dtype(device))
    result = Fingerprint(values, [])
    for module in model.modules():
        _add_reference(module, result)
        for name, value in vars(module).items():
            if type(value) in _SCALARS:
                values.append(value)
            elif name not in _OWN and not (type(value) in _CONTAINERS and not value):
                _add(value, result)
        for tensor in itertools.chain(module._parameters.values(), module._buffers.values()):
            if tensor is not None:
                _add_tensor(tensor, result)
    return result


def runs_python_code(model: TokenModel) -> bool:
    """Whether a step runs Python code that is not the model's: hooks, a forward of a module's own, or a function mode.

    Modules have hooks or a forward of their own to load offloaded weights, for example. A CUDA graph would run the code
    once, and not at each step.
    """
    if function_mode_is_active() or global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks:
        return True
    return any(
        module._forward_hooks
        or module._forward_pre_hooks
        or ("forward" in vars(module) and not is_compiled_forward(vars(module)["forward"]))
        for module in model.modules()
    )


def _add(value: Any, result: Fingerprint) -> None:
    """Append the value of an attribute.

    An object that compares by identity is not kept alive, because it may refer to the model.
    """
    kind: Any = type(value)
    if isinstance(value, Tensor):
        _add_tensor(value, result)
    elif isinstance(value, MethodType) and type(value.__self__).__weakrefoffset__:
        _add_reference(value.__self__, result)
        result.values.append(value.__func__)
    elif isinstance(value, nn.Module) or (kind.__eq__ is object.__eq__ and kind.__weakrefoffset__):
        _add_reference(value, result)
    elif isinstance(value, Mapping):
        for item in itertools.chain.from_iterable(value.items()):
            _add(item, result)
        result.values.append(len(value))
    elif type(value) in _CONTAINERS:
        for item in value:
            _add(item, result)
        result.values.append(len(value))
    else:
        result.values.append(value)


def _add_tensor(tensor: Tensor, result: Fingerprint) -> None:
    _add_reference(tensor, result)
    layout = (tensor.dtype, tensor.shape, tensor.device, tensor.requires_grad, *_addresses(tensor))
    result.values.append(layout)


def _add_reference(value: Any, result: Fingerprint) -> None:
    result.values.append(id(value))
    result.objects.append(weakref.ref(value))


def _addresses(tensor: Tensor) -> list[int]:
    """Return the address of the elements, or those of the tensors that a subclass, such as a quantised one, holds."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor.data_ptr()]
    names, _ = tensor.__tensor_flatten__()
    return [address for name in names for address in _addresses(getattr(tensor, name))]
