"""Queries about torch's active modes and transforms, for which torch 2.11 to 2.13 have no public function."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def functorch_is_active() -> bool:
    """Whether a torch.func transform (grad, vmap, jvp, functionalize, ...) is running."""
    return bool(torch._C._are_functorch_transforms_active())


def transform_is_active() -> bool:
    """Whether eager code runs under a torch.func transform or with forward-mode tangents: kernels have no rules."""
    return not torch.compiler.is_compiling() and (functorch_is_active() or forward_ad._current_level >= 0)


def have_tangents(tensors: Iterable[object]) -> bool:
    """Whether any of these tensors has a forward-mode tangent. An operator without a rule would discard it."""
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def is_exporting() -> bool:
    """Whether torch.export is tracing. In Dynamo of torch 2.11 the public function is also true under torch.compile."""
    return torch.compiler._is_exporting_flag


def fake_mode_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Return the mode of a fake tensor, in which new tensors are fake too; for another tensor an empty context."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else nullcontext()


def dispatch_mode_is_active() -> bool:
    """Whether a dispatch mode must see every operator, such as FlopCounterMode, FakeTensorMode and that of make_fx.

    torch.compile does not run under these. It does under modes that ignore compiled code, such as those of selective
    checkpointing.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = _get_current_dispatch_mode_stack()
    return any(mode.is_infra_mode() or not mode.ignore_compile_internals() for mode in modes)


def function_mode_is_active() -> bool:
    """Whether a torch function mode must see the calls of torch's functions; a default device is a mode, too."""
    modes = range(torch._C._len_torch_function_stack())
    return any(not isinstance(torch._C._get_function_stack_at(i), DeviceContext) for i in modes)


def values_are_readable(*tensors: Tensor | None) -> bool:
    """Whether Python code may read the values of these tensors.

    It may on the CPU. It may not read fake tensors, nor any tensor while torch.compile traces, or while a dispatch
    mode or a torch.func transform is active.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or functorch_is_active():
        return False
    return all(x is None or (x.device.type == "cpu" and not isinstance(x, FakeTensor)) for x in tensors)
