"""Changes of a stack's fields by dotted path: `layers.sliding_window.window=1024`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deltazoo.backends.io.errors import ConfigError, PatternError, cut
from deltazoo.backends.update import registry
from deltazoo.blocks.spec import document
from deltazoo.blocks.spec.parsing import MLPS, suggestion
from deltazoo.blocks.spec.pattern import names, parse
from deltazoo.mixers.core.patterns import Name

# A field of named entries, and the field of the stack with the pattern that names them.
_PATTERNS = {"layers": "pattern", "mlps": "mlp"}
# Keys that select a class. A new value resets the other keys of the mapping, which belong to the old class.
_TAGS = ("mixer", "type")


def override(data: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Apply settings to the plain data of a stack, in order; the stack is validated when it is built from the result.

    A path begins with a field of `StackSpec`. Below `layers` and `mlps` the next key is a name of the pattern, also
    that of a registered mixer or a type of MLP without an entry. Items of a list are numbered from 0. The value is
    YAML. A new value of the key `mixer` or `type` resets the other keys of its mapping to their defaults.

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
        if keys[0] in _PATTERNS and len(keys) > 1:
            data = _with_entry(data, keys)
            if keys[0] == "layers" and keys[2:3] == ["mlp"] and len(keys) > 3:
                data = _with_own_mlp(data, keys)
        elif keys[0] == "mlp" and len(keys) > 1 and _is_pattern(data["mlp"]):
            raise ConfigError(f"{path}: mlp is the pattern {cut(data['mlp'])}; set mlps.NAME.{'.'.join(keys[1:])}")
        elif keys[0] not in data:
            for field, kind in (("layers", "a layer"), ("mlps", "an MLP")):
                if keys[0] in _entries(data, field):
                    raise ConfigError(f"{path}: {keys[0]!r} is {kind}; write {field}.{setting}")
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


def _entries(data: dict[str, Any], field: str) -> dict[str, Any]:
    """Return the entries of `layers` or `mlps`, and one for each registered mixer or type that only a pattern names."""
    known = {"layers": dict.fromkeys(registry.names(registry.MIXERS), "mixer"), "mlps": dict.fromkeys(MLPS, "type")}
    used = [name.name for name in _pattern_names(data, field)]
    return {name: {known[field][name]: name} for name in used if name in known[field]} | data[field]


def _with_entry(data: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """Add the entry that is set, if only the pattern names it.

    Raises: ConfigError: there is no such entry, or the pattern sets the field for a use of it.
    """
    (field, name), path = keys[:2], ".".join(keys)
    if field == "mlps" and not _is_pattern(data["mlp"]):
        raise ConfigError(f"{path}: mlp is not a pattern; set it first, such as mlp='dense + moe'")
    entries, used = _entries(data, field), _pattern_names(data, field)
    if name not in entries and name not in {term.name for term in used}:
        raise ConfigError(f"{path}: {_unknown(name, dict.fromkeys([*entries, *(term.name for term in used)]))}")
    for term in used:
        if len(keys) > 2 and term.name == name and keys[2] in dict(term.fields):
            raise ConfigError(f"{path}: the pattern sets {keys[2]!r} itself, in '{term}'; change the pattern")
    return {**data, field: {key: entry for key, entry in entries.items() if key == name or key in data[field]}}


def _with_own_mlp(data: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """Copy the stack's MLP to a layer that does not set `mlp`; the entry of a mixer cannot have one."""
    name, layer = keys[1], data["layers"].get(keys[1])
    if not isinstance(layer, Mapping) or (isinstance(layer.get("mixer"), str) and layer["mixer"] != "none"):
        return data
    if "mlp" not in layer and _is_pattern(data["mlp"]):
        path, rest = ".".join(keys), ".".join(keys[3:])
        raise ConfigError(f"{path}: the layer has its MLP from the pattern {cut(data['mlp'])}; set mlps.NAME.{rest}")
    return {**data, "layers": {**data["layers"], name: {"mlp": data["mlp"], **layer}}}


def _is_pattern(mlp: object) -> bool:
    return isinstance(mlp, str) and mlp != "none"


def _pattern_names(data: dict[str, Any], field: str) -> list[Name]:
    """Return the names in the pattern whose entries are in `layers` or `mlps`."""
    pattern = data[_PATTERNS[field]]
    try:
        return list(names(parse(pattern))) if isinstance(pattern, str) else []
    except PatternError:
        return []  # StackSpec reports the error
