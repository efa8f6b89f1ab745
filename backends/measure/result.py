"""The result of a benchmark of backends: settings, a row per case, and tables of them."""

import itertools
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from deltazoo.backends.frozen_config import FrozenConfig
from deltazoo.backends.measure.environment import Environment
from deltazoo.backends.measure.table import Table, group, three_digits
from deltazoo.backends.measure.timing import MIN_ROUNDS
from deltazoo.backends.measure.workload import DIRECTIONS, Direction
from deltazoo.backends.shapes import Shape
from deltazoo.backends.spec import UpdateSpec

Dtype = Literal["float64", "float32", "bfloat16", "float16"]


class BenchConfig(FrozenConfig):
    """Settings of a benchmark.

    Args:
        directions: "forward": without gradients. "backward": forward and backward. "decode": one token in place.
        device, dtype: of the operands.
        rounds: upper limit of timed calls per backend.
        seconds: approximate time limit per mixer, shape and direction.
        baseline: the backend whose median time is divided by those of the others; None means the first.
        seed: random seed of the operands.
        errors: measure the error against the float64 reference.
        graphs: time replays of CUDA graphs; a backend that cannot be captured gets a row with the reason.
    """

    directions: tuple[Direction, ...] = DIRECTIONS
    device: str = "cpu"
    dtype: Dtype = "float32"
    rounds: int = Field(default=20, ge=MIN_ROUNDS)
    seconds: float = Field(default=20.0, gt=0)
    baseline: str | None = None
    seed: int = Field(default=0, ge=0)
    errors: bool = True
    graphs: bool = False


class Row(BaseModel):
    """The figures of one backend on one update and shape in one direction.

    Args:
        mixer: the name of the update, a key of `Benchmark.specs`.
        first_call_s: seconds of the first call, including compilation; not part of the other figures.
        median_ms, low_ms, high_ms: median, 20th and 80th percentile of the timed calls. On CUDA this is the device
            time of a call that is issued while the device is still busy, as in training.
        host_ms: median time that the host needs to issue a call; CUDA only.
        ratio: the baseline's median divided by this median; above 1 is faster.
        error: largest relative RMS error of the results of the first call (o and state, or the gradients) against
            the float64 reference, on the first key head of the first sequence.
        peak_mib: peak of device memory during a call, with results and without operands; CUDA only.
        kernels: number of launches of each kernel in the first call; {} for backends other than triton.
        refused: why there are no figures; [] if there are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    mixer: str = ""
    shape: str
    direction: Direction
    backend: str
    first_call_s: float | None = None
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    host_ms: float | None = None
    rounds: int = 0
    ratio: float | None = None
    error: float | None = None
    peak_mib: float | None = None
    kernels: dict[str, int] = {}
    refused: list[str] = []

    def labels(self) -> list[str]:
        """Return the mixer, the shape and the direction as they are printed."""
        return [self.mixer, self.shape, "fwd + bwd" if self.direction == "backward" else self.direction]

    def figures(self) -> list[str]:
        """Format the figures of a row that has some; "" for those that were not measured."""
        assert self.median_ms is not None and self.low_ms is not None and self.high_ms is not None
        return [
            three_digits(self.median_ms),
            f"{three_digits(self.low_ms)}-{three_digits(self.high_ms)}",
            "" if self.ratio is None else f"{self.ratio:.2f}",
            "" if self.error is None else f"{self.error:.1e}",
            "" if self.peak_mib is None else f"{self.peak_mib:.0f}",
            "" if self.host_ms is None else three_digits(self.host_ms),
            "" if self.first_call_s is None else f"{self.first_call_s:.2f}",
        ]


class Benchmark(BaseModel):
    """The figures of a benchmark, with its environment and settings. specs: the update of each mixer, by its name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: Environment
    specs: dict[str, UpdateSpec]
    config: BenchConfig
    baseline: str
    shapes: list[Annotated[Shape, PlainSerializer(Shape._asdict)]]
    rows: list[Row]

    @property
    def timed(self) -> list[Row]:
        """The rows with figures."""
        return [row for row in self.rows if row.median_ms is not None]

    def header(self) -> list[str]:
        """Describe environment, settings and shapes, one sentence per line."""
        config = self.config
        settings = [*filter(None, [", ".join(self.specs)]), config.dtype, f"seed {config.seed}"]
        if config.device.startswith("cuda"):
            settings.append("queued, L2 flushed" + (", CUDA graphs" if config.graphs else ""))
        lines = [self.environment.line(), "; ".join(settings)]
        for shape in self.shapes:
            sizes = " ".join(f"{name}={getattr(shape, name)}" for name in ("B", "T", "H", "HV", "K", "V"))
            lines.append(f"{shape.name}: {sizes}" + (f" in {len(shape.lengths)} sequences" if shape.lengths else ""))
        return lines

    def table(self) -> Table:
        """Return a table with a row per backend, without the columns that have no figures."""
        legend = [
            ("ms", "median"),
            ("20-80 %", "percentiles, ms"),
            ("ratio", f"time of {self.baseline} / time"),
            ("error", "relative RMS error against float64"),
            ("MiB", "peak memory of a call"),
            ("host ms", "host time to issue a call"),
            ("first s", "first call, with compilation"),
        ]
        columns = ["mixer", "shape", "direction", "backend", *(f">{title}" for title, _ in legend)]
        rows = [[*self._labels(row), row.backend, *row.figures()] for row in self.timed]
        return Table(columns, rows, self._refusals(), legend).without_empty_columns()

    def matrix(self) -> Table:
        """Return a table of medians with a row per mixer, shape and direction, and a column per backend."""
        backends = list(dict.fromkeys(row.backend for row in self.rows))
        rows = []
        for _, group_of_case in itertools.groupby(self.rows, Row.labels):
            case = list(group_of_case)
            medians = {row.backend: three_digits(row.median_ms) for row in case if row.median_ms is not None}
            rows.append([*self._labels(case[0]), *(medians.get(backend, "-") for backend in backends)])
        columns = ["mixer", "shape", "direction", *(f">{backend}, ms" for backend in backends)]
        return Table(columns, rows, self._refusals()).without_empty_columns()

    def markdown(self, matrix: bool = False) -> str:
        """Format the header, and `table` or `matrix` with its legend, as Markdown."""
        return (self.matrix() if matrix else self.table()).markdown(self.header())

    def _labels(self, row: Row) -> list[str]:
        """Return the labels of a row; a mixer that all rows have in common is printed in the header."""
        return row.labels() if len(self.specs) > 1 else ["", *row.labels()[1:]]

    def _refusals(self) -> list[tuple[str, str]]:
        notes = [
            (row.backend, " ".join(filter(None, self._labels(row))), reason)
            for row in self.rows
            for reason in row.refused
        ]
        places = len({tuple(row.labels()) for row in self.rows})
        return group(notes, places)
