"""`deltazoo doctor`."""

import typer

from deltazoo.cli.options import AsJson
from deltazoo.cli.output import print_json, print_table, say


def command(as_json: AsJson = False) -> None:
    """Check this installation: versions, devices, compiler, backends, plug-ins. Exit code 1: there is a problem."""
    from deltazoo.blocks.inspect.doctor import checkup

    found = checkup()
    if as_json:
        print_json(found)
    else:
        print_table(["environment", ""], found.environment.model_dump().items())
        columns = ["device", "dtype", "backend", "gated delta rule, training"]
        print_table(columns, [row.model_dump().values() for row in found.backends])
        for problem in found.problems or ["No problems found."]:
            say(problem)
    raise typer.Exit(1 if found.problems else 0)
