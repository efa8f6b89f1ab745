"""Layer-by-layer compilation: equal layers share one compiled graph, so compile time does not grow with depth."""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, MethodType
from typing import Any

import torch

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.dispatch import requested_backend, use_backend
from deltazoo.blocks.layer import Layer, LayerSpec
from deltazoo.blocks.stack import LanguageModel
from deltazoo.mixers.core.delta_mixer import Update
from deltazoo.mixers.parts.norms import RMSNorm

_counter = itertools.count()


def compile_layers(model: LanguageModel, compiler: str | Callable[..., Any] = "inductor") -> LanguageModel:
    """Compile every layer, once for each distinct LayerSpec, and the last norm, with fullgraph=True; return the model.

    The embedding and the head stay eager, because they offer nothing to fuse. The parameters and the state dict do not
    change.

    Args: compiler: the `backend` argument of torch.compile.
    """
    compiled: dict[LayerSpec, Callable[..., object]] = {}
    for spec, layer in zip(model.spec.expand(), model.stack.layers, strict=True):
        if spec not in compiled:
            compiled[spec] = _compile_method(Layer.forward, compiler)
        vars(layer)["forward"] = MethodType(compiled[spec], layer)
    vars(model.stack.norm)["forward"] = MethodType(_compile_method(RMSNorm.forward, compiler), model.stack.norm)
    return model


def check_updates(model: LanguageModel, dtype: torch.dtype) -> None:
    """Raise UnsupportedError, with the reasons, if a backend cannot train an update of the model in this dtype.

    In a compiled graph the same error would be a long traceback.
    """
    for update in model.modules():
        if isinstance(update, Update):
            update.bound.backend_for(update.meta(model.device.type, dtype, grad=True))


def run_eagerly(device: torch.device | str) -> AbstractContextManager[None]:
    """Return a context in which modules are built with updates that torch.compile does not compile.

    Their backend is `CompileBackend(compiled=False)`, unless the caller, the stack or an enclosing `use_backend` names
    one. On CUDA the context changes nothing, because `compile` is not the default there.
    """
    if str(device).startswith("cuda") or requested_backend(None) is not None:
        return nullcontext()
    return use_backend(CompileBackend(compiled=False))


def _compile_method(method: Callable[..., object], compiler: str | Callable[..., Any]) -> Callable[..., object]:
    """Compile a method. A traced caller gets the method itself, because torch 2.11 cannot trace the compiled one."""
    compiled = torch.compile(_renamed_copy(method), fullgraph=True, backend=compiler)

    def forward(*arguments: Any, **keywords: Any) -> object:
        return (method if torch.compiler.is_compiling() else compiled)(*arguments, **keywords)

    return forward


def _renamed_copy(method: Callable[..., object]) -> FunctionType:
    """Copy a method under a new name, so that layer specs and models do not share Dynamo's caches.

    Dynamo limits recompilations per code object and records by function name which sizes changed between calls.
    """
    assert isinstance(method, FunctionType)
    name = f"layer_{next(_counter)}"
    return FunctionType(method.__code__.replace(co_name=name), method.__globals__, name, method.__defaults__)
