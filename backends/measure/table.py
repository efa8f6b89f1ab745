"""Tables of measurements: a column without figures is omitted, and refusals are sentences below the table."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """A table and the sentences below it.

    Args:
        columns: titles; ">" marks a right-aligned column of figures.
        rows: a text per column; "" where there is no figure.
        notes: what did not run -> why.
        legend: title of a column -> its meaning.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[tuple[str, str]] = ()
    legend: Sequence[tuple[str, str]] = ()

    def without_empty_columns(self) -> "Table":
        """Return the table without the columns that are empty in every row, and without their legend."""
        kept = [i for i in range(len(self.columns)) if any(row[i] for row in self.rows)]
        columns = [self.columns[i] for i in kept]
        titles = {column.removeprefix(">") for column in columns}
        legend = [(title, text) for title, text in self.legend if title in titles]
        return self._replace(columns=columns, rows=[[row[i] for i in kept] for row in self.rows], legend=legend)

    def legend_line(self) -> str:
        """Format the legend as one line."""
        return "; ".join(f"{title}: {text}" for title, text in self.legend)

    def markdown(self, header: Iterable[str]) -> str:
        """Format the sentences of a header, the legend, the table and its notes as Markdown."""
        about = "; ".join([*header, *filter(None, [self.legend_line()])])
        rules = ["---:" if column.startswith(">") else "---" for column in self.columns]
        lines = [[column.removeprefix(">") for column in self.columns], rules, *self.rows]
        text = "".join(f"| {' | '.join(line)} |\n" for line in lines) if self.rows else ""
        notes = "".join(f"- {subject}: {sentence}\n" for subject, sentence in self.notes)
        return f"{about}\n\n{text}" + (f"\n{notes}" if notes else "")


def group(notes: Iterable[tuple[str, str, str]], places: int) -> list[tuple[str, str]]:
    """Merge equal reasons of one subject at several places: (subject, place, reason) -> (subject and places, reason).

    Args: places: number of places in total; a reason that holds in all of them is printed without them.
    """
    merged: dict[tuple[str, str], list[str]] = {}
    for subject, place, reason in notes:
        merged.setdefault((subject, reason), []).append(place)
    return [
        (subject if len(where) == places else f"{subject} ({', '.join(where)})", reason)
        for (subject, reason), where in merged.items()
    ]


def three_digits(x: float) -> str:
    """Format a figure with three digits, or more if it is large, without an exponent."""
    return f"{x:.0f}" if x >= 1000 else f"{x:.3g}"
