"""Reading and writing of plain data as YAML 1.2 and JSON files. A repeated key is an error.

`deltazoo.backends.io.yaml_text` describes the differences from PyYAML's defaults.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from deltazoo.backends.io import yaml_text
from deltazoo.backends.io.errors import ConfigError, cut, file_errors
from deltazoo.backends.io.output_path import output_path

SUFFIXES = (".yaml", ".yml", ".json")


def read(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML or JSON file; the suffix selects the format.

    Raises: ConfigError: the file cannot be read, has another suffix, or does not hold a mapping.
    """
    _check_suffix(path)
    try:
        with file_errors("read", path):
            text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: it must be text in UTF-8: {error.reason}") from error
    return parse(text, path.suffix, str(path))


def parse(text: str, suffix: str, source: str) -> dict[str, Any]:
    """Parse a mapping from text. `source` appears in error messages."""
    try:
        data = _load_json(text) if suffix == ".json" else yaml_text.load(text)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:  # ValueError: JSON, or an integer of too many digits
        raise ConfigError(f"{source} cannot be read: {error}") from error
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{source} must contain a mapping with names as keys, got {cut(data)}")
    return data


def parse_value(text: str, source: str) -> Any:
    """Parse any YAML value: `1e-5` is a number, `off` and `swiglu` are strings. `source` appears in error messages."""
    try:
        return yaml_text.load(text)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{source}: the value is not YAML: {error}") from error


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Write a mapping as YAML or JSON; the suffix selects the format. Raises: ConfigError: it cannot be written."""
    _check_suffix(path)
    text = json.dumps(data, indent=2) + "\n" if path.suffix == ".json" else yaml_text.dump(data)
    with file_errors("write", path):
        output_path(path).write_text(text, encoding="utf-8")


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"a configuration file must end in {', '.join(SUFFIXES)}, got {cut(str(path))}")


def _load_json(text: str) -> Any:
    data = json.loads(text, object_pairs_hook=_mapping)
    level, below = 0, [data]
    while below := [item for value in below if isinstance(value, dict | list) for item in _items(value)]:
        level += 1
        if level > yaml_text.MAX_LEVELS:
            raise ConfigError(f"values must be nested at most {yaml_text.MAX_LEVELS} levels deep, got more")
    return data


def _items(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise ConfigError(f"the key {cut(key)} is repeated")
        data[key] = value
    return data
