"""Tune warps and stages of the kernels that a model launches beside its updates, on the operands of its own calls.

The calls of operators are captured while the model trains and decodes. Each class of launches is timed within the call
that launched it first, all other launches as before. A candidate must leave the results of the call as they are, up to
rounding.
"""

import functools
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from filelock import FileLock
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from deltazoo.backends.io.output_path import output_path
from deltazoo.backends.io.progress import Progress, silent
from deltazoo.backends.measure.timing import time_interleaved
from deltazoo.backends.torch_ext.cuda_graph import capture_and_keep
from deltazoo.backends.torch_ext.custom_op import observed_calls
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.runtime.options import forced, launches_seen
from deltazoo.backends.triton.runtime.records import OperatorKey, OperatorRecord
from deltazoo.backends.triton.runtime.revisions import revision_of
from deltazoo.backends.triton.runtime.table import Table, clear_caches, read_table, user_table
from deltazoo.backends.triton.support import Options
from deltazoo.backends.tuning.tune import MARGIN, TuneConfig

_MAX_SECONDS = 1.0
_LIMITS = {torch.float32: 1e-3, torch.float64: 1e-9}  # relative RMS difference of results; 16 bits: 2e-2


class OperatorCall(NamedTuple):
    """A call of an operator: its name, what computes it, and its arguments."""

    operator: str
    body: Callable[..., Any]
    arguments: tuple[Any, ...]


class Tunable(NamedTuple):
    """A class of launches, with its own options and a call that contains it."""

    key: OperatorKey
    options: Options
    call: OperatorCall


class OperatorsTuned(BaseModel):
    """The result: records of this run, classes that the table already had, failures, and rejected candidates."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    records: list[OperatorRecord]
    kept: int
    left: int
    failures: list[str]
    rejected: list[str]


class OperatorRunner(ABC):
    """Interface to check and time the options of a class of launches; tests have one without a GPU."""

    device: DeviceSpec

    @abstractmethod
    def check(self, tunable: Tunable, options: Options) -> str:
        """Compare the results of the call with those of its own options. Returns a reason to reject it, or ""."""

    @abstractmethod
    def time(self, tunable: Tunable, options: Sequence[Options], rounds: int) -> list[float]:
        """Return the median seconds of the call with each of the options, timed in alternation."""


class CudaOperatorRunner(OperatorRunner):
    """Check and time on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.device = device, DeviceSpec.current(device.index)

    def check(self, tunable: Tunable, options: Options) -> str:
        try:
            expected = _results(tunable.call)
            with forced(tunable.key, options):
                actual = _results(tunable.call)
            torch.cuda.synchronize(self.cuda)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            return f"failed with {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        return difference(actual, expected)

    def time(self, tunable: Tunable, options: Sequence[Options], rounds: int) -> list[float]:
        calls = {}
        for candidate in options:
            arguments = _copied(tunable.call.arguments)
            with forced(tunable.key, candidate), torch.no_grad():
                call = functools.partial(tunable.call.body, *arguments)
                calls[str(candidate)] = capture_and_keep(call, self.cuda)
        times = time_interleaved(calls, self.cuda, rounds, _MAX_SECONDS, lambda *_: None)
        return [median(times[str(candidate)].seconds) for candidate in options]


