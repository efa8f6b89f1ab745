"""StackSpec: the config of a language model, from Python, YAML or JSON."""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, WithJsonSchema, field_serializer

from deltazoo.backends.io.errors import ConfigError, ConfigWarning, DeltazooError, PatternError, cut
from deltazoo.backends.io.frozen_config import changed_fields
from deltazoo.backends.torch_ext.allocation import allocation_problem, format_bytes, physical_memory
from deltazoo.backends.update import registry
from deltazoo.backends.update.base import Backend
from deltazoo.backends.update.check import check_type
from deltazoo.blocks.inspect import schema
from deltazoo.blocks.inspect.describe import describe
from deltazoo.blocks.inspect.layer_table import Description
from deltazoo.blocks.model.layer import Layer, LayerSpec, NormPosition, unused_residual_scale
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec import document, presets
from deltazoo.blocks.spec.parsing import (
    MLP_FORMS,
    MlpConfig,
    PlainDataModel,
    changed_mlp_fields,
    check_keys,
    parse_mixer,
    parse_mlp,
)
from deltazoo.blocks.spec.pattern import NAME, RESERVED, expand, names, parse
from deltazoo.blocks.spec.resolve import layer_stem, mlp_stem, pattern_text, resolve_layer, resolve_mlp, without_effect
from deltazoo.blocks.spec.trust import refuse_untrusted
from deltazoo.mixers.core import config as configs
from deltazoo.mixers.core.initialization import drawn_in_float32
from deltazoo.mixers.core.mixer import MixerConfig, Place
from deltazoo.mixers.core.patterns import Term
from deltazoo.mixers.parts.norms import NormKind


