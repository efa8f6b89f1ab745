"""Benchmark of the updates of mixers; mixers, shapes and backends are given by name."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from deltazoo.backends import registry
from deltazoo.backends.conformance.check_file import ShapeFields
from deltazoo.backends.errors import ConfigError, UnknownNameError
from deltazoo.backends.frozen_config import describe_errors
from deltazoo.backends.measure.benchmark import BenchConfig, Benchmark, bench
from deltazoo.backends.progress import Progress, silent
from deltazoo.backends.shapes import SHAPES, Shape
from deltazoo.backends.spec import UpdateSpec
from deltazoo.blocks import pattern
from deltazoo.blocks.parsing import parse_mixer
from deltazoo.mixers.core.config import config_class
from deltazoo.mixers.core.patterns import Name

DEFAULT_SHAPE = "cpu"


def measure(
    mixers: Sequence[str] | None = None,
    shapes: Sequence[str] = (DEFAULT_SHAPE,),
    backends: Sequence[str] | None = None,
    config: BenchConfig | None = None,
    progress: Progress = silent,
) -> Benchmark:
    """Time backends on the updates of mixers.

    Args:
        mixers: names, with fields as in a pattern: "gated_deltanet(negative_eigenvalues=both)". None selects every
            update of a registered mixer with default fields; the first mixer names an update that several have.
        shapes: names or sizes, as for `parse_shape`.
        backends: names; None selects all that are installed.
    Raises: ConfigError; PatternError; UnknownNameError, DuplicateNameError, PluginError.
    """
    specs = _all_updates() if mixers is None else {mixer: parse_update(mixer) for mixer in mixers}
    names = registry.names(registry.BACKENDS) if backends is None else backends
    return bench(specs, [parse_shape(shape) for shape in shapes], names, config, progress)


def parse_update(text: str) -> UpdateSpec:
    """Return the update of a mixer, given by name and fields as in a pattern.

    Raises: ConfigError: the mixer has no update, or a field is invalid; PatternError; UnknownNameError; PluginError.
    """
    term = pattern.parse(text)
    if not isinstance(term, Name):
        raise ConfigError(f"a mixer must be one name, with fields in parentheses if any, got {text!r}")
    config_class(term.name)  # its error names the nearest mixer
    spec = parse_mixer((term.name,), {"mixer": term.name, **dict(term.fields)}).spec()
    if spec is None:
        raise ConfigError(f"mixer {term.name!r} has no update that backends compute; there is nothing to measure")
    return spec


def _all_updates() -> dict[str, UpdateSpec]:
    first_mixer: dict[UpdateSpec, str] = {}
    for name in registry.names(registry.MIXERS):
        spec = config_class(name)().spec()
        if spec is not None:
            first_mixer.setdefault(spec, name)
    return {name: spec for spec, name in first_mixer.items()}


def parse_shape(text: str) -> Shape:
    """Return a named shape, or the shape of sizes such as "B=4 T=1000 H=8 K=64".

    HV defaults to H, V to K and B to 1.

    Raises: UnknownNameError; ConfigError.
    """
    if "=" not in text:
        if text not in SHAPES:
            raise UnknownNameError("shape", text, SHAPES)
        return SHAPES[text]
    sizes: dict[str, Any] = {}
    for item in re.split(r"[\s,]+", text.strip()):
        name, _, size = item.partition("=")
        sizes[name] = size
    try:
        return ShapeFields.model_validate(sizes).shape()
    except ValidationError as error:
        raise ConfigError(f"shape {text!r}: {describe_errors((), error, ShapeFields)}") from error


def parse_batch(texts: Sequence[str]) -> tuple[int, int]:
    """Return the batch B and the length T of sizes such as ["B=4 T=1000"]. Raises: ConfigError."""
    match = re.fullmatch(r"B=(\d+)[\s,]+T=(\d+)", texts[0].strip()) if len(texts) == 1 else None
    if match is None:
        raise ConfigError(f"the shape of a model must be one such as 'B=4 T=1000', got {', '.join(texts)}")
    return int(match[1]), int(match[2])
