"""The tuner: check and time the candidates of each kernel for a shape, and store each winner as it is found.

Kernels are tuned one after the other, while the candidates of the next kernel compile. The tables and the heuristic
choose the launches of the other kernels. A candidate must pass the numeric check before it is timed. It replaces the
best so far if it is at least 1 % faster, the two timed in alternation. `chunk` and `checkpoint_chunks` are not tuned,
because they determine the saved tensors.
"""

import functools
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field

from deltazoo.backends.conformance.decode_step import typical_step
from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.io.frozen_config import FrozenConfig
from deltazoo.backends.io.output_path import output_path
from deltazoo.backends.io.progress import Progress, silent
from deltazoo.backends.measure.environment import Environment
from deltazoo.backends.measure.workload import DIRECTIONS, Direction
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.config import LaunchConfig
from deltazoo.backends.triton.decode import fused
from deltazoo.backends.triton.runtime.records import Key, Record, describe, key_of
from deltazoo.backends.triton.runtime.revisions import REVISIONS
from deltazoo.backends.triton.runtime.table import (
    Table,
    clear_caches,
    configured,
    read_table,
    records_of,
    user_table,
)
from deltazoo.backends.tuning.candidates import Target, candidates, problem_of

_ORDER: tuple[str, ...] = (
    "decode", "segment_chunks", "reverse", "gradients", "scan", "recompute", "prepare", "fused_step",
)  # fmt: skip
MARGIN = 1.01  # a candidate must be this much faster than the best so far
DIRECTION_OF: dict[str, Direction] = {
    "segment_chunks": "backward", "prepare": "forward", "scan": "forward", "recompute": "backward",
    "reverse": "backward", "gradients": "backward", "decode": "decode", "fused_step": "decode",
}  # fmt: skip


class TuneConfig(FrozenConfig):
    """Settings of the tuner.

    Args:
        directions: tune the kernels of these directions. A shape with T = 1 has only "decode", where each sequence is a
            row.
        effort: "quick" tries launches that were near the best on some shape, "full" every combination.
        budget: seconds after which no further kernel is started; None: no limit.
        rounds: timed calls of each of two compared configs.
        again: also measure the classes of problems (`Key`) that the table already contains.
    """

    directions: tuple[Direction, ...] = DIRECTIONS
    effort: Literal["quick", "full"] = "quick"
    budget: float | None = Field(default=None, gt=0)
    rounds: int = Field(default=11, ge=3)
    again: bool = False


class Runner(ABC):
    """Interface to check and time configs on a device; tests have an implementation without a GPU."""

    device: DeviceSpec

    @abstractmethod
    def environment(self) -> Environment:
        """Describe the machine and its software."""

    @abstractmethod
    def compile(self, target: Target, kernel: str, configs: Sequence[LaunchConfig]) -> None:
        """Start to compile the kernels of configs in parallel; `check` waits for those that it launches."""

    @abstractmethod
    def check(self, target: Target, kernel: str, config: LaunchConfig) -> str:
        """Compare a config with float64 on short cases of the target. Returns a reason to reject it, or ""."""

    @abstractmethod
    def time(self, target: Target, kernel: str, configs: Sequence[LaunchConfig], rounds: int) -> list[float]:
        """Return the median seconds of the kernel's direction or step with each config, timed in alternation."""


class Planned(BaseModel):
    """A kernel of a shape that `tune` would measure.

    Args:
        key: the class of problems that the record in the table would serve.
        candidates: the launches to compare, the default first; for "segment_chunks" the numbers of chunks per segment.
        done: the table already contains the class.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: str
    shape: str
    key: str
    candidates: list[str]
    done: bool

    def cells(self) -> list[str]:
        """Format a table row: kernel, shape, number of candidates, whether it is in the table."""
        return [self.kernel, self.shape, str(len(self.candidates)), "in the table" if self.done else ""]


class Gain(BaseModel):
    """Median times of a shape in one direction, with the heuristic's launches and with those of the tables."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: str
    direction: Direction
    heuristic_ms: float
    tuned_ms: float

    def cells(self) -> list[str]:
        """Format a table row: shape, direction, both times, the heuristic's time over the tuned one."""
        times = f"{self.heuristic_ms:.3f}", f"{self.tuned_ms:.3f}"
        return [self.shape, self.direction, *times, f"{self.heuristic_ms / self.tuned_ms:.2f}"]