class StackSpec(PlainDataModel):
    """The config of a language model: embedding, layers in the order of a pattern, norm, head.

        StackSpec(width=768, depth=12, vocab=256, pattern="3*gated_deltanet + window",
                  layers={"gated_deltanet": GatedDeltaNet(heads=6), "window": SlidingWindow(window=2048)})
        StackSpec(width=768, depth=12, vocab=256, pattern=3 * GatedDeltaNet(heads=6) + SlidingWindow(window=2048))

    The two are equal: equality compares the models that the specs describe, not the names of their layers. The MLPs may
    have a pattern of their own, here an MoE in every second layer:

        StackSpec(width=768, depth=12, vocab=256, pattern="3*kda + mla", mlp="dense + moe",
                  mlps={"dense": Dense(width=2048), "moe": MoE(width=512)})
        StackSpec(width=768, depth=12, vocab=256, pattern=3 * KDA() + MLA(), mlp=Dense(width=2048) + MoE(width=512))

    Args:
        width: D, the width of the residual stream.
        depth: number of layers.
        vocab: number of tokens in the vocabulary.
        pattern: the order of the layers, as text (`deltazoo.blocks.spec.pattern`) or built with Python's operators
            (`deltazoo.mixers.core.patterns`); it is repeated up to `depth` layers.
        layers: the mixer or layer of each name in the pattern. A name that is missing here is a registered mixer or
            "module:Class".
        mlp: the default for all layers: a `Dense` MLP, a `MoE` (`{type: moe, ...}`), "none", or a pattern of these,
            which is expanded to `depth` like `pattern`.
        mlps: the MLP of each name in the pattern `mlp`. A name that is missing here is "dense", "moe" or "none".
        norm: of the layers' inputs and of the head's: "rms", or "layer", a layer norm with a bias (RWKV); the default
            for all layers.
        norm_eps: epsilon of the norms, added to the mean square under the root; the default for all layers.
        norm_offset: added to the weights of the RMS norms, 1 in Gemma and Qwen3-Next, whose checkpoints store weights
            near 0; the default for all layers.
        norm_position: "pre", "output" or "post", see `LayerSpec`; the default for all layers.
        residual_scale: factor of the residual connections; needs layers with the position "post".
        branch_scale: factor of the branches that are added to the residual stream, see `LayerSpec`; the default for all
            layers.
        tied: whether the head shares the embedding's weights.
        embedding_norm: whether the embeddings pass a norm (RWKV).
        embedding_scale: factor on the embeddings; Gemma and Griffin have the root of the width.
        logit_scale: factor of the logits, before the cap; Granite and Falcon-H1 have one.
        logit_cap: c of logits <- c tanh(logits / c), 30 in RecurrentGemma; None: no cap.
        backend: name of the backend of the mixers' updates, the default for all layers; None: `deltazoo.bind` chooses
            by device.
    Raises: ConfigError: gives the path of the key and the nearest known key; PatternError: marks the position.
    """

    width: int = Field(ge=1)
    depth: int = Field(ge=1, le=10_000)
    vocab: int = Field(ge=1)
    pattern: Annotated[str | Term, WithJsonSchema({"type": "string"})]
    layers: dict[str, MixerConfig | LayerSpec] = Field(default_factory=dict)
    mlp: MlpConfig | Annotated[str | Term, WithJsonSchema({"type": "string"})] = Dense()
    mlps: dict[str, MlpConfig | Literal["none"]] = Field(default_factory=dict)
    norm: NormKind = "rms"
    norm_eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    norm_offset: float = Field(default=0.0, allow_inf_nan=False)
    norm_position: NormPosition = "pre"
    residual_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    branch_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    tied: bool = True
    embedding_norm: bool = False
    embedding_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    logit_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    logit_cap: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    backend: str | None = None

    def expand(self) -> list[LayerSpec]:
        """Return a complete LayerSpec for each of the `depth` layers.

        Raises: PatternError: a name is neither in `layers` nor a registered mixer, or a field does not exist.
        """
        defaults = {field: getattr(self, field) for field in _LAYER_DEFAULTS}
        layers = []
        for layer, mlp in zip(self._layers_of_pattern(), self._mlps_of_pattern(), strict=True):
            missing = {field: x for field, x in {**defaults, "mlp": mlp}.items() if getattr(layer, field) is None}
            layers.append(layer.model_copy(update=missing))
        return layers

    def layer_names(self) -> list[str]:
        """Return the name of each layer in the pattern; those of parallel mixers are joined by " | "."""
        layers = expand(parse(str(self.pattern)), self.depth)
        return [" | ".join(name.name for term in terms for name in names(term)) for terms in layers]

    @drawn_in_float32
    def build(self, backend: str | Backend | None = None) -> LanguageModel:
        """Build the model, with weights drawn from torch's default generator.

        Weights of 16 bits (torch's default dtype) are drawn in float32 and rounded.

        Args: backend: overrides the backends of the layers and of the stack.
        Raises: ConfigError: a mixer does not fit the width, or the weights do not fit in memory; UnknownNameError:
            unknown backend.
        """
        try:
            self._check_memory(backend)
            return LanguageModel(self, backend)
        except (RuntimeError, TypeError, MemoryError, OverflowError) as error:
            problem = allocation_problem(error)
            if problem is None:
                raise
            raise ConfigError(self._too_large(problem)) from error

    def build_layers(self, backend: str | Backend | None = None) -> list[Layer]:
        """Build the layers only; arguments and errors as for `build`. A shared module is repeated in the list."""
        layers: list[Layer] = []
        shared: dict[str, Layer] = {}
        for i, spec in enumerate(self.expand()):
            if spec.share in shared:
                layers.append(shared[spec.share])
                continue
            try:
                layers.append(spec.build(self.width, Place(i, self.depth), backend))
            except ConfigError as error:
                raise ConfigError(f"layer {i} ({spec.title}): {error}") from error
            if spec.share is not None:
                shared[spec.share] = layers[-1]
        return layers

    def describe(self, backend: str | Backend | None = None) -> Description:
        """Count parameters, bytes and operations of each layer, without allocating weights; see `Description`."""
        with torch.device("meta"):
            return describe(self.build(backend))

    def changed_fields(self) -> dict[str, Any]:
        """Return the plain data of the fields that differ from their defaults; `StackSpec(**data)` equals this spec."""
        data = self.model_dump(mode="json", include={*changed_fields(self)} - {"layers", "mlps"})
        if self.layers:
            data["layers"] = {name: _changed_layer(layer) for name, layer in self.layers.items()}
        if isinstance(self.mlp, MlpConfig) and "mlp" in data:
            data["mlp"] = changed_mlp_fields(self.mlp)
        if self.mlps:
            data["mlps"] = {name: changed_mlp_fields(mlp) for name, mlp in self.mlps.items()}
        return {field: data[field] for field in type(self).model_fields if field in data}

    def save(self, path: str | Path) -> None:
        """Write the fields that differ from their defaults to a .yaml, .yml or .json file that `load` reads.

        A field that the file omits has the default of the version that loads it. The folder of a training run holds
        every field: `model_dump(mode="json")`.
        """
        document.write(Path(path), self.changed_fields())

    @classmethod
    def load(cls, source: str | Path, trust: bool = False) -> Self:
        """Read a spec from a .yaml, .yml or .json file, or a preset by its name.

        Args: trust: allow the file to name mixers and backends as "module:Class". Importing the module runs its code.
        Raises: ConfigError, also for a folder or a pattern; PatternError; UnknownNameError: names the nearest preset;
            InputError: wrong type.
        """
        check_type("source", source, str | Path, "a path or the name of a preset")
        if isinstance(source, Path) or Path(source).suffix in document.SUFFIXES:
            data = document.read(Path(source))
        elif problem := _other_source(source):
            raise ConfigError(problem)
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
        """Return the JSON Schema of the files that `load` reads, with every installed mixer, for editors."""
        return schema.with_mixers(StackSpec)

    def _check_memory(self, backend: str | Backend | None) -> None:
        """Refuse weights that exceed the main memory, because Linux kills the process instead of raising an error."""
        memory = physical_memory()
        roughly = torch.get_default_dtype().itemsize * self.width * (self.vocab + 12 * self.width * self.depth)
        if memory is None or roughly < memory / 4 or torch.get_default_device().type != "cpu":
            return
        with torch.device("meta"):
            needed = sum(x.numel() * x.element_size() for x in LanguageModel(self, backend).parameters())
        if needed > memory:
            weights = f"the weights need {format_bytes(needed)}, and this machine has {format_bytes(memory)}"
            raise ConfigError(self._too_large(weights))

    def _too_large(self, problem: str) -> str:
        return f"{problem} (width={self.width}, depth={self.depth}, vocab={self.vocab})"

    def __str__(self) -> str:
        """Return the table of the layers that `describe` returns; `repr` has the fields."""
        try:
            return str(self.describe())
        except DeltazooError as error:
            return f"{self!r}\ncannot be built: {error}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StackSpec) and self._model() == other._model()

    def __hash__(self) -> int:
        return hash(self._model())

    def _model(self) -> tuple[object, ...]:
        """Return everything that determines the model; the names of the layers do not."""
        norms = self.norm, self.norm_eps, self.norm_offset, self.embedding_norm
        factors = self.embedding_scale, self.logit_scale, self.logit_cap
        return self.width, self.vocab, self.tied, norms, factors, tuple(self.expand())

    def unused(self) -> list[str]:
        """Return a sentence for each entry of `layers` and `mlps` and each name in the patterns that has no effect."""
        sentences = without_effect(
            "layers", self.layers, str(self.pattern), range(self.depth), "has no layer for it", self.depth
        )
        if isinstance(self.mlp, str):
            places = [i for i, layer in enumerate(self._layers_of_pattern()) if layer.mlp is None]
            reason = "has no layer for it without an mlp of its own"
            return sentences + without_effect("mlps", self.mlps, self.mlp, places, reason, self.depth)
        return sentences + [f"mlps.{name} has no effect: mlp is not a pattern" for name in self.mlps]

    def _layers_of_pattern(self) -> list[LayerSpec]:
        """Return the layers without the defaults of the stack."""
        text = str(self.pattern)
        return [resolve_layer(terms, self.layers, text) for terms in expand(parse(text), self.depth)]

    def _mlps_of_pattern(self) -> list[MlpConfig | Literal["none"]]:
        """Return the default MLP of each layer."""
        if isinstance(self.mlp, MlpConfig):
            return [self.mlp] * self.depth
        text = str(self.mlp)
        try:
            return [resolve_mlp(terms, self.mlps, text) for terms in expand(parse(text), self.depth)]
        except PatternError as error:
            raise PatternError("mlp: " + str(error).removeprefix("pattern: ")) from None

    def _check(self) -> None:
        shared: dict[str, tuple[int, LayerSpec]] = {}
        for i, layer in enumerate(self.expand()):
            if layer.share is not None:
                first, other = shared.setdefault(layer.share, (i, layer))
                if layer != other:
                    raise ConfigError(
                        f"share: layers with the same label must be equal, got {cut(other)} in layer {first} and "
                        f"{cut(layer)} in layer {i} for {cut(layer.share)}"
                    )
            if layer.norm == "layer" and layer.norm_offset:
                raise ConfigError(
                    f'norm_offset needs norm="rms", got {layer.norm_offset} with norm="layer" in layer {i}'
                )
        self._check_residual_scales()
        for sentence in self.unused():
            warnings.warn(sentence, ConfigWarning, stacklevel=4)  # the caller of StackSpec(...)

    def _check_residual_scales(self) -> None:
        """Refuse a factor that no layer uses. Raises: ConfigError."""
        for name, layer in self.layers.items():
            if isinstance(layer, LayerSpec) and layer.norm_position is None:
                try:
                    layer.check_residual_scale(self.norm_position)
                except ConfigError as error:
                    raise ConfigError(f"layers.{name}: {error}") from None
        if self.residual_scale != 1.0 and all(layer.norm_position != "post" for layer in self.expand()):
            raise ConfigError(unused_residual_scale(self.residual_scale, self.norm_position))

    @field_serializer("pattern")
    def _dump_pattern(self, pattern: Any) -> str:
        return str(pattern)

    @field_serializer("layers")
    def _dump_layers(self, layers: dict[str, Any]) -> dict[str, Any]:
        return {name: _dump_layer(layer) for name, layer in layers.items()}

    @staticmethod
    def _parse_fields(data: dict[str, Any]) -> dict[str, Any]:
        layers = data.get("layers", {})
        if not isinstance(layers, Mapping):
            raise ConfigError(f"layers: must map names to mixers or layers, got {cut(layers)}")
        data["layers"] = parsed = {name: _parse_layer(name, layer) for name, layer in layers.items()}
        data |= _parse_mlps(data)
        pattern = data.get("pattern", "")
        if isinstance(pattern, Term):
            data["pattern"] = pattern_text(pattern, parsed, layer_stem)
        elif not isinstance(pattern, str):
            raise ConfigError(f"pattern: must be text, or mixers joined by +, * and |, got {cut(pattern)}")
        return data


