"""`deltazoo check`."""

from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.options import AsJson, BackendNames, Device, split
from deltazoo.cli.output import print_json, print_table, progress, say


def command(
    file: Annotated[Path, typer.Argument(help="YAML or JSON: spec, shapes, dtypes; see `deltazoo check --help`.")],
    backends: BackendNames = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Compare backends with float64 on your own recurrence, shapes and dtypes. Exit code 1: one is wrong."""
    from deltazoo.backends.conformance.checking import check_file

    with progress() as told:
        found = check_file(file, split(backends), device, told)
    if as_json:
        print_json(found)
    else:
        print_table(["case", "backend", "tensor", ">error", ">limit", ""], [row.cells() for row in found.rows])
        for sentence in found.failures:
            say(sentence)
        say(f"{len(found.failures)} failures on {found.cases} cases of {', '.join(found.backends)}")
    raise typer.Exit(1 if found.failures else 0)
