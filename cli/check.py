"""`deltazoo check`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltazoo.cli.terminal.completion import complete_mixer
from deltazoo.cli.terminal.options import AsJson, BackendNames, Device, split
from deltazoo.cli.terminal.output import print_json, print_line, print_notes, print_table, print_text, progress

if TYPE_CHECKING:
    from deltazoo.backends.conformance.check_file import CheckResults
    from deltazoo.mixers.core.conformance import Result

_MAX_FAILURES = 5  # sentences without --verbose


def command(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="FILE|MIXER",
            help="YAML or JSON file in the format above; or a mixer, a name or module:Class.",
            autocompletion=complete_mixer,
        ),
    ],
    backends: BackendNames = None,
    device: Device = "cpu",
    verbose: Annotated[bool, typer.Option("--verbose", help="Print every case, tensor and failure.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare backends with the float64 reference, or check a mixer.

    \b
    Of a file: prints the worst error of each backend on the recurrence,
    shapes and dtypes of the file, relative to its limit.
    Of a mixer: prints the errors of the conformance kit's properties, such as
    decoding, packs, gradients and one graph, on a CPU.
    Exit code 1: an error exceeds its limit, a backend or mixer raises an
    exception, or a backend that --backends names refuses every case.

    \b
    spec: {decay: head, beta: head, negative_eigenvalues: both}
    shapes:
    - cpu
    - {B: 4, T: 1000, H: 8, K: 96, V: 192}
    - {H: 2, HV: 8, K: 64, lengths: [700, 0, 324]}
    dtypes: ["float32", "bfloat16"]
    """
    from deltazoo.backends.conformance.check_file import check_file
    from deltazoo.backends.update import registry

    if subject in registry.names(registry.MIXERS) or (":" in subject and not Path(subject).exists()):
        raise typer.Exit(_check_mixer(subject, split(backends), device, as_json))
    with progress() as report_progress:
        results = check_file(Path(subject), split(backends), device, report_progress)
    if as_json:
        print_json(results)
    else:
        _print(results, verbose, is_default=backends is None)
    raise typer.Exit(1 if results.failures else 0)


def _check_mixer(name: str, backends: list[str] | None, device: str, as_json: bool) -> int:
    """Run the conformance kit of mixers, with its default backend unless some are named. Returns: the exit code."""
    from deltazoo.backends.io.errors import InputError, count
    from deltazoo.mixers.core import conformance
    from deltazoo.mixers.core.config import parse

    if device != "cpu":
        raise InputError(f'device must be "cpu" for a mixer, got {device!r}')
    config = parse({"mixer": name}, trust=True)  # the command line names the code
    results: dict[str, list[conformance.Result]] = {}
    with progress() as report_progress:
        names: list[str | None] = [None] if backends is None else [*backends]
        for backend in names:
            rows = results[backend or "default"] = []
            for result in conformance.check(config, backend=backend):
                rows.append(result)
                report_progress(f"check {name}", len(rows), len(conformance.PROPERTIES), result.name)
    failures = [result.failure for rows in results.values() for result in rows if result.failure]
    if as_json:
        print_json({"mixer": name, "results": {key: [row._asdict() for row in rows] for key, rows in results.items()}})
    else:
        header = ["backend", "property", ">relative error", ">bound", ""]
        print_table(header, (_cells(backend, row) for backend, rows in results.items() for row in rows))
        print_line()
        for sentence in failures:
            print_text(sentence)
        checks = count(sum(map(len, results.values())), "check")
        print_text(f"{count(len(failures), 'failure')} in {checks} of {name}")
    return 1 if failures else 0


def _cells(backend: str, result: "Result") -> list[str]:
    measured = "raised" if result.error is None else f"{result.error:.1e}"
    return [backend, result.name, measured, f"{result.bound:.0e}", "FAILS" if result.failure else ""]


def _print(results: "CheckResults", verbose: bool, is_default: bool) -> None:
    from deltazoo.backends.io.errors import count

    # Without --backends, those that support nothing of the file are one line.
    hidden = [row.backend for row in results.summary if row.refused == results.cases and is_default and not verbose]
    print_line(f"{results.spec}, relative RMS errors")
    if verbose:
        rows = [(row.backend, *row.cells()) for row in results.rows]
        print_table(["backend", "tensor", ">error", ">limit", "", "case"], rows)
    else:
        worst = ["worst\ntensor", ">worst\nerror", ">worst\nlimit", "", "worst\ncase"]
        print_table(["backend", ">cases", *worst], (row for row in _worst(results) if row[0] not in hidden))
    print_line()
    print_notes((row.backend, reason) for row in results.rows for reason in row.refused if row.backend not in hidden)
    print_notes((name, "no support for any of these cases; --verbose prints the reasons") for name in hidden)
    failures = results.failures if verbose else results.failures[:_MAX_FAILURES]
    for sentence in failures:
        print_text(sentence)
    if more := len(results.failures) - len(failures):
        print_line(f"{count(more, 'more failure')}: --verbose prints them")
    refusals = sum(row.refused for row in results.summary)
    refused = f", {refusals} refused" if refusals else ""
    failed, cases = count(len(results.failures), "failure"), count(results.cases, "case")
    print_text(f"{failed} on {cases} of {', '.join(results.backends)}{refused}")


def _worst(results: "CheckResults") -> list[list[str]]:
    """Return a row per backend: how many cases were compared, and the cells of the worst error."""
    rows = []
    for summary in results.summary:
        raised = results.cases - summary.compared - summary.refused
        nothing = ["", "", "", "raised an error" if raised else "refused", ""]
        cells = nothing if summary.worst is None else summary.worst.cells()
        rows.append([summary.backend, f"{summary.compared}/{results.cases}", *cells])
    return rows
