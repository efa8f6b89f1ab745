"""`deltazoo list`."""

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from deltazoo.cli.options import AsJson
from deltazoo.cli.output import print_json, print_line, print_notes, print_table, print_text

if TYPE_CHECKING:
    from deltazoo.blocks.inspect.catalog import BackendEntry, MixerEntry

_LEGEND = "S: state before token t, S': state after it. d_t: decay that depends on the token, d: constant decay."
_PLUG_IN = ("of", "")  # columns that are empty, and therefore omitted, without plug-ins


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

    listed = catalog()
    if as_json:
        print_json(listed.model_dump(include={kind.value} if kind else None))
        return
    mixers, backends, presets = (kind in (None, each) for each in Kind)
    if mixers:
        rows = [(entry.name, entry.recurrence, *_plug_in(entry)) for entry in listed.mixers]
        print_table(["mixer", "recurrence", *_PLUG_IN], rows, one_line=True)
        print_text(_LEGEND)
    if backends:
        rows = [(entry.name, entry.about, *_plug_in(entry)) for entry in listed.backends]
        _print_next(mixers, ["backend", "", *_PLUG_IN], rows)
    if presets:
        sizes = [(entry.name, str(entry.depth), str(entry.width), entry.pattern) for entry in listed.presets]
        _print_next(mixers or backends, ["preset", ">layers", ">width", "pattern"], sizes)
    listed_plug_ins: list[MixerEntry | BackendEntry] = [
        *(listed.mixers if mixers else []),
        *(listed.backends if backends else []),
    ]
    print_notes((f"{e.name} of {e.owner} cannot be used", e.problem) for e in listed_plug_ins if e.problem is not None)
    if kind is None:
        print_line("\nEquations, fields and sources: deltazoo show NAME")


def _plug_in(entry: "MixerEntry | BackendEntry") -> tuple[str, str]:
    """Return the package of a plug-in, empty for deltazoo's own entries, and whether it has a problem."""
    owner = "" if entry.owner.startswith("deltazoo ") else entry.owner
    return owner, "" if entry.problem is None else "PROBLEM, see below"


def _print_next(follows: bool, columns: list[str], rows: Sequence[Sequence[str]]) -> None:
    if follows:
        print_line()
    print_table(columns, rows, one_line=True)
