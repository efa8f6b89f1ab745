"""Runs within a time budget: every learning rate with one seed, then further seeds at the best rate of each cell."""

import os
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import NamedTuple

import torch

from deltazoo.backends.io.errors import ConfigError, DeltazooError
from deltazoo.backends.io.progress import Progress, ProgressLines
from deltazoo.backends.torch_ext.devices import usable_device
from deltazoo.blocks.probes import records
from deltazoo.blocks.probes.model import probe_stack
from deltazoo.blocks.probes.progress import CellInProgress
from deltazoo.blocks.probes.records import Run, has_settings
from deltazoo.blocks.probes.tasks import task as task_of

_PROCESSES_PER_GPU = 4  # some compile while others train
_POLL, _REPORT = 1.0, 10.0  # seconds between two notes of a process, and between two that the caller gets
_SPENT = "the budget is spent; the same command continues"


class ProbeConfig(NamedTuple):
    """What to run.

    Args:
        budget: seconds; runs that are not finished then are dropped.
        seeds: at the best rate.
        device: "cpu", "cuda:0", ...; "cuda": every visible GPU.
        workers: processes, each of which trains a cell; None: one per core on a CPU, 4 per GPU.
    """

    budget: float = 600.0
    seeds: int = 3
    device: str = "cpu"
    workers: int | None = None


class Probe(NamedTuple):
    """The finished runs of a folder, and what could not run or is not finished.

    Args:
        problems: (mixer and task, reason).
        setup_seconds: before the first steps of cells, mostly of compilation, added up over the processes.
    """

    runs: list[Run]
    problems: list[tuple[str, str]]
    setup_seconds: float = 0.0


class _Job(NamedTuple):
    """A cell of the table for a worker process; done: its finished runs; deadline: of `time.time`."""

    task: str
    mixer: str
    config: ProbeConfig
    path: Path
    done: list[Run]
    deadline: float

    @property
    def name(self) -> str:
        return f"{self.mixer} on {self.task}"

    @property
    def group(self) -> Hashable:
        """Name the cells that share compiled layers."""
        task = task_of(self.task)
        if self.config.device == "cpu":
            return self.task, self.mixer
        return frozenset(probe_stack(self.mixer, task).expand()), task.width, task.dtype

    def cell(self) -> CellInProgress:
        """Return the cell with its finished runs. A CPU trains one run at a time, so that a spent budget loses one."""
        at_once = 1 if self.config.device == "cpu" else None
        return CellInProgress(self.task, self.mixer, self.done, self.config.seeds, self.config.device, at_once)


class _Result(NamedTuple):
    """The end of a cell; problem: why it is not complete."""

    name: str
    problem: str | None
    setup_seconds: float


_Report = str | Run | _Result  # a note about the run in progress, a finished run, or the end of a cell
_worker_queue: "list[SimpleQueue[_Report]]" = []  # of a worker process, to the one that started it


def probe(
    products: Sequence[tuple[Sequence[str], Sequence[str]]],
    folder: str | Path,
    config: ProbeConfig | None = None,
    progress: Progress | None = None,
    on_run: Callable[[Run], None] | None = None,
) -> Probe:
    """Train small models of each mixer on each task, and append a line per run to runs.jsonl in the folder.

    Runs that the file holds are not repeated, so that a second call continues the first. A run is a function of its
    task, mixer, rate and seed: on the same device and versions the same call repeats it bit for bit.

    Args:
        products: (mixers, tasks): names or hybrid patterns, see `probe_stack`, and each of the tasks for them.
        progress: called at the end of each cell, and every ten seconds with the step and the loss of a run.
        on_run: called with each run when it is finished.
    Raises: ConfigError, PatternError, UnknownNameError: before the first run.
    """
    config, progress = config or ProbeConfig(), progress or ProgressLines()
    started = time.time()
    path = Path(folder) / records.RUNS
    is_gpu = usable_device(config.device).type != "cpu"
    for mixers, tasks in products:
        if not mixers or not tasks:
            raise ConfigError(f"mixers and tasks must not be empty, got {list(mixers)} and {list(tasks)}")
    wanted = [(task, mixer) for mixers, tasks in products for task in tasks for mixer in mixers]
    for task, mixer in wanted:
        probe_stack(mixer, task_of(task))
    done = records.read(path)
    _check_settings(done, path)
    deadline = started + config.budget
    every = [_Job(task, mixer, config, path, done, deadline) for task, mixer in wanted]
    jobs = [job for job in every if job.cell().pending()]
    groups: dict[Hashable, list[_Job]] = {}
    for job in jobs:
        groups.setdefault(job.group, []).append(job)
    workers = config.workers or (_PROCESSES_PER_GPU * _gpus(config) if is_gpu else os.cpu_count() or 1)
    problems: list[tuple[str, str]] = []
    setup_seconds = 0.0
    ended, reported = 0, time.monotonic()
    progress("probing", 0, len(jobs))
    for report in _reports([*groups.values()], workers):
        if isinstance(report, Run):
            done = [*done, report]
            if on_run is not None:
                on_run(report)
        elif isinstance(report, _Result):
            ended += 1
            setup_seconds += report.setup_seconds
            problems += [(report.name, report.problem)] if report.problem else []
            progress("probing", ended, len(jobs))
        elif time.monotonic() - reported >= _REPORT:
            reported = time.monotonic()
            progress("probing", ended, len(jobs), report)
    return Probe([run for run in done if (run.task, run.mixer) in wanted], problems, setup_seconds)


