"""The tuner: measure the candidates of each kernel for a shape, reject the wrong ones, store what won as it is found.

Kernels are taken in turn, each measured with the others as they stand. A candidate must run, and pass the numeric
check, before it is timed; it wins over the best so far by a hundredth or more, each timed against the other in turns.
chunk and every are never tuned: they shape what is saved. H key heads, HV value heads, K key width, V value width
"""

import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field

from deltazoo.backends.conformance.decode_step import typical_step
from deltazoo.backends.errors import ConfigError
from deltazoo.backends.measure.environment import Environment
from deltazoo.backends.measure.workload import DIRECTIONS, Direction
from deltazoo.backends.progress import Progress, silent
from deltazoo.backends.triton import decode_step as fused
from deltazoo.backends.triton.config import Device, LaunchConfig
from deltazoo.backends.triton.fingerprint import source_of
from deltazoo.backends.triton.table import (
    KERNELS,
    Kernel,
    Key,
    Record,
    Table,
    configured,
    forget,
    key_of,
    read_table,
    records_of,
    user_table,
)  # fmt: skip
from deltazoo.backends.tuning.candidates import Target, candidates, problem_of

MARGIN = 1.01  # how much faster a candidate must be than the best so far
_AHEAD = 4  # targets whose candidates are checked before the first is timed
DIRECTION_OF: dict[Kernel, Direction] = {
    "split": "backward", "prepare": "forward", "scan": "forward", "replay": "backward", "reverse": "backward",
    "gradients": "backward", "decode": "decode", "fused_step": "decode",
}  # fmt: skip


class Step(NamedTuple):
    """One kernel of one target: the heuristic's config first among the candidates, the others as the table has them."""

    target: Target
    kernel: Kernel
    key: Key
    configs: list[LaunchConfig]
    done: bool


class TuneConfig(BaseModel):
    """How to tune.

    Args:
        directions: the kernels of which directions; a shape with T = 1 has "decode" alone, "decode" takes each
            sequence as a row.
        effort: "quick" tries what has been near the best somewhere, "full" every combination.
        budget: seconds, after which no other kernel is begun, and no check ahead; None is no end.
        rounds: timed calls of each of two configs that are compared.
        again: measure, too, what the table has already.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    directions: tuple[Direction, ...] = DIRECTIONS
    effort: Literal["quick", "full"] = "quick"
    budget: float | None = Field(default=None, gt=0)
    rounds: int = Field(default=11, ge=3)
    again: bool = False


class Runner(ABC):
    """What the tuner needs of a device; the tests give it one without a GPU."""

    device: Device
    triton: str

    @abstractmethod
    def environment(self) -> Environment:
        """What this runs on."""

    @abstractmethod
    def check(self, target: Target, kernel: Kernel, configs: Sequence[LaunchConfig]) -> list[str]:
        """Run each config on the target with a short T, and compare with float64: "", or what is wrong."""

    @abstractmethod
    def time(self, target: Target, kernel: Kernel, configs: Sequence[LaunchConfig], rounds: int) -> list[float]:
        """The median seconds of each config, in turns, of what the kernel is tuned for: its direction, or its step."""

    @abstractmethod
    def ahead(self, steps: "Sequence[Step]", until: float | None) -> None:
        """Hear what will be checked next: it can be done side by side, while nothing is timed.

        Args: until: of `time.monotonic`, after which no check is begun; None is no end.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of what is held."""


class Planned(BaseModel):
    """A kernel of a shape that would be measured. done: the table has it already."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: Kernel
    shape: str
    key: str
    candidates: int
    done: bool

    def cells(self) -> list[str]:
        """The plan as words: kernel, shape, class, candidates, whether it is in the table."""
        return [self.kernel, self.shape, self.key, str(self.candidates), "in the table" if self.done else ""]


