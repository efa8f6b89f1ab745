"""`deltazoo list`."""

from enum import StrEnum
from typing import Annotated

import typer

from deltazoo.cli.options import AsJson
from deltazoo.cli.output import print_json, print_table


class Kind(StrEnum):
    """The kinds of entries in the catalog."""

    mixers = "mixers"
    backends = "backends"
    presets = "presets"


def command(
    kind: Annotated[
        Kind | None, typer.Argument(help="List only this kind. Default: all three.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the installed mixers, backends and presets, plug-ins included."""
    from deltazoo.blocks.inspect.catalog import catalog

    listed = catalog().model_dump(include={kind.value} if kind else None)
    if as_json:
        print_json(listed)
        return
    for title, entries in listed.items():
        for entry in entries:
            problem = entry.pop("problem", None)
            entry.update({"owner": f"{entry.get('owner', '')} PROBLEM: {problem}"} if problem else {})
        print_table(list(entries[0]), [entry.values() for entry in entries], title=title)
