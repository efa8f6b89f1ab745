"""Conversion of mixer configs to plain data and back, tagged with the mixer's name."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from deltazoo.backends.io.errors import ConfigError, PluginError, cut, nearest
from deltazoo.backends.io.frozen_config import changed_fields, describe_errors
from deltazoo.backends.update import registry
from deltazoo.mixers.core.mixer import MixerConfig


def dump(config: MixerConfig) -> dict[str, Any]:
    """Convert a config to plain data for JSON or YAML: `{"mixer": name, field: value, ...}`.

    The tag of a config whose class is not registered under its name is "module:Class". `parse` reads such data only
    with trust=True.
    """
    return {"mixer": _tag(type(config)), **config.model_dump(mode="json")}


def dump_changed(config: MixerConfig) -> dict[str, Any]:
    """Convert a config to plain data as `dump` does, without the fields that have their defaults."""
    changed = changed_fields(config)
    fields = config.model_dump(mode="json", include={*changed})
    nested = {name: dump_changed(value) for name, value in changed.items() if isinstance(value, MixerConfig)}
    return {"mixer": _tag(type(config)), **fields, **nested}


def parse(data: Mapping[str, Any] | MixerConfig, trust: bool = False) -> MixerConfig:
    """Build a config from the output of `dump`, or from equal data in a file. Missing fields get their defaults.

    Args:
        data: `{"mixer": name, field: value, ...}`; a config is returned unchanged.
        trust: allow "module:Class" as a mixer name, here and in nested mixers. Importing the module runs its code.
    Raises: ConfigError, which suggests the nearest field for an unknown one; UnknownNameError; PluginError.
    """
    if isinstance(data, MixerConfig):
        return data
    if not isinstance(data, Mapping):
        raise ConfigError(f"a mixer must be a mapping such as {{mixer: gated_deltanet, heads: 6}}, got {cut(data)}")
    fields = dict(data)
    name = fields.pop("mixer", None)
    if not isinstance(name, str):
        got = "no such key" if name is None else cut(name)
        raise ConfigError(f"a mixer needs the key 'mixer' with a registered name, got {got} in {cut(dict(data))}")
    if not trust:
        registry.refuse_untrusted("mixer", name, "key 'mixer'")
    config_type = config_class(name)
    for field in fields:
        if field not in config_type.model_fields:
            raise ConfigError(_unknown_field(name, field, config_type))
    try:
        return from_fields(config_type, fields, trust)
    except ValidationError as error:
        raise ConfigError(f"mixer {name!r}: {describe_errors((), error)}") from error


def from_fields(config_type: type[MixerConfig], fields: Mapping[str, Any], trust: bool = False) -> MixerConfig:
    """Validate fields and build a config. `trust` also applies to mixers nested in the fields (MoM).

    Raises: pydantic.ValidationError.
    """
    return config_type.model_validate(dict(fields), context={"trust": trust})


def config_class(name: str) -> type[MixerConfig]:
    """Return the config class with this name: a registered name or "module:Class".

    Raises: UnknownNameError; DuplicateNameError; PluginError, if it is not a subclass of `MixerConfig`.
    """
    loaded = registry.load(registry.MIXERS, name)
    if not (isinstance(loaded, type) and issubclass(loaded, MixerConfig)):
        raise PluginError(f"mixer {name!r} must be a subclass of deltazoo.MixerConfig, got {loaded!r}")
    return loaded


def _tag(config_type: type[MixerConfig]) -> str:
    name = config_type.name
    if name in registry.names(registry.MIXERS) and registry.load(registry.MIXERS, name) is config_type:
        return name
    return f"{config_type.__module__}:{config_type.__qualname__}"


def _unknown_field(name: str, field: object, config_type: type[MixerConfig]) -> str:
    known = list(config_type.model_fields)
    return f"mixer {name!r} has no field {cut(field)}{nearest(str(field), known) or '.'} It has: {', '.join(known)}."