class Tuned(BaseModel):
    """The result of tuning.

    Args:
        environment: the device and the software of the run.
        table: the path of the table.
        records: records of this run, including those that confirm the heuristic's choice.
        gains: the times of each shape and direction in which another launch than the heuristic's was chosen.
        kept: number of classes that the table already contained.
        left: number of kernels that the budget did not reach.
        failures: a sentence for each kernel whose candidates all failed.
        rejected: a sentence for each candidate that did not run or failed the numeric check.
        seconds: the duration of the run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: Environment
    table: Path
    records: list[Record]
    gains: list[Gain]
    kept: int
    left: int
    failures: list[str]
    rejected: list[str]
    seconds: float

    @property
    def last_line(self) -> str:
        """A line of Python that uses the table, or a comment if none is needed or no table was written."""
        if not self.records and not self.kept:
            return "# nothing was measured; no table was written"
        if self.table == user_table(self.environment.device):
            return f"# used from now on, unless you delete {self.table}"
        return f'from deltazoo.backends.triton import use_table; use_table("{self.table}")'


class _Job(NamedTuple):
    """One kernel of one target.

    Args:
        key: the class of problems.
        configs: the candidates, the default first.
        done: whether the table contains the class.
    """

    target: Target
    kernel: str
    key: Key
    configs: list[LaunchConfig]
    done: bool

    @property
    def name(self) -> str:
        return f"{self.target.shape.name} {self.kernel}"


def tune(
    targets: Sequence[Target],
    runner: Runner,
    config: TuneConfig | None = None,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> Tuned:
    """Tune, and store each choice in the table immediately, so that an interrupted run resumes where it stopped.

    Args: out: the table, extended if it exists; None: the user's table, which every process reads.
    Raises: ConfigError for no targets, an invalid table or one of another device; OSError.
    """
    config, start = config or TuneConfig(), time.monotonic()
    path = user_table(runner.device.name) if out is None else Path(out)
    table = _read_or_create(path, runner.device.name)
    if not targets:
        raise ConfigError("tuning needs at least one shape, got none")
    pairs = [(target, kernel) for target in targets for kernel in kernels_of(target, config)]
    records: list[Record] = []
    failures: list[str] = []
    rejected: list[str] = []
    left, kept, measured = 0, set[Key](), set[Key]()

    def must_be_measured(job: _Job) -> bool:
        return job.key not in measured and len(job.configs) > 1 and (config.again or not job.done)

    try:
        for done, (target, kernel) in enumerate(pairs):
            job = _job(target, kernel, runner.device, table, config)
            if not must_be_measured(job):
                if job.done and job.key not in measured:
                    kept.add(job.key)
                continue
            if config.budget is not None and time.monotonic() - start > config.budget:
                left = len(pairs) - done
                break
            measured.add(job.key)
            later = filter(must_be_measured, (_job(*pair, runner.device, table, config) for pair in pairs[done + 1 :]))
            for compiled in (job, *itertools.islice(later, 1)):
                runner.compile(compiled.target, compiled.kernel, compiled.configs)
            record, reasons = _search(job, runner, config.rounds, functools.partial(progress, "tune", done, len(pairs)))
            rejected += reasons
            if record is None:
                failures.append(
                    f"{kernel} of {target.shape.name}: no candidate passes the numeric check and can be timed; "
                    "none is chosen"
                )
                continue
            table = _store(record, path, table.device)
            records.append(record)
    finally:
        clear_caches()
    gains = [gain for target in targets for gain in _gains(target, runner, table, records, config.rounds)]
    progress("tune", len(pairs) - left, len(pairs))
    return Tuned(
        environment=runner.environment(), table=path, records=records, gains=gains, kept=len(kept), left=left,
        failures=failures, rejected=rejected, seconds=time.monotonic() - start,
    )  # fmt: skip


def plan(
    targets: Sequence[Target], device: DeviceSpec, config: TuneConfig | None = None, out: str | Path | None = None
) -> list[Planned]:
    """List the kernels that `tune` would measure on a device. No GPU is needed.

    The number of segments, on which the candidates depend, is that of the table, else that of the heuristic.

    Raises: ConfigError for an invalid table or one of another device.
    """
    config = config or TuneConfig()
    table = _read_or_create(user_table(device.name) if out is None else Path(out), device.name)
    planned: dict[Key, Planned] = {}
    for target in targets:
        for kernel in kernels_of(target, config):
            job = _job(target, kernel, device, table, config)
            if len(job.configs) == 1 or job.key in planned:
                continue
            planned[job.key] = Planned(
                kernel=kernel, shape=target.shape.name, key=str(job.key),
                candidates=[_choice(candidate, kernel) for candidate in job.configs],
                done=job.done and not config.again,
            )  # fmt: skip
    return list(planned.values())


def kernels_of(target: Target, config: TuneConfig) -> list[str]:
    """Return the kernels of a target in the order of tuning.

    The decode kernel is first, because its candidates compile and run within seconds, while the others compile. Then
    segments, because all kernels of forward and backward depend on them, and the reverse scan, which decides whether
    the recomputation and the gradients are launched. The others follow by their usual share of the time.
    """
    directions = {"decode"} & set(config.directions) if target.shape.T == 1 else set(config.directions)
    only_gates = target.spec.transition == "additive" and target.spec.decay != "channel"
    excluded = ["prepare"] if only_gates else []
    # with several keys per token the heuristic limits the tile of the fused step by registers
    if target.spec.householders > 1 or fused.unsupported(typical_step(target.spec, target.shape)):
        excluded.append("fused_step")
    return [kernel for kernel in _ORDER if DIRECTION_OF[kernel] in directions and kernel not in excluded]


def _gains(target: Target, runner: Runner, table: Table, records: Sequence[Record], rounds: int) -> Iterator[Gain]:
    """Time the heuristic's config against the tuned one, in each direction where a record changed it."""
    changed = [record for record in records if record.shape == target.shape.name and record.gain != 1]
    for direction in dict.fromkeys(DIRECTION_OF[record.key.kernel] for record in changed):
        kernel = next(record.key.kernel for record in changed if DIRECTION_OF[record.key.kernel] == direction)
        problem = problem_of(target, kernel, runner.device)
        known = records_of(runner.device.name, runner.device.triton) | table.usable(runner.device.triton)
        configs = [configured(problem, runner.device, choices) for choices in ({}, known)]
        heuristic_s, tuned_s = runner.time(target, kernel, configs, rounds)
        if math.isfinite(heuristic_s) and math.isfinite(tuned_s):
            yield Gain(
                shape=target.shape.name, direction=direction, heuristic_ms=1e3 * heuristic_s, tuned_ms=1e3 * tuned_s
            )


