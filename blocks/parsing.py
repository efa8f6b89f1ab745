"""Plain data, as YAML has it, to values; each mistake is a ConfigError that begins with the path of the key."""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from deltazoo.backends.errors import ConfigError, DeltazooError
from deltazoo.blocks.mlp import SwiGLU
from deltazoo.mixers.core import config as configs
from deltazoo.mixers.core.mixer import MixerConfig

Path = tuple[str, ...]


class PlainDataModel(BaseModel, ABC):
    """A frozen model built from plain data; every mistake is a ConfigError that begins with the path of the key."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    if not TYPE_CHECKING:  # type checkers still see the fields as parameters

        def __init__(self, **data: Any) -> None:
            check_keys((), data, type(self).model_fields)
            try:
                super().__init__(**self._parse_fields(data))
            except ValidationError as error:
                raise ConfigError(sentences((), error)) from None
            self._check()

    @staticmethod
    @abstractmethod
    def _parse_fields(data: dict[str, Any]) -> dict[str, Any]:
        """Parse the fields that pydantic cannot parse from plain data."""

    @abstractmethod
    def _check(self) -> None:
        """Check the parsed fields together. Not a pydantic validator, which would hide the class of the error."""


def check_keys(path: Path, data: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise unless every key is known: `layers.gdn.haeds: unknown key; did you mean 'heads'? ...`."""
    names = list(known)
    for key in data:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
            hint = f" did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{dotted(path, key)}: unknown key;{hint} Known: {', '.join(names)}.")


def sentences(path: Path, error: ValidationError) -> str:
    """Pydantic's complaints, one sentence each, with the path of each key."""
    lines = []
    for problem in error.errors():
        got = "" if problem["type"] == "missing" else f", got {problem['input']!r}"
        where = dotted(path, *problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{where}: {message}{got if problem['loc'] else ''}" if where else message)
    return "; ".join(lines)


def mixer(path: Path, data: object) -> MixerConfig:
    """Read a mixer config: a config, or a mapping with the key `mixer`."""
    if isinstance(data, MixerConfig):
        return data
    if not isinstance(data, Mapping) or not isinstance(data.get("mixer"), str):
        got = "no such key" if isinstance(data, Mapping) and "mixer" not in data else repr(data)
        raise ConfigError(f"{dotted(path)}: must be a mapping with a mixer's name under the key 'mixer', got {got}")
    fields = {key: value for key, value in data.items() if key != "mixer"}
    try:
        kind = configs.config_class(data["mixer"])
    except DeltazooError as error:
        raise ConfigError(f"{dotted(path, 'mixer')}: {error}") from error
    check_keys(path, fields, kind.model_fields)
    try:
        return kind(**fields)
    except ValidationError as error:
        raise ConfigError(sentences(path, error)) from None


def mlp(path: Path, data: object) -> SwiGLU | Literal["none"]:
    """Read an MLP: a `SwiGLU`, a mapping of its fields, or "none"."""
    if isinstance(data, SwiGLU):
        return data
    if data == "none":
        return "none"
    if not isinstance(data, Mapping):
        raise ConfigError(f"{dotted(path)}: must be {{width: ...}}, {{ratio: ...}} or none, got {data!r}")
    check_keys(path, data, SwiGLU.model_fields)
    try:
        return SwiGLU(**data)
    except ValidationError as error:
        raise ConfigError(sentences(path, error)) from None


def dotted(path: Path, *more: object) -> str:
    """Write a path as `layers.gdn.heads`."""
    return ".".join(map(str, (*path, *more)))
