"""Changes of a stack's fields by dotted path: `layers.sliding_window.window=1024`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deltazoo.backends import registry
from deltazoo.backends.errors import ConfigError, PatternError, cut
from deltazoo.blocks import document
from deltazoo.blocks.parsing import suggestion
from deltazoo.blocks.pattern import names, parse
from deltazoo.mixers.core.patterns import Name

# Keys that select a class. A new value resets the other keys of the mapping, which belong to the old class.
_TAGS = ("mixer", "type")


def override(data: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Apply settings to the plain data of a stack, in order; the stack is validated when it is built from the result.

    A path begins with a field of `StackSpec`. Below `layers` the next key is the name of a layer, also of a registered
    mixer that the pattern names without an entry in `layers`. Items of a list are numbered from 0. The value is YAML.
    A new value of the key `mixer` or `type` resets the other keys of its mapping to their defaults.

    Args: data: from `StackSpec.model_dump(mode="json")`; it is not changed. settings: "path=value".
    Raises: ConfigError: names the key and the nearest known one, or the pattern sets the field itself.
    """
    for setting in settings:
        path, equals, text = setting.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(
                f"a setting must be PATH=VALUE, such as layers.sliding_window.window=1024, got {cut(setting)}"
            )
        if keys[0] == "layers" and len(keys) > 1:
            data = _with_layers_of_pattern(data)
            _check_layer(keys, data)
            if keys[2:3] == ["mlp"] and len(keys) > 3:
                data = _with_own_mlp(data, keys[1])
        elif keys[0] not in data and keys[0] in _with_layers_of_pattern(data)["layers"]:
            raise ConfigError(f"{path}: {keys[0]!r} is a layer; write layers.{setting}")
        data = _set(data, keys, document.parse_value(text, setting), path)
    return data


def _set(node: Any, keys: list[str], value: Any, path: str) -> Any:
    """Return a copy of the node with the value at the keys."""
    key, rest = keys[0], keys[1:]
    if isinstance(node, list):
        if not key.isdecimal() or int(key) >= len(node):
            raise ConfigError(f"{path}: {key!r} must be an index from 0 to {len(node) - 1}")
        items = list(node)
        items[int(key)] = _set(items[int(key)], rest, value, path) if rest else value
        return items
    if not isinstance(node, Mapping):
        raise ConfigError(f"{path}: {key!r} cannot be set in {cut(node)}, which has no fields")
    if rest:
        if key not in node:
            raise ConfigError(f"{path}: {_unknown(key, node)}")
        return {**node, key: _set(node[key], rest, value, path)}
    if key in _TAGS and isinstance(node.get(key), str) and isinstance(value, str) and value != node[key]:
        return {key: value}
    return {**node, key: value}


def _unknown(key: str, known: Iterable[str]) -> str:
    return f"{cut(key)} is unknown{suggestion(key, list(known))}"


def _with_layers_of_pattern(data: dict[str, Any]) -> dict[str, Any]:
    """Add an entry to `layers` for each registered mixer that only the pattern names."""
    mixers = registry.names(registry.MIXERS)
    used = {name.name: {"mixer": name.name} for name in _pattern_names(data) if name.name in mixers}
    return {**data, "layers": used | data["layers"]}


def _with_own_mlp(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Copy the stack's MLP to a layer that does not set `mlp`; the entry of a mixer cannot have one."""
    layer = data["layers"].get(name)
    if not isinstance(layer, Mapping) or (isinstance(layer.get("mixer"), str) and layer["mixer"] != "none"):
        return data
    return {**data, "layers": {**data["layers"], name: {"mlp": data["mlp"], **layer}}}


def _check_layer(keys: list[str], data: dict[str, Any]) -> None:
    """Refuse a layer that does not exist, and a field that the pattern sets for a use of the layer."""
    used, path = _pattern_names(data), ".".join(keys)
    known = dict.fromkeys([*data["layers"], *(name.name for name in used)])
    if keys[1] not in known:
        raise ConfigError(f"{path}: {_unknown(keys[1], known)}")
    for name in used:
        if len(keys) > 2 and name.name == keys[1] and keys[2] in dict(name.fields):
            raise ConfigError(f"{path}: the pattern sets {keys[2]!r} itself, in '{name}'; change the pattern")


def _pattern_names(data: dict[str, Any]) -> list[Name]:
    try:
        return list(names(parse(str(data["pattern"]))))
    except PatternError:
        return []  # StackSpec reports the error
