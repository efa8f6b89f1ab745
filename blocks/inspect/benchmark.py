"""Benchmark of a mixer's update; the mixer, shapes and backends are given by name."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from deltazoo.backends import registry
from deltazoo.backends.conformance.check_file import ShapeFields
from deltazoo.backends.errors import ConfigError, UnknownNameError, describe_invalid
from deltazoo.backends.measure.benchmark import BenchConfig, Benchmark, bench
from deltazoo.backends.progress import Progress, silent
from deltazoo.backends.shapes import SHAPES, Shape
from deltazoo.mixers.core.config import config_class

DEFAULT_SHAPE = "cpu"


def measure(
    mixer: str,
    shapes: Sequence[str] = (DEFAULT_SHAPE,),
    backends: Sequence[str] | None = None,
    config: BenchConfig | None = None,
    progress: Progress = silent,
) -> Benchmark:
    """Time backends on the update of a mixer with default fields.

    Args:
        shapes: names or sizes, as for `parse_shape`.
        backends: names; None selects all that are installed.
    Raises: ConfigError; UnknownNameError, DuplicateNameError, PluginError.
    """
    spec = config_class(mixer)().spec()
    if spec is None:
        raise ConfigError(f"mixer {mixer!r} has no update that backends compute; there is nothing to measure")
    names = registry.names(registry.BACKENDS) if backends is None else backends
    return bench(spec, [parse_shape(shape) for shape in shapes], names, config, progress)


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
        sentences = "; ".join(describe_invalid(".".join(map(str, e["loc"])), e["msg"]) for e in error.errors())
        raise ConfigError(f"shape {text!r}: {sentences}") from error
