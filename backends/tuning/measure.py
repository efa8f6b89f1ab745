"""Check and time launch configs on a GPU."""

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.conformance.cases import REGIMES, Case, Regime, draw
from deltazoo.backends.conformance.compare import (
    Cotangents,
    draw_cotangents,
    limit,
    reference_results,
    relative_error,
    run,
)
from deltazoo.backends.conformance.decode_step import FusedOperands, draw_step, reference_step, typical_step
from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.measure.environment import Environment, environment
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.measure.timing import time_interleaved
from deltazoo.backends.measure.workload import Direction, Workload
from deltazoo.backends.torch_ext.cuda_graph import Call, capture_and_keep
from deltazoo.backends.torch_ext.devices import DeviceSpec, usable_device
from deltazoo.backends.triton.backend import TritonBackend
from deltazoo.backends.triton.chunk.registry import STEPS
from deltazoo.backends.triton.config import LaunchConfig
from deltazoo.backends.triton.runtime.records import key_of
from deltazoo.backends.tuning.candidates import Target, problem_of, zero_operands
from deltazoo.backends.tuning.tune import DIRECTION_OF, Runner
from deltazoo.backends.update.base import UpdateInputs, UpdateMeta
from deltazoo.backends.update.dispatch import BoundUpdate, bind

_MAX_SECONDS = 2.0  # limit of the timed calls of one comparison


class Expected(NamedTuple):
    """Operands of a case and the float64 results on them.

    Args:
        cotangents: of o and the final state; None for decode steps.
        scale: the results on ordinary inputs, a fraction of which bounds the denominator of relative errors from below.
    """

    operands: UpdateInputs | FusedOperands
    cotangents: Cotangents | None
    results: dict[str, Tensor]
    scale: dict[str, Tensor]


class CudaRunner(Runner):
    """Check and time configs on a CUDA device. Raises: ConfigError if there is none.

    A candidate that exceeds shared memory or registers raises before it runs, and is rejected. One that breaks the CUDA
    context ends the run with an error that names it; the records so far are in the table.
    """

    def __init__(self, device: str = "cuda", regimes: Sequence[Regime] = REGIMES) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("tuning needs an NVIDIA GPU, and torch finds none on this machine")
        cuda = usable_device(device)
        if cuda.type != "cuda":
            raise ConfigError(f"tuning needs a CUDA device, got {device!r}")
        index = cuda.index if cuda.index is not None else torch.cuda.current_device()
        self.cuda = torch.device("cuda", index)
        self.device, self.regimes = DeviceSpec.current(index), regimes
        self._verdicts: dict[tuple[object, ...], str] = {}
        self._expected: dict[tuple[Case, bool], Expected] = {}
        self._bench: _Bench | None = None

    def environment(self) -> Environment:
        return environment(self.cuda)

    def refusals(self, target: Target) -> list[str]:
        """Return the reasons why the kernels do not support a target; [] if they do."""
        return refusals(target, self.device)

    def compile(self, target: Target, kernel: str, configs: Sequence[LaunchConfig]) -> None:
        if kernel == "fused_step":
            work = _FusedWork(target, self.cuda)
            for config in configs:
                TritonBackend(config).compile_fused_step_in_threads(work.step, *work.operands)
            return
        inputs = zero_operands(target, kernel, self.cuda)
        for config in configs:
            TritonBackend(config).compile_in_threads(target.spec, inputs)

    def check(self, target: Target, kernel: str, config: LaunchConfig) -> str:
        problem_key = key_of(kernel, problem_of(target, kernel, self.device), config.segment_chunks)
        key = (problem_key.code, target.spec, getattr(config, kernel))
        if key not in self._verdicts:
            self._bench = None  # frees its memory
            self._verdicts[key] = self._verdict(target, kernel, config)
            torch.cuda.empty_cache()
        return self._verdicts[key]

    def _verdict(self, target: Target, kernel: str, config: LaunchConfig) -> str:
        try:
            for case in checks_of(target, kernel, config, self.regimes):
                key = (case, kernel == "fused_step")
                if key not in self._expected:
                    self._expected[key] = expected_results(case, kernel, self.cuda)
                if reason := numeric_error(config, case, self._expected[key], self.cuda):
                    return reason
            _run_once(target, kernel, config, self.cuda)
            torch.cuda.synchronize(self.cuda)
        except torch.AcceleratorError as error:
            raise ConfigError(f"{kernel} {getattr(config, kernel)!r} broke the CUDA context: {error}") from error
        except Exception as error:
            sentence = str(error).strip().partition("\n")[0]
            return f"failed with {type(error).__name__}: {sentence[:200]}"
        return ""

    def time(self, target: Target, kernel: str, configs: Sequence[LaunchConfig], rounds: int) -> list[float]:
        timed: Direction | Literal["fused_step"] = "fused_step" if kernel == "fused_step" else DIRECTION_OF[kernel]
        try:
            if self._bench is None or (self._bench.target, self._bench.timed) != (target, timed):
                self._bench = None
                self._bench = _Bench(target, timed, self.cuda)
            return self._bench.time(configs, rounds)
        except torch.OutOfMemoryError:  # compared configs hold the memory of several calls
            self._bench = None
            torch.cuda.empty_cache()
            return [math.inf] * len(configs)


