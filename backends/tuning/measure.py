"""Check and time launch configs on a GPU: each check in a process of its own, each time from a captured graph.

A config may ask for more shared memory than there is, hang, or break the process's hold on the device: so every
candidate runs first in a process that may be lost. These also compile side by side, and leave what they compile in
Triton's cache.
"""

import contextlib
import math
import multiprocessing
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.base import UpdateInputs, UpdateMeta
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
from deltazoo.backends.devices import usable_device
from deltazoo.backends.dispatch import BoundUpdate, bind
from deltazoo.backends.errors import ConfigError
from deltazoo.backends.measure.environment import Environment, environment
from deltazoo.backends.measure.timing import time_interleaved
from deltazoo.backends.measure.workload import Direction, Workload
from deltazoo.backends.shapes import Shape
from deltazoo.backends.torch_ext.cuda_graph import Call, captured
from deltazoo.backends.triton.backend import TritonBackend
from deltazoo.backends.triton.config import LaunchConfig, device_of, parse
from deltazoo.backends.triton.table import STEPS, Kernel, key_of
from deltazoo.backends.tuning.candidates import Target, blank, problem_of
from deltazoo.backends.tuning.tune import DIRECTION_OF, Runner, Step

_PATIENCE = 240.0  # seconds for one check, compilation included
_LONGEST_TURN = 2.0  # seconds of timed calls for one comparison
_OUT_OF_MEMORY = torch.OutOfMemoryError.__name__


class CudaRunner(Runner):
    """A CUDA device.

    Args: workers: processes that check side by side; None is one a core but one, at most 15.
    Raises: ConfigError where there is no such GPU.
    """

    def __init__(self, device: str = "cuda", workers: int | None = None, regimes: Sequence[Regime] = REGIMES) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("tuning needs an NVIDIA GPU, and torch sees none on this machine")
        self.on = usable_device(device)
        if self.on.type != "cuda":
            raise ConfigError(f"tuning needs a CUDA device, got {device!r}")
        import triton

        index = self.on.index if self.on.index is not None else torch.cuda.current_device()
        self.on = torch.device("cuda", index)
        self.device, self.triton, self.regimes = device_of(index), triton.__version__, regimes
        self._free: queue.Queue[_Worker] = queue.Queue()
        self._count = workers or max(1, min(15, (os.cpu_count() or 2) - 1))
        for _ in range(self._count):
            self._free.put(_Worker(self.on))
        self._folder = tempfile.TemporaryDirectory(prefix="deltazoo-tune-")
        self._verdicts: dict[tuple[object, ...], str] = {}
        self._exact: dict[tuple[Case, bool], Path] = {}
        self._answering = threading.Lock()
        self._bench: _Bench | None = None

    def environment(self) -> Environment:
        return environment(self.on)

    def refusals(self, target: Target) -> list[str]:
        """Why the kernels do not take a target; [] where they do."""
        _, _, _, H, HV, K, V, lengths = target.shape
        meta = UpdateMeta(self.on.type, target.dtype, H, HV, K, V, packed=bool(lengths), grad=True)
        return TritonBackend().unsupported(target.spec, meta)

    def check(self, target: Target, kernel: Kernel, configs: Sequence[LaunchConfig]) -> list[str]:
        self._check([(target, kernel, config) for config in configs])
        return [self._verdicts[_held(target, kernel, config)] for config in configs]

    def ahead(self, steps: Sequence[Step], until: float | None) -> None:
        by_target = [
            [(target, step.kernel, config) for step in steps if step.target == target for config in step.configs]
            for target in dict.fromkeys(step.target for step in steps)
        ]
        mixed = zip_longest(*by_target)  # in turns: while one process compiles what a target's all need, others do not
        self._check([asked for turn in mixed for asked in turn if asked is not None], until)

    def _check(self, asked: Sequence[tuple[Target, Kernel, LaunchConfig]], until: float | None = None) -> None:
        wanted = {_held(*one): one for one in asked if _held(*one) not in self._verdicts}
        if not wanted:
            return
        self._bench = None
        torch.cuda.empty_cache()
        most = max(_bytes(target) for target, _, _ in wanted.values())
        room = int(0.7 * torch.cuda.mem_get_info(self.on)[0] / (2**30 + most))
        with ThreadPoolExecutor(max(1, min(self._count, room))) as pool:
            try:
                said = {pool.submit(self._ask, one, until): held for held, one in wanted.items()}
                for future in as_completed(said):
                    self._keep(said[future], future.result())
            except BaseException:  # an interruption must not wait for all that is to come
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        for held, one in wanted.items():
            if _OUT_OF_MEMORY in self._verdicts.get(held, ""):  # as may be for what ran beside it: now alone
                self._keep(held, self._ask(one, until))

    def _keep(self, held: tuple[object, ...], verdict: str | None) -> None:
        if verdict is not None:
            self._verdicts[held] = verdict

    def time(self, target: Target, kernel: Kernel, configs: Sequence[LaunchConfig], rounds: int) -> list[float]:
        timed = kernel if kernel == "fused_step" else DIRECTION_OF[kernel]
        try:
            if self._bench is None or (self._bench.target, self._bench.timed) != (target, timed):
                self._bench = None
                self._bench = _Bench(target, timed, self.on)
            return self._bench.time(configs, rounds)
        except torch.OutOfMemoryError:  # several that are compared hold more than one
            self._bench = None
            torch.cuda.empty_cache()
            return [math.inf] * len(configs)

    def close(self) -> None:
        self._bench = None
        while not self._free.empty():
            self._free.get().stop()
        self._folder.cleanup()

    def _job(self, target: Target, kernel: Kernel, config: LaunchConfig) -> "_Job":
        at, cases = checks_of(target, kernel, config, self.regimes)
        fuses = kernel == "fused_step"
        for case in cases:
            if (case, fuses) not in self._exact:
                self._exact[case, fuses] = Path(self._folder.name) / f"{len(self._exact)}.pt"
                torch.save(_answers(case, kernel, self.on), self._exact[case, fuses])
        files = [(case, str(self._exact[case, fuses])) for case in cases]
        return _Job(target, kernel, at.model_dump_json(), config.model_dump_json(), files)

    def _ask(self, one: tuple[Target, Kernel, LaunchConfig], until: float | None) -> str | None:
        """The verdict of a worker; None where it is too late to begin."""
        if until is not None and time.monotonic() > until:
            return None
        with self._answering:
            job = self._job(*one)
        worker = self._free.get()
        try:
            return worker.ask(job)
        finally:
            self._free.put(worker)


