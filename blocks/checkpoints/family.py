"""A family of models in another library's folders: its config.json as a stack and back, and its weight rules.

A package adds a family by an entry point, as deltazoo does for its own:

    [project.entry-points."deltazoo.families"]
    my_model_type = "my_package.my_module:MyFamily"
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from deltazoo.backends.io.errors import ConfigError, PluginError, cut
from deltazoo.backends.update import registry
from deltazoo.blocks.checkpoints.rules import Rule
from deltazoo.blocks.checkpoints.values import EPSILON, SIZE, check_mapping, check_value
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.mixers.parts.rope_scaling import RopeScaling

CONFIG = "config.json"
INFINITY = {"__float__": "Infinity"}  # as transformers writes it

# Fields of any family that do not change the logits. They are written back, except those that describe the file.
_KEPT = (
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache", "max_position_embeddings",
    "model_max_length", "output_router_logits", "router_aux_loss_coef", "block_size",
)  # fmt: skip
_DESCRIPTIONS = (
    "architectures", "auto_map", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path",
    "tokenizer_class", "pretraining_tp", "transformers.js_config",
)  # fmt: skip


class HubConfig:
    """The fields of a config.json. It records which were read, so that none is ignored silently.

    Args: place: of the fields in the file, before their names: "attn.".
    """

    def __init__(self, values: Mapping[str, Any], model_type: str, place: str = "") -> None:
        self._values, self._model_type, self._place = values, model_type, place
        self._read: dict[str, None] = {}  # in the order of reading

    def __getitem__(self, field: str) -> Any:
        """Return the value of a field: a number if its name ends with eps, a text if with pattern, else a size.

        Raises: ConfigError: it is missing, or has another type.
        """
        example = EPSILON if field.endswith(("eps", "epsilon")) else "" if field.endswith("pattern") else SIZE
        value = self.get(field, like=example, least=1)
        if value is None:
            raise ConfigError(f"config.json: a model of type {self._model_type!r} needs the field {self._place}{field}")
        return value

    def get(self, field: str, default: Any = None, like: Any = None, least: int = 0) -> Any:
        """Return the value of a field, or the default if it is missing or null.

        Args: like: an example of the type of a field whose default is None; least: of an integer.
        Raises: ConfigError: the type is not that of the default.
        """
        self._note(field)
        value = self._values.get(field)
        if value is None:
            return default
        check_value(self._place + field, value, like if default is None else default, least)
        return value

    def _note(self, field: str) -> None:
        self._read.pop(field, None)
        self._read[field] = None

    def last_read(self, count: int = 4) -> str:
        """Return the fields that were read last and their values, for an error: "num_attention_heads = 0, ..."."""
        fields = [field for field in self._read if self._values.get(field) is not None][-count:]
        return ", ".join(f"{field} = {cut(self._values[field])}" for field in fields)

    def layer_types(self, default: Sequence[str]) -> list[str]:
        """Return `layer_types`, the name of each layer. Raises: ConfigError: they are not `num_hidden_layers` names."""
        depth, types = self["num_hidden_layers"], self.get("layer_types", [*default])
        if len(types) != depth or not all(isinstance(each, str) for each in types):
            raise ConfigError(
                f"config.json: layer_types must be a list of num_hidden_layers = {depth} names, got {cut(types)}"
            )
        return types

    def get_or_null(self, field: str, default: Any) -> Any:
        """Return the value of a field, None if it is null, or the default if it is missing."""
        self._note(field)
        value = self._values.get(field, default)
        if value is not None:
            check_value(self._place + field, value, default)
        return value

    def nested(self, field: str, known: Sequence[str]) -> "HubConfig":
        """Return the fields of a mapping in the config, none if it is missing. Raises: ConfigError: it has others."""
        values = self._mapping(field)
        if unknown := [name for name in values if name not in known]:
            raise ConfigError(f"config.json: {field} with {', '.join(unknown)} is not supported")
        return HubConfig(values, self._model_type, f"{field}.")

    def _mapping(self, field: str) -> dict[str, Any]:
        values: dict[str, Any] = self.get(field, {})
        check_mapping(field, values)
        return values

    def require(self, **expected: Any) -> None:
        """Refuse a field with another value than the only one that a stack expresses; a missing field is accepted.

        Raises: ConfigError.
        """
        for field, value in expected.items():
            self._note(field)
            actual = self._values.get(field)
            if actual is not None and actual != value:
                raise ConfigError(
                    f"config.json: {self._place}{field} must be {value!r} for a model of type {self._model_type!r}, "
                    f"got {cut(actual)}; deltazoo has no other form of it"
                )

    def rotary(self, theta: float = 10000.0, fraction: float | None = None, optional: bool = False) -> dict[str, Any]:
        """Return `rotary_theta`, `rotary_fraction` and, if there is one, `rope_scaling` of `Attention`.

        As in transformers, rope_scaling replaces rope_parameters.

        Args: theta, fraction: the defaults of the family, None: all channels rotate in any case; optional: a theta that
            is null means no positions.
        Raises: ConfigError: theta is null and not optional, a kind of scaling is not supported, or some channels shall
            not rotate in a family whose channels all do.
        """
        given = {
            "rope_theta": self.get_or_null("rope_theta", theta),
            "partial_rotary_factor": self.get("partial_rotary_factor", fraction or 1.0),
        }
        old, new = self._mapping("rope_scaling"), self._mapping("rope_parameters")
        parameters = old or new
        given |= {field: x for field, x in parameters.items() if field in given}
        for field, x in given.items():
            if x is not None or field != "rope_theta":
                check_value(field, x, theta)
        base = given["rope_theta"]
        if base is None and not optional:
            raise ConfigError("config.json: rope_theta must be a number, got null")
        if base is not None and base <= 1:
            raise ConfigError(f"config.json: rope_theta must be greater than 1, got {base}")
        if not 0 < given["partial_rotary_factor"] <= 1:
            raise ConfigError(
                "config.json: partial_rotary_factor must be greater than 0 and at most 1, got "
                f"{given['partial_rotary_factor']}"
            )
        fields: dict[str, Any] = {
            "rotary_theta": None if base is None else float(base),
            "rotary_fraction": float(given["partial_rotary_factor"]),
        }
        if fraction is None and fields["rotary_fraction"] != 1:
            raise ConfigError(
                f"config.json: partial_rotary_factor must be 1 for a model of type {self._model_type!r}, because "
                f"its model in transformers rotates all channels, got {fields['rotary_fraction']:g}"
            )
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind == "default" or base is None:
            return fields
        scaling = {x: y for x, y in parameters.items() if x not in (*given, "type") and y is not None}
        if kind in ("yarn", "llama3") and self.get("max_position_embeddings") is not None:
            scaling.setdefault("original_max_position_embeddings", self["max_position_embeddings"])
        try:
            return fields | {"rope_scaling": RopeScaling(**scaling | {"rope_type": kind})}
        except ConfigError as error:
            problem = str(error).removeprefix("RopeScaling: ")
            raise ConfigError(f"config.json: rope_parameters of the type {cut(kind)}: {problem}") from None

    def step_limits(self) -> tuple[float, float | None]:
        """Return `step_limits` of `Mamba2` from the field time_step_limit."""
        limits = self.get("time_step_limit", like=[]) or [0.0, INFINITY]
        open_end = len(limits) == 2 and limits[1] in (INFINITY, math.inf)
        check_value("time_step_limit", [limits[0], 0.0] if open_end else limits, [0.0, 0.0])
        return float(limits[0]), None if open_end else float(limits[1])

    def kept(self) -> dict[str, Any]:
        """Return the fields without effect on the logits that a saved folder keeps."""
        return {field: self._values[field] for field in _KEPT if field in self._values}

    def check_all_read(self, ignored: tuple[str, ...]) -> None:
        """Refuse fields that were not read and are set. Raises: ConfigError, which names them."""
        known = {*self._read, *ignored, *_KEPT, *_DESCRIPTIONS}
        unknown = [field for field, x in self._values.items() if field not in known and x not in (None, False, [], {})]
        if unknown:
            raise ConfigError(
                f"config.json: a model of type {self._model_type!r} with {', '.join(unknown)} is not supported: "
                "deltazoo does not know the effect on the logits"
            )


def limits_config(limits: tuple[float, float | None]) -> dict[str, Any]:
    """Return the field that `HubConfig.step_limits` reads, none for the usual limits."""
    low, high = limits
    return {} if limits == (0, None) else {"time_step_limit": [low, INFINITY if high is None else high]}


class Family(ABC):
    """How the folders of one `model_type` map to stacks. Subclasses are stateless.

    Class attributes:
        architecture: the class of the model, for config.json.
        library: that of the class. Without a `model_type` a stack is written for transformers if both express it.
        dropped: tensors of a folder that no stack uses, as patterns of `fnmatch`: "mtp.*".
        aliases: other names of tensors that folders have, as regular expressions, and their replacements.
        ignored: fields of config.json without effect on the logits, beside the common ones.
        nested: the field of config.json that holds the config of the text model, if there is one.
        written_as: the `model_type` of the text model, as which such a folder is written.
    """

    architecture: ClassVar[str]
    library: ClassVar[str] = "transformers"
    dropped: ClassVar[tuple[str, ...]] = ()
    aliases: ClassVar[Mapping[str, str]] = {}
    ignored: ClassVar[tuple[str, ...]] = ()
    nested: ClassVar[str | None] = None
    written_as: ClassVar[str | None] = None

    @abstractmethod
    def stack(self, config: HubConfig) -> dict[str, Any]:
        """Return the fields of the `StackSpec`. Raises: ConfigError, which names a field that no stack expresses."""

    @abstractmethod
    def config(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the fields of config.json that `stack` reads.

        The result may be wrong for a stack that the family does not express: the caller compares `stack` of it.
        Any exception says that the family does not express it.
        """

    @abstractmethod
    def rules(self, spec: ModelSpec) -> list[Rule]:
        """Return the rules; each tensor of the model's state dict is in one of them."""

    def constants(self, spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of a folder that follow from its config.json; `dropped` names them, too."""
        return {}


def family(model_type: str) -> Family:
    """Return the family of a `model_type`. Raises: UnknownNameError; PluginError: it is no `Family`."""
    loaded = registry.load(registry.FAMILIES, model_type)
    if not (isinstance(loaded, type) and issubclass(loaded, Family)):
        raise PluginError(f"family {model_type!r} must be a subclass of Family, got {loaded!r}")
    return loaded()


def read_config(values: Mapping[str, Any]) -> tuple[str, HubConfig]:
    """Return the model type and the fields of the text model of a config.json.

    Raises: ConfigError: there is no model type; UnknownNameError.
    """
    model_type = values.get("model_type")
    if model_type is None and {"d_model", "n_layer", "ssm_cfg"} <= values.keys():  # state-spaces has no types
        layer = values["ssm_cfg"] or {}
        check_mapping("ssm_cfg", layer)
        kind = layer.get("layer", "Mamba1")
        if kind not in ("Mamba1", "Mamba2"):
            raise ConfigError(f"config.json: ssm_cfg.layer must be 'Mamba1' or 'Mamba2', got {cut(kind)}")
        model_type = {"Mamba1": "state_spaces_mamba", "Mamba2": "state_spaces_mamba2"}[kind]
    if not isinstance(model_type, str) or ":" in model_type:
        raise ConfigError(f"config.json: model_type must be the name of a family, got {cut(model_type)}")
    nested = family(model_type).nested
    if nested is not None and isinstance(values.get(nested), Mapping):
        tied = {field: values[field] for field in ("tie_word_embeddings",) if field in values}
        return model_type, HubConfig({**tied, **values[nested]}, model_type)
    return model_type, HubConfig(values, model_type)
