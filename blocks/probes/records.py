"""Finished runs as JSON lines. A run is named by its task, mixer, rate and seed; a file holds each once."""

import functools
import importlib.resources
import math
import os
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.measure.environment import Environment
from deltazoo.blocks.probes.task import Task

RUNS = "runs.jsonl"
SOLVED = 0.999  # accuracy at every length, at which a run ends


# JSON has no NaN: a loss that is not finite is null.
Loss = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


class Point(NamedTuple):
    """The training loss in nats per answer, and the accuracy at the training length, after `step` steps."""

    step: int
    loss: Loss
    accuracy: float


class Run(BaseModel):
    """One finished run.

    Args:
        task, mixer: as typed on the command line.
        settings: every field of the task.
        steps: taken; fewer than the schedule's if the run solved the task, or diverged.
        accuracy: of the scored answers by sequence length; NaN logits are wrong.
        bits: mean cross entropy of the scored answers by sequence length; empty in older records.
        chance: accuracy without reading the sequence.
        state_bytes: of the recurrent states of all layers for one sequence, in float32; cache_bytes: per token.
        seconds: of training and evaluation; runs that were trained at the same time have equal shares of the time.
        captured: whether a step was a CUDA graph.
        kernels: whether the updates ran by the device's kernels, as in long runs and in records without the
            field; else in plain torch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    mixer: str
    rate: float
    seed: int
    settings: dict[str, Any]
    steps: int
    accuracy: dict[int, float]
    bits: dict[int, Loss] = {}
    chance: float
    curve: list[Point]
    diverged: bool
    parameters: int
    state_bytes: int
    cache_bytes: int
    seconds: float
    captured: bool
    kernels: bool = True
    environment: Environment

    @property
    def score(self) -> float:
        """The accuracy at the longest length."""
        return self.accuracy[max(self.accuracy)]

    @property
    def trained(self) -> float:
        """The accuracy at the training length, or at the shortest one if that was not evaluated."""
        return self.accuracy.get(self.settings["length"], self.accuracy[min(self.accuracy)])

    @property
    def is_solved(self) -> bool:
        """Whether the model solves the task at every length."""
        return min(self.accuracy.values()) >= SOLVED

    @property
    def rank(self) -> tuple[float, float]:
        """Mean accuracy over the lengths, then score: the order of learning rates.

        At a length where all rates are at chance, the score alone would choose by noise. Models of a text, whose
        settings ask for equal parameters, are compared at the training length.
        """
        mean = self.trained if self.settings.get("equal_parameters") else fmean(self.accuracy.values())
        return mean, self.score


def has_settings(run: Run, task: Task) -> bool:
    """Whether a run was made with these settings. A field that is newer than the run had its default.

    The task may have got more rates since then, because a run depends on its own rate alone.
    """
    return run.rate in task.rates and type(task).model_validate({**run.settings, "rates": task.rates}) == task


class Cell(NamedTuple):
    """The runs of a mixer on a task at its best rate. A rate is best if its first seed is."""

    task: str
    mixer: str
    rate: float
    runs: tuple[Run, ...]

    @property
    def score(self) -> float:
        """The mean score of the seeds."""
        return fmean(run.score for run in self.runs)

    @property
    def best(self) -> float:
        """The score of the best seed."""
        return max(run.score for run in self.runs)

    def accuracy(self, length: int) -> float:
        """Return the mean accuracy of the seeds at a length."""
        return fmean(run.accuracy[length] for run in self.runs)

    def bits(self, length: int) -> float:
        """Return the mean cross entropy of the seeds at a length."""
        return fmean(run.bits[length] for run in self.runs)

    def text(self) -> str:
        """Format the mean in percent, with the lowest and the highest seed, and the number that diverged."""
        scores = [run.score for run in self.runs]
        spread = f" ({100 * min(scores):.1f} to {100 * max(scores):.1f})" if len(scores) > 1 else ""
        diverged = sum(run.diverged for run in self.runs)
        ended = f", {diverged} of {len(scores)} diverged" if diverged else ""
        return f"{100 * self.score:.1f}{spread}{ended}"


def read(path: Path) -> list[Run]:
    """Read the runs of a file, [] if there is none. An incomplete last line, of a killed process, is left out.

    Raises: ConfigError: another line is no run.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return _parse(lines[:-1], path)


def append(path: Path, run: Run) -> None:
    """Append a run in one write, so that several processes may append to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    end = b""
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            end = b"" if file.read() == b"\n" else b"\n"
    with path.open("ab", buffering=0) as file:
        file.write(end + run.model_dump_json().encode() + b"\n")


def cells(runs: Iterable[Run]) -> dict[tuple[str, str], Cell]:
    """Group runs by (task, mixer), each with the seeds of its best rate."""
    grouped: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        grouped.setdefault((run.task, run.mixer), []).append(run)
    found = {}
    for (task, mixer), each in grouped.items():
        first = min(run.seed for run in each)
        rate = max((run for run in each if run.seed == first), key=lambda run: run.rank).rate
        found[task, mixer] = Cell(task, mixer, rate, tuple(run for run in each if run.rate == rate))
    return found


@functools.cache
def packaged() -> tuple[Run, ...]:
    """Return the runs that ship with the package, in blocks/probes/results/."""
    folder = importlib.resources.files("deltazoo.blocks.probes") / "results"
    if not folder.is_dir():
        return ()
    files = sorted((each for each in folder.iterdir() if each.name.endswith(".jsonl")), key=lambda each: each.name)
    return tuple(run for each in files for run in _parse(each.read_text(encoding="utf-8").splitlines(), each.name))


def _parse(lines: Iterable[str], source: object) -> list[Run]:
    runs: dict[tuple[object, ...], Run] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            run = Run.model_validate_json(line)
        except ValidationError as error:
            if not line.endswith("}"):  # a killed process has cut it
                continue
            raise ConfigError(f"{source}, line {number}, must be a run of deltazoo probe: {error}") from error
        runs.setdefault((run.task, run.mixer, run.rate, run.seed), run)
    return list(runs.values())
