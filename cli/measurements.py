"""Printing of measurements: the environment, a table with its legend, and what did not run."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from deltazoo.cli.output import print_line, print_notes, print_table, print_text

if TYPE_CHECKING:
    from deltazoo.backends.measure.table import Table


def print_header(lines: Iterable[str]) -> None:
    """Print sentences, one per line."""
    for line in lines:
        print_text(line)


def print_measurements(table: "Table") -> None:
    """Print a table of measurements, its legend, and below them what did not run and why."""
    print_line()
    print_table(table.columns, table.rows)
    if not table.rows:
        print_line("nothing ran")
    elif table.legend:
        print_text(table.legend_line())
    if table.notes:
        print_line()
        print_notes(table.notes)
