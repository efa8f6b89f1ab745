"""Compile a model layer by layer: equal layers share one compiled graph, so compile time does not grow with depth."""

import itertools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

from deltazoo.blocks.layer import Layer, LayerSpec
from deltazoo.blocks.stack import LanguageModel

_number = itertools.count()


def compile_layers(model: LanguageModel, compiler: str | Callable[..., Any] = "inductor") -> LanguageModel:
    """Run every layer under torch.compile(fullgraph=True), once compiled for each kind of layer; return the model.

    Embedding, last norm and head stay as they are: little is left to fuse there. Parameters and state dict do
    not change.

    Args: compiler: what torch.compile calls its backend.
    """
    compiled: dict[LayerSpec, Callable[..., object]] = {}
    for spec, layer in zip(model.spec.expand(), model.stack.layers, strict=True):
        if spec not in compiled:
            compiled[spec] = torch.compile(_own(Layer.forward), fullgraph=True, backend=compiler)
        vars(layer)["forward"] = MethodType(compiled[spec], layer)
    return model


def _own(method: Callable[..., object]) -> FunctionType:
    # torch.compile counts recompilations by code object, and remembers by name which numbers changed between calls:
    # a renamed copy keeps each kind of layer, of each model, to itself.
    assert isinstance(method, FunctionType)
    name = f"layer_{next(_number)}"
    return FunctionType(method.__code__.replace(co_name=name), method.__globals__, name, method.__defaults__)