def refusals(target: Target, device: DeviceSpec) -> list[str]:
    """Return the reasons why the kernels do not support a target on a device; [] if they do.

    The device need not be in this machine.
    """
    _, _, _, H, HV, K, V, lengths = target.shape
    meta = UpdateMeta("cuda", target.dtype, H, HV, K, V, packed=bool(lengths), grad=True)
    return TritonBackend().unsupported_on(target.spec, meta, device)


def checks_of(target: Target, kernel: str, config: LaunchConfig, regimes: Sequence[Regime] = REGIMES) -> list[Case]:
    """Return the short cases of the numeric check, which run the same compiled kernels as the target.

    A case has more than one segment if the target has segments, else more than one interval between checkpoints; a T
    that is no multiple of the chunk; and packed sequences, one of them empty, if the target is packed. Heads and widths
    are those of the target, because the compiled kernels depend on them.
    """
    spec, shape, dtype = target
    if kernel in STEPS:
        return [Case(spec, Shape("short", 3, 1, *shape[3:7]), dtype)]
    T = (
        64 * (config.segment_chunks or max(config.checkpoint_chunks, 16)) + 144
    )  # a run of the recomputation has at least 16 chunks
    lengths = (T - 80, 0, 64, 16) if shape.lengths else ()
    short = Shape("short", 1, T, *shape[3:7], lengths)
    return [Case(spec, short, dtype, regime) for regime in (regimes[:1] if config.segment_chunks else regimes)]


def expected_results(case: Case, kernel: str, device: torch.device) -> Expected:
    """Draw the operands of a case, and compute the float64 results to compare a config with."""
    if kernel == "fused_step":
        operands = draw_step(typical_step(case.spec, case.shape), (), case.shape.B, case.dtype, device, case.seed)
        results = _step_results(*reference_step(typical_step(case.spec, case.shape), operands))
        return Expected(operands, None, results, results)
    inputs = draw(case, device)
    cotangents = None if kernel == "decode" else draw_cotangents(case, inputs)
    results = scale = reference_results(case.spec, inputs, cotangents)
    if case.regime != "ordinary":
        scale = reference_results(case.spec, draw(case._replace(regime="ordinary"), device), cotangents)
    return Expected(inputs, cotangents, results, scale)


def numeric_error(config: LaunchConfig, case: Case, expected: Expected, device: torch.device) -> str:
    """Describe the first result of a config whose error is above its limit; "" if there is none."""
    results = _compute(TritonBackend(config), case, expected.operands, expected.cotangents)
    for name, exact in expected.results.items():
        error, allowed = relative_error(results[name], exact, expected.scale[name]), limit(case, name, device)
        if not error <= allowed:
            return f"{name} has relative RMS error {error:.1e}, above {allowed:.0e}, on {case}"
    return ""


