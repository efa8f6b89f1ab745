"""The result of a benchmark of backends: settings, a row per case, and tables of them."""

from collections.abc import Sequence
from itertools import compress, groupby
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from deltazoo.backends.io.frozen_config import FrozenConfig
from deltazoo.backends.measure.environment import Environment
from deltazoo.backends.measure.shapes import SHAPES, Shape
from deltazoo.backends.measure.table import Note, Table, group, partial_line, spread, three_digits
from deltazoo.backends.measure.timing import MIN_ROUNDS
from deltazoo.backends.measure.workload import DIRECTIONS, Direction
from deltazoo.backends.update.spec import UpdateSpec

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

    directions: tuple[Direction, ...] = Field(default=DIRECTIONS, min_length=1)
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

    def figures(self) -> list[str]:
        """Format the figures of a row that has some; "" for those that were not measured."""
        assert self.median_ms is not None and self.low_ms is not None and self.high_ms is not None
        return [
            three_digits(self.median_ms),
            spread(self.low_ms, self.median_ms, self.high_ms),
            "" if self.ratio is None else f"{self.ratio:.2f}",
            "" if self.error is None else f"{self.error:.1e}",
            "" if self.peak_mib is None else f"{self.peak_mib:.0f}",
            "" if self.host_ms is None else three_digits(self.host_ms),
            "" if self.first_call_s is None else f"{self.first_call_s:.2f}",
        ]


