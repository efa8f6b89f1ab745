"""Comparison of a benchmark with an earlier one: which cases became slower, larger, less accurate or unsupported."""

import json
import math
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from deltazoo.backends.io.errors import ConfigError, count, describe_invalid
from deltazoo.backends.measure.environment import Environment
from deltazoo.backends.measure.result import BenchConfig, Benchmark, Row
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.measure.table import Table, three_digits
from deltazoo.backends.update.spec import UpdateSpec

TIME_FACTOR, MEMORY_FACTOR, ERROR_FACTOR = 1.05, 1.05, 2.0  # larger growth is a regression


class Change(BaseModel):
    """One case before and now.

    Args: case: what distinguishes it; regressions: what became worse, a sentence each; [] if nothing did.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    case: str
    before: Row
    now: Row
    regressions: list[str]

    def cells(self) -> list[str]:
        """Format a table row: case, backend, both medians, the factor, the noise, the verdict."""
        before, now = self.before.median_ms, self.now.median_ms
        assert before is not None
        if now is None:
            figures = [three_digits(before), "-", "", ""]
        else:
            noise = f"{_noise(self.before, self.now) / before:.0%}"
            figures = [three_digits(before), three_digits(now), f"{before / now:.2f}", noise]
        verdict = "regression" if self.regressions else "faster" if _is_slower(self.now, self.before) else ""
        return [self.case, self.now.backend, *figures, verdict]


class Comparison(BaseModel):
    """The cases that two benchmarks have in common.

    Args:
        before: the environment of the earlier benchmark.
        changes: the cases that the earlier benchmark timed.
        unmatched: number of cases that only the earlier benchmark timed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    before: Environment
    changes: list[Change]
    unmatched: int

    @property
    def regressions(self) -> list[Change]:
        """The changes with a regression."""
        return [change for change in self.changes if change.regressions]

    def table(self) -> Table:
        """Return a table with a row per case, and the regressions below it."""
        columns = ["case", "backend", ">before", ">now", ">speed-up", ">noise", ""]
        rows = [change.cells() for change in self.changes]
        if not any(row[0] for row in rows):
            columns, rows = columns[1:], [row[1:] for row in rows]
        notes = [
            (", ".join(filter(None, [change.case, change.now.backend])), sentence)
            for change in self.regressions
            for sentence in change.regressions
        ]
        legend = [
            ("before, now", "median, ms"),
            ("speed-up", "before / now"),
            ("noise", "both ranges from the 20th to the 80th percentile together, relative to before"),
        ]
        return Table(columns, rows, notes, legend)

    def line(self) -> str:
        """Summarise the comparison in one line."""
        others = f"; {self.unmatched} cases of the earlier benchmark were not measured" if self.unmatched else ""
        return f"{count(len(self.regressions), 'regression')} in {count(len(self.changes), 'case')}{others}"


class Earlier(NamedTuple):
    """An earlier benchmark that was read from a file."""

    path: Path
    benchmark: Benchmark

    def check(self, config: BenchConfig, now: Environment) -> None:
        """Refuse a benchmark whose times cannot be compared with those of these settings and environment.

        Raises: ConfigError: it has another device, dtype or method of timing.
        """
        before = self.benchmark
        differences = {
            "device": (before.environment.device, now.device),
            "dtype": (before.config.dtype, config.dtype),
            "graphs": (before.config.graphs, config.graphs),
        }
        for name, (old, new) in differences.items():
            if old != new:
                raise ConfigError(f"{self.path} was measured with {name} {old}, which does not compare with {new}")

    def compare(self, now: Benchmark) -> Comparison:
        """Compare the cases with equal update, sizes, direction and backend.

        A time is a regression if the median grew by more than 5 % and by more than the noise: both ranges from the
        20th to the 80th percentile together. Memory is one if it grew by more than 5 %; an error if it more than
        doubled; a refusal always.

        Raises: ConfigError: there is no such case.
        """
        cases = {_case(now, row): row for row in now.rows}
        timed = {_case(self.benchmark, row): row for row in self.benchmark.timed}
        changes = [
            Change(
                case=now.case(cases[case]),
                before=before,
                now=cases[case],
                regressions=_regressions(before, cases[case]),
            )
            for case, before in timed.items()
            if case in cases
        ]
        if not changes:
            same = "update, sizes, direction and backend"
            raise ConfigError(f"{self.path} has no case with the {same} of one of this benchmark")
        return Comparison(before=self.benchmark.environment, changes=changes, unmatched=len(timed) - len(changes))


def read_earlier(path: Path) -> Earlier:
    """Read the JSON of a benchmark, with or without a comparison. Raises: ConfigError; OSError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        compared = isinstance(data, dict) and "comparison" in data
        return Earlier(path, Benchmark.model_validate(data["benchmark"] if compared else data, strict=False))
    except (ValidationError, ValueError, KeyError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        reason = error if first is None else describe_invalid(".".join(map(str, first["loc"])), first["msg"])
        raise ConfigError(f"{path} must contain the output of `deltazoo bench --json`: {reason}") from None


def _case(benchmark: Benchmark, row: Row) -> tuple[UpdateSpec, Shape, str, str]:
    shape = next(shape for shape in benchmark.shapes if shape.name == row.shape)
    return benchmark.specs[row.mixer], shape._replace(name=""), row.direction, row.backend


def _regressions(before: Row, now: Row) -> list[str]:
    if now.median_ms is None:
        return [f"it ran before; now: {' '.join(now.refused)}"]
    assert before.median_ms is not None
    sentences = []
    if _is_slower(before, now):
        sentences.append(f"{three_digits(before.median_ms)} ms became {three_digits(now.median_ms)} ms")
    if before.peak_mib is not None and now.peak_mib is not None and now.peak_mib > MEMORY_FACTOR * before.peak_mib:
        sentences.append(f"{before.peak_mib:.0f} MiB became {now.peak_mib:.0f} MiB")
    if before.error is not None and now.error is not None and _is_worse(before.error, now.error):
        sentences.append(f"the error {before.error:.1e} became {now.error:.1e}")
    return sentences


def _is_worse(before: float, now: float) -> bool:
    # NaN is worse than any number; errors below 1e-12 are rounding errors of float64
    return math.isfinite(before) and not now <= max(ERROR_FACTOR * before, 1e-12)


def _is_slower(before: Row, now: Row) -> bool:
    assert before.median_ms is not None and now.median_ms is not None
    growth = now.median_ms - before.median_ms
    return growth > max((TIME_FACTOR - 1) * before.median_ms, _noise(before, now))


def _noise(before: Row, now: Row) -> float:
    """Return the width in ms of both ranges from the 20th to the 80th percentile together."""
    assert before.low_ms is not None and before.high_ms is not None
    assert now.low_ms is not None and now.high_ms is not None
    return before.high_ms - before.low_ms + now.high_ms - now.low_ms
