"""A check of backends on one's own recurrence, shapes and dtypes, as a YAML or JSON file:

spec: {decay: head, beta: head, negative_eigenvalues: both}
shapes: [cpu, {B: 4, T: 1000, H: 8, K: 96, V: 192}, {H: 2, HV: 8, K: 64, lengths: [700, 0, 324]}]
dtypes: [float32, bfloat16]
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from deltazoo.backends.base import Backend
from deltazoo.backends.conformance.cases import REGIMES, Case, Regime
from deltazoo.backends.conformance.compare import Report, compare
from deltazoo.backends.errors import ConfigError, unknown_name
from deltazoo.backends.registry import resolve
from deltazoo.backends.shapes import SHAPES, Shape
from deltazoo.backends.spec import UpdateSpec

Dtype = Literal["float64", "float32", "bfloat16", "float16"]


class ShapeFields(BaseModel):
    """A shape in a file; HV is H and V is K unless given, and `lengths` of packed sequences stand for B and T."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    B: int = Field(default=1, ge=1)
    T: int | None = Field(default=None, ge=0)
    H: int = Field(ge=1)
    HV: int | None = Field(default=None, ge=1)
    K: int = Field(ge=1)
    V: int | None = Field(default=None, ge=1)
    lengths: tuple[Annotated[int, Field(ge=0)], ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.HV is not None and self.HV % self.H:
            raise ValueError(f"HV must be a multiple of H, got HV={self.HV}, H={self.H}")
        if bool(self.lengths) == (self.T is not None):
            raise ValueError(
                f"a shape has T, or the lengths of packed sequences, got T={self.T}, lengths={self.lengths}"
            )
        if self.lengths and self.B != 1:
            raise ValueError(f"packed sequences (lengths) need B = 1, got B={self.B}")
        return self

    def shape(self) -> Shape:
        """The shape as the kit has it."""
        T = sum(self.lengths) if self.T is None else self.T
        HV, V = self.HV or self.H, self.V or self.K
        name = self.name or f"{self.B}x{T} heads {self.H}/{HV} widths {self.K}/{V}"
        return Shape(name, self.B, T, self.H, HV, self.K, V, self.lengths)


def _named(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value not in SHAPES:
        raise ValueError(unknown_name("shape", value, SHAPES))
    return {key: field for key, field in SHAPES[value]._asdict().items() if key != "T" or not SHAPES[value].lengths}


class CheckFile(BaseModel):
    """What to check. Shapes are named ones or sizes; regimes are how inputs are drawn, see `Case`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    spec: UpdateSpec
    shapes: tuple[Annotated[ShapeFields, BeforeValidator(_named)], ...] = Field(min_length=1)
    dtypes: tuple[Dtype, ...] = Field(default=("float32",), min_length=1)
    regimes: tuple[Regime, ...] = Field(default=REGIMES, min_length=1)
    seed: int = 0

    def cases(self) -> list[Case]:
        """Every shape in every dtype and regime."""
        return [
            Case(self.spec, fields.shape(), getattr(torch, dtype), regime, seed=self.seed)
            for fields in self.shapes
            for dtype in self.dtypes
            for regime in self.regimes
        ]


def read_check(path: str | Path) -> CheckFile:
    """Read a check from a YAML or JSON file.

    Raises: ConfigError, naming every field that is wrong, and for an unknown one the nearest that is known.
    """
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        return CheckFile.model_validate(data)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"])
            message = problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "extra_forbidden":
                message = unknown_name("field", str(problem["loc"][-1]), _fields(str(problem["loc"][0])))
            lines.append(f"{where}: {message}" if where else message)
        raise ConfigError(f"{path} is not a check: " + "; ".join(lines)) from error


def run_checks(
    cases: Iterable[Case], backends: Sequence[str | Backend], device: torch.device | str = "cpu"
) -> Iterator[Report]:
    """Compare each backend with the float64 reference on each case; a backend that raises has failed, in words.

    Raises: UnknownNameError, DuplicateNameError, PluginError before anything is computed.
    """
    resolved = [resolve(backend) for backend in backends]
    for case in cases:
        for backend in resolved:
            try:
                yield compare(backend, case, device=device)
            except Exception as error:
                yield Report(backend.name, case, [], [f"it raised {type(error).__name__}: {error}"], [])


def _fields(part: str) -> list[str]:
    """The fields that are known in a part of the file."""
    if part == "spec":
        return list(UpdateSpec.model_fields)
    return list(ShapeFields.model_fields if part == "shapes" else CheckFile.model_fields)