@contextmanager
def captured_tunables() -> Iterator[dict[OperatorKey, Tunable]]:
    """Collect the classes of launches of the operators that are called inside the block, each with its first call."""
    found: dict[OperatorKey, Tunable] = {}

    def observe(name: str, body: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        with launches_seen() as seen:
            results = body(*arguments)
        for key, options in seen.items():
            found.setdefault(key, Tunable(key, options, OperatorCall(name, body, _detached(arguments))))
        return results

    with observed_calls(observe):
        yield found


def candidates(options: Options, effort: str = "quick") -> list[Options]:
    """Return the options to try for a launch, its own first: its neighbours, or every combination."""
    own_warps, own_stages = options.warps, options.stages
    pairs = list(itertools.product((1, 2, 4, 8, 16), (1, 2, 3, 4, 5)))
    if effort == "quick":
        neighbours = [(own_warps // 2, own_stages), (2 * own_warps, own_stages)]
        neighbours += [(own_warps, own_stages - 1), (own_warps, own_stages + 1)]
        pairs = [pair for pair in neighbours if pair in pairs]
    return list(dict.fromkeys([options, *(options._replace(warps=w, stages=s) for w, s in pairs)]))


def tune_operators(
    tunables: Sequence[Tunable], runner: OperatorRunner, config: TuneConfig, out: Path | None,
    progress: Progress = silent,
) -> OperatorsTuned:  # fmt: skip
    """Measure the options of each class of launches, and store each winner as it is found. Raises: ConfigError."""
    device, start = runner.device, time.monotonic()
    path = user_table(device.name) if out is None else out
    records: list[OperatorRecord] = []
    failures: list[str] = []
    rejected: list[str] = []
    kept = left = 0
    try:
        for n, tunable in enumerate(tunables):
            progress("tune operators", n, len(tunables), tunable.key.kernel)
            table = _stored(path, device.name)
            known = table.usable_operators(device.triton).get(tunable.key)
            if known is not None and known.triton == device.triton and not config.again:
                kept += 1
                continue
            if config.budget is not None and time.monotonic() - start > config.budget:
                left = len(tunables) - n
                break
            record, reasons = _search(tunable, runner, config)
            rejected += reasons
            if record is None:
                failures.append(f"{tunable.key.kernel}: its own launch cannot be timed; none is chosen")
                continue
            records.append(record)
            with FileLock(output_path(path).with_name(f".{path.name}.lock")):
                _stored(path, device.name).merged(Table(device=device.name, operators=(record,))).write(path)
    finally:
        clear_caches()
    progress("tune operators", len(tunables), len(tunables))
    return OperatorsTuned(records=records, kept=kept, left=left, failures=failures, rejected=rejected)


def difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Describe the first result that differs by more than rounding; "" if there is none."""
    for n, (x, y) in enumerate(zip(actual, expected, strict=True)):
        if not y.is_floating_point() or y.numel() == 0:
            continue
        exact, finite = y.double(), y.isfinite()
        if not torch.equal(x.isfinite(), finite):
            return f"result {n} is finite elsewhere"
        norm = float(exact[finite].norm())
        error = float((x.double() - exact)[finite].norm()) / norm if norm else float(x.double()[finite].norm())
        if not error <= _LIMITS.get(y.dtype, 2e-2):
            return f"result {n} differs by {error:.1e} (relative RMS)"
    return ""


def _search(tunable: Tunable, runner: OperatorRunner, config: TuneConfig) -> tuple[OperatorRecord | None, list[str]]:
    default, *others = candidates(tunable.options, config.effort)
    reasons = {options: runner.check(tunable, options) for options in others}
    rejected = [
        f"{tunable.key.kernel} warps={options.warps} stages={options.stages}: {reason}"
        for options, reason in reasons.items()
        if reason
    ]
    best = default
    default_s = best_s = runner.time(tunable, [default], config.rounds)[0]
    for challenger in (options for options, reason in reasons.items() if not reason):
        current_s, other_s = runner.time(tunable, [best, challenger], config.rounds)
        if current_s > MARGIN * other_s:
            best = challenger
    if best != default:
        default_s, best_s = runner.time(tunable, [default, best], config.rounds)
        if default_s < best_s:  # the difference was noise
            best, best_s = default, default_s
    if not math.isfinite(best_s):
        return None, rejected
    return OperatorRecord(
        key=tunable.key, triton=runner.device.triton, revision=revision_of(tunable.key.kernel), warps=best.warps,
        stages=best.stages, ms=1e3 * best_s, heuristic_ms=1e3 * default_s, tried=1 + len(others),
        rejected=len(rejected),
    ), rejected  # fmt: skip


def _stored(path: Path, device: str) -> Table:
    table = read_table(path) if path.exists() else Table(device=device)
    return Table(device=device).merged(table)


def _results(call: OperatorCall) -> list[Tensor]:
    """Run a call on copies, and return its results and the arguments it may have written."""
    arguments = _copied(call.arguments)
    with torch.no_grad():
        results = call.body(*arguments)
    return [*_tensors(results), *_tensors(arguments)]


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for y in x:
            yield from _tensors(y)


def _copied(x: Any) -> Any:
    return _mapped(lambda y: y.detach().clone(), x)


def _detached(x: Any) -> Any:
    return _mapped(lambda y: y.detach(), x)


def _mapped(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, list | tuple):
        items = [_mapped(function, y) for y in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    return x
