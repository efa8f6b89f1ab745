"""How every command speaks: tables and JSON on stdout, progress and complaints on stderr."""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

    from deltazoo.backends.progress import Progress
    from deltazoo.blocks.inspect.describe import Description, LayerRow

_WIDTH_OF_A_PIPE, _WIDEST = 160, 1000
_QUIET_SECONDS = 10.0  # between two lines of progress where there is no terminal


def say(text: str = "") -> None:
    """Print a line on stdout."""
    sys.stdout.write(f"{text}\n")


def write(piece: str) -> None:
    """Print a piece of text on stdout at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def print_json(data: "BaseModel | Any") -> None:
    """Print one JSON document on stdout."""
    from pydantic import BaseModel
    from pydantic_core import to_jsonable_python

    plain = data.model_dump_json() if isinstance(data, BaseModel) else None
    found = json.loads(plain) if plain else to_jsonable_python(data, inf_nan_mode="null")
    say(json.dumps(found, indent=2, allow_nan=False))


def print_table(columns: Sequence[str], rows: Iterable[Iterable[object]], title: str | None = None) -> None:
    """Print a table, unless it has no rows; columns whose head starts with ">" stand right.

    On a narrow terminal words are folded; a table whose figures have no room is wider than the terminal.
    """
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    if not rows:
        return
    table = Table(
        title=title and Text(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        show_header=any(columns),
    )
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    for row in rows:
        table.add_row(*(Text("none" if cell is None else str(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE, highlight=False)
    least = Measurement.get(console, console.options.update(width=_WIDEST), table).minimum
    console.width = max(console.width, least)
    console.print(table)


def print_layers(found: "Description") -> None:
    """Print what every layer is and costs, and the sums."""
    columns = ["", "mixer", ">parameters", ">FLOPs/token", ">/context", ">state B", ">cache B", "backend"]
    rows = [
        [
            row.layer,
            row.mixer,
            *_figures(row),
            _by_device({device: name or "none" for device, name in row.backends.items()}),
        ]
        for row in found.layers
    ]
    print_table(columns, [*rows, ["", "all", *_figures(found), ""]])
    say(
        f"{found.dtype}. All: with embedding and head. /context: more FLOPs a token for each token looked back on. "
        "state B: bytes a sequence. cache B: more for every token kept."
    )


def _by_device(names: Mapping[str, str]) -> str:
    """One name, or each with its device."""
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return ", ".join(f"{name} ({device})" for device, name in names.items())


def _figures(row: "LayerRow | Description") -> list[str]:
    counts = (row.parameters, row.flops, row.flops_context, row.state_bytes, row.cache_bytes)
    return [f"{count:,}" for count in counts]


@contextmanager
def progress() -> Iterator["Progress"]:
    """Give a function that draws a bar for each task on a terminal, and elsewhere a line now and then."""
    if not sys.stderr.isatty():
        yield _Lines()
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
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def draw(task: str, done: int, total: int, note: str = "") -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total, note=note)
            bars.update(tasks[task], completed=done, total=total, note=note)

        yield draw


class _Lines:
    """A line on stderr for every ten seconds of work, and none for what is done sooner."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, task: str, done: int, total: int, note: str = "") -> None:
        now = time.monotonic()
        if now - self.last >= _QUIET_SECONDS:
            self.last = now
            sys.stderr.write(f"{task}: {done}/{total} {note}\n")
            sys.stderr.flush()
