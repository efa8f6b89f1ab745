"""The rule of a value in a config.json: it has the type of the field's default; a field without one is a size."""

import math
from collections.abc import Sequence
from typing import Any

from deltazoo.backends.io.errors import ConfigError, cut

SIZE, EPSILON = 1, 1e-6  # examples of the values of fields without a default
_MOST = 2**16  # layers and experts, of which a stack has a list
_POSITIVE = ("conv", "kernel", "head_dim", "group", "period", "interval", "multiple")  # in the names of sizes
_Rule = tuple[bool, str]


def check_value(field: str, value: Any, example: Any, least: int = 0) -> None:
    """Raise ConfigError unless a value has the type of an example. Args: least: the least integer."""
    holds, rule = _rule(field, value, example, least)
    if not holds:
        raise ConfigError(f"config.json: {field} must be {rule}, got {cut(value)}")


def check_mapping(field: str, value: Any) -> None:
    """Raise ConfigError unless a value is a mapping."""
    if not isinstance(value, dict):
        raise ConfigError(f"config.json: {field} must be a mapping, got {cut(value)}")


def _rule(field: str, value: Any, example: Any, least: int) -> _Rule:
    if isinstance(example, bool):
        return isinstance(value, bool), "true or false"
    if example == "auto":
        holds, rule = _integer(field, value, 1)
        return value == "auto" or holds, f"'auto' or {rule}"
    if isinstance(example, str):
        return isinstance(value, str), "a text"
    if isinstance(example, float):
        return _is_number(value), "a finite number"
    if isinstance(example, int):
        return _integer(field, value, least)
    if isinstance(example, Sequence):
        return _list(value, example)
    return True, ""


def _integer(field: str, value: Any, least: int) -> _Rule:
    least = max(least, int(any(word in field for word in _POSITIVE)))
    counts = ("layer" in field or "expert" in field) and not field.endswith("_size")
    most = _MOST if counts else 2**63 - 1
    rule = f"an integer of at least {least}" if type(value) is not int or value < least else f"at most {most:,}"
    return type(value) is int and least <= value <= most, rule


def _list(value: Any, example: Sequence[Any]) -> _Rule:
    """Return the rule of a list; with an example of factors, it has as many."""
    if example and isinstance(example[0], float):
        holds = isinstance(value, list) and len(value) == len(example) and all(map(_is_number, value))
        return holds, f"a list of {len(example)} finite numbers"
    return isinstance(value, list), "a list"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
