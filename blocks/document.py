"""Reading and writing of plain data as YAML 1.2 and JSON files.

PyYAML implements YAML 1.1. This loader follows 1.2: only true and false are booleans (`off` is a string), 1e-5 is
a number, 010 is ten. A repeated key is an error.
"""

import json
import re
import reprlib
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from deltazoo.backends.errors import ConfigError
from deltazoo.backends.output_path import output_path

SUFFIXES = (".yaml", ".yml", ".json")


def read(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML or JSON file; the suffix selects the format.

    Raises: ConfigError: the file cannot be read, has another suffix, or does not hold a mapping.
    """
    _check_suffix(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return parse(text, path.suffix, str(path))


def parse(text: str, suffix: str, source: str) -> dict[str, Any]:
    """Parse a mapping from text. `source` appears in error messages."""
    try:
        data = json.loads(text, object_pairs_hook=_mapping) if suffix == ".json" else yaml.load(text, _Loader)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    except (json.JSONDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{source} cannot be read: {error}") from error
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{source} must contain a mapping with names as keys, got {reprlib.repr(data)}")
    return data


def parse_value(text: str, source: str) -> Any:
    """Parse any YAML value: `1e-5` is a number, `off` and `swiglu` are strings. `source` appears in error messages."""
    try:
        return yaml.load(text, _Loader)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{source}: the value is not YAML: {error}") from error


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Write a mapping as YAML or JSON; the suffix selects the format."""
    _check_suffix(path)
    text = json.dumps(data, indent=2) + "\n" if path.suffix == ".json" else yaml.safe_dump(data, sort_keys=False)
    output_path(path).write_text(text, encoding="utf-8")


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"a configuration file must end in {', '.join(SUFFIXES)}, got {str(path)!r}")


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for i, (key, _) in enumerate(pairs):
        if any(key == earlier for earlier, _ in pairs[:i]):
            raise ConfigError(f"the key {key!r} is repeated")
    return dict(pairs)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalar types of YAML 1.2, which refuses repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"a key must be a name, got a list or a mapping in line {line}")
            if key.value in keys:
                raise ConfigError(f"the key {key.value!r} is repeated in line {line}")
            keys.add(key.value)
        return super().construct_mapping(node, deep)


_YAML_1_1_TYPES = ("bool", "int", "float", "timestamp")

_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.split(":")[-1] not in _YAML_1_1_TYPES]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^([-+]?\d+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: _integer(node.value))
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false)$"), list("tf"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\.\d+|\d+\.\d*|\d+(?=[eE]))([eE][-+]?\d+)?$"), list("-+.0123456789")
)


def _integer(text: str) -> int:
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)
