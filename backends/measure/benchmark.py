"""Benchmark backends on the same operands: time, ratio to a baseline, and error against float64."""

from collections.abc import Sequence
from statistics import median
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer
from torch import Tensor

from deltazoo.backends.base import Backend
from deltazoo.backends.conformance.cases import Case
from deltazoo.backends.devices import usable_device
from deltazoo.backends.dispatch import BoundUpdate, bind
from deltazoo.backends.errors import ConfigError
from deltazoo.backends.explain import explain
from deltazoo.backends.frozen_config import FrozenConfig
from deltazoo.backends.measure.environment import Environment, environment
from deltazoo.backends.measure.timing import MIN_ROUNDS, Times, peak_bytes, time_interleaved, time_once
from deltazoo.backends.measure.workload import DIRECTIONS, Direction, Workload
from deltazoo.backends.progress import Progress, silent
from deltazoo.backends.shapes import Shape
from deltazoo.backends.spec import UpdateSpec
from deltazoo.backends.torch_ext.cuda_graph import Call, capture
from deltazoo.backends.watch import watch

Dtype = Literal["float64", "float32", "bfloat16", "float16"]


class BenchConfig(FrozenConfig):
    """Settings of a benchmark.

    Args:
        directions: "forward": without gradients. "backward": forward and backward. "decode": one token in place.
        device, dtype: of the operands.
        rounds: upper limit of timed calls per backend.
        seconds: approximate time limit per shape and direction.
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
    """The figures of one backend on one shape in one direction.

    Args:
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

    def cells(self) -> list[str]:
        """Format the row for the columns `Benchmark.columns`."""
        labels = [self.shape, "fwd + bwd" if self.direction == "backward" else self.direction, self.backend]
        if self.median_ms is None:
            return [*labels, f"refused: {' '.join(self.refused)}", "", "", "", "", "", ""]
        return [
            *labels,
            f"{self.median_ms:.3g}",
            f"{self.low_ms:.3g}-{self.high_ms:.3g}",
            "" if self.ratio is None else f"{self.ratio:.2f}",
            "" if self.error is None else f"{self.error:.1e}",
            "" if self.peak_mib is None else f"{self.peak_mib:.0f}",
            "" if self.host_ms is None else f"{self.host_ms:.3g}",
            f"{self.first_call_s:.2f}",
        ]


