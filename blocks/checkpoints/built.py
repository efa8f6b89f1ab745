"""Whether two stacks describe the same model, although one of them spells out defaults of the other."""

from collections.abc import Iterator
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

from deltazoo.backends.io.errors import cut
from deltazoo.blocks.model.mlp import HiddenWidth

_OF_LAYERS = ("pattern", "layers", "mlp", "mlps")  # the built layers are compared
_PLAIN = (bool, int, float, str, torch.dtype)


def first_difference(spec: Any, other: Any) -> str | None:
    """Name the first setting in which the model of a `StackSpec` differs from that of another; None: they are equal."""
    for field in type(spec).model_fields:
        if field not in _OF_LAYERS and getattr(spec, field) != getattr(other, field):
            return f"{field} must be {cut(getattr(other, field))}, got {cut(getattr(spec, field))}"
    with torch.device("meta"):
        ours, theirs = (dict(_settings(one.build())) for one in (spec, other))
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if name not in theirs:
            return f"{name} must be none, got {cut(ours[name])}"
        if name not in ours:
            return f"{name} must be {cut(theirs[name])}, got none"
        if ours[name] != theirs[name]:
            return f"{name} must be {cut(theirs[name])}, got {cut(ours[name])}"
    return None


def _settings(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the classes, numbers, texts, configs and shapes of all modules by name."""
    for place, module in model.named_modules():
        prefix = f"{place}." if place else ""
        if place:
            yield place, type(module).__name__
        for name, value in vars(module).items():
            if not name.startswith("_") and name not in ("training", "spec"):
                yield from _leaves(prefix + name, value)
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield f"the shape of {prefix}{name}", [*tensor.shape]


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the plain values in an attribute. The width of an MLP is in the shapes of its weights."""
    if isinstance(value, BaseModel):
        for field in type(value).model_fields:
            if not (isinstance(value, HiddenWidth) and field in HiddenWidth.model_fields):
                yield from _leaves(f"{name}.{field}", getattr(value, field))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _leaves(f"{name}.{i}", item)
    elif value is None or isinstance(value, _PLAIN):
        yield name, value
