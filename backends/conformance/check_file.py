"""`deltazoo check`: compare backends on a recurrence, shapes and dtypes from a YAML or JSON file.

spec: {decay: head, beta: head, negative_eigenvalues: both}
shapes: [cpu, {B: 4, T: 1000, H: 8, K: 96, V: 192}, {H: 2, HV: 8, K: 64, lengths: [700, 0, 324]}]
dtypes: [float32, bfloat16]
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from deltazoo.backends.conformance.cases import REGIMES, Case, Regime
from deltazoo.backends.conformance.compare import Report, compare
from deltazoo.backends.io import yaml_text
from deltazoo.backends.io.errors import ConfigError, cut, describe_invalid, unknown_name
from deltazoo.backends.io.frozen_config import FrozenConfig, without_consequences
from deltazoo.backends.io.progress import Progress, silent
from deltazoo.backends.measure.shapes import SHAPES, Shape
from deltazoo.backends.torch_ext.devices import usable_device
from deltazoo.backends.update import registry
from deltazoo.backends.update.base import Backend
from deltazoo.backends.update.registry import resolve
from deltazoo.backends.update.spec import UpdateSpec

Dtype = Literal["float64", "float32", "bfloat16", "float16"]


class ShapeFields(FrozenConfig):
    """A shape in a file. HV defaults to H and V to K; `lengths` of packed sequences replace B and T."""

    name: str = ""
    B: int = Field(default=1, ge=1)
    T: int | None = Field(default=None, ge=0)
    H: int = Field(ge=1)
    HV: int | None = Field(default=None, ge=1)
    K: int = Field(ge=1)
    V: int | None = Field(default=None, ge=1)
    lengths: tuple[Annotated[int, Field(ge=0)], ...] = ()

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.HV is not None and self.HV % self.H:
            raise ValueError(f"HV must be a multiple of H, got HV={self.HV}, H={self.H}")
        if bool(self.lengths) == (self.T is not None):
            raise ValueError(
                f"a shape needs either T or the lengths of packed sequences, got T={self.T}, lengths={self.lengths}"
            )
        if self.lengths and self.B != 1:
            raise ValueError(f"packed sequences (lengths) need B = 1, got B={self.B}")
        return self

    def shape(self) -> Shape:
        """Return the shape with all defaults filled in."""
        T = sum(self.lengths) if self.T is None else self.T
        HV, V = self.HV or self.H, self.V or self.K
        name = self.name or f"{self.B}x{T} heads {self.H}/{HV} widths {self.K}/{V}"
        return Shape(name, self.B, T, self.H, HV, self.K, V, self.lengths)


def _expand_named_shape(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value not in SHAPES:
        raise ValueError(unknown_name("shape", value, SHAPES))
    return {key: field for key, field in SHAPES[value]._asdict().items() if key != "T" or not SHAPES[value].lengths}


class CheckFile(FrozenConfig):
    """Contents of a check file. Shapes are names or sizes; regimes are described at `Case`."""

    spec: UpdateSpec
    shapes: tuple[Annotated[ShapeFields, BeforeValidator(_expand_named_shape)], ...] = Field(min_length=1)
    dtypes: tuple[Dtype, ...] = Field(default=("float32",), min_length=1)
    regimes: tuple[Regime, ...] = Field(default=REGIMES, min_length=1)
    seed: int = 0

    def cases(self) -> list[Case]:
        """Return every shape in every dtype and regime."""
        return [
            Case(self.spec, fields.shape(), getattr(torch, dtype), regime, seed=self.seed)
            for fields in self.shapes
            for dtype in self.dtypes
            for regime in self.regimes
        ]


def read_check(path: str | Path) -> CheckFile:
    """Read a check file, YAML or JSON.

    Raises: ConfigError, which names every invalid field, and the nearest known field for an unknown one.
    """
    try:
        data = yaml_text.load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(data, dict) or not data.keys() & {"spec", "shapes"}:
        raise ConfigError(f"{path} is not a check file: it must have the keys spec and shapes, got {cut(data)}")
    try:
        return CheckFile.model_validate(data)
    except ValidationError as error:
        messages = []
        for problem in without_consequences(error):
            location = ".".join(str(part) for part in problem["loc"])
            message = describe_invalid(location, problem["msg"])
            if problem["type"] == "extra_forbidden":
                unknown = unknown_name("field", str(problem["loc"][-1]), _fields(str(problem["loc"][0])))
                message = f"{location}: {unknown}"
            messages.append(message)
        raise ConfigError(f"{path} is not a valid check file: " + "; ".join(messages)) from error


def run_checks(
    cases: Iterable[Case], backends: Sequence[str | Backend], device: torch.device | str = "cpu"
) -> Iterator[Report]:
    """Compare each backend with the float64 reference on each case; an exception of a backend is a failure.

    Raises: UnknownNameError, DuplicateNameError, PluginError before the first comparison.
    """
    resolved = [resolve(backend) for backend in backends]
    for case in cases:
        for backend in resolved:
            try:
                yield compare(backend, case, device=device)
            except Exception as error:
                yield Report(backend.name, case, [], [f"it raised {type(error).__name__}: {error}"], [])


class CheckRow(BaseModel):
    """Error of one tensor of one backend on one case. refused: the reasons of a backend that does not support it."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    case: str
    backend: str
    tensor: str = ""
    error: float | None = None
    limit: float | None = None
    ok: bool = True
    refused: list[str] = []

    def cells(self) -> list[str]:
        """Return the row as text: tensor, error, limit, verdict, case."""
        if self.error is None or self.limit is None:
            return ["", "", "", "refused", self.case]
        verdict = "" if self.ok else "ABOVE LIMIT"
        return [self.tensor, f"{self.error:.1e}", f"{self.limit:.0e}", verdict, self.case]

    @property
    def severity(self) -> float:
        """The error relative to the limit; infinite if it is not a number, -1 without an error."""
        if self.error is None or self.limit is None:
            return -1.0
        return self.error / self.limit if math.isfinite(self.error) and self.limit else math.inf


