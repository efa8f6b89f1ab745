"""Nested mappings by paths such as "optimizer.learning_rate"."""

from collections.abc import Mapping
from typing import Any

_MAPPINGS = ("rates", "mixture")  # settings that are mappings


def merged(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested data with changes; a key of a change may be a path."""
    result = dict(data)
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        old = result.get(name)
        if rest:
            result[name] = merged(old if isinstance(old, Mapping) else {}, {rest: value})
        elif isinstance(value, Mapping) and isinstance(old, Mapping) and name not in _MAPPINGS:
            result[name] = merged(old, value)
        else:
            result[name] = value
    return result


def flat(data: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested data by paths."""
    result: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Mapping) and name not in _MAPPINGS:
            result |= flat(value, f"{path}{name}.")
        else:
            result[path + name] = value
    return result
