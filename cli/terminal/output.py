"""Output of the commands: tables and JSON on stdout, progress and errors on stderr."""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deltazoo.backends.io.text_layout import group_by_text, table_lines, wrap

if TYPE_CHECKING:
    from pydantic import BaseModel

    from deltazoo.backends.io.progress import Progress


PIPE_WIDTH = 100  # columns of sentences and YAML on a pipe or in a file, for commands that wrap them there


def print_line(text: str = "") -> None:
    """Print a line on stdout."""
    sys.stdout.write(f"{_encodable(text)}\n")


def print_lines(lines: Iterable[str]) -> None:
    """Print lines on stdout that are already wrapped."""
    for line in lines:
        print_line(line)


def print_note(text: str) -> None:
    """Print a line on stderr, for example a warning."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def print_piece(text: str) -> None:
    """Print text without a line break on stdout, and flush."""
    sys.stdout.write(_encodable(text))
    sys.stdout.flush()


def _encodable(text: str, replacement: str | None = None) -> str:
    """Return the text with a replacement, or escapes, for the characters that the encoding of stdout lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return replacement or text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def print_json(data: "BaseModel | Any") -> None:
    """Print one JSON document on stdout; NaN and infinities become null."""
    from pydantic import BaseModel
    from pydantic_core import to_jsonable_python

    if isinstance(data, BaseModel):
        plain = json.loads(data.model_dump_json())
    else:
        plain = to_jsonable_python(data, inf_nan_mode="null")
    print_line(json.dumps(plain, indent=2, allow_nan=False))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Iterable[object]],
    title: str | None = None,
    one_line: bool = False,
    pipe_width: int | None = None,
) -> None:
    """Print a table that fits the width of the output, unless it has no rows; see `table_lines`.

    Args: pipe_width: columns on a pipe or in a file; None: a line per row.

    A long text, such as the reason of a refusal, makes other columns narrow: print it below, see `print_notes`.
    """
    cells = [list(row) for row in rows]
    if not cells:
        return
    if title:
        print_line(title)
    print_lines(table_lines(columns, cells, output_width() or pipe_width, rule(), one_line))


def print_text(text: str, pipe_width: int | None = None) -> None:
    """Print lines, wrapped to the width of the output; a line's continuation is indented by two columns more.

    Args: pipe_width: columns on a pipe or in a file; None: nothing is wrapped.
    """
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        for wrapped in wrap(line, output_width() or pipe_width, rest=indent):
            print_line(wrapped)


def print_notes(notes: Iterable[tuple[str, str]], pipe_width: int | None = None) -> None:
    """Print sentences with the names they are about, below a table; a sentence that several names share once.

    Args: pipe_width: as for `print_text`.
    """
    for text, names in group_by_text(notes).items():
        print_text(f"{', '.join(names)}: {text}", pipe_width)


def rule() -> str:
    """Return the character of the line below the header of a table."""
    return _encodable("─", "-")


def output_width() -> int | None:
    """Return the columns of COLUMNS or of the terminal; None for a pipe or a file, where nothing is wrapped."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@contextmanager
def progress() -> Iterator["Progress"]:
    """Yield a progress callback: it draws a bar per task on a terminal, and prints occasional lines elsewhere."""
    if not sys.stderr.isatty():
        from deltazoo.backends.io.progress import ProgressLines

        yield ProgressLines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
    )
    # rich would move all that is printed to stderr: right above a bar of the same terminal, wrong for a pipe
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty()) as bars:
        tasks = {}

        def draw(task: str, done: int, total: int, note: str = "") -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total, note=note)
            bars.update(tasks[task], completed=done, total=total, note=note)

        yield draw