class BackendSummary(BaseModel):
    """The result of one backend.

    Args:
        compared: number of cases with errors; refused: number of cases that the backend does not support. It raised
            an exception on the others.
        worst: the row with the largest error relative to its limit; None if there is none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    backend: str
    compared: int
    refused: int
    worst: CheckRow | None


class CheckResults(BaseModel):
    """Results of a check file.

    Args:
        spec: the fields of the spec that differ from their defaults; `case` of a row gives the other conditions.
        failures: one sentence each, with the backend and the case: an error above its limit, an exception, or the
            refusal of every case by a backend that was named.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    backends: list[str]
    spec: str
    cases: int
    summary: list[BackendSummary]
    rows: list[CheckRow]
    failures: list[str]


def check_file(
    path: str | Path, backends: Sequence[str] | None = None, device: str = "cpu", progress: Progress = silent
) -> CheckResults:
    """Compare backends with the reference in float64 on the cases of a file.

    Args: backends: names; None is all installed backends.
    Raises: ConfigError; UnknownNameError, DuplicateNameError, PluginError.
    """
    names = registry.names(registry.BACKENDS) if backends is None else list(backends)
    cases = read_check(path).cases()
    rows: list[CheckRow] = []
    failures: list[str] = []
    total = len(cases) * len(names)
    progress("check", 0, total)
    for done, report in enumerate(run_checks(cases, names, usable_device(device)), 1):
        rows += _rows(report)
        failures += [f"{report.backend} on {report.case}: {failure}" for failure in report.failures]
        progress("check", done, total, report.backend)
    summary = [_summary(resolve(name).name, rows) for name in names]
    if backends is not None:
        refusing = [row.backend for row in summary if row.refused == len(cases)]
        failures += [f"{name} refused every case, so it was not checked" for name in refusing]
    spec = cases[0].spec_text
    return CheckResults(backends=names, spec=spec, cases=len(cases), summary=summary, rows=rows, failures=failures)


def _summary(backend: str, rows: list[CheckRow]) -> BackendSummary:
    own = [row for row in rows if row.backend == backend]
    compared = [row for row in own if not row.refused]
    return BackendSummary(
        backend=backend,
        compared=len({row.case for row in compared}),
        refused=len(own) - len(compared),
        worst=max(compared, key=lambda row: row.severity, default=None),
    )


def _rows(report: Report) -> list[CheckRow]:
    case, backend = report.case.conditions, report.backend
    if report.refused:
        return [CheckRow(case=case, backend=backend, refused=report.refused)]
    return [
        CheckRow(case=case, backend=backend, tensor=error.tensor, error=error.relative, limit=error.limit, ok=error.ok)
        for error in report.errors
    ]


def _fields(section: str) -> list[str]:
    """Return the known fields of a section of the file."""
    if section == "spec":
        return list(UpdateSpec.model_fields)
    return list(ShapeFields.model_fields if section == "shapes" else CheckFile.model_fields)
