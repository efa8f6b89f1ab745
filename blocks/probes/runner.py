"""Runs within a time budget: every learning rate with one seed, then further seeds at the best rate of each cell."""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

from deltazoo.backends.io.errors import ConfigError, DeltazooError
from deltazoo.backends.io.progress import Progress, ProgressLines
from deltazoo.backends.measure.environment import Environment, environment
from deltazoo.backends.torch_ext.devices import usable_device
from deltazoo.blocks.inspect.layer_table import Description
from deltazoo.blocks.model.compilation import CompiledLayers, run_eagerly
from deltazoo.blocks.probes import records
from deltazoo.blocks.probes.model import probe_stack
from deltazoo.blocks.probes.records import Point, Run, cells
from deltazoo.blocks.probes.task import Task
from deltazoo.blocks.probes.tasks import task as task_of
from deltazoo.blocks.probes.trainer import Trainer
from deltazoo.blocks.spec.stack_spec import StackSpec

_POINTS = 10  # evaluations during a run
_TURN = 25  # steps of a run before the next run continues
_SOLVED = 0.999
_CHECK_TOKENS = 2**14  # of an evaluation during a run, at each length
_GPU_WORKERS = 4
_COMPILED_TOKENS = 2e8  # from here on compiled layers save more time than their compilation takes


class ProbeConfig(NamedTuple):
    """What to run.

    Args:
        budget: seconds; runs that are not finished then are dropped.
        seeds: at the best rate.
        device: "cpu", "cuda", ...
        workers: processes, each with one cell at a time; None: 4 on a GPU, one per core on a CPU.
    """

    budget: float = 600.0
    seeds: int = 3
    device: str = "cpu"
    workers: int | None = None


class Probe(NamedTuple):
    """The finished runs of a folder, and what could not run or is not finished.

    Args: problems: (mixer and task, reason).
    """

    runs: list[Run]
    problems: list[tuple[str, str]]


class _Job(NamedTuple):
    """A cell of the table for a worker process; done: its finished runs; deadline: of `time.time`."""

    task: str
    mixer: str
    config: ProbeConfig
    path: Path
    done: list[Run]
    deadline: float
    threads: int | None


_Result = tuple[list[Run], tuple[str, str] | None]


class OutOfTimeError(Exception):
    """The budget is spent; finished runs are kept."""


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
    jobs = []
    for task in tasks:
        for mixer in mixers:
            finished = [run for run in done if (run.task, run.mixer) == (task, mixer)]
            if _pending(task_of(task), finished, config.seeds):
                jobs.append(_Job(task, mixer, config, path, finished, started + config.budget, 1))
    workers = config.workers or (_GPU_WORKERS if is_gpu else os.cpu_count() or 1)
    problems: list[tuple[str, str]] = []
    for n, (runs, problem) in enumerate(_results(jobs, workers), 1):
        done += runs
        problems += [problem] if problem else []
        for run in runs:
            if on_run is not None:
                on_run(run)
        progress("probing", n, len(jobs))
    wanted = [run for run in done if run.task in tasks and run.mixer in mixers]
    return Probe(wanted, problems)


