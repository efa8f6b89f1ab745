"""Printing of measurements: the environment, rows as they are measured, their legend, and what did not run."""

import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from deltazoo.backends.io.text_layout import row_lines, rule_line
from deltazoo.cli.terminal.output import output_width, print_line, print_lines, print_notes, print_text, rule

if TYPE_CHECKING:
    from deltazoo.backends.measure.table import Table

_LEAST = 12  # columns for the case


def print_header(lines: Iterable[str]) -> None:
    """Print sentences, one per line."""
    for line in lines:
        print_text(line)


def print_measurements(table: "Table") -> None:
    """Print a table of measurements, its legend, and below them what did not run and why."""
    live = LiveTable()
    live.print_new_rows(table)
    live.print_end(table)


class LiveTable:
    """A table of measurements that grows: each call prints the rows that were measured since the last one.

    The first column names the case. On a terminal it is printed once for the rows of a case and wrapped to their lines,
    so that the table fits the width; on a pipe each row has it.
    """

    def __init__(self) -> None:
        self.printed = 0
        self.case = ""
        self.widths: list[int] = []

    def print_new_rows(self, table: "Table") -> None:
        """Print the rows that are new, and the head before the first ones."""
        rows = table.rows[self.printed :]
        if rows and not self.printed:
            self._print_head(table)
        self.printed = len(table.rows)
        right = [column.startswith(">") for column in table.columns]
        label: list[str] = []
        for row in rows:
            if row[0] != self.case or output_width() is None:
                print_lines(label)  # the lines of a label that is longer than the rows of its case
                self.case, label = row[0], self._wrapped(row[0])
            print_lines(row_lines([label.pop(0) if label else "", *row[1:]], self.widths, right))
        print_lines(label)
        sys.stdout.flush()

    def print_end(self, table: "Table") -> None:
        """Print the legend, and what did not run and why."""
        if not table.rows:
            print_line("\nnothing ran")
        elif table.legend:
            print_text(table.legend_line())
        if table.notes:
            print_line()
            print_notes(table.notes)

    def _print_head(self, table: "Table") -> None:
        titles = [column.removeprefix(">") for column in table.columns]
        texts = zip(titles, *table.rows, strict=True)
        least = table.widths or [0] * len(titles)
        self.widths = [max(width, *map(len, column)) for width, column in zip(least, texts, strict=True)]
        limit = output_width()
        if limit is not None:
            others = len(rule_line(self.widths, "-")) - self.widths[0]
            self.widths[0] = min(self.widths[0], max(_LEAST, limit - others))
        print_line()
        right = [column.startswith(">") for column in table.columns]
        print_lines(row_lines(titles, self.widths, right))
        print_line(rule_line(self.widths, rule()))

    def _wrapped(self, case: str) -> list[str]:
        if output_width() is None:
            return [case]
        if max(map(len, case.split()), default=0) > self.widths[0]:
            case = case.replace("(", "\n(")  # the fields of a mixer begin a line
        return [
            wrapped
            for line in case.split("\n")
            for wrapped in textwrap.wrap(line, self.widths[0], break_on_hyphens=False)
        ]
