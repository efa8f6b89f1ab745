"""Benchmark backends on the same operands: time, ratio to a baseline, and error against float64."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor

from deltazoo.backends.conformance.cases import Case
from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.io.progress import Progress, silent
from deltazoo.backends.measure.environment import environment
from deltazoo.backends.measure.result import BenchConfig, Benchmark, Row
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.measure.timing import Times, failure_reason, peak_bytes, time_interleaved, time_once
from deltazoo.backends.measure.workload import Workload
from deltazoo.backends.torch_ext.cuda_graph import Call, capture_and_keep
from deltazoo.backends.torch_ext.devices import usable_device
from deltazoo.backends.update.base import Backend
from deltazoo.backends.update.dispatch import BoundUpdate, bind
from deltazoo.backends.update.explain import explain
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.backends.update.watch import watch

__all__ = ["BenchConfig", "Benchmark", "bench"]

Report = Callable[[Benchmark], None]


def ignore(benchmark: Benchmark) -> None:
    """Ignore the report."""


def bench(
    spec: UpdateSpec | Mapping[str, UpdateSpec],
    shapes: Sequence[Shape],
    backends: Sequence[str | Backend],
    config: BenchConfig | None = None,
    progress: Progress = silent,
    report: Report = ignore,
) -> Benchmark:
    """Time every backend on every update and shape in every direction.

    A backend that refuses a case or fails gets a row with the reason. Equal updates are timed once.

    Args:
        spec: an update, or several by name.
        report: receives the benchmark before the first case and after each, so that a caller who is interrupted keeps
            what was measured.
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
    specs, same = _merged({"": spec} if isinstance(spec, UpdateSpec) else spec)
    bound = {
        mixer: {name: bind(update, backend) for name, backend in zip(names, backends, strict=True)}
        for mixer, update in specs.items()
    }
    cases = list(itertools.product(specs.items(), shapes, config.directions))
    benchmark = Benchmark(
        environment=environment(device), specs=specs, same=same, config=config, backends=names, baseline=baseline,
        shapes=list(shapes), rows=[], missing=len(cases),
    )  # fmt: skip
    report(benchmark)
    for done, ((mixer, update), shape, direction) in enumerate(cases, 1):
        place = ", ".join(filter(None, benchmark.place(mixer, shape.name, direction)))
        note = partial(_note, progress, done - 1, len(cases), place)
        workload = Workload(Case(update, shape, getattr(torch, config.dtype), seed=config.seed), direction, device)
        rows = _Comparison(mixer, workload, config, device, note).run(bound[mixer], baseline)
        benchmark = benchmark.model_copy(update={"rows": benchmark.rows + rows, "missing": len(cases) - done})
        report(benchmark)
    progress("bench", len(cases), len(cases))
    return benchmark


def _merged(specs: Mapping[str, UpdateSpec]) -> tuple[dict[str, UpdateSpec], dict[str, list[str]]]:
    """Return the distinct updates by their first name, and the other names of those that have several."""
    names: dict[UpdateSpec, list[str]] = {}
    for name, spec in specs.items():
        names.setdefault(spec, []).append(name)
    distinct = {first: spec for spec, (first, *_) in names.items()}
    return distinct, {first: others for first, *others in names.values() if others}


def _note(progress: Progress, done: int, total: int, case: str, text: str) -> None:
    progress("bench", done, total, f"{case}: {text}")


class _Comparison:
    """Several backends on one workload, the update of a mixer."""

    def __init__(
        self, mixer: str, workload: Workload, config: BenchConfig, device: torch.device, note: Callable[[str], None]
    ) -> None:
        self.mixer, self.workload, self.config, self.device, self.note = mixer, workload, config, device, note
        self.exact: dict[str, Tensor] | None = None
        self.calls: dict[str, Call] = {}

    def run(self, bound: dict[str, BoundUpdate], baseline: str) -> list[Row]:
        shape, direction = self.workload.case.shape.name, self.workload.direction
        rows: dict[str, Row] = {}
        for name, update in bound.items():
            self.note(f"first call of {name}")
            rows[name] = self._first_call(Row(mixer=self.mixer, shape=shape, direction=direction, backend=name), update)
        times = time_interleaved(
            self.calls,
            self.device,
            self.config.rounds,
            self.config.seconds,
            lambda done, total, _: self.note(f"round {done + 1} of {total}") if done < total else None,
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
            timed: Call = capture_and_keep(call, self.device) if self.config.graphs else call
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
