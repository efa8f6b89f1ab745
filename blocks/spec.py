"""StackSpec and LayerSpec: a whole model, and one layer of it, as frozen values that build themselves."""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, ValidationError, WithJsonSchema, field_serializer

from deltazoo.backends import registry
from deltazoo.backends.base import Backend
from deltazoo.backends.errors import ConfigError, PatternError, unknown_name
from deltazoo.blocks import document, parsing, presets
from deltazoo.blocks.inspect import schema
from deltazoo.blocks.inspect.describe import Description, describe
from deltazoo.blocks.layer import Layer, LayerSpec
from deltazoo.blocks.mlp import SwiGLU
from deltazoo.blocks.parsing import PlainDataModel
from deltazoo.blocks.pattern import NAME, RESERVED, expand, parse, pattern_error, with_names
from deltazoo.blocks.stack import LanguageModel
from deltazoo.blocks.trust import refuse_untrusted
from deltazoo.mixers.core import config as configs
from deltazoo.mixers.core.mixer import MixerConfig, Place
from deltazoo.mixers.core.patterns import Name, Term


class StackSpec(PlainDataModel):
    """Say what a language model is: embedding, layers in the order of a pattern, norm, head.

        StackSpec(width=768, depth=12, vocab=256, pattern="3*gdn + swa",
                  layers={"gdn": GatedDeltaNet(heads=6), "swa": SlidingWindow(window=2048)})
        StackSpec(width=768, depth=12, vocab=256, pattern=3 * GatedDeltaNet(heads=6) + SlidingWindow(window=2048))

    The two are equal: specs are equal when they describe the same model, whatever its layers are called.

    Args:
        pattern: the order of the layers, as text (`deltazoo.blocks.pattern`) or from Python's operators
            (`deltazoo.mixers.core.patterns`); repeated to `depth`.
        layers: what the names of the pattern stand for; a name that is not there is an installed mixer's.
        mlp: a `SwiGLU`, or "none", for every layer that does not say otherwise.
        norm_eps: added to the mean square inside the root of the RMS norms.
        tied: whether the head uses the embedding's weights.
        backend: the name of the backend of the mixers' updates; None leaves it to `deltazoo.bind`.
    Raises: ConfigError, with the path of the key and the nearest one known; PatternError, with a caret.
    """

    width: int = Field(ge=1)
    depth: int = Field(ge=1)
    vocab: int = Field(ge=1)
    pattern: Annotated[str | Term, WithJsonSchema({"type": "string"})]
    layers: dict[str, MixerConfig | LayerSpec] = Field(default_factory=dict)
    mlp: SwiGLU | Literal["none"] = SwiGLU()
    norm_eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    tied: bool = True
    backend: str | None = None

    def expand(self) -> list[LayerSpec]:
        """Lay the pattern out over the depth: a complete LayerSpec for each layer.

        Raises: PatternError: a name that is neither in `layers` nor an installed mixer's, or a field it has not.
        """
        text = str(self.pattern)
        own = {"mlp": self.mlp, "norm_eps": self.norm_eps, "backend": self.backend}
        found = []
        for terms in expand(parse(text), self.depth):
            layer = _side_by_side([_resolved(term, self.layers, text) for term in terms], text)
            missing = {field: value for field, value in own.items() if getattr(layer, field) is None}
            found.append(layer.model_copy(update=missing))
        return found

    def _check(self) -> None:
        self.expand()

    def build(self, backend: str | Backend | None = None) -> LanguageModel:
        """Make the model, with weights drawn from torch's default generator.

        Args: backend: for all layers, before their own; None is theirs, then the stack's, then as for `deltazoo.bind`.
        Raises: ConfigError: a mixer does not fit the width; UnknownNameError: no such backend.
        """
        return LanguageModel(self, backend)

    def build_layers(self, backend: str | Backend | None = None) -> list[Layer]:
        """Make the layers alone; arguments and errors as for `build`."""
        layers = []
        for i, layer in enumerate(self.expand()):
            try:
                layers.append(layer.build(self.width, Place(i, self.depth), backend))
            except ConfigError as error:
                raise ConfigError(f"layer {i} ({_title(layer)}): {error}") from error
        return layers

    def describe(self, backend: str | Backend | None = None) -> Description:
        """Count parameters, bytes and operations, layer by layer, without making the weights; see `Description`."""
        with torch.device("meta"):
            return describe(self.build(backend))

    def save(self, path: str | Path) -> None:
        """Write the spec to a .yaml, .yml or .json file; `load` reads it back."""
        document.write(Path(path), self.model_dump(mode="json"))

    @classmethod
    def load(cls, source: str | Path, trust: bool = False) -> Self:
        """Read a spec from a .yaml, .yml or .json file, or a preset by its name.

        Args: trust: allow mixers and backends that the file names as "module:Class", which runs the module's code.
        Raises: ConfigError; PatternError; UnknownNameError, with the nearest preset's name.
        """
        if isinstance(source, Path) or Path(source).suffix in document.SUFFIXES:
            data = document.read(Path(source))
        else:
            data = presets.read(source)
        if not trust:
            refuse_untrusted(data, source)
        try:
            return cls(**data)
        except (ConfigError, PatternError) as error:
            raise type(error)(f"{source}: {error}") from None

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The JSON Schema of the files that `load` reads, with every installed mixer, for editors."""
        return schema.with_mixers(StackSpec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StackSpec) and self._meaning() == other._meaning()

    def __hash__(self) -> int:
        return hash(self._meaning())

    def _meaning(self) -> tuple[object, ...]:
        return self.width, self.vocab, self.tied, self.norm_eps, tuple(self.expand())

    @field_serializer("pattern")
    def _dump_pattern(self, pattern: Any) -> str:
        return str(pattern)

    @field_serializer("layers")
    def _dump_layers(self, layers: dict[str, Any]) -> dict[str, Any]:
        return {name: _plain(layer) for name, layer in layers.items()}

    @staticmethod
    def _parse_fields(data: dict[str, Any]) -> dict[str, Any]:
        layers = data.get("layers", {})
        if not isinstance(layers, Mapping):
            raise ConfigError(f"layers: must map names to mixers or layers, got {layers!r}")
        data["layers"] = read = {name: _layer(name, layer) for name, layer in layers.items()}
        if "mlp" in data:
            data["mlp"] = parsing.mlp(("mlp",), data["mlp"])
        pattern = data.get("pattern", "")
        if isinstance(pattern, Term):
            data["pattern"] = _named(pattern, read)
        elif not isinstance(pattern, str):
            raise ConfigError(f"pattern: must be text, or mixers joined by +, * and |, got {pattern!r}")
        return data


def _layer(name: str, data: object) -> MixerConfig | LayerSpec:
    """Read an entry of `layers`: a value; or a mapping, whose `mixer` is a name (a mixer) or more (a layer)."""
    if not isinstance(name, str) or not re.fullmatch(NAME, name) or name in RESERVED:
        raise ConfigError(f"layers: a layer's name must be a word other than {' and '.join(RESERVED)}, got {name!r}")
    if isinstance(data, LayerSpec):
        return data
    if not isinstance(data, Mapping) or isinstance(data.get("mixer"), str) or "mixer" not in data:
        return parsing.mixer(("layers", name), data)
    parsing.check_keys(("layers", name), data, LayerSpec.model_fields)
    try:
        return LayerSpec(**data)
    except ConfigError as error:
        raise ConfigError(f"layers.{name}.{error}") from None


def _plain(layer: MixerConfig | LayerSpec) -> dict[str, Any]:
    if isinstance(layer, MixerConfig):
        return configs.dump(layer)
    return {field: value for field, value in layer.model_dump(mode="json").items() if value is not None}


def _named(pattern: Term, layers: dict[str, MixerConfig | LayerSpec]) -> str:
    """Write a pattern of values as text; each value enters `layers` under its mixer's name, numbered if taken."""

    def name(value: Term) -> Name:
        if not isinstance(value, MixerConfig | LayerSpec):
            raise PatternError(f"pattern: a layer must be a mixer config or a LayerSpec, got {value!r}")
        for known, layer in layers.items():
            if layer == value:
                return Name(known)
        stem = (value if isinstance(value, MixerConfig) else value.mixers[0]).name
        free = next(word for i in itertools.count(1) if (word := stem if i == 1 else f"{stem}_{i}") not in layers)
        layers[free] = value
        return Name(free)

    return str(with_names(pattern, name))


