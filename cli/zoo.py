"""`deltazoo zoo`."""

import typer

from deltazoo.cli.options import AsJson
from deltazoo.cli.output import print_json


def command(as_json: AsJson = False) -> None:
    """Print the page of the zoo, docs/zoo.md: every mixer with equation, spec, cost, backends, source and oracle."""
    from deltazoo.blocks.inspect import zoo

    if as_json:
        print_json([animal.model_dump() for animal in zoo.zoo()])
    else:
        typer.echo(zoo.page(), nl=False)
