"""Reports of runs: a table of scores, and a figure with a heat map and the curves over length."""

import math
import textwrap
from collections.abc import Container, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.io.output_path import output_path
from deltazoo.backends.measure.table import Table
from deltazoo.blocks.inspect.figure import new_figure
from deltazoo.blocks.probes.prefix_task import PrefixTask
from deltazoo.blocks.probes.records import Cell, Run, cells
from deltazoo.blocks.probes.tasks import TASKS
from deltazoo.blocks.probes.tasks import task as task_of
from deltazoo.blocks.probes.tasks.text import TextTask

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

_DPI = 150
_COLUMNS = 3  # of curves in a figure
_LABEL = 30  # characters of a line of a label
_RECALLED = 0.9
_MEMORY = (">state, bytes in float32", ">cache, bytes per token")
_DARK = 0.6  # scores below it have dark cells


class Axes(NamedTuple):
    """The mixers and tasks of runs, in the order of their first run, and their cells by (task, mixer)."""

    mixers: list[str]
    tasks: list[str]
    cells: dict[tuple[str, str], Cell]


def axes(runs: Sequence[Run]) -> Axes:
    """Group runs for a table."""
    mixers, tasks = (list(dict.fromkeys(names)) for names in zip(*((r.mixer, r.task) for r in runs), strict=True))
    return Axes(mixers, tasks, cells(runs))


def score_table(runs: Sequence[Run]) -> Table:
    """Return a row per mixer and a column per task: the mean score in percent, and lowest and highest seed."""
    if not runs:
        return Table(["mixer"], [])
    mixers, tasks, found = axes(runs)
    rows = [
        [mixer, *(found[task, mixer].text() if (task, mixer) in found else "" for task in tasks)] for mixer in mixers
    ]
    notes = [(task, task_line(task)) for task in tasks]
    return Table(["mixer", *(f">{task}" for task in tasks)], rows, notes)


def run_table(runs: Sequence[Run]) -> Table:
    """Return a row per task and mixer at its best rate: accuracies, rate, seeds, steps, seconds and sizes."""
    columns = ["task", "mixer", ">accuracy, %", ">at the training length", ">learning rate", ">seeds", ">steps"]
    columns += [">s per run", ">parameters", *_MEMORY]
    rows = []
    for (task, mixer), cell in cells(runs).items():
        steps = sorted(run.steps for run in cell.runs)
        seconds = sum(run.seconds for run in cell.runs) / len(cell.runs)
        taken = f"{steps[0]:,}" if steps[0] == steps[-1] else f"{steps[0]:,} to {steps[-1]:,}"
        first = cell.runs[0]
        figures = [
            cell.text(),
            f"{100 * fmean(run.trained for run in cell.runs):.1f}",
            f"{cell.rate:g}",
            str(len(cell.runs)),
            taken,
            f"{seconds:.1f}",
            f"{first.parameters:,}",
            f"{first.state_bytes:,}",
            f"{first.cache_bytes:,}",
        ]
        rows.append([task, mixer, *figures])
    return Table(columns, rows)