class Benchmark(BaseModel):
    """The figures of a benchmark, with its environment and settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: Environment
    spec: UpdateSpec
    config: BenchConfig
    baseline: str
    shapes: list[Annotated[Shape, PlainSerializer(Shape._asdict)]]
    rows: list[Row]

    @property
    def columns(self) -> list[str]:
        """The titles of `Row.cells`."""
        ratio = f"x {self.baseline}"
        return ["shape", "direction", "backend", "ms", "20-80 %", ratio, "error", "MiB", "host ms", "first s"]

    def header(self) -> str:
        """Describe environment, settings, shapes and columns in one line."""
        config = self.config
        parts = [self.environment.line(), config.dtype, f"seed {config.seed}"]
        if config.device.startswith("cuda"):
            parts.append("queued, L2 flushed" + (", CUDA graphs" if config.graphs else ""))
        for shape in self.shapes:
            sizes = " ".join(f"{name}={getattr(shape, name)}" for name in ("B", "T", "H", "HV", "K", "V"))
            parts.append(f"{shape.name}: {sizes}" + (f" in {len(shape.lengths)} sequences" if shape.lengths else ""))
        columns = "ms: median and percentiles; error: relative RMS error against float64; MiB: peak memory of a call; "
        columns += "host ms: host time to issue a call; first s: first call, with compilation"
        return "; ".join([*parts, columns])

    def markdown(self) -> str:
        """Format the header and a Markdown table."""
        lines = [self.columns, ["---"] * 3 + ["---:"] * 7, *(row.cells() for row in self.rows)]
        return "\n".join([self.header(), "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def bench(
    spec: UpdateSpec,
    shapes: Sequence[Shape],
    backends: Sequence[str | Backend],
    config: BenchConfig | None = None,
    progress: Progress = silent,
) -> Benchmark:
    """Time every backend on every shape in every direction.

    A backend that refuses a case or fails gets a row with the reason.

    Raises: ConfigError; UnknownNameError, DuplicateNameError and PluginError for the backends.
    """
    config = config or BenchConfig()
    device = usable_device(config.device)
    if config.graphs and device.type != "cuda":
        raise ConfigError(f"graphs needs a CUDA device, got {config.device!r}")
    if not shapes or not backends:
        raise ConfigError(f"bench needs a shape and a backend, got {len(shapes)} shapes and {len(backends)} backends")
    names = [backend if isinstance(backend, str) else backend.name for backend in backends]
    if len(set(names)) < len(names):
        raise ConfigError(f"backends must have different names, got {', '.join(names)}")
    bound = {name: bind(spec, backend) for name, backend in zip(names, backends, strict=True)}
    baseline = config.baseline or next(iter(bound))
    if baseline not in bound:
        raise ConfigError(f"baseline must be one of the backends {', '.join(bound)}, got {baseline!r}")
    rows: list[Row] = []
    for shape in shapes:
        for direction in config.directions:
            workload = Workload(Case(spec, shape, getattr(torch, config.dtype), seed=config.seed), direction, device)
            rows += _Comparison(workload, config, device, progress).run(bound, baseline)
    return Benchmark(
        environment=environment(device), spec=spec, config=config, baseline=baseline, shapes=list(shapes), rows=rows
    )


class _Comparison:
    """Several backends on one workload."""

    def __init__(self, workload: Workload, config: BenchConfig, device: torch.device, progress: Progress) -> None:
        self.workload, self.config, self.device, self.progress = workload, config, device, progress
        self.exact: dict[str, Tensor] | None = None
        self.calls: dict[str, Call] = {}

    def run(self, bound: dict[str, BoundUpdate], baseline: str) -> list[Row]:
        shape, direction = self.workload.case.shape.name, self.workload.direction
        task = f"{shape} {direction}"
        rows: dict[str, Row] = {}
        for name, update in bound.items():
            self.progress(task, 0, self.config.rounds, f"first call of {name}")
            rows[name] = self._first_call(Row(shape=shape, direction=direction, backend=name), update)
        times = time_interleaved(
            self.calls,
            self.device,
            self.config.rounds,
            self.config.seconds,
            lambda done, total, note: self.progress(task, done, total, note),
        )
        base = median(times[baseline].seconds) if baseline in times else None
        return [_with_times(row, times.get(name, Times([], [])), base) for name, row in rows.items()]

    def _first_call(self, row: Row, update: BoundUpdate) -> Row:
        reasons = explain(self.workload.case.spec, self.workload.meta, update.requested).verdicts[0].reasons
        if reasons:
            return row.model_copy(update={"refused": reasons})
        results: dict[str, Tensor] = {}
        try:
            call = self.workload.call(update)
            with watch() as log:
                seconds = time_once(lambda: results.update(call()), self.device)
            error = self._error(results) if self.config.errors else None
            results.clear()
            peak = peak_bytes(call, self.device)
            timed: Call = capture(call, self.device) if self.config.graphs else call
        except Exception as failure:  # one backend's failure must not end the benchmark
            sentence = str(failure).strip().partition("\n")[0]
            return row.model_copy(update={"refused": [f"failed with {type(failure).__name__}: {sentence}"]})
        self.calls[row.backend] = timed
        figures = {"first_call_s": seconds, "error": error, "peak_mib": peak and peak / 2**20}
        return row.model_copy(update=figures | {"kernels": log.kernels})

    def _error(self, results: dict[str, Tensor]) -> float:
        self.exact = self.exact or self.workload.exact()
        return self.workload.error(results, self.exact)


def _with_times(row: Row, times: Times, base: float | None) -> Row:
    if not times.seconds:
        return row
    low, middle, high = (float(x) for x in np.percentile(times.seconds, [20, 50, 80]))
    figures = {"median_ms": 1e3 * middle, "low_ms": 1e3 * low, "high_ms": 1e3 * high, "rounds": len(times.seconds)}
    figures |= {"host_ms": 1e3 * median(times.host)} if times.host else {}
    return row.model_copy(update=figures | {"ratio": None if base is None else base / middle})