def _resolved(term: Term, layers: Mapping[str, MixerConfig | LayerSpec], text: str) -> MixerConfig | LayerSpec:
    """Find what a name stands for, with the fields that the pattern changes."""
    assert isinstance(term, Name)  # text has nothing else
    found = layers.get(term.name)
    if found is None:
        mixers = registry.names(registry.MIXERS)
        if term.name not in mixers and ":" not in term.name:
            sentence = unknown_name("layer", term.name, [*layers, *mixers])
            raise pattern_error(f"pattern: {sentence}", text, term.position)
        found = configs.config_class(term.name)()
    if not term.fields:
        return found
    try:
        parsing.check_keys((term.name,), dict(term.fields), type(found).model_fields)
        return type(found)(**{**dict(found), **dict(term.fields)})
    except ValidationError as error:
        raise pattern_error(f"pattern: {parsing.sentences((term.name,), error)}", text, term.position) from None
    except ConfigError as error:
        raise pattern_error(f"pattern: {error}", text, term.position) from None


def _side_by_side(parts: list[MixerConfig | LayerSpec], text: str) -> LayerSpec:
    if len(parts) == 1:
        return parts[0] if isinstance(parts[0], LayerSpec) else LayerSpec(mixer=parts[0])
    for part in parts:
        if isinstance(part, LayerSpec):
            raise PatternError(f"pattern: '|' in '{text}' takes mixers, got the layer {part!r}")
    return LayerSpec(mixer=tuple(part for part in parts if isinstance(part, MixerConfig)))


def _title(layer: LayerSpec) -> str:
    return " | ".join(config.name for config in layer.mixers)


def preset(name: str) -> StackSpec:
    """Return the stack of a preset; `deltazoo list presets` prints the names.

    Raises: UnknownNameError: names the nearest preset.
    """
    return StackSpec(**presets.read(name))