def _reports(groups: list[list[_Job]], workers: int) -> Iterator[_Report]:
    """Train cells in processes of one thread each, or one cell after the other with all threads.

    A process trains all cells of a group, for which it compiles once.
    """
    workers = min(workers, len(groups))
    if workers <= 1:
        for group in groups:
            for job in group:
                yield from _run_cell(job)
        return
    context, waiting, gpus = get_context("spawn"), list(groups), _gpus(groups[0][0].config)
    queue: SimpleQueue[_Report] = context.SimpleQueue()
    running: dict[Future[_Result], tuple[ProcessPoolExecutor, list[_Job]]] = {}
    with ExitStack() as stack:
        for number in range(workers):
            begin = (number % gpus if gpus > 1 else None, queue)
            pool = stack.enter_context(ProcessPoolExecutor(1, context, _begin_worker, begin))
            first, *rest = waiting.pop(0)
            running[pool.submit(_run_in_worker, first)] = pool, rest
        while running:
            ended = wait(running, timeout=_POLL, return_when=FIRST_COMPLETED).done
            while not queue.empty():
                yield queue.get()
            for future in ended:
                pool, rest = running.pop(future)
                yield future.result()
                if group := rest or (waiting.pop(0) if waiting else []):
                    running[pool.submit(_run_in_worker, group[0])] = pool, group[1:]


def _gpus(config: ProbeConfig) -> int:
    """Return the number of GPUs that the workers share."""
    return torch.cuda.device_count() if config.device == "cuda" else 1


def _begin_worker(gpu: int | None, queue: "SimpleQueue[_Report]") -> None:
    """Give a process one thread, for operators and for torch.compile, one of several GPUs, and a way to report."""
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    if gpu is not None:
        torch.cuda.set_device(gpu)
    _worker_queue.append(queue)


def _run_in_worker(job: _Job) -> _Result:
    """Train the missing runs of a cell; queue all reports but the last, and return that."""
    for report in _run_cell(job):
        if isinstance(report, _Result):
            return report
        _worker_queue[0].put(report)
    raise AssertionError("a cell ends with its result")


def _run_cell(job: _Job) -> Iterator[_Report]:
    """Train the missing runs of a cell, and report about once a second."""
    cell, reported = job.cell(), time.monotonic()
    while cell.members or cell.pending():
        if time.time() > job.deadline:
            yield _Result(job.name, _SPENT, cell.setup_seconds)
            return
        try:
            cell.advance()
        except (DeltazooError, RuntimeError) as error:
            yield _Result(job.name, f"{type(error).__name__}: {str(error).splitlines()[0]}", cell.setup_seconds)
            return
        for run in cell.ended():
            records.append(job.path, run)
            yield run
        if cell.members and time.monotonic() - reported >= _POLL:
            reported = time.monotonic()
            yield f"{job.name}: {cell.members[0].note()}"
    yield _Result(job.name, None, cell.setup_seconds)


def _check_settings(runs: Sequence[Run], path: Path) -> None:
    """Refuse a file whose runs have other settings than their tasks have now. Raises: ConfigError."""
    for run in runs:
        if not has_settings(run, task_of(run.task)):
            raise ConfigError(f"{path} has a run of {run.task} with other settings; choose another folder")