class Tuned(BaseModel):
    """What was found.

    Args:
        records: measured now; kept: kernels of shapes that the table had already; left: those that the budget did not
            reach; failures: a sentence for each whose candidates all failed.
        rejected: a sentence for each candidate that did not run, or whose numbers were wrong.
        paste: what to paste to use the table; "" where deltazoo finds it by itself.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: Environment
    table: Path
    records: list[Record]
    kept: int
    left: int
    failures: list[str]
    rejected: list[str]
    seconds: float

    @property
    def last_line(self) -> str:
        """What to do with the table."""
        if self.table == user_table(self.environment.device):
            return f"# used from now on, unless you delete {self.table}"
        return f'from deltazoo.backends.triton import use_table; use_table("{self.table}")'


def tune(
    targets: Sequence[Target],
    runner: Runner,
    config: TuneConfig | None = None,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> Tuned:
    """Measure, and write each choice to the table as it is made: an interrupted run goes on where it stopped.

    Args: out: the table, read first where it exists; None is the user's, which every process reads.
    Raises: ConfigError for no targets, a broken table and another device's; OSError.
    """
    config, start = config or TuneConfig(), time.monotonic()
    until = None if config.budget is None else start + config.budget
    path = user_table(runner.device.name) if out is None else Path(out)
    table = _begun(path, runner.device.name)
    if not targets:
        raise ConfigError("tuning needs at least one shape, got none")
    jobs = [(target, kernel) for target in targets for kernel in kernels_of(target, config)]
    records: list[Record] = []
    failures: list[str] = []
    rejected: list[str] = []
    kept, seen, done = 0, set[Key](), 0
    announced: set[Target] = set()
    try:
        for done, (target, kernel) in enumerate(jobs):
            step = _step(target, kernel, runner, table, config)
            if step.key in seen or len(step.configs) == 1 or (step.done and not config.again):
                kept += step.key not in seen and step.done
                continue
            if target not in announced:
                some = list(dict.fromkeys(target for target, _ in jobs[done:]))[:_AHEAD]
                announced |= set(some)
                runner.ahead(_steps(some, runner, table, config), until)
            if until is not None and time.monotonic() > until:
                break
            seen.add(step.key)
            search = _Search(step, runner, config, functools.partial(_told, progress, done, len(jobs)))
            record = search.run()
            rejected += search.rejected
            if record is None:
                failures.append(f"{kernel} of {target.shape.name}: no candidate runs and is right; none is chosen")
                continue
            table = _stored(record, path, table.device)
            records.append(record)
        else:
            done = len(jobs)
    finally:
        runner.close()
        forget()
    progress("tune", done, len(jobs))
    return Tuned(
        environment=runner.environment(), table=path, records=records, kept=kept, left=len(jobs) - done,
        failures=failures, rejected=rejected, seconds=time.monotonic() - start,
    )  # fmt: skip


def plan(
    targets: Sequence[Target], runner: Runner, config: TuneConfig | None = None, out: str | Path | None = None
) -> list[Planned]:
    """List what `tune` would measure; classes below `split` are those of the heuristic's, where it is not in the table.

    Raises: ConfigError for a broken table and another device's.
    """
    config = config or TuneConfig()
    table = _begun(user_table(runner.device.name) if out is None else Path(out), runner.device.name)
    found: dict[Key, Planned] = {}
    for target in targets:
        for kernel in kernels_of(target, config):
            step = _step(target, kernel, runner, table, config)
            if len(step.configs) == 1:
                continue
            found.setdefault(
                step.key,
                Planned(
                    kernel=kernel, shape=target.shape.name, key=str(step.key), candidates=len(step.configs),
                    done=step.done and not config.again,
                ),
            )  # fmt: skip
    return list(found.values())


def kernels_of(target: Target, config: TuneConfig) -> list[Kernel]:
    """The kernels that a target runs, in the order of tuning."""
    directions = {"decode"} & set(config.directions) if target.shape.T == 1 else set(config.directions)
    found = [kernel for kernel in KERNELS if DIRECTION_OF[kernel] in directions]
    none = [] if target.spec.transition == "delta" else ["prepare"]
    if target.spec.householders > 1 or fused.unsupported(typical_step(target.spec, target.shape)):
        none.append("fused_step")  # what several keys take of registers is told by the heuristic
    return [kernel for kernel in found if kernel not in none]


def _step(target: Target, kernel: Kernel, runner: Runner, table: Table, config: TuneConfig) -> Step:
    problem, measured = problem_of(target, kernel), table.of(runner.triton)
    known = records_of(runner.device.name, runner.triton) | measured  # with which it will be launched
    key = key_of(kernel, problem, 0 if kernel == "split" else configured(problem, runner.device, known).split)
    others = {other: record for other, record in known.items() if other.kernel != kernel}
    base = configured(problem, runner.device, others)
    return Step(target, kernel, key, candidates(kernel, problem, base, runner.device, config.effort), key in measured)


def _steps(targets: Sequence[Target], runner: Runner, table: Table, config: TuneConfig) -> list[Step]:
    """What there is to do for targets, as far as it can be told now."""
    steps = [
        _step(target, kernel, runner, table, config) for target in targets for kernel in kernels_of(target, config)
    ]
    return [step for step in steps if len(step.configs) > 1 and (config.again or not step.done)]


class _Search:
    """The best of a step's candidates."""

    def __init__(self, step: Step, runner: Runner, config: TuneConfig, told: Callable[[str], None]) -> None:
        self.step, self.runner, self.config, self.tell = step, runner, config, told
        self.rejected: list[str] = []

    def run(self) -> Record | None:
        """Check all, then let the best so far meet one after the other."""
        target, kernel, key, configs, _ = self.step
        name = f"{target.shape.name} {kernel}"
        self.tell(f"{name}: checking {len(configs)}")
        wrong = self.runner.check(target, kernel, configs)
        right = [config for config, reason in zip(configs, wrong, strict=True) if not reason]
        self.rejected = [
            f"{name} {_said(config, kernel)}: {reason}" for config, reason in zip(configs, wrong, strict=True) if reason
        ]
        if not right:
            return None
        best, best_s = right[0], 0.0
        for n, challenger in enumerate(right[1:], 2):
            best_s, other_s = self._time([best, challenger])
            if best_s > MARGIN * other_s:
                best, best_s = challenger, other_s
            self.tell(f"{name} {n}/{len(right)}: best {1e3 * best_s:.3f} ms, {_said(best, kernel)}")
        heuristic_s = None
        if best is configs[0]:
            heuristic_s = best_s = self._time([best])[0]
        elif right[0] is configs[0]:
            heuristic_s, best_s = self._time([configs[0], best])
            if heuristic_s < best_s:  # what looked quicker was noise
                best, best_s = configs[0], heuristic_s
        else:
            best_s = self._time([best])[0]
        if not math.isfinite(best_s):
            return None
        if heuristic_s is not None and not math.isfinite(heuristic_s):
            heuristic_s = None
        return Record(
            triton=self.runner.triton, source=source_of(kernel), **key._asdict(),
            launch=None if kernel == "split" else getattr(best, kernel),
            split=best.split if kernel == "split" else None,
            shape=target.shape.name, ms=1e3 * best_s, heuristic_ms=None if heuristic_s is None else 1e3 * heuristic_s,
            tried=len(configs), rejected=len(self.rejected),
        )  # fmt: skip

    def _time(self, configs: list[LaunchConfig]) -> list[float]:
        return self.runner.time(self.step.target, self.step.kernel, configs, self.config.rounds)


def _told(progress: Progress, done: int, total: int, note: str) -> None:
    progress("tune", done, total, note)


def _begun(path: Path, device: str) -> Table:
    """The table as an earlier run left it."""
    table = read_table(path) if path.exists() else Table(device=device)
    return Table(device=device).merged(table)


def _stored(record: Record, path: Path, device: str) -> Table:
    """The table with a record more, over what others may have written meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        table = _begun(path, device).merged(Table(device=device, records=(record,)))
        table.write(path)
    return table


def _said(config: LaunchConfig, kernel: Kernel) -> str:
    if kernel == "split":
        return f"split={config.split}"
    return " ".join(f"{name}={value}" for name, value in getattr(config, kernel) if value)
