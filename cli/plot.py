"""`deltazoo plot`."""

from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.terminal.output import print_line, print_table


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of training runs.")],
    out: Annotated[Path, typer.Option(help="File of the picture: png, svg or pdf.")] = Path("runs.png"),
) -> None:
    """Compare the losses and the speed of training runs in one picture; also of runs that still train."""
    from deltazoo.blocks.training.run_plot import plot_runs

    last = plot_runs(runs, out)
    columns = ["run", ">step", ">train", ">validation, bits", ">tokens/s"]
    print_table(columns, [[name, *point.cells()] for name, point in last.items()])
    print_line(f"the picture is {out}")