def _job(target: Target, kernel: str, device: DeviceSpec, table: Table, config: TuneConfig) -> _Job:
    problem = problem_of(target, kernel, device)
    # a record of another Triton version may be usable, but the kernel is measured again
    measured = {k: record for k, record in table.usable(device.triton).items() if record.triton == device.triton}
    known = records_of(device.name, device.triton) | measured
    segment_chunks = 0 if kernel == "segment_chunks" else configured(problem, device, known).segment_chunks
    key = key_of(kernel, problem, segment_chunks)
    base = configured(problem, device, {other: record for other, record in known.items() if other.kernel != kernel})
    return _Job(target, kernel, key, candidates(kernel, problem, base, device, config.effort), key in measured)


def _search(job: _Job, runner: Runner, rounds: int, report: Callable[[str], None]) -> tuple[Record | None, list[str]]:
    """Check all candidates, and time each that passes against the best so far.

    Returns: the record, None if no candidate passes or can be timed; why candidates were rejected.
    """
    target, kernel, key, configs, _ = job
    report(f"{job.name}: checking {len(configs)}")
    reasons = {config: runner.check(target, kernel, config) for config in configs}
    rejected = [f"{job.name} {_choice(config, kernel)}: {reason}" for config, reason in reasons.items() if reason]
    correct = [config for config, reason in reasons.items() if not reason]

    def measure(*compared: LaunchConfig) -> list[float]:
        return runner.time(target, kernel, compared, rounds)

    if not correct:
        return None, rejected
    best = correct[0]
    for n, challenger in enumerate(correct[1:], 2):
        best_s, other_s = measure(best, challenger)
        if best_s > MARGIN * other_s:
            best, best_s = challenger, other_s
        report(f"{job.name} {n}/{len(correct)}: best {1e3 * best_s:.3f} ms, {_choice(best, kernel)}")
    default = configs[0] if configs[0] in correct else None
    default_s = None
    if default in (None, best):
        (best_s,) = measure(best)
        default_s = best_s if default is best else None
    else:
        assert default is not None
        default_s, best_s = measure(default, best)
        if default_s < best_s:  # the difference was noise
            best, best_s = default, default_s
    if not math.isfinite(best_s):
        return None, rejected
    choice = {kernel: best.segment_chunks} if kernel == "segment_chunks" else {"launch": getattr(best, kernel)}
    return Record(
        key=key, triton=runner.device.triton, revision=REVISIONS[kernel], **choice, shape=target.shape.name,
        ms=1e3 * best_s, heuristic_ms=1e3 * default_s if default_s and math.isfinite(default_s) else None,
        tried=len(configs), rejected=len(rejected),
    ), rejected  # fmt: skip


def _choice(config: LaunchConfig, kernel: str) -> str:
    return describe(getattr(config, kernel))


def _read_or_create(path: Path, device: str) -> Table:
    """Read the table of earlier runs, or create an empty one. Raises: ConfigError for a table of another device."""
    table = read_table(path) if path.exists() else Table(device=device)
    return Table(device=device).merged(table)


def _store(record: Record, path: Path, device: str) -> Table:
    """Add a record to the table on disk, which other processes may have extended."""
    with FileLock(output_path(path).with_name(f".{path.name}.lock")):
        table = _read_or_create(path, device).merged(Table(device=device, records=(record,)))
        table.write(path)
    return table
