"""Benchmark the update of a mixer by names: of the mixer, of shapes, of backends."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from deltazoo.backends import registry
from deltazoo.backends.conformance.check_file import ShapeFields
from deltazoo.backends.errors import ConfigError, UnknownNameError
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
    """Time backends on the update of a mixer with its default fields.

    Args: shapes: as for `shape_of`; backends: names, None is all that are installed.
    Raises: ConfigError; UnknownNameError, DuplicateNameError, PluginError.
    """
    spec = config_class(mixer)().spec()
    if spec is None:
        raise ConfigError(f"mixer {mixer!r} has no update that backends compute; there is nothing to measure")
    names = registry.names(registry.BACKENDS) if backends is None else backends
    return bench(spec, [shape_of(shape) for shape in shapes], names, config, progress)


def shape_of(text: str) -> Shape:
    """Find a named shape, or read sizes: "B=4 T=1000 H=8 K=64", with HV = H, V = K and B = 1 unless given.

    Raises: UnknownNameError; ConfigError.
    """
    if "=" not in text:
        if text not in SHAPES:
            raise UnknownNameError("shape", text, SHAPES)
        return SHAPES[text]
    sizes: dict[str, Any] = {}
    for part in re.split(r"[\s,]+", text.strip()):
        name, _, size = part.partition("=")
        sizes[name] = size
    try:
        return ShapeFields(**sizes).shape()
    except ValidationError as error:
        wrong = [(".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")) for e in error.errors()]
        lines = "; ".join(f"{name}: {message}" if name else message for name, message in wrong)
        raise ConfigError(f"shape {text!r}: {lines}") from error