# Fields of the stack, besides the MLP, that are the defaults of the fields of its layers.
_LAYER_DEFAULTS = ("norm", "norm_eps", "norm_offset", "norm_position", "residual_scale", "branch_scale", "backend")


def preset(name: str) -> StackSpec:
    """Return the stack of a preset; `deltazoo list presets` prints the names.

    Raises: UnknownNameError: names the nearest preset; InputError: the name is not a string.
    """
    check_type("name", name, str, "the name of a preset")
    return StackSpec(**presets.read(name))


def _other_source(source: str) -> str | None:
    """Return what to give instead of a folder or a pattern; None for the name of a preset."""
    if source in presets.names():
        return None
    if Path(source).is_dir():
        return f"{source} is a folder: give a stack file, such as {Path(source) / 'stack.yaml'}"
    try:
        used = {name.name for name in names(parse(source))}
    except PatternError:
        return None
    if used & {*registry.names(registry.MIXERS)}:
        return f"{cut(source)} is a pattern and no file or preset: set the field pattern (--pattern) and the sizes"
    return None


def _parse_layer(name: str, data: object) -> MixerConfig | LayerSpec:
    """Parse an entry of `layers`: a mixer's config if the value of its key `mixer` is a mixer's name, else a layer."""
    _check_name("layers", "a layer's name", name, RESERVED)
    if isinstance(data, LayerSpec):
        return data
    mixer = data.get("mixer") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or mixer is None or (isinstance(mixer, str) and mixer != "none"):
        return parse_mixer(("layers", name), data)
    check_keys(("layers", name), data, LayerSpec.model_fields)
    try:
        return LayerSpec(**data)
    except ConfigError as error:
        raise ConfigError(f"layers.{name}.{error}") from None