def _run_once(target: Target, kernel: str, config: LaunchConfig, device: torch.device) -> None:
    """Run a config on the full target, which also compiles it for the timing."""
    backend, case = TritonBackend(config), Case(*target)
    if kernel == "fused_step":
        _FusedWork(target, device).call(bind(case.spec, backend))()
        return
    inputs = zero_operands(target, kernel, device)
    assert inputs.state is not None
    zeros = None if kernel == "decode" else (torch.zeros_like(inputs.v), torch.zeros_like(inputs.state))
    _compute(backend, case, inputs, zeros)


def _compute(
    backend: TritonBackend, case: Case, operands: UpdateInputs | FusedOperands, cotangents: Cotangents | None
) -> dict[str, Tensor]:
    bound = bind(case.spec, backend)
    if isinstance(operands, FusedOperands):
        copy: FusedOperands = _clone(operands)  # the step updates states and history in place
        return _step_results(bound.fused_decode_step_(typical_step(case.spec, case.shape), *copy), copy)
    if cotangents is not None:
        return run(backend, case.spec, operands, cotangents)
    assert operands.state is not None
    states = operands.state.clone()
    with torch.no_grad():
        o = bound.step_(operands._replace(state=None), states)
    return {"o": o, "state": states}


def _clone(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.clone()
    return type(x)(*map(_clone, x)) if isinstance(x, tuple) else x


def _step_results(o: Tensor, after: FusedOperands) -> dict[str, Tensor]:
    assert after.inputs.history is not None
    return {"o": o, "state": after.states, "history": after.inputs.history}


class _FusedWork:
    """The fused decode step of a typical mixer with the update of the target, as `Workload` is for updates."""

    def __init__(self, target: Target, device: torch.device) -> None:
        self.step = typical_step(target.spec, target.shape)
        self.operands = draw_step(self.step, (), target.shape.sequences, target.dtype, device)

    def call(self, bound: BoundUpdate) -> Callable[[], dict[str, Tensor]]:
        return lambda: {"o": bound.fused_decode_step_(self.step, *self.operands)}


class _Bench:
    """Times configs of a target in one direction, or its fused step, as CUDA graphs.

    It keeps the graphs of the configs that were compared last.
    """

    def __init__(self, target: Target, timed: Direction | Literal["fused_step"], device: torch.device) -> None:
        self.target, self.timed, self.device = target, timed, device
        self.case = Case(target.spec, target.shape, target.dtype)
        self.work = _FusedWork(target, device) if timed == "fused_step" else Workload(self.case, timed, device)
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[LaunchConfig, Call] = {}
        self.first: dict[str, Tensor] | None = None

    def time(self, configs: Sequence[LaunchConfig], rounds: int) -> list[float]:
        """Return the median seconds of each config; infinity if its results differ from those of the first config."""
        self.graphs = {config: graph for config, graph in self.graphs.items() if config in configs}
        calls: dict[str, Call] = {
            config.model_dump_json(): self.graphs[config]
            for config in configs
            if config in self.graphs or self._capture(config)
        }
        times = time_interleaved(calls, self.device, rounds, _MAX_SECONDS, lambda done, total, note: None)
        seconds = {name: median(measured.seconds) for name, measured in times.items()}
        return [seconds.get(config.model_dump_json(), math.inf) for config in configs]

    def _capture(self, config: LaunchConfig) -> bool:
        """Capture a config in a graph. Returns False if its results are wrong."""
        call = self.work.call(bind(self.target.spec, TritonBackend(config)))
        results = call()
        if self.timed in ("forward", "backward"):  # a step changes its states from call to call
            if self.first is None:
                self.first = {name: x.clone() for name, x in results.items()}
            for name, first in self.first.items():
                if not relative_error(results[name], first.double(), first) <= 2 * limit(self.case, name, self.device):
                    return False
        del results
        self.graphs[config] = capture_and_keep(call, self.device, self.pool)
        return True
