"""Tables of measurements, whose rows are printed as they are measured, with refusals as sentences below."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MAX_NAMES = 6  # of places in a note


class Table(NamedTuple):
    """A table and the sentences below it.

    Args:
        columns: titles; ">" marks a right-aligned column of figures.
        rows: a text per column; "" where there is no figure.
        notes: what did not run -> why.
        legend: title of a column -> its meaning.
        widths: of the widest texts of each column, also in rows that are not measured yet; () if there are none.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[tuple[str, str]] = ()
    legend: Sequence[tuple[str, str]] = ()
    widths: Sequence[int] = ()

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


class Note(NamedTuple):
    """Why `subject` did not run at a place, such as ("gla", "cpu", "decode")."""

    subject: str
    place: tuple[str, ...]
    reason: str


def group(notes: Iterable[Note], places: Iterable[tuple[str, ...]]) -> list[tuple[str, str]]:
    """Merge equal reasons of one subject at several places: [(subject and places, reason), ...].

    Args: places: all places. A coordinate that does not matter for the reason is not printed.
    """
    merged: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    for subject, place, reason in notes:
        merged.setdefault((subject, reason), []).append(place)
    every = set(places)
    return [
        (" ".join(filter(None, [subject, _where(set(where), every)])), reason)
        for (subject, reason), where in merged.items()
    ]


def _where(where: set[tuple[str, ...]], every: set[tuple[str, ...]]) -> str:
    """Describe a part of all places: "" for all, "(gla, kda; decode)", or else "(7 of 24 cases)"."""
    if where == every:
        return ""
    axes = range(len(next(iter(every))))
    values = [sorted({place[i] for place in where}) for i in axes]
    inside = {place for place in every if all(place[i] in values[i] for i in axes)}
    named = [values[i] for i in axes if len(values[i]) < len({place[i] for place in every})]
    if inside != where or max(map(len, named)) > _MAX_NAMES:
        return f"({len(where)} of {len(every)} cases)"
    return f"({'; '.join(', '.join(names) for names in named)})"


def partial_line(measured: int, missing: int) -> str:
    """Say how many of the cases were measured, if some are missing."""
    return f"partial: {measured} of {measured + missing} cases were measured" if missing else ""


def three_digits(x: float) -> str:
    """Format a figure with three digits, or more if it is large."""
    return f"{x:.0f}" if x >= 999.5 else f"{x:.3g}"


def spread(low: float, median: float, high: float) -> str:
    """Format percentiles by their distances from the median in per cent, such as "-2 +13"."""
    return f"{100 * (low / median - 1):+.0f} {100 * (high / median - 1):+.0f}"