def _dump_layer(layer: MixerConfig | LayerSpec) -> dict[str, Any]:
    if isinstance(layer, MixerConfig):
        return configs.dump(layer)
    return {field: value for field, value in layer.model_dump(mode="json").items() if value is not None}


def _parse_mlps(data: Mapping[str, Any]) -> dict[str, Any]:
    """Parse `mlps`, and `mlp` if it is given."""
    mlps = data.get("mlps", {})
    if not isinstance(mlps, Mapping):
        raise ConfigError(f"mlps: must map names to MLPs, got {cut(mlps)}")
    for name in mlps:
        _check_name("mlps", "an MLP's name", name, (*RESERVED, "none"))
    parsed: dict[str, Any] = {name: parse_mlp(("mlps", name), mlp) for name, mlp in mlps.items()}
    mlp = data.get("mlp", Dense())
    if isinstance(mlp, Term) and not isinstance(mlp, MlpConfig):
        mlp = pattern_text(mlp, parsed, mlp_stem)
    rule = f"{MLP_FORMS}, or a pattern such as dense + moe"
    return {"mlps": parsed, "mlp": mlp if isinstance(mlp, str) else parse_mlp(("mlp",), mlp, rule)}


def _check_name(field: str, kind: str, name: object, reserved: Sequence[str]) -> None:
    if not isinstance(name, str) or not re.fullmatch(NAME, name) or name in reserved:
        raise ConfigError(f"{field}: {kind} must be a word other than {', '.join(reserved)}, got {cut(name)}")


def _changed_layer(layer: MixerConfig | LayerSpec) -> dict[str, Any]:
    return configs.dump_changed(layer) if isinstance(layer, MixerConfig) else layer.changed_fields()
