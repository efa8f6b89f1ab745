"""`deltazoo zoo`."""

import typer

from deltazoo.cli.options import AsJson
from deltazoo.cli.output import print_json


def command(as_json: AsJson = False) -> None:
    """Print docs/zoo.md: the equation, spec, cost, backends, source and oracle of every mixer."""
    from deltazoo.blocks.inspect.zoo import zoo_entries, zoo_page

    if as_json:
        print_json([entry.model_dump() for entry in zoo_entries()])
    else:
        typer.echo(zoo_page(), nl=False)
