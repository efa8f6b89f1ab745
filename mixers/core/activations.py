"""Device and dtype of a module's activations, also if its parameters are quantised, sharded or offloaded."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain

import torch
from torch import Tensor, nn

from deltazoo.backends.torch_ext.modes import fake_mode_of
from deltazoo.backends.update.check import FLOAT_DTYPES


def activation_like(*modules: nn.Module) -> Tensor:
    """Return an empty plain tensor with the device and dtype of the modules' activations.

    States are made from it and never from a parameter, whose dtype and class may be those of a packed, sharded or
    offloaded weight.

    dtype: that of the first parameter in float64, float32, bfloat16 or float16, or else of the first such buffer. If
        there is none, as in attention whose maps are all quantised, torch's default dtype.
    device: the execution device of a module that `accelerate` offloads; otherwise that of the first parameter or
        buffer (for a DTensor that of its mesh), or torch's default device.
    """
    parameters = list(chain.from_iterable(module.parameters() for module in modules))
    tensors = [*parameters, *chain.from_iterable(module.buffers() for module in modules)]
    dtype = next((x.dtype for x in tensors if x.dtype in FLOAT_DTYPES), torch.get_default_dtype())
    device = next(_execution_devices(modules), None)
    if device is None and tensors:
        device = compute_device(tensors[0])
    with fake_mode_of(tensors[0]) if tensors else nullcontext():
        return torch.empty(0, device=device, dtype=dtype)


def compute_device(tensor: Tensor) -> torch.device:
    """Return the device where a parameter is used: FSDP2 may keep the shards of a CUDA mesh on the CPU."""
    mesh = getattr(tensor, "device_mesh", None)
    return tensor.device if mesh is None or mesh.device_type == tensor.device.type else torch.device(mesh.device_type)


def _execution_devices(modules: tuple[nn.Module, ...]) -> Iterator[torch.device]:
    """Yield the devices to which accelerate's hooks move weights and inputs before a call."""
    for module in chain.from_iterable(module.modules() for module in modules):
        hook = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", [hook]):
            device = getattr(part, "execution_device", None)
            if device is not None:
                yield torch.device(device)