def checks_of(
    target: Target, kernel: Kernel, config: LaunchConfig, regimes: Sequence[Regime] = REGIMES
) -> tuple[LaunchConfig, list[Case]]:
    """The config and the short cases on which a candidate is checked: the code that runs is the target's.

    Two chunks and more of a sequence, or of two parts where the target is walked in parts, else in segments that begin
    at checkpoints; a T that is no multiple of a chunk, and packed sequences, one empty, where the target is packed.
    """
    spec, shape, dtype = target
    if kernel in STEPS:
        short = Shape("short", 3, 1, 2, 2 * shape.HV // shape.H, shape.K, shape.V)
        return config, [Case(spec, short, dtype)]
    split = config.split if kernel == "split" else min(config.split, LaunchConfig().every)
    T = 64 * split + 80 if split else 1040 if shape.lengths else 272  # in a pack segments are longer than sequences
    lengths = (T - 80, 0, 64, 16) if shape.lengths and not split else (T - 16, 0, 16) if shape.lengths else ()
    short = Shape("short", 1, T, 1, shape.HV // shape.H, shape.K, shape.V, lengths)
    chosen = regimes if not split else regimes[:1]
    short_walk = config.changed(split=split) if split else config.changed(split=0, every=2, scratch=0)
    return short_walk, [Case(spec, short, dtype, regime) for regime in chosen]


def _held(target: Target, kernel: Kernel, config: LaunchConfig) -> tuple[object, ...]:
    """What a verdict holds for: the code, and what is new in the config."""
    key = key_of(kernel, problem_of(target, kernel), config.split)
    return (key.code, target.spec, config.split if kernel == "split" else getattr(config, kernel))


class _Job(NamedTuple):
    """checked: the config as JSON, for the cases; config: for the target. cases: with the files of their answers."""

    target: Target
    kernel: Kernel
    checked: str
    config: str
    cases: list[tuple[Case, str]]


class _Worker:
    """A process that checks one job after another, begun anew after one that it did not survive."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.process: Any = None
        self.line: Connection | None = None

    def ask(self, job: _Job) -> str:
        if self.process is None or self.line is None:
            context = multiprocessing.get_context("spawn")
            self.line, far = context.Pipe()
            self.process = context.Process(target=_serve, args=(far, str(self.device)), daemon=True)
            self.process.start()
            far.close()
        try:
            self.line.send(job)
            if not self.line.poll(_PATIENCE):
                self.stop()
                return f"took more than {_PATIENCE:.0f} s"
            said: str = self.line.recv()
        except (EOFError, OSError):
            self.stop()
            return "ended the process that ran it"
        if "CUDA" in said:  # an error of the device stays with the process
            self.stop()
        return said

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
        if self.line is not None:
            self.line.close()
        self.process = self.line = None


def _serve(line: Connection, device: str) -> None:
    """The worker's life."""
    torch.set_num_threads(1)
    torch.cuda.set_device(device)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            job: _Job = line.recv()
            try:
                said = _verdict(job, torch.device(device))
            except Exception as error:
                sentence = str(error).strip().partition("\n")[0]
                said = f"failed with {type(error).__name__}: {sentence[:200]}"
            torch.cuda.empty_cache()  # others check beside it
            line.send(said)


def _verdict(job: _Job, device: torch.device) -> str:
    """What is wrong with a config: "" where nothing is."""
    backend = TritonBackend(parse(job.checked))
    for case, path in job.cases:
        given, cotangents, want, usual = torch.load(path, map_location=device, weights_only=False)
        got = _computed(backend, case, given, cotangents)
        for name in want:
            error = relative_error(got[name], want[name], usual[name])
            if not error <= limit(case, name, device):
                return f"{name} has relative RMS error {error:.1e}, above {limit(case, name, device):.0e}, on {case}"
    _run_once(job, device)
    torch.cuda.synchronize(device)
    return ""


def _run_once(job: _Job, device: torch.device) -> None:
    """The target itself must run, and is compiled for the timing."""
    backend, case = TritonBackend(parse(job.config)), Case(*job.target)
    if job.kernel == "fused_step":
        _FusedWork(job.target, device).call(bind(case.spec, backend))()
        return
    inputs = blank(job.target, job.kernel, device)
    assert inputs.state is not None
    zeros = None if job.kernel == "decode" else (torch.zeros_like(inputs.v), torch.zeros_like(inputs.state))
    _computed(backend, case, inputs, zeros)


def _answers(
    case: Case, kernel: Kernel, device: torch.device
) -> tuple[UpdateInputs | FusedOperands, Cotangents | None, dict[str, Tensor], dict[str, Tensor]]:
    """Operands, cotangents (none of a step), what is right for them, and what is right on ordinary inputs."""
    if kernel == "fused_step":
        given = draw_step(typical_step(case.spec, case.shape), (), case.shape.B, case.dtype, device, case.seed)
        o, after = reference_step(typical_step(case.spec, case.shape), given)
        want = _results(o, after)
        return given, None, want, want
    inputs = draw(case, device)
    cotangents = None if kernel == "decode" else draw_cotangents(case, inputs)
    want = reference_results(case.spec, inputs, cotangents)
    usual = want
    if case.regime != "ordinary":
        usual = reference_results(case.spec, draw(case._replace(regime="ordinary"), device), cotangents)
    return inputs, cotangents, want, usual


def _results(o: Tensor, after: FusedOperands) -> dict[str, Tensor]:
    """What a step leaves."""
    assert after.inputs.history is not None
    return {"o": o, "state": after.states, "history": after.inputs.history}


def _computed(
    backend: TritonBackend, case: Case, given: UpdateInputs | FusedOperands, cotangents: Cotangents | None
) -> dict[str, Tensor]:
    bound = bind(case.spec, backend)
    if isinstance(given, FusedOperands):
        return _results(bound.fused_decode_step_(typical_step(case.spec, case.shape), *given), given)
    if cotangents is not None:
        return run(backend, case.spec, given, cotangents)
    assert given.state is not None
    states = given.state.clone()
    with torch.no_grad():
        o = bound.step_(given._replace(state=None), states)
    return {"o": o, "state": states}


def _bytes(target: Target) -> int:
    """About what one call takes, forward and backward."""
    shape = target.shape
    return 6 * shape.B * shape.T * (shape.HV * (shape.V + shape.K) + 2 * shape.H * shape.K) + 2**30


class _FusedWork:
    """A decode step of a mixer in one, around a target's spec."""

    def __init__(self, target: Target, device: torch.device) -> None:
        self.step = typical_step(target.spec, target.shape)
        self.given = draw_step(self.step, (), target.shape.sequences, target.dtype, device)

    def call(self, bound: BoundUpdate) -> Callable[[], dict[str, Tensor]]:
        return lambda: {"o": bound.fused_decode_step_(self.step, *self.given)}


class _Bench:
    """A target in one direction, or in a step of a mixer, with the captured graphs of the configs compared last."""

    def __init__(self, target: Target, timed: Direction | Literal["fused_step"], device: torch.device) -> None:
        self.target, self.timed, self.device = target, timed, device
        self.case = Case(target.spec, target.shape, target.dtype)
        self.work = _FusedWork(target, device) if timed == "fused_step" else Workload(self.case, timed, device)
        self.pool = torch.cuda.graph_pool_handle()
        self.replays: dict[LaunchConfig, Call] = {}
        self.first: dict[str, Tensor] | None = None

    def time(self, configs: Sequence[LaunchConfig], rounds: int) -> list[float]:
        """The median seconds of each; infinity where the numbers are not those of the first that was ever timed."""
        self.replays = {config: replay for config, replay in self.replays.items() if config in configs}
        right = [config for config in configs if config in self.replays or self._captured(config)]
        calls: dict[str, Call] = {config.model_dump_json(): self.replays[config] for config in right}
        times = time_interleaved(calls, self.device, rounds, _LONGEST_TURN, lambda done, total, note: None)
        found = {name: median(of.seconds) for name, of in times.items()}
        return [found.get(config.model_dump_json(), math.inf) for config in configs]

    def _captured(self, config: LaunchConfig) -> bool:
        call = self.work.call(bind(self.target.spec, TritonBackend(config)))
        got = call()
        if self.timed in ("forward", "backward"):  # in steps states go on from call to call
            if self.first is None:
                self.first = {name: x.clone() for name, x in got.items()}
            for name, want in self.first.items():
                if not relative_error(got[name], want.double(), want) <= 2 * limit(self.case, name, self.device):
                    return False
        del got
        self.replays[config] = captured(call, self.device, self.pool)
        return True
