"""Runs within a time budget: every learning rate with one seed, then further seeds at the best rate of each cell."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

from deltazoo.backends.io.errors import ConfigError, DeltazooError
from deltazoo.backends.io.progress import Progress, ProgressLines
from deltazoo.backends.torch_ext.devices import usable_device
from deltazoo.blocks.probes import records
from deltazoo.blocks.probes.model import probe_stack
from deltazoo.blocks.probes.progress import CellInProgress, advance, failure
from deltazoo.blocks.probes.records import Run
from deltazoo.blocks.probes.tasks import task as task_of

_COMPILING = 8  # processes
_RUNS_AT_ONCE = 6  # on a GPU; a cell that begins below it may exceed it
_POLL = 0.05  # seconds between looks for a compiled cell
_SPENT = "the budget is spent; the same command continues"


class ProbeConfig(NamedTuple):
    """What to run.

    Args:
        budget: seconds; runs that are not finished then are dropped.
        seeds: at the best rate.
        device: "cpu", "cuda", ...
        workers: processes that train cells on a CPU, or compile kernels for a GPU, on which one more process trains;
            None: one per core on a CPU, 8 for a GPU.
    """

    budget: float = 600.0
    seeds: int = 3
    device: str = "cpu"
    workers: int | None = None


class Probe(NamedTuple):
    """The finished runs of a folder, and what could not run or is not finished.

    Args:
        problems: (mixer and task, reason).
        compile_seconds: of the processes that compiled kernels on a GPU, added up.
    """

    runs: list[Run]
    problems: list[tuple[str, str]]
    compile_seconds: float = 0.0


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

    def cell(self, at_once: int | None = None) -> CellInProgress:
        """Return the cell with its finished runs."""
        return CellInProgress(self.task, self.mixer, self.done, self.config.seeds, self.config.device, at_once)


class _Event(NamedTuple):
    """New runs of a cell.

    Args:
        ends: whether the cell is left; problem: why it is not complete then.
        compile_seconds: of its kernels.
    """

    name: str
    runs: list[Run]
    ends: bool
    problem: str | None = None
    compile_seconds: float = 0.0


def probe(
    mixers: Sequence[str],
    tasks: Sequence[str],
    folder: str | Path,
    config: ProbeConfig | None = None,
    progress: Progress | None = None,
    on_run: Callable[[Run], None] | None = None,
) -> Probe:
    """Train small models of each mixer on each task, and append a line per run to runs.jsonl in the folder.

    Runs that the file holds are not repeated, so that a second call continues the first. A run is a function of its
    task, mixer, rate and seed: on the same device and versions it repeats bit for bit.

    Args:
        mixers: names or hybrid patterns, see `probe_stack`.
        tasks: names, see `deltazoo.blocks.probes.tasks`.
        on_run: called with each run when it is finished.
    Raises: ConfigError, PatternError, UnknownNameError: before the first run.
    """
    config, progress = config or ProbeConfig(), progress or ProgressLines()
    started = time.time()
    path = Path(folder) / records.RUNS
    is_gpu = usable_device(config.device).type != "cpu"
    if not mixers or not tasks:
        raise ConfigError(f"mixers and tasks must not be empty, got {list(mixers)} and {list(tasks)}")
    for task in tasks:
        for mixer in mixers:
            probe_stack(mixer, task_of(task))
    done = records.read(path)
    _check_settings(done, path)
    deadline = started + config.budget
    every = [_Job(task, mixer, config, path, done, deadline) for task in tasks for mixer in mixers]
    jobs = [job for job in every if job.cell().pending()]
    workers = config.workers or (_COMPILING if is_gpu else os.cpu_count() or 1)
    problems: list[tuple[str, str]] = []
    ended, compile_seconds = 0, 0.0
    for event in (_on_gpu if is_gpu else _on_cpu)(jobs, workers):
        done = [*done, *event.runs]
        compile_seconds += event.compile_seconds
        problems += [(event.name, event.problem)] if event.problem else []
        for run in event.runs:
            if on_run is not None:
                on_run(run)
        if event.ends:
            ended += 1
            progress("probing", ended, len(jobs))
    wanted = [run for run in done if run.task in tasks and run.mixer in mixers]
    return Probe(wanted, problems, compile_seconds)


def _on_cpu(jobs: Sequence[_Job], workers: int) -> Iterator[_Event]:
    """Train cells in processes of one thread each, or one cell after the other with all threads."""
    if min(workers, len(jobs)) <= 1:
        yield from map(_run_cell, jobs)
        return
    with ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn"), _use_one_thread) as pool:
        for future in as_completed([pool.submit(_run_cell, job) for job in jobs]):
            yield future.result()


def _use_one_thread() -> None:
    torch.set_num_threads(1)


def _run_cell(job: _Job) -> _Event:
    """Train the missing runs of a cell, one after the other, so that a spent budget loses one run."""
    cell, new = job.cell(at_once=1), list[Run]()
    while cell.members or cell.pending():
        if time.time() > job.deadline:
            return _Event(job.name, new, True, _SPENT)
        if reason := advance([cell]).get(cell):
            return _Event(job.name, new, True, reason)
        for run in cell.ended():
            records.append(job.path, run)
            new.append(run)
    return _Event(job.name, new, True)


def _on_gpu(jobs: Sequence[_Job], workers: int) -> Iterator[_Event]:
    """Train runs of several cells at the same time, while other processes compile the kernels of the next cells."""
    if not jobs:
        return
    running: list[tuple[_Job, CellInProgress]] = []
    with get_context("spawn").Pool(min(workers, len(jobs)), _use_one_thread) as pool:  # which ends its processes
        compiling = [(job, pool.apply_async(_compile, (job,))) for job in jobs]
        while compiling or running:
            if time.time() > jobs[0].deadline:
                yield from (_Event(job.name, [], True, _SPENT) for job, _ in (*running, *compiling))
                return
            for entry in [entry for entry in compiling if entry[1].ready()]:
                if sum(len(cell.members or cell.pending()) for _, cell in running) >= _RUNS_AT_ONCE:
                    break
                compiling.remove(entry)
                job, (seconds, problem) = entry[0], entry[1].get()
                running += [] if problem else [(job, job.cell())]
                yield _Event(job.name, [], problem is not None, problem, seconds)
            if not running:
                time.sleep(_POLL)
                continue
            failed = advance([cell for _, cell in running])
            for job, cell in list(running):
                for run in cell.ended():
                    records.append(job.path, run)
                    yield _Event(job.name, [run], False)
                if cell in failed or not (cell.members or cell.pending()):
                    running.remove((job, cell))
                    yield _Event(job.name, [], True, failed.get(cell))


def _compile(job: _Job) -> tuple[float, str | None]:
    """Fill the caches with the kernels of a cell; return the seconds, and the reason if it fails."""
    start = time.perf_counter()
    try:
        job.cell().compile()
    except (DeltazooError, RuntimeError) as error:
        return time.perf_counter() - start, failure(error)
    return time.perf_counter() - start, None


def _check_settings(runs: Sequence[Run], path: Path) -> None:
    """Refuse a file whose runs have other settings than their tasks have now. Raises: ConfigError."""
    for run in runs:
        if task_of(run.task).model_dump(mode="json") != run.settings:
            raise ConfigError(f"{path} has a run of {run.task} with other settings; choose another folder")
