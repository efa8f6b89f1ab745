"""`deltazoo check`."""

from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.options import AsJson, BackendNames, Device, split
from deltazoo.cli.output import print_json, print_line, print_table, progress


def command(
    file: Annotated[Path, typer.Argument(help="YAML or JSON file in the format above.")],
    backends: BackendNames = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Compare backends with the float64 reference on the recurrence, shapes and dtypes of a file.

    Exit code 1: a backend exceeds a tolerance or refuses every case.

    \b
    spec: {decay: head, beta: head, negative_eigenvalues: both}
    shapes: [cpu, {B: 4, T: 1000, H: 8, K: 96, V: 192}, {H: 2, HV: 8, K: 64, lengths: [700, 0, 324]}]
    dtypes: ["float32", "bfloat16"]
    """
    from deltazoo.backends.conformance.check_file import check_file

    with progress() as report_progress:
        report = check_file(file, split(backends), device, report_progress)
    if as_json:
        print_json(report)
    else:
        print_table(["case", "backend", "tensor", ">error", ">limit", ""], [row.cells() for row in report.rows])
        for sentence in report.failures:
            print_line(sentence)
        refusals = sum(bool(row.refused) for row in report.rows)
        refused = f", {refusals} refused" if refusals else ""
        print_line(f"{len(report.failures)} failures on {report.cases} cases of {', '.join(report.backends)}{refused}")
        for name in report.refusing:
            print_line(f"{name} refused every case, so it was not checked")
    raise typer.Exit(1 if report.failures or report.refusing else 0)
