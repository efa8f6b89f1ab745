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
_OWNER = "package"  # a column that is empty, and therefore omitted, without plug-ins


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
        rows = [_row(entry, entry.recurrence) for entry in listed.mixers]
        print_table(["mixer", "recurrence", _OWNER], rows, one_line=True)
        print_text(_LEGEND)
    if backends:
        rows = [_row(entry, entry.about) for entry in listed.backends]
        _print_next(mixers, ["backend", "", _OWNER], rows)
    if presets:
        sizes = [(entry.name, str(entry.depth), str(entry.width), entry.pattern) for entry in listed.presets]
        _print_next(mixers or backends, ["preset", ">layers", ">width", "pattern"], sizes)
    _print_problems([*(listed.mixers if mixers else []), *(listed.backends if backends else [])])
    if kind is None:
        print_line("\nEquations, fields and sources: deltazoo show NAME")


def _row(entry: "MixerEntry | BackendEntry", about: str) -> tuple[str, str, str]:
    """Return the cells of a row: the name, a description, and for a plug-in its package."""
    owner = "" if entry.owner.startswith("deltazoo ") else entry.owner
    return entry.name, about if entry.problem is None else "PROBLEM, see below", owner


def _print_problems(entries: "Sequence[MixerEntry | BackendEntry]") -> None:
    broken = [(f"{entry.name} of {entry.owner} cannot be used", entry.problem) for entry in entries if entry.problem]
    if broken:
        print_line()
        print_notes(broken)


def _print_next(follows: bool, columns: list[str], rows: Sequence[tuple[str, ...]]) -> None:
    if follows:
        print_line()
    print_table(columns, rows, one_line=True)
