"""The names in the patterns of a stack: their configs, the names of configs in a pattern, and names without effect."""

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from deltazoo.backends.io.errors import ConfigError, PatternError, cut, unknown_name
from deltazoo.backends.io.frozen_config import describe_errors
from deltazoo.backends.update import registry
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.spec.parsing import MLPS, MlpConfig, check_keys
from deltazoo.blocks.spec.pattern import names, parse, pattern_error, unreached, with_names
from deltazoo.mixers.core.config import config_class
from deltazoo.mixers.core.mixer import MixerConfig
from deltazoo.mixers.core.patterns import Name, Term


def resolve_layer(terms: Sequence[Term], layers: Mapping[str, MixerConfig | LayerSpec], text: str) -> LayerSpec:
    """Return the layer of a name in a pattern, or of several parallel mixers, with the fields that the pattern changes.

    Raises: PatternError: a name is neither in `layers` nor a mixer, or a field is wrong.
    """
    configs = [_resolve(term, layers, text) for term in terms]
    if len(configs) == 1:
        return configs[0] if isinstance(configs[0], LayerSpec) else LayerSpec(mixer=configs[0])
    for config in configs:
        if isinstance(config, LayerSpec):
            raise PatternError(f"pattern: '|' in '{text}' takes mixers, got the layer {cut(config)}")
    return LayerSpec(mixer=tuple(config for config in configs if isinstance(config, MixerConfig)))


def resolve_mlp(terms: Sequence[Term], mlps: Mapping[str, Any], text: str) -> Any:
    """Return the MLP of a name in the pattern `mlp`, with the fields that the pattern changes.

    Raises: PatternError: a name is neither in `mlps` nor dense, moe or none, a field is wrong, or mixers are parallel.
    """
    if len(terms) > 1:
        raise PatternError(f"'|' joins parallel mixers, and a layer has one MLP, got '{text}'")
    (term,) = terms
    assert isinstance(term, Name)
    known = {**{name: mlp() for name, mlp in MLPS.items()}, "none": "none", **mlps}
    if term.name not in known:
        raise pattern_error(unknown_name("MLP", term.name, known), text, term.position)
    if known[term.name] == "none" and term.fields:
        raise pattern_error(f"{term.name} is no MLP and has no fields, got '{term}'", text, term.position)
    return _with_fields(known[term.name], term, text)


def _resolve(term: Term, layers: Mapping[str, MixerConfig | LayerSpec], text: str) -> MixerConfig | LayerSpec:
    assert isinstance(term, Name)  # parsed text has no other single terms
    config = layers.get(term.name)
    if config is None:
        mixers = registry.names(registry.MIXERS)
        if term.name not in mixers and ":" not in term.name:
            sentence = unknown_name("layer", term.name, [*layers, *mixers])
            raise pattern_error(f"pattern: {sentence}", text, term.position)
        config = config_class(term.name)()
    changed: MixerConfig | LayerSpec = _with_fields(config, term, text)
    return changed


def _with_fields(config: Any, term: Name, text: str) -> Any:
    """Return a config with the fields that the pattern changes."""
    if not term.fields:
        return config
    try:
        check_keys((term.name,), dict(term.fields), type(config).model_fields)
        return type(config).model_validate({**dict(config), **dict(term.fields)})
    except ValidationError as error:
        raise pattern_error(f"pattern: {describe_errors((term.name,), error)}", text, term.position) from None
    except ConfigError as error:
        raise pattern_error(f"pattern: {error}", text, term.position) from None


def pattern_text(pattern: Term, entries: dict[str, Any], stem: Callable[[Term], str]) -> str:
    """Format a pattern of configs as text. Adds each config to `entries` under its stem, numbered if taken."""

    def entry_name(config: Term) -> Name:
        first = stem(config)
        for name, entry in entries.items():
            if entry == config:
                return Name(name)
        candidates = (first if i == 1 else f"{first}_{i}" for i in itertools.count(1))
        unused = next(name for name in candidates if name not in entries)
        entries[unused] = config
        return Name(unused)

    return str(with_names(pattern, entry_name))


def layer_stem(config: Term) -> str:
    """Return the name of a layer of a pattern built in Python. Raises: PatternError: it is no layer."""
    if isinstance(config, MixerConfig):
        return config.name
    if isinstance(config, LayerSpec):
        return next((mixer.name for mixer in config.mixers), "mlp")
    raise PatternError(f"pattern: a layer must be a mixer config or a LayerSpec, got {cut(config)}")


def mlp_stem(config: Term) -> str:
    """Return the name of an MLP of a pattern built in Python. Raises: PatternError: it is no MLP."""
    if isinstance(config, MlpConfig):
        return config.type
    raise PatternError(f"mlp: the MLP of a layer must be a Dense or a MoE, got {cut(config)}")


def without_effect(
    field: str, entries: Mapping[str, object], text: str, places: Container[int], reason: str, depth: int
) -> list[str]:
    """Return a sentence for each entry that is not in a pattern, and for each name that is at none of the places.

    Args: field: layers or mlps; places: the indices of the layers that count; reason: why a name is at none of them.
    """
    pattern = parse(text)
    used = {term.name for term in names(pattern)}
    where = f"in the {'mlp ' if field == 'mlps' else ''}pattern {cut(text)}"
    sentences = [f"{field}.{name} is not {where}" for name in entries if name not in used]
    if isinstance(pattern, Name):
        return sentences
    missing = unreached(pattern, depth, places)
    return sentences + [f"{name} {where} is not reached: depth={depth} {reason}" for name in missing]
