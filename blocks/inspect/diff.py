"""The fields in which two stacks differ."""

from collections.abc import Iterator, Set
from typing import Any

import yaml
from pydantic import BaseModel

from deltazoo.blocks.layer import LayerSpec
from deltazoo.blocks.spec import StackSpec
from deltazoo.mixers.core.mixer import MixerConfig


class Difference(BaseModel):
    """A field in which two stacks differ.

    Args:
        path: dotted, such as `layers.sliding_window.window`.
        a, b: the values; a value is not set if its stack has no such field. The value of a layer that only one stack
            has is its config, without the fields that have their defaults.
    """

    path: str
    a: Any = None
    b: Any = None

    def cells(self) -> list[Any]:
        """Return the row of a table: an empty cell for a field that a stack does not have."""
        return [self.path, *(flow_yaml(getattr(self, side)) if side in self.model_fields_set else "" for side in "ab")]


class StackDiff(BaseModel):
    """The differences of two stacks.

    Args: same_model: whether both describe the same model; the names of layers and the pattern's text may still differ.
    """

    same_model: bool
    differences: list[Difference]


def diff(a: StackSpec, b: StackSpec) -> StackDiff:
    """Compare two stacks field by field, in the order of their files; layers are compared by name."""
    in_both = a.layers.keys() & b.layers.keys()
    fields_a, fields_b = (_fields(spec, in_both) for spec in (a, b))
    differences = []
    for path in {**fields_a, **fields_b}:
        sides = {side: fields[path] for side, fields in (("a", fields_a), ("b", fields_b)) if path in fields}
        if len(sides) == 1 or sides["a"] != sides["b"]:
            differences.append(Difference(path=path, **sides))
    return StackDiff(same_model=a == b, differences=differences)


def _fields(spec: StackSpec, in_both: Set[str]) -> dict[str, Any]:
    """Return the values of a stack by dotted path; one value for a layer that is not in both stacks."""
    data = spec.model_dump(mode="json")
    layers = data.pop("layers")
    fields = dict(_flatten(data, ""))
    for name, layer in spec.layers.items():
        path = f"layers.{name}"
        fields |= dict(_flatten(layers[name], path)) if name in in_both else {path: without_defaults(layer)}
    return fields


def without_defaults(layer: MixerConfig | LayerSpec) -> dict[str, Any]:
    """Return the fields of a layer that differ from their defaults, in the form of a stack file."""
    if isinstance(layer, MixerConfig):
        return {"mixer": layer.name, **layer.model_dump(mode="json", exclude_defaults=True)}
    mixers = [without_defaults(config) for config in layer.mixers]
    mixer = mixers if isinstance(layer.mixer, tuple) else mixers[0] if mixers else "none"
    return {"mixer": mixer, **layer.model_dump(mode="json", exclude_defaults=True, exclude={"mixer"})}


def _flatten(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, and of lists of mappings, with their dotted paths."""
    if isinstance(data, list) and any(isinstance(item, dict) for item in data):
        data = {str(i): item for i, item in enumerate(data)}
    if not isinstance(data, dict):
        yield path, data
        return
    for key, value in data.items():
        yield from _flatten(value, f"{path}.{key}" if path else key)


def flow_yaml(value: Any) -> Any:
    """Format a mapping as YAML in one line; return other values unchanged."""
    if not isinstance(value, dict):
        return value
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000).strip()
