"""`deltazoo check`."""

from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.options import AsJson, BackendNames, Device, split
from deltazoo.cli.output import print_json, print_table, progress, say


def command(
    file: Annotated[Path, typer.Argument(help="YAML or JSON, as below.")],
    backends: BackendNames = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Compare backends with float64 on your own recurrence, shapes and dtypes.

    Exit code 1: one is wrong, or refuses all.

    \b
    spec: {decay: head, beta: head, negative_eigenvalues: both}
    shapes: [cpu, {B: 4, T: 1000, H: 8, K: 96, V: 192}, {H: 2, HV: 8, K: 64, lengths: [700, 0, 324]}]
    dtypes: ["float32", "bfloat16"]
    """
    from deltazoo.backends.conformance.check_file import check_file

    with progress() as told:
        found = check_file(file, split(backends), device, told)
    if as_json:
        print_json(found)
    else:
        print_table(["case", "backend", "tensor", ">error", ">limit", ""], [row.cells() for row in found.rows])
        for sentence in found.failures:
            say(sentence)
        refusals = sum(bool(row.refused) for row in found.rows)
        refused = f", {refusals} refused" if refusals else ""
        say(f"{len(found.failures)} failures on {found.cases} cases of {', '.join(found.backends)}{refused}")
        for name in found.without:
            say(f"{name} takes none of them, so nothing is known of it")
    raise typer.Exit(1 if found.failures or found.without else 0)
