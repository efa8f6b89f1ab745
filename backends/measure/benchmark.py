"""Benchmark backends on the same operands: time, ratio to a baseline, and error against float64."""

import itertools
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from deltazoo.backends.base import Backend
from deltazoo.backends.conformance.cases import Case
from deltazoo.backends.devices import usable_device
from deltazoo.backends.dispatch import BoundUpdate, bind
from deltazoo.backends.errors import ConfigError
from deltazoo.backends.explain import explain
from deltazoo.backends.measure.environment import environment
from deltazoo.backends.measure.result import BenchConfig, Benchmark, Row
from deltazoo.backends.measure.timing import Times, failure_reason, peak_bytes, time_interleaved, time_once
from deltazoo.backends.measure.workload import Workload
from deltazoo.backends.progress import Progress, silent
from deltazoo.backends.shapes import Shape
from deltazoo.backends.spec import UpdateSpec
from deltazoo.backends.torch_ext.cuda_graph import Call, capture
from deltazoo.backends.watch import watch

__all__ = ["BenchConfig", "Benchmark", "bench"]


def bench(
    spec: UpdateSpec | Mapping[str, UpdateSpec],
    shapes: Sequence[Shape],
    backends: Sequence[str | Backend],
    config: BenchConfig | None = None,
    progress: Progress = silent,
) -> Benchmark:
    """Time every backend on every update and shape in every direction.

    A backend that refuses a case or fails gets a row with the reason.

    Args: spec: an update, or several by name.
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
    baseline = config.baseline or names[0]
    if baseline not in names:
        raise ConfigError(f"baseline must be one of the backends {', '.join(names)}, got {baseline!r}")
    specs = {"": spec} if isinstance(spec, UpdateSpec) else dict(spec)
    bound = {
        mixer: {name: bind(update, backend) for name, backend in zip(names, backends, strict=True)}
        for mixer, update in specs.items()
    }
    rows: list[Row] = []
    for (mixer, update), shape, direction in itertools.product(specs.items(), shapes, config.directions):
        workload = Workload(Case(update, shape, getattr(torch, config.dtype), seed=config.seed), direction, device)
        rows += _Comparison(mixer, workload, config, device, progress).run(bound[mixer], baseline)
    return Benchmark(
        environment=environment(device), specs=specs, config=config, baseline=baseline, shapes=list(shapes), rows=rows
    )


class _Comparison:
    """Several backends on one workload, the update of a mixer."""

    def __init__(
        self, mixer: str, workload: Workload, config: BenchConfig, device: torch.device, progress: Progress
    ) -> None:
        self.mixer, self.workload, self.config, self.device, self.progress = mixer, workload, config, device, progress
        self.exact: dict[str, Tensor] | None = None
        self.calls: dict[str, Call] = {}

    def run(self, bound: dict[str, BoundUpdate], baseline: str) -> list[Row]:
        shape, direction = self.workload.case.shape.name, self.workload.direction
        task = f"{self.mixer} {shape} {direction}".strip()
        rows: dict[str, Row] = {}
        for name, update in bound.items():
            self.progress(task, 0, self.config.rounds, f"first call of {name}")
            rows[name] = self._first_call(Row(mixer=self.mixer, shape=shape, direction=direction, backend=name), update)
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
            return row.model_copy(update={"refused": [failure_reason(failure)]})
        self.calls[row.backend] = timed
        figures = {"first_call_s": seconds, "error": error, "peak_mib": peak and peak / 2**20}
        return row.model_copy(update=figures | {"kernels": log.kernels})

    def _error(self, results: dict[str, Tensor]) -> float:
        self.exact = self.exact or self.workload.exact()
        return self.workload.error(results, self.exact)


def _with_times(row: Row, times: Times, base: float | None) -> Row:
    if not times.seconds:
        return row
    low, middle, high = times.percentiles_ms()
    figures = {"median_ms": middle, "low_ms": low, "high_ms": high, "rounds": len(times.seconds)}
    figures |= {"host_ms": 1e3 * median(times.host)} if times.host else {}
    return row.model_copy(update=figures | {"ratio": None if base is None else 1e3 * base / middle})
