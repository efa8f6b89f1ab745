"""Whether two stacks describe the same model, although one of them spells out defaults of the other."""

from collections.abc import Iterator
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

from deltazoo.backends.io.errors import cut
from deltazoo.blocks.model.mlp import HiddenWidth

_OF_LAYERS = ("pattern", "layers", "mlp", "mlps")  # the expanded layers are compared
_PLAIN = (bool, int, float, str, torch.dtype)


def first_difference(spec: Any, other: Any) -> str | None:
    """Name the first setting in which the model of a `StackSpec` differs from that of another; None: they are equal.

    Fields that both give must be equal. A field that is None in one of them has a default: the built models are equal
    if it is the value of the other.
    """
    ours, theirs = dict(_given(spec)), dict(_given(other))
    for name, value in ours.items():
        if value is not None and theirs.get(name) not in (None, value):
            return _must_be(name, theirs, ours)
    with torch.device("meta"):
        ours, theirs = (dict(_settings(one.build())) for one in (spec, other))
    for name in ours | theirs:
        if (name in ours, ours.get(name)) != (name in theirs, theirs.get(name)):
            return _must_be(name, theirs, ours)
    return None


def _must_be(name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    wanted, got = (cut(one[name]) if name in one else "none" for one in (theirs, ours))
    return f"{name} must be {wanted}, got {got}"


def _given(spec: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of the stack and of its layers by name."""
    for field in type(spec).model_fields:
        if field not in _OF_LAYERS:
            yield field, getattr(spec, field)
    for i, layer in enumerate(spec.expand()):
        for field in type(layer).model_fields:
            yield from _leaves(f"layer {i}: {field}", getattr(layer, field))


def _settings(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the classes, numbers, texts, configs and shapes of all modules by name."""
    for place, module in model.named_modules():
        prefix = f"{place}." if place else ""
        yield place, type(module).__name__
        for name, value in vars(module).items():
            if not name.startswith("_") and (prefix or name != "spec"):  # the model's spec may spell out defaults
                yield from _leaves(prefix + name, value)
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield f"the shape of {prefix}{name}", [*tensor.shape]


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the plain values in a value, and the classes of configs, but not an MLP's width, which its weights show."""
    if isinstance(value, BaseModel):
        yield name, type(value).__name__
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
