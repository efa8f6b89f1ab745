"""Mixer configs to plain data and back, tagged with the mixer's name."""

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from deltazoo.backends import registry
from deltazoo.backends.errors import ConfigError, PluginError
from deltazoo.mixers.core.mixer import MixerConfig


def dump(config: MixerConfig) -> dict[str, Any]:
    """Write a config as plain data that JSON and YAML can hold: `{"mixer": name, field: value, ...}`.

    A config whose class is not installed under its name is tagged "module:Class", so that `parse` finds it.
    """
    return {"mixer": _tag(type(config)), **config.model_dump(mode="json")}


def parse(data: Mapping[str, Any] | MixerConfig) -> MixerConfig:
    """Read a config back from what `dump` wrote, or from YAML; fields left out have their defaults.

    Args: data: `{"mixer": name, field: value, ...}`; a config passes through.
    Raises: ConfigError, naming the nearest field where one is unknown; UnknownNameError; PluginError.
    """
    if isinstance(data, MixerConfig):
        return data
    if not isinstance(data, Mapping):
        raise ConfigError(f"a mixer must be a mapping with the key 'mixer', got {data!r}")
    fields = dict(data)
    name = fields.pop("mixer", None)
    if not isinstance(name, str):
        got = "no such key" if name is None else repr(name)
        raise ConfigError(f"a mixer needs the key 'mixer' with a registered name, got {got} in {dict(data)!r}")
    kind = config_class(name)
    for field in fields:
        if field not in kind.model_fields:
            raise ConfigError(_unknown_field(name, field, kind))
    try:
        return kind(**fields)
    except ValidationError as error:
        raise ConfigError(_sentences(name, error)) from error


def config_class(name: str) -> type[MixerConfig]:
    """Find the config class that a name stands for: a registered name or "module:Class".

    Raises: UnknownNameError; DuplicateNameError; PluginError, where it is not a `MixerConfig`.
    """
    found = registry.load(registry.MIXERS, name)
    if not (isinstance(found, type) and issubclass(found, MixerConfig)):
        raise PluginError(f"mixer {name!r} must be a subclass of deltazoo.MixerConfig, got {found!r}")
    return found


def _tag(kind: type[MixerConfig]) -> str:
    if kind.name in registry.names(registry.MIXERS) and registry.load(registry.MIXERS, kind.name) is kind:
        return kind.name
    return f"{kind.__module__}:{kind.__qualname__}"


def _unknown_field(name: str, field: object, kind: type[MixerConfig]) -> str:
    known = list(kind.model_fields)
    near = difflib.get_close_matches(str(field), known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"mixer {name!r} has no field {field!r}{hint} It has: {', '.join(known)}."


def _sentences(name: str, error: ValidationError) -> str:
    """Pydantic's complaints, one sentence each."""
    lines = []
    for problem in error.errors():
        message = problem["msg"].removeprefix("Value error, ")
        where = ".".join(str(part) for part in problem["loc"])
        got = f", got {problem['input']!r}" if where else ""
        lines.append(f"{where + ': ' if where else ''}{message}{got}")
    return f"mixer {name!r}: " + "; ".join(lines)
