"""`deltazoo doctor`."""

from typing import TYPE_CHECKING

import typer

from deltazoo.cli.terminal.options import AsJson
from deltazoo.cli.terminal.output import print_json, print_line, print_notes, print_table, print_text

if TYPE_CHECKING:
    from deltazoo.blocks.inspect.doctor import BackendStatus


def command(as_json: AsJson = False) -> None:
    """Check the versions, devices, C++ compiler, backends and plug-ins of this installation.

    Exit code 1: a problem was found.
    """
    from deltazoo.blocks.inspect.doctor import diagnose

    diagnosis = diagnose()
    if as_json:
        print_json(diagnosis)
    else:
        print_table(["environment", ""], diagnosis.environment.model_dump().items())
        print_line()
        _print_backends(diagnosis.backends, diagnosis.problems)
        print_line()
        for problem in diagnosis.problems or ["No problems found."]:
            print_text(problem)
    raise typer.Exit(1 if diagnosis.problems else 0)


def _print_backends(rows: "list[BackendStatus]", problems: list[str]) -> None:
    """Print a column per device and dtype, and below it each reason once that is not among the problems."""
    places = list(dict.fromkeys((row.device, row.dtype) for row in rows))
    verdicts = {(row.backend, row.device, row.dtype): _verdict(row) for row in rows}
    backends = sorted({row.backend for row in rows})
    print_table(
        ["backend", *(f"{device}\n{dtype}" for device, dtype in places)],
        [[backend, *(verdicts.get((backend, *place), "") for place in places)] for backend in backends],
        title="training with the gated delta rule",
    )
    print_line()
    reasons = [(row.backend, reason) for row in rows for reason in row.reasons]
    print_notes((backend, reason) for backend, reason in reasons if not any(reason in text for text in problems))


def _verdict(row: "BackendStatus") -> str:
    from deltazoo.backends.update.explain import is_supported

    return "chosen" if row.chosen else "supported" if is_supported(row.reasons) else "refuses"
