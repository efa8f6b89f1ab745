"""`deltazoo list`."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from deltazoo.backends.io.text_layout import table_lines
from deltazoo.cli.terminal.options import AsJson
from deltazoo.cli.terminal.output import (
    output_width,
    print_json,
    print_line,
    print_notes,
    print_table,
    print_text,
    rule,
)

if TYPE_CHECKING:
    from deltazoo.blocks.inspect.catalog import BackendEntry, MixerEntry, PresetEntry

_OWNER = "package"  # a column that is empty, and therefore omitted, without plug-ins
_NOTHING_FOUND = 1  # exit code


class Kind(StrEnum):
    """The kinds of entries in the catalog."""

    mixers = "mixers"
    backends = "backends"
    presets = "presets"


def command(
    kind: Annotated[
        Kind | None, typer.Argument(help="List only this kind. Default: all three.", show_default=False)
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(help='List only what contains these words in any field: "delta channel", kimi, 2412.06464.'),
    ] = None,
    equations: Annotated[bool, typer.Option("--equations", help="Print the equations of each mixer below it.")] = False,
    evidence: Annotated[
        bool, typer.Option("--evidence", help="Print what each mixer scored on synthetic tasks; see deltazoo probe.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the installed mixers, backends and presets, plug-ins included.

    Exit code 1: --search finds nothing.
    """
    if evidence:
        _print_evidence(as_json)
        return
    from deltazoo.blocks.inspect.catalog import catalog

    kinds = [kind] if kind else [*Kind]
    everything = catalog(kinds)
    listed = everything if search is None else everything.search(search)
    found = any(getattr(listed, each) for each in kinds)
    if as_json:
        print_json(listed.model_dump(include={kind.value} if kind else None))
    elif not found:
        print_line(f"no {' or '.join(each.removesuffix('s') for each in kinds)} contains {search!r}")
    else:
        shown = [each for each in kinds if getattr(listed, each)]
        for each in shown:
            if each != shown[0]:
                print_line()
            if each is Kind.mixers:
                _print_mixers(listed.families(), equations)
            elif each is Kind.backends:
                rows = [_described(entry, entry.about) for entry in listed.backends]
                print_table(["backend", "", _OWNER], rows, one_line=True)
            else:
                _print_presets(listed.sources())
        _print_problems([entry for each in shown if each is not Kind.presets for entry in getattr(listed, each)])
        if kind is None:
            print_line()
            print_text("Equations: deltazoo list --equations. Fields, costs and backends: deltazoo show NAME.")
    if not found:
        raise typer.Exit(_NOTHING_FOUND)


def _print_evidence(as_json: bool) -> None:
    from deltazoo.blocks.probes.records import cells, packaged
    from deltazoo.blocks.probes.report import environments, score_table
    from deltazoo.blocks.probes.table import of_short_rows, of_table

    runs = packaged()
    if as_json:
        print_json([cell._asdict() for cell in cells(runs).values()])
        return
    for part in (of_table(runs), *of_short_rows(runs)):
        table = score_table(part)
        print_table(table.columns, table.rows, one_line=True)
        print_line()
        print_notes(table.notes)
    print_text("Other tasks and mixers with changed fields: docs/evidence/, and --json.")
    for line in environments(runs):
        print_text(line)


def _print_mixers(families: "Mapping[str, Sequence[MixerEntry]]", equations: bool) -> None:
    rows = {
        family or "other": [
            (f"  {entry.name}", entry.year or "", *_described(entry, entry.purpose)[1:]) for entry in entries
        ]
        for family, entries in families.items()
    }
    below = [_equations(entry) if equations else [] for entries in families.values() for entry in entries]
    _print_groups(["mixer", ">year", "", _OWNER], rows, below)


def _equations(entry: "MixerEntry") -> list[str]:
    """Return the equation or description of the whole mixer, and the equation of its update if it has one."""
    first, *others = entry.equation.split("\n")
    update = f"update: {first}" if entry.spec else first
    return [line.strip() for line in (entry.about, update, *others) if line]


def _print_presets(sources: "Mapping[str, Sequence[PresetEntry]]") -> None:
    rows = {
        source or "small models of bytes, for tests and laptops": [
            (f"  {entry.name}", _rounded(entry.parameters), entry.depth, entry.width, entry.pattern)
            for entry in entries
        ]
        for source, entries in sources.items()
    }
    _print_groups(["preset", ">parameters", ">layers", ">width", "pattern"], rows)


def _print_groups(
    columns: Sequence[str], groups: Mapping[str, Sequence[Sequence[object]]], below: Sequence[Sequence[str]] = ()
) -> None:
    """Print a table with a line above each group of rows, and further lines below each row."""
    rows = [row for group in groups.values() for row in group]
    head, below_head, *lines = table_lines(columns, rows, output_width(), rule(), one_line=True)
    print_line(head)
    print_line(below_head)
    first = 0
    for name, group in groups.items():
        print_line(name)
        for n in range(first, first + len(group)):
            print_line(lines[n])
            for text in below[n] if below else []:
                print_text(f"      {text}")
        first += len(group)


def _described(entry: "MixerEntry | BackendEntry", about: str) -> tuple[str, str, str]:
    """Return the name, a description, and for a plug-in its package."""
    owner = "" if entry.owner.startswith("deltazoo ") else entry.owner
    return entry.name, about if entry.problem is None else "PROBLEM, see below", owner


def _rounded(count: int) -> str:
    """Format a number of parameters with three digits: 341M."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.{max(0, 3 - len(str(count // size)))}f}{unit}"
    return str(count)


def _print_problems(entries: "Sequence[MixerEntry | BackendEntry]") -> None:
    broken = [(f"{entry.name} of {entry.owner} cannot be used", entry.problem) for entry in entries if entry.problem]
    if broken:
        print_line()
        print_notes(broken)