class Benchmark(BaseModel):
    """The figures of a benchmark, with its environment and settings.

    Args:
        specs: the update of each mixer, by its name.
        same: mixers with an equal update, by the mixer whose times are also theirs.
        backends: those that were timed; skipped: those that support none of the cases and were not asked for by name.
        missing: number of cases that are not measured yet, or that an interruption has left out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: Environment
    specs: dict[str, UpdateSpec]
    same: dict[str, list[str]] = {}
    config: BenchConfig
    backends: list[str] = []
    skipped: list[str] = []
    baseline: str
    shapes: list[Annotated[Shape, PlainSerializer(Shape._asdict)]]
    rows: list[Row]
    missing: int = 0

    @property
    def timed(self) -> list[Row]:
        """The rows with figures."""
        return [row for row in self.rows if row.median_ms is not None]

    @property
    def cases(self) -> int:
        """The number of cases, measured or not: a mixer and shape in one direction."""
        return len(self.specs) * len(self.shapes) * len(self.config.directions)

    def header(self) -> list[str]:
        """Describe environment, settings and shapes, one sentence per line."""
        config = self.config
        updates = f"{len(self.specs)} updates" if len(self.specs) > 1 else "".join(self.specs)
        settings = [*filter(None, [updates]), config.dtype, f"seed {config.seed}"]
        if config.device.startswith("cuda"):
            settings.append("queued, L2 flushed" + (", CUDA graphs" if config.graphs else ""))
        lines = [self.environment.line(), "; ".join(settings)]
        for shape in self.shapes:
            name = f"{shape.name}: " if shape.name in SHAPES else ""
            lines.append(name + _sizes(shape) + (f" in {len(shape.lengths)} sequences" if shape.lengths else ""))
        if self.same:
            equal = ", ".join(f"{name} (also {', '.join(others)})" for name, others in self.same.items())
            lines.append(f"equal updates are timed once: {equal}")
        return lines

    def partial(self) -> str:
        """Say how many of the cases were measured, if some are missing."""
        return partial_line(self.cases - self.missing, self.missing)

    def table(self) -> Table:
        """Return a table with a row per backend and case."""
        is_cuda = self.config.device.startswith("cuda")
        figures = [  # title, meaning, usual width, whether it is measured
            ("ms", "median", 6, True),
            ("20-80 %", "percentiles, %", 9, True),
            ("ratio", f"time of {self.baseline} / time", 5, True),
            ("error", "relative RMS error against float64", 7, self.config.errors),
            ("MiB", "peak memory of a call", 5, is_cuda),
            ("host ms", "host time to issue a call", 7, is_cuda),
            ("first s", "first call, with compilation", 7, True),
        ]
        measured = [is_measured for *_, is_measured in figures]
        rows = [[*self._case(row), row.backend, *compress(row.figures(), measured)] for row in self.timed]
        shown = [*compress(figures, measured)]
        title, width = self._case_column()
        columns = [*title, "backend", *(f">{title}" for title, *_ in shown)]
        widths = [*width, max(map(len, self.backends), default=0), *(width for *_, width, _ in shown)]
        return Table(columns, rows, self._refusals(), [(title, text) for title, text, *_ in shown], widths)

    def matrix(self) -> Table:
        """Return a table of medians with a row per case and a column per backend."""
        rows = []
        for case, group_of_case in groupby(self.rows, lambda row: (row.mixer, row.shape, row.direction)):
            medians = {row.backend: three_digits(row.median_ms) for row in group_of_case if row.median_ms is not None}
            rows.append([*self._joined(self.place(*case)), *(medians.get(backend, "-") for backend in self.backends)])
        title, width = self._case_column()
        columns = [*title, *(f">{backend}" for backend in self.backends)]
        legend = [("figures", "median, ms"), ("-", "did not run")]
        return Table(columns, rows, self._refusals(), legend, [*width, *(5 for _ in self.backends)])

    def markdown(self, matrix: bool = False) -> str:
        """Format the header, and `table` or `matrix` with its legend, as Markdown."""
        header = [*self.header(), *filter(None, [self.partial()])]
        return (self.matrix() if matrix else self.table()).markdown(header)

    def title(self) -> list[str]:
        """Return two lines for the top of a plot: what all cases have in common, and where they were measured."""
        mixers, shapes = list(self.specs), [_sizes(shape) for shape in self.shapes]
        directions = [_direction(direction) for direction in self.config.directions]
        common = (each[0] for each in (mixers, shapes, directions) if len(each) == 1)
        environment = self.environment
        where = f"{environment.device}, torch {environment.torch}, {self.config.dtype}"
        return [", ".join(filter(None, common)), where]

    def case(self, row: Row) -> str:
        """Return what distinguishes the case of a row: mixer, shape and direction if there are several of each."""
        return "".join(self._case(row))

    def place(self, mixer: str, shape: str, direction: Direction) -> tuple[str, str, str]:
        """Return the mixer, the shape and the direction of a case as they are printed."""
        sizes = next(each for each in self.shapes if each.name == shape)
        return mixer, self._shape_label(sizes), _direction(direction)

    def _case(self, row: Row) -> list[str]:
        """Return the one cell of the column of cases, or none if there is one case."""
        return self._joined(self.place(row.mixer, row.shape, row.direction))

    def _case_column(self) -> tuple[list[str], list[int]]:
        """Return the title and the width of the column of cases, or [] and [] if there is one case."""
        directions = [_direction(direction) for direction in self.config.directions]
        widest = [max(texts, key=len) for texts in (self.specs, map(self._shape_label, self.shapes), directions)]
        return self._joined(["mixer", "shape", "direction"]), [len(text) for text in self._joined(widest)]

    def _joined(self, texts: Sequence[str]) -> list[str]:
        several = (len(group) > 1 for group in (self.specs, self.shapes, self.config.directions))
        return [*filter(None, [", ".join(compress(texts, several))])]

    def _shape_label(self, shape: Shape) -> str:
        """Return the name of a named shape, or the sizes that distinguish a shape from the others."""
        if shape.name in SHAPES:
            return shape.name
        differing = [name for name in _SIZES if len({getattr(other, name) for other in self.shapes}) > 1]
        return _sizes(shape, differing or _SIZES)

    def _refusals(self) -> list[tuple[str, str]]:
        places = [self.place(row.mixer, row.shape, row.direction) for row in self.rows]
        notes = [
            Note(row.backend, place, reason)
            for row, place in zip(self.rows, places, strict=True)
            for reason in row.refused
        ]
        skipped = [(", ".join(self.skipped), "no support for any of these cases; --backends NAME prints the reasons")]
        return [*group(notes, places), *(skipped if self.skipped else [])]


_SIZES = ("B", "T", "H", "HV", "K", "V")


def _sizes(shape: Shape, names: Sequence[str] = _SIZES) -> str:
    return " ".join(f"{name}={getattr(shape, name)}" for name in names)


def _direction(direction: Direction) -> str:
    return "fwd + bwd" if direction == "backward" else direction