def capacity_table(runs: Sequence[Run]) -> Table:
    """Return a row per mixer: its state, the most pairs with a recall of 90 %, and the recall for each number."""
    lengths = sorted(runs[0].accuracy)
    columns = ["mixer", *_MEMORY, ">most pairs with recall of 90 %", *(f">{n // 4}" for n in lengths)]
    rows = []
    for cell in cells(runs).values():
        means = [cell.accuracy(length) for length in lengths]
        kept = max((n // 4 for n, mean in zip(lengths, means, strict=True) if mean >= _RECALLED), default=0)
        first = cell.runs[0]
        figures = [f"{first.state_bytes:,}", f"{first.cache_bytes:,}", str(kept) if kept else "none"]
        rows.append([cell.mixer, *figures, *(f"{100 * mean:.1f}" for mean in means)])
    return Table(columns, rows)


def length_table(runs: Sequence[Run]) -> Table:
    """Return a row per mixer: the mean accuracy at each length in percent."""
    lengths = sorted(runs[0].accuracy)
    rows = [
        [cell.mixer, *(f"{100 * cell.accuracy(length):.1f}" for length in lengths)] for cell in cells(runs).values()
    ]
    return Table(["mixer", *(f">{length:,} tokens" for length in lengths)], rows)


def position_table(runs: Sequence[Run]) -> Table:
    """Return a row per mixer: the mean bits per byte at its best rate, in the second half of each length.

    At the training length also the lowest and the highest of the seeds.
    """
    lengths, trained = sorted(runs[0].bits), runs[0].settings["length"]
    columns = ["mixer", ">learning rate", ">seeds", ">parameters", ">s per run"]
    columns += [f">{n // 2:,}-{n:,}" for n in lengths]
    rows = []
    for cell in cells(runs).values():
        first, seconds = cell.runs[0], fmean(run.seconds for run in cell.runs)
        means = {length: f"{cell.bits(length):.3f}" for length in lengths}
        if len(cell.runs) > 1 and trained in means:
            of_seeds = [run.bits[trained] for run in cell.runs]
            means[trained] += f" ({min(of_seeds):.3f} to {max(of_seeds):.3f})"
        figures = [f"{cell.rate:g}", str(len(cell.runs)), f"{first.parameters:,}", f"{seconds:.1f}"]
        rows.append([cell.mixer, *figures, *means.values()])
    return Table(columns, rows)


def task_line(name: str) -> str:
    """Describe the settings and the score of a task in a sentence."""
    task = task_of(name)
    length = max(task.lengths)
    place = "in the second half of" if isinstance(task, PrefixTask) else "of"
    layers = f"{task.depth} layer{'s' * (task.depth > 1)} of width {task.width} with {task.heads} heads"
    count = max(1, task.evaluation_tokens // length)
    score = (
        f"accuracy {place} {count:,} sequences of {length:,} tokens in percent, mean over seeds (lowest to highest), "
        f"chance {100 * task.chance:.1f}"
    )
    if isinstance(task, TextTask):
        score = f"cross entropy {place} {length:,} bytes, and of shorter windows, {task.evaluation_tokens:,} in all"
    rates = ", ".join(f"{x:g}" for x in task.rates)
    return (
        f"{task.about}; {score}; trained on {task.length:,} tokens, {task.steps:,} steps with batch size {task.batch}; "
        f"{layers}; {'best of the learning rates' if len(task.rates) > 1 else 'learning rate'} {rates}"
    )


def source_line(name: str, others: Container[str] = ()) -> str:
    """Name the source of a task, and how the settings differ from its own.

    Args: others: tasks that are described, too.
    """
    task = task_of(name)
    base = next((each for each, default in TASKS.items() if type(default) is type(task) and not default.changes), None)
    if task.changes and base in others:
        return f"Source: {task.source}. Settings of `{base}` but for {task.changes}"
    return f"Source: {task.source}. Settings: {task.difference}"


def environments(runs: Sequence[Run]) -> list[str]:
    """Return a line for each environment in which runs were made, without the times of the day."""
    lines = {run.environment.model_copy(update={"date": run.environment.date[:10]}).line() for run in runs}
    return sorted(lines)


def plot(runs: Sequence[Run], path: str | Path) -> None:
    """Draw the scores as a heat map, and below it for each task the accuracy over the sequence length.

    Raises: ConfigError: matplotlib is not installed, or there are no runs.
    """
    if not runs:
        raise ConfigError("there is nothing to plot: no run is finished")
    grouped = axes(runs)
    lines = -(-len(grouped.tasks) // _COLUMNS)
    upper, lower = 2.0 + 0.3 * len(grouped.mixers), max(2.8 * lines, 0.6 + 0.19 * len(grouped.mixers))
    figure = new_figure(max(10.0, 4.0 + 1.1 * len(grouped.tasks)), upper + lower)
    halves: Any = figure.subfigures(2, 1, height_ratios=[upper, lower])  # an array, in spite of its annotation
    above, below = halves
    _draw_map(above, grouped)
    _draw_curves(below, grouped, lines)
    figure.savefig(output_path(path), dpi=_DPI)


def _draw_map(figure: "SubFigure", grouped: Axes) -> None:
    mixers, tasks, found = grouped
    map_axes = figure.subplots()
    scores = [[found[t, m].score if (t, m) in found else math.nan for t in tasks] for m in mixers]
    image = map_axes.imshow(scores, vmin=0, vmax=1, aspect="auto", cmap="viridis")
    for (task, mixer), cell in found.items():
        place = tasks.index(task), mixers.index(mixer)
        colour = "white" if cell.score < _DARK else "black"
        map_axes.text(*place, f"{100 * cell.score:.0f}", ha="center", va="center", color=colour, fontsize="small")
    map_axes.set_xticks(range(len(tasks)), [_wrapped(task) for task in tasks], fontsize="x-small")
    map_axes.set_yticks(range(len(mixers)), [_wrapped(mixer) for mixer in mixers], fontsize="x-small")
    figure.colorbar(image, ax=map_axes, label="accuracy at the longest length")


def _draw_curves(figure: "SubFigure", grouped: Axes, lines: int) -> None:
    mixers, tasks, found = grouped
    handles: dict[str, Any] = {}
    for place, curve_axes in enumerate(figure.subplots(lines, _COLUMNS, squeeze=False).flat):
        if place >= len(tasks):
            curve_axes.set_axis_off()
            continue
        for n, mixer in enumerate(mixers):
            if (cell := found.get((tasks[place], mixer))) is not None:
                lengths = sorted(cell.runs[0].accuracy)
                means = [cell.accuracy(length) for length in lengths]
                style = ("o-", "s--", "^:")[n // 10 % 3]
                (handles[mixer],) = curve_axes.plot(lengths, means, style, color=f"C{n % 10}", markersize=3)
        curve_axes.axhline(task_of(tasks[place]).chance, color="grey", linestyle=":", linewidth=1)
        curve_axes.set_title(_wrapped(tasks[place]), fontsize="small")
        curve_axes.set_xscale("log", base=2)
        curve_axes.set(xlabel="tokens", ylabel="accuracy", ylim=(-0.02, 1.02))
        curve_axes.grid(alpha=0.3)
    labels = [_wrapped(mixer) for mixer in handles]
    figure.legend([*handles.values()], labels, fontsize="x-small", loc="outside right upper")


def _wrapped(name: str) -> str:
    """Break a name with many fields into lines."""
    return "\n".join(textwrap.wrap(name.replace(",", ", ").replace("(", " ("), _LABEL, break_long_words=False))
