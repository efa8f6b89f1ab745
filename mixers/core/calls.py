"""Calls of the parts of a mixer, from which FSDP2 casts activations only."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deltazoo.mixers.core.named_tensors import NamedTensors

_WIDE_OPERANDS = ("log_decay", "step", "rate", "beta", "erase", "write")  # may be float32 beside 16-bit q, k and v


def call_part(part: nn.Module, *arguments: Any) -> Any:
    """Call a part with the arguments (..., state, context), and keep the dtype of gates and states.

    FSDP2 with mixed precision casts every floating-point argument of a module that `fully_shard` wraps. A decay, or the
    logarithm of a running maximum, that is rounded to bfloat16 makes the results of a recurrence wrong.
    """
    if torch.compiler.is_compiling() or not _is_sharded(part):
        return part(*arguments)
    *others, state, context = arguments
    hidden = [_map_operands(_hide, argument) for argument in others]
    with part.register_forward_pre_hook(_show_arguments):  # it runs after the hook of FSDP2, which is the first one
        return part(*hidden, _hide(state), context)


def _is_sharded(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and bool(module._forward_pre_hooks) and isinstance(module, fsdp.FSDPModule)


def _show_arguments(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    *others, state, context = arguments
    return *(_map_operands(_show, argument) for argument in others), _show(state), context


def _map_operands(function: Callable[[Any], Any], argument: Any) -> Any:
    """Apply a function to the wide operands in `UpdateInputs`, also in the fields of `OutputArguments`."""
    if isinstance(argument, Tensor) or not hasattr(argument, "_fields"):
        return argument
    wide = {name: function(getattr(argument, name)) for name in _WIDE_OPERANDS if name in argument._fields}
    rest = {name: _map_operands(function, value) for name, value in argument._asdict().items() if name not in wide}
    return type(argument)(**rest, **wide)


def _hide(tensors: Any) -> Any:
    return None if tensors is None else NamedTensors({"hidden": tensors})


def _show(hidden: Any) -> Any:
    return None if hidden is None else hidden["hidden"]
