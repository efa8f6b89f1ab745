"""Wrapping of Markdown prose; code, tables, quotes and headings stay as they are."""

import re
import textwrap

WIDTH = 100  # columns

_FENCE = re.compile(r"\s*(```|~~~|:::)")
_ITEM = re.compile(r"\s*([-*+]|\d+[.)])\s+")
_FIXED = re.compile(r"\s*(\|.*\|$|#{1,6} |>|<|={3,}$|-{3,}$)|.*(\\| {2})$")  # the last: a line break of the page
_SPAN = re.compile(r"`[^`]+`|\$[^$]+\$")  # code and formulas
_MARKER = re.compile(r" (?=([-*+>=|]|#{1,6}|\d+[.)])( |$))")
_HELD = "\0"  # a space at which no line breaks


def wrap_prose(text: str, width: int = WIDTH) -> str:
    """Wrap the paragraphs and list items of a page that have a line beyond `width` columns.

    Code and formulas stay on one line, and no line begins with what Markdown reads as a marker. A word that does not
    fit has a line for itself.
    """
    lines: list[str] = []
    paragraph: list[str] = []
    fence, item = "", 0  # item: the indent of the text of the last list item
    for line in [*text.split("\n"), ""]:
        indent, delimiter = len(line) - len(line.lstrip()), _FENCE.match(line)
        is_code = fence or delimiter or (indent >= item + 4 and not paragraph)
        if is_code or not line or _FIXED.match(line):
            lines += [*_wrapped(paragraph, width), line]
            paragraph = []
            if delimiter:
                fence = delimiter[1] if not fence else "" if line.strip() == fence else fence
            elif line and not is_code:
                item = min(item, indent)
        elif start := _ITEM.match(line):
            lines += _wrapped(paragraph, width)
            paragraph, item = [line], start.end()
        else:
            item = item if paragraph else min(item, indent)
            paragraph.append(line)
    return "\n".join(lines[:-1])


def _wrapped(paragraph: list[str], width: int) -> list[str]:
    if all(len(line) <= width for line in paragraph):
        return paragraph
    start = _ITEM.match(paragraph[0])
    first = start[0] if start else " " * (len(paragraph[0]) - len(paragraph[0].lstrip()))
    text = " ".join([paragraph[0][len(first) :], *(line.strip() for line in paragraph[1:])])
    text = _SPAN.sub(lambda span: span[0].replace(" ", _HELD), text)
    wrapped = textwrap.wrap(
        _MARKER.sub(_HELD, text), width, initial_indent=first, subsequent_indent=" " * len(first),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [line.replace(_HELD, " ") for line in wrapped]
