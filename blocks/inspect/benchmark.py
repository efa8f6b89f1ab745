"""Benchmark of the updates of mixers; mixers, shapes and backends are given by name."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import ValidationError

from deltazoo.backends.conformance.cases import Case
from deltazoo.backends.conformance.check_file import ShapeFields
from deltazoo.backends.conformance.compare import refusal
from deltazoo.backends.io.errors import ConfigError, UnknownNameError
from deltazoo.backends.io.frozen_config import describe_errors
from deltazoo.backends.io.progress import Progress, silent
from deltazoo.backends.measure.benchmark import BenchConfig, Benchmark, Report, bench, ignore
from deltazoo.backends.measure.shapes import SHAPES, Shape
from deltazoo.backends.measure.workload import in_direction
from deltazoo.backends.torch_ext.devices import usable_device
from deltazoo.backends.update import registry
from deltazoo.backends.update.registry import resolve
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.blocks.spec import pattern
from deltazoo.blocks.spec.parsing import parse_mixer
from deltazoo.mixers.core.config import config_class
from deltazoo.mixers.core.mixer import MixerConfig
from deltazoo.mixers.core.patterns import Name

DEFAULT_SHAPE = "cpu"


def measure(
    mixers: Sequence[str] | None = None,
    shapes: Sequence[str] = (DEFAULT_SHAPE,),
    backends: Sequence[str] | None = None,
    config: BenchConfig | None = None,
    progress: Progress = silent,
    report: Report = ignore,
) -> Benchmark:
    """Time backends on the updates of mixers.

    Args:
        mixers: names, with fields as in a pattern: "gated_deltanet(negative_eigenvalues=both)". None selects every
            update of a registered mixer with default fields.
        shapes: names or sizes, as for `parse_shape`.
        backends: names; None selects all that support a case, if any does.
        report: as for `bench`.
    Raises: ConfigError; PatternError; UnknownNameError, DuplicateNameError, PluginError.
    """
    config = config or BenchConfig()
    specs = _all_updates() if mixers is None else {mixer: parse_update(mixer) for mixer in mixers}
    sizes = [parse_shape(shape) for shape in shapes]
    names, skipped = backends, {}
    if names is None:
        usable_device(config.device)
        installed = registry.names(registry.BACKENDS)
        names = [name for name in installed if _supports_a_case(name, specs, sizes, config)] or installed
        skipped = {"skipped": [name for name in installed if name not in names]}
    return bench(
        specs, sizes, names, config, progress, lambda part: report(part.model_copy(update=skipped))
    ).model_copy(update=skipped)


def parse_update(text: str) -> UpdateSpec:
    """Return the update of a mixer, given by name and fields as in a pattern.

    Raises: ConfigError: the mixer has no update, or a field is invalid; PatternError; UnknownNameError; PluginError.
    """
    config = parse_config(text)
    spec = config.spec()
    if spec is None:
        raise ConfigError(f"mixer {config.name!r} has no update that backends compute; there is nothing to measure")
    return spec


def parse_config(text: str) -> MixerConfig:
    """Return the config of a mixer, given by name and fields as in a pattern.

    Raises: ConfigError: a field is invalid; PatternError; UnknownNameError; PluginError.
    """
    term = pattern.parse(text)
    if not isinstance(term, Name):
        raise ConfigError(f"a mixer must be one name, with fields in parentheses if any, got {text!r}")
    config_class(term.name)  # its error names the nearest mixer
    return parse_mixer((term.name,), {"mixer": term.name, **dict(term.fields)})


def _all_updates() -> dict[str, UpdateSpec]:
    specs = {name: config_class(name)().spec() for name in registry.names(registry.MIXERS)}
    return {name: spec for name, spec in specs.items() if spec is not None}


def _supports_a_case(name: str, specs: dict[str, UpdateSpec], shapes: list[Shape], config: BenchConfig) -> bool:
    backend = resolve(name)
    return any(
        refusal(backend, in_direction(case, direction), config.device, direction == "backward") is None
        for spec, shape, direction in itertools.product(set(specs.values()), shapes, config.directions)
        for case in [Case(spec, shape, getattr(torch, config.dtype), seed=config.seed)]
    )


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
