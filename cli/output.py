"""Output of the commands: tables and JSON on stdout, progress and errors on stderr."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

    from deltazoo.backends.progress import Progress
    from deltazoo.blocks.inspect.describe import Description, LayerRow

_PIPE_WIDTH, _MAX_WIDTH = 160, 1000  # columns


def print_line(text: str = "") -> None:
    """Print a line on stdout."""
    sys.stdout.write(f"{text}\n")


def print_piece(text: str) -> None:
    """Print text without a line break on stdout, and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_json(data: "BaseModel | Any") -> None:
    """Print one JSON document on stdout; NaN and infinities become null."""
    from pydantic import BaseModel
    from pydantic_core import to_jsonable_python

    if isinstance(data, BaseModel):
        plain = json.loads(data.model_dump_json())
    else:
        plain = to_jsonable_python(data, inf_nan_mode="null")
    print_line(json.dumps(plain, indent=2, allow_nan=False))


def print_table(columns: Sequence[str], rows: Iterable[Iterable[object]], title: str | None = None) -> None:
    """Print a table, unless it has no rows. A column whose title starts with ">" is right-aligned and never wrapped.

    On a narrow terminal the other columns wrap. If the right-aligned columns still do not fit, the table is wider than
    the terminal.
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
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    min_width = Measurement.get(console, console.options.update(width=_MAX_WIDTH), table).minimum
    console.width = max(console.width, min_width)
    console.print(table)


def print_layers(description: "Description") -> None:
    """Print the mixers and costs of every layer, and the totals."""
    columns = ["", "mixer", ">parameters", ">FLOPs/token", ">/context", ">state B", ">cache B", "backend"]
    rows = [
        [
            row.layer,
            row.mixer,
            *_costs(row),
            _join_devices({device: name or "none" for device, name in row.backends.items()}),
        ]
        for row in description.layers
    ]
    print_table(columns, [*rows, ["", "all", *_costs(description), ""]])
    print_line(
        f"{description.dtype}. all: with embedding and head. /context: additional FLOPs per token for each token of "
        "context. state B: bytes per sequence. cache B: bytes per token."
    )


def _join_devices(backends: Mapping[str, str]) -> str:
    """Return the name of the backend if it is the same on all devices, else each name with its device."""
    if len(set(backends.values())) == 1:
        return next(iter(backends.values()))
    return ", ".join(f"{name} ({device})" for device, name in backends.items())


def _costs(row: "LayerRow | Description") -> list[str]:
    counts = (row.parameters, row.flops, row.flops_context, row.state_bytes, row.cache_bytes)
    return [f"{count:,}" for count in counts]


@contextmanager
def progress() -> Iterator["Progress"]:
    """Yield a progress callback: it draws a bar per task on a terminal, and prints occasional lines elsewhere."""
    if not sys.stderr.isatty():
        from deltazoo.backends.progress import ProgressLines

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
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def draw(task: str, done: int, total: int, note: str = "") -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total, note=note)
            bars.update(tasks[task], completed=done, total=total, note=note)

        yield draw
