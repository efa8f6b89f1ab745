"""`deltazoo zoo`."""

from deltazoo.cli.terminal.options import AsJson
from deltazoo.cli.terminal.output import print_json, print_piece


def command(as_json: AsJson = False) -> None:
    """Print docs/zoo.md: the equation, spec, cost, backends, source and oracle of every mixer."""
    from deltazoo.blocks.inspect.zoo import zoo_entries, zoo_page

    entries = zoo_entries()
    if as_json:
        print_json(entries)
    else:
        print_piece(zoo_page(entries))
