"""The fields in which two stacks differ."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from deltazoo.backends.io.yaml_text import dump_inline
from deltazoo.blocks.spec.parsing import MlpConfig, changed_mlp_fields
from deltazoo.blocks.spec.stack_spec import StackSpec


class Difference(BaseModel):
    """A field in which two stacks differ.

    Args:
        path: dotted, such as `layers.sliding_window.window`.
        a, b: the values; a value is not set if its stack has no such field. If only one stack has a layer or an MLP, or
            the classes of the two differ, the fields with their defaults are omitted.
    """

    path: str
    a: Any = None
    b: Any = None

    def cells(self) -> list[str]:
        """Return the row of a table, the values as YAML: an empty cell for a field that a stack does not have."""
        return [self.path, *(dump_inline(getattr(self, x)) if x in self.model_fields_set else "" for x in "ab")]


class StackDiff(BaseModel):
    """The differences of two stacks.

    Args: same_model: whether both describe the same model; the names of layers and the pattern's text may still differ.
    """

    same_model: bool
    differences: list[Difference]


def diff(a: StackSpec, b: StackSpec) -> StackDiff:
    """Compare two stacks field by field, in the order of their files; layers and MLPs are compared by name."""
    fields_a, fields_b = _fields(a, b), _fields(b, a)
    differences = []
    for path in {**fields_a, **fields_b}:
        sides = {side: fields[path] for side, fields in (("a", fields_a), ("b", fields_b)) if path in fields}
        if len(sides) == 1 or sides["a"] != sides["b"]:
            differences.append(Difference(path=path, **sides))
    return StackDiff(same_model=a == b, differences=differences)


def _fields(spec: StackSpec, other: StackSpec) -> dict[str, Any]:
    """Return the values of a stack by dotted path."""
    data, changed = spec.model_dump(mode="json"), spec.changed_fields()
    for field in ("layers", "mlps"):
        for name, entry in getattr(spec, field).items():
            if type(entry) is not type(getattr(other, field).get(name)):
                data[field][name] = changed[field][name]
    if isinstance(spec.mlp, MlpConfig) and type(spec.mlp) is not type(other.mlp):
        data["mlp"] = {"type": spec.mlp.type, **changed_mlp_fields(spec.mlp)}
    return dict(_flatten(data, ""))


def _flatten(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, and of lists of mappings, with their dotted paths."""
    if isinstance(data, list) and any(isinstance(item, dict) for item in data):
        data = {str(i): item for i, item in enumerate(data)}
    if not isinstance(data, dict):
        yield path, data
        return
    for key, value in data.items():
        yield from _flatten(value, f"{path}.{key}" if path else key)
