"""Plain data in YAML and JSON files, read so that a mistake is a sentence and `off` is a word.

YAML follows its version 1.2 where PyYAML follows 1.1: only true and false are booleans, 1e-5 is a number, 010 is ten,
and a key that stands twice is an error.
"""

import json
import re
import reprlib
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from deltazoo.backends.errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".json")


def read(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML or JSON file, by its suffix.

    Raises: ConfigError: no such file, another suffix, not readable, or not a mapping.
    """
    _check_suffix(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return parse(text, path.suffix, str(path))


def parse(text: str, suffix: str, where: str) -> dict[str, Any]:
    """Read a mapping from text; `where` names its source in errors."""
    try:
        data = json.loads(text, object_pairs_hook=_pairs) if suffix == ".json" else yaml.load(text, _Loader)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except (json.JSONDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{where} must hold a mapping with names as keys, got {reprlib.repr(data)}")
    return data


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Write a mapping as YAML or JSON, by the path's suffix."""
    _check_suffix(path)
    text = json.dumps(data, indent=2) + "\n" if path.suffix == ".json" else yaml.safe_dump(data, sort_keys=False)
    path.write_text(text, encoding="utf-8")


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"a configuration file must end in {', '.join(SUFFIXES)}, got {str(path)!r}")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for i, (key, _) in enumerate(pairs):
        if any(key == earlier for earlier, _ in pairs[:i]):
            raise ConfigError(f"the key {key!r} stands twice")
    return dict(pairs)


def _whole(text: str) -> int:
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


_OF_1_1 = ("bool", "int", "float", "timestamp")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2 and without repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"a key must be a name, got a list or a mapping in line {key.start_mark.line + 1}")
            if key.value in seen:
                raise ConfigError(f"the key {key.value!r} stands twice, again in line {key.start_mark.line + 1}")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.split(":")[-1] not in _OF_1_1]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^([-+]?\d+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: _whole(node.value))
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false)$"), list("tf"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\.\d+|\d+\.\d*|\d+(?=[eE]))([eE][-+]?\d+)?$"), list("-+.0123456789")
)