def train_all(
    stack: StackSpec, task: Task, runs: Sequence[tuple[float, int]], device: str, deadline: float
) -> Iterator[Run]:
    """Train one model for each (rate, seed), on a GPU all at the same time; yield the runs as they end.

    Raises: OutOfTimeError.
    """
    where, costs = environment(device), stack.describe()
    members = [_Member(stack, task, rate, seed, device) for rate, seed in runs]
    if members[0].trainer.is_cuda and task.steps * task.batch * task.length >= _COMPILED_TOKENS:
        layers = CompiledLayers(members[0].trainer.model)
        for member in members:
            member.trainer.compiled = layers.of(member.trainer.model)
    bounds = sorted({-(-task.steps * n // _POINTS) for n in range(_POINTS + 1)})
    for first, last in itertools.pairwise(bounds):
        running = [member for member in members if not member.accuracy]
        start = time.perf_counter()
        for until in range(first + _TURN, last + _TURN, _TURN):
            for member in running:
                member.trainer.train(min(until, last))
            if time.time() > deadline:
                raise OutOfTimeError
        for member in running:
            member.evaluate()
        for member in running:
            member.seconds += (time.perf_counter() - start) / len(running)
        yield from (member.run(where, costs) for member in running if member.accuracy)


class _Member:
    """One of the runs that are trained together; `accuracy` is empty until it ends."""

    def __init__(self, stack: StackSpec, task: Task, rate: float, seed: int, device: str) -> None:
        with torch.random.fork_rng(devices=[]), run_eagerly(device):
            torch.manual_seed(seed)
            model = stack.build()
        self.trainer = Trainer(model.to(device), task, rate, seed)
        self.rate, self.seed = rate, seed
        self.curve: list[Point] = []
        self.accuracy: dict[int, float] = {}
        self.seconds = 0.0

    def evaluate(self) -> None:
        """Add a point to the curve, and end the run if it is complete, diverged or solves the task."""
        trainer, task, loss = self.trainer, self.trainer.task, self.trainer.last_loss()
        tokens = min(_CHECK_TOKENS, task.evaluation_tokens)
        accuracies = [trainer.accuracy(length, tokens) for length in task.lengths]
        self.curve.append(Point(trainer.step, loss, accuracies[0]))
        if trainer.step == task.steps or not math.isfinite(loss) or min(accuracies) >= _SOLVED:
            self.accuracy = {length: trainer.accuracy(length, task.evaluation_tokens) for length in task.lengths}

    def run(self, where: Environment, costs: Description) -> Run:
        """Return the record of the run, whose task and mixer the caller names."""
        trainer, task = self.trainer, self.trainer.task
        return Run(
            task="", mixer="", rate=self.rate, seed=self.seed, settings=task.model_dump(mode="json"),
            steps=trainer.step, accuracy=self.accuracy, chance=task.chance, curve=self.curve,
            diverged=not math.isfinite(self.curve[-1].loss), parameters=costs.parameters,
            state_bytes=costs.state_bytes, cache_bytes=costs.cache_bytes, seconds=round(self.seconds, 2),
            captured=trainer.graph is not None, environment=where,
        )  # fmt: skip


def _pending(task: Task, done: Sequence[Run], seeds: int) -> list[tuple[float, int]]:
    """Return the next runs of a cell that can be trained together: the missing rates, else the missing seeds."""
    finished = {(run.rate, run.seed) for run in done}
    rates = [(rate, 0) for rate in task.rates if (rate, 0) not in finished]
    if rates:
        return rates
    (best,) = cells(run for run in done if run.rate in task.rates).values()
    return [(best.rate, seed) for seed in range(seeds) if (best.rate, seed) not in finished]


def _results(jobs: Sequence[_Job], workers: int) -> Iterator[_Result]:
    """Yield what `_run_cell` returns for each job, in the order in which they end."""
    if min(workers, len(jobs)) <= 1:
        yield from (_run_cell(job._replace(threads=None)) for job in jobs)
        return
    with ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn")) as pool:
        waiting: set[Future[_Result]] = {pool.submit(_run_cell, job) for job in jobs}
        while waiting:
            ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in ended:
                yield future.result()


def _run_cell(job: _Job) -> _Result:
    """Run the missing runs of a cell; return them, and the reason if some are still missing."""
    if job.threads is not None and job.config.device == "cpu":
        torch.set_num_threads(job.threads)
    task, new = task_of(job.task), list[Run]()
    name = f"{job.mixer} on {job.task}"
    stack = probe_stack(job.mixer, task)
    try:
        while pending := _pending(task, [*job.done, *new], job.config.seeds):
            # A CPU trains one model at a time, so that a spent budget loses one run.
            together = pending if job.config.device != "cpu" else pending[:1]
            if time.time() > job.deadline:
                raise OutOfTimeError
            for run in train_all(stack, task, together, job.config.device, job.deadline):
                named = run.model_copy(update={"task": job.task, "mixer": job.mixer})
                records.append(job.path, named)
                new.append(named)
    except OutOfTimeError:
        return new, (name, "the budget is spent; the same command continues")
    except (DeltazooError, RuntimeError) as error:
        return new, (name, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return new, None


def _check_settings(runs: Sequence[Run], path: Path) -> None:
    """Refuse a file whose runs have other settings than their tasks have now. Raises: ConfigError."""
    for run in runs:
        if task_of(run.task).model_dump(mode="json") != run.settings:
            raise ConfigError(f"{path} has a run of {run.task} with other settings; choose another folder")
