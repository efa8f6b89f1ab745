"""Layout of tables and sentences as lines of text that fit a width.

A width of None means that nothing is wrapped. No line ends in spaces, and no word is broken.
"""

import textwrap
from collections.abc import Iterable, Sequence

from rich.cells import cell_len  # terminal columns: two for a wide character

_GAP = "  "  # between two columns
_CUT = " ..."  # end of a shortened text


def table_lines(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    width: int | None,
    rule: str = "-",
    one_line: bool = False,
) -> list[str]:
    """Lay out a table; a column that is empty in every row is omitted.

    Args:
        columns: titles. A column whose title starts with ">" is right-aligned and never wrapped. A title may have
            several lines. If all titles are empty, the table has no header.
        rows: a value per column; None is printed as none.
        width: the other columns wrap at spaces to fit it. If that is not enough, the table is wider.
        rule: the character of the line below the header.
        one_line: shorten texts that do not fit instead of wrapping them.
    """
    texts = [["none" if cell is None else str(cell) for cell in row] for row in rows]
    kept = [i for i in range(len(columns)) if any(row[i] for row in texts)]
    right = [columns[i].startswith(">") for i in kept]
    head = [columns[i].removeprefix(">") for i in kept]
    body = [[row[i] for i in kept] for row in texts]
    natural = [_width(cells) for cells in zip(head, *body, strict=True)]
    least = [
        wide if is_right else _width(word for cell in cells for word in cell.split())
        for wide, is_right, cells in zip(natural, right, zip(head, *body, strict=True), strict=True)
    ]
    widths = natural if width is None else _fit(natural, least, width - len(_GAP) * (len(kept) - 1))
    if one_line:
        body = [[_shorten(cell, wide) for cell, wide in zip(row, widths, strict=True)] for row in body]
    lines = [line for row in body for line in row_lines(row, widths, right)]
    if not any(head):
        return lines
    return [*row_lines(head, widths, right), rule_line(widths, rule), *lines]


def rule_line(widths: Sequence[int], rule: str) -> str:
    """Return the line below the header of a table with columns of these widths."""
    return rule * (sum(widths) + len(_GAP) * (len(widths) - 1))


def wrap(text: str, width: int | None, first: str = "", rest: str = "") -> list[str]:
    """Wrap each line of a text at spaces. `first` and `rest` start the first line and the lines that continue it."""
    return [
        wrapped
        for line in text.split("\n")
        for wrapped in textwrap.wrap(
            line,
            width or len(first) + len(line) + 1,
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
        or [""]
    ]


def group_by_text(notes: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the names of each text, so that a text that several names share is printed once."""
    names: dict[str, list[str]] = {}
    for name, text in notes:
        if name not in names.setdefault(text, []):
            names[text].append(name)
    return names


def _shorten(text: str, width: int) -> str:
    if _width([text]) <= width:
        return text
    return textwrap.shorten(text, max(width, len(_CUT)), placeholder=_CUT, break_on_hyphens=False)


def _width(texts: Iterable[str]) -> int:
    return max((cell_len(line) for text in texts for line in text.split("\n")), default=0)


def _fit(natural: Sequence[int], least: Sequence[int], width: int) -> list[int]:
    """Narrow the widest columns until the table fits, but no column below its longest word."""
    widths = list(natural)
    while sum(widths) > width:
        wide = [i for i in range(len(widths)) if widths[i] > least[i]]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def row_lines(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    """Lay out a row in columns of these widths, of which some are right-aligned."""
    wrapped = [wrap(cell, width) for cell, width in zip(cells, widths, strict=True)]
    lines = []
    for i in range(max(map(len, wrapped), default=0)):
        parts = [cell[i] if i < len(cell) else "" for cell in wrapped]
        padding = [" " * (width - cell_len(part)) for part, width in zip(parts, widths, strict=True)]
        padded = [
            pad + part if is_right else part + pad for part, pad, is_right in zip(parts, padding, right, strict=True)
        ]
        lines.append(_GAP.join(padded).rstrip())
    return lines
