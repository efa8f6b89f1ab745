"""`deltazoo doctor`."""

import typer

from deltazoo.cli.options import AsJson
from deltazoo.cli.output import print_json, print_line, print_table


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
        columns = ["device", "dtype", "backend", "gated delta rule, training"]
        print_table(columns, [row.model_dump().values() for row in diagnosis.backends])
        for problem in diagnosis.problems or ["No problems found."]:
            print_line(problem)
    raise typer.Exit(1 if diagnosis.problems else 0)
