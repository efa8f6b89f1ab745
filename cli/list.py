"""`deltazoo list`."""

from enum import StrEnum
from typing import Annotated

import typer

from deltazoo.cli.options import AsJson
from deltazoo.cli.output import print_json, print_table


class What(StrEnum):
    """What can be listed."""

    mixers = "mixers"
    backends = "backends"
    presets = "presets"


def command(
    what: Annotated[What | None, typer.Argument(help="All three if none.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """List the mixers, backends and presets that are installed, plug-ins among them."""
    from deltazoo.blocks.inspect.catalog import catalog

    found = catalog().model_dump(include={what.value} if what else None)
    if as_json:
        print_json(found)
        return
    for kind, entries in found.items():
        for entry in entries:
            problem = entry.pop("problem", None)
            entry.update({"owner": f"{entry.get('owner', '')} PROBLEM: {problem}"} if problem else {})
        print_table(list(entries[0]), [entry.values() for entry in entries], title=kind)
