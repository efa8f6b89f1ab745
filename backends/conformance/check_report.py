"""What `deltazoo check` finds: every backend's distance from float64 on the cases of a file, as plain values."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from deltazoo.backends import registry
from deltazoo.backends.conformance.check_file import read_check, run_checks
from deltazoo.backends.conformance.compare import Report
from deltazoo.backends.devices import usable_device
from deltazoo.backends.progress import Progress, silent


class CheckRow(BaseModel):
    """One tensor of one backend on one case; refused: why there is none."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    case: str
    backend: str
    tensor: str = ""
    error: float | None = None
    limit: float | None = None
    ok: bool = True
    refused: str = ""

    def cells(self) -> list[str]:
        """The row as words: case, backend, tensor, error, limit, verdict."""
        if self.error is None or self.limit is None:
            return [self.case, self.backend, "", "", "", f"refused: {self.refused}"]
        verdict = "" if self.ok else "TOO MUCH"
        return [self.case, self.backend, self.tensor, f"{self.error:.1e}", f"{self.limit:.0e}", verdict]


class Checked(BaseModel):
    """All rows; failures: a sentence each, with the backend and the case."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backends: list[str]
    cases: int
    rows: list[CheckRow]
    failures: list[str]

    @property
    def without(self) -> list[str]:
        """The backends that refuse every case."""
        compared = {row.backend for row in self.rows if not row.refused}
        return [name for name in self.backends if name not in compared]


def check_file(
    path: str | Path, backends: Sequence[str] | None = None, device: str = "cpu", progress: Progress = silent
) -> Checked:
    """Compare backends with the reference in float64 on the cases of a file; see `checkfile`.

    Args: backends: names; None is all that are installed.
    Raises: ConfigError; UnknownNameError, DuplicateNameError, PluginError.
    """
    names = registry.names(registry.BACKENDS) if backends is None else list(backends)
    cases = read_check(path).cases()
    rows: list[CheckRow] = []
    failures: list[str] = []
    total = len(cases) * len(names)
    progress("check", 0, total)
    for done, report in enumerate(run_checks(cases, names, usable_device(device)), 1):
        rows += _rows(report)
        failures += [f"{report.backend} on {report.case}: {failure}" for failure in report.failures]
        progress("check", done, total, report.backend)
    return Checked(backends=names, cases=len(cases), rows=rows, failures=failures)


def _rows(report: Report) -> list[CheckRow]:
    case = str(report.case)
    if report.refused:
        return [CheckRow(case=case, backend=report.backend, refused=" ".join(report.refused))]
    return [
        CheckRow(
            case=case, backend=report.backend, tensor=error.tensor, error=error.relative, limit=error.limit, ok=error.ok
        )
        for error in report.errors
    ]
