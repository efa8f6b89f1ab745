"""Parsing of plain data from YAML and JSON into configs. Errors begin with the path of the wrong key."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, ValidationError

from deltazoo.backends.io.errors import ConfigError, DeltazooError, cut, nearest
from deltazoo.backends.io.frozen_config import FrozenConfig, changed_fields, describe_errors
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.model.moe import MoE
from deltazoo.mixers.core import config as configs
from deltazoo.mixers.core.mixer import MixerConfig

KeyPath = tuple[str, ...]
MlpConfig = Dense | MoE
MLP_FORMS = "{width: ...}, {ratio: ...}, {type: moe, ...} or none"
MLPS: dict[str, type[MlpConfig]] = {"dense": Dense, "moe": MoE}
# the fields of a layer that mixers do not have
_LAYER_FIELDS = dict.fromkeys(
    ("mlp", "norm_position", "residual_scale", "branch_scale", "mixer_scales", "share", "backend"),
    "it is a field of the layer, whose mixer is nested: {mixer: {mixer: NAME, ...}, mlp: none}",
)


class PlainDataModel(FrozenConfig, ABC):
    """A frozen pydantic model that is built from plain data and raises ConfigError with the path of the wrong key."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    if not TYPE_CHECKING:  # type checkers still see the fields as parameters

        def __init__(self, **data: Any) -> None:
            check_keys((), data, type(self).model_fields)
            try:
                super().__init__(**self._parse_fields(data))
            except ValidationError as error:
                raise ConfigError(describe_errors((), error)) from None
            self._check()

    @staticmethod
    @abstractmethod
    def _parse_fields(data: dict[str, Any]) -> dict[str, Any]:
        """Parse the fields whose plain data pydantic cannot parse."""

    @abstractmethod
    def _check(self) -> None:
        """Check the parsed fields together. A pydantic validator would replace the class of the error."""


def check_keys(
    path: KeyPath, data: Mapping[str, Any], known: Iterable[str], elsewhere: Mapping[str, str] | None = None
) -> None:
    """Raise ConfigError for an unknown key: `layers.kda.haeds: unknown key; did you mean 'heads'? ...`.

    Args: elsewhere: for keys that belong to another place, what to write instead.
    """
    names = list(known)
    for key in data:
        if key in names:
            continue
        if elsewhere and key in elsewhere:
            raise ConfigError(f"{join_path(path, key)}: unknown key; {elsewhere[key]}.")
        raise ConfigError(f"{join_path(path, key)}: unknown key{suggestion(str(key), names)}")


def suggestion(key: str, known: Sequence[str]) -> str:
    """Return the end of a message about an unknown key: the nearest known key, if there is one, and all of them."""
    return f"{nearest(key, known) or '.'} Known: {', '.join(known)}."


def parse_mixer(path: KeyPath, data: object) -> MixerConfig:
    """Return a mixer config: `data` itself, or the config of a mapping with the key `mixer`.

    "module:Class" names are loaded; `deltazoo.blocks.spec.trust` checks data from files before it is parsed.
    """
    if isinstance(data, MixerConfig):
        return data
    if not isinstance(data, Mapping) or not isinstance(data.get("mixer"), str):
        value = "no such key" if isinstance(data, Mapping) and "mixer" not in data else cut(data)
        raise ConfigError(
            f"{join_path(path)}: must be a mapping with a mixer's name under the key 'mixer', got {value}"
        )
    fields = {key: value for key, value in data.items() if key != "mixer"}
    try:
        config_type = configs.config_class(data["mixer"])
    except DeltazooError as error:
        raise ConfigError(f"{join_path(path, 'mixer')}: {error}") from error
    check_keys(path, fields, config_type.model_fields, _LAYER_FIELDS)
    try:
        return configs.from_fields(config_type, fields, trust=True)
    except ValidationError as error:
        raise ConfigError(describe_errors(path, error)) from None


def parse_mlp(path: KeyPath, data: object, rule: str = MLP_FORMS) -> MlpConfig | Literal["none"]:
    """Return an MLP config: `data` itself, the config of a mapping of its fields, or "none".

    The key `type` of a mapping is "dense", the default, or "moe".

    Args: rule: what the data must be, for the error message.
    """
    if isinstance(data, MlpConfig):
        return data
    if data == "none":
        return "none"
    if not isinstance(data, Mapping):
        hint = "; only the mlp of the stack may be a pattern" if isinstance(data, str) else ""
        raise ConfigError(f"{join_path(path)}: must be {rule}, got {cut(data)}{hint}")
    name = data.get("type", "dense")
    if name not in MLPS:
        raise ConfigError(f"{join_path(path, 'type')}: must be {' or '.join(MLPS)}, got {cut(name)}")
    moe_only = MoE.model_fields.keys() - Dense.model_fields.keys() if "type" not in data else ()
    check_keys(path, data, MLPS[name].model_fields, dict.fromkeys(moe_only, "a mixture of experts has type: moe"))
    try:
        return MLPS[name].model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(describe_errors(path, error)) from None


def changed_mlp_fields(mlp: MlpConfig | Literal["none"]) -> Any:
    """Return what `parse_mlp` reads: the fields of an MLP that differ from their defaults, or "none".

    The key `type` is omitted for a dense MLP with other fields.
    """
    if mlp == "none":
        return mlp
    fields = mlp.model_dump(mode="json", include={*changed_fields(mlp)})
    return fields if fields and mlp.type == "dense" else {"type": mlp.type, **fields}


def join_path(path: KeyPath, *keys: object) -> str:
    """Format a path as `layers.kda.heads`."""
    return ".".join(map(str, (*path, *keys)))
