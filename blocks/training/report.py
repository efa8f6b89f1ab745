"""Reports: plots and Markdown tables of training runs and benchmarks."""

import os
from collections.abc import Mapping
from pathlib import Path

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.io.output_path import output_path
from deltazoo.backends.measure.benchmark import Benchmark
from deltazoo.blocks.inspect.figure import new_figure
from deltazoo.blocks.training.records import Training

BEGIN, END = "<!-- deltazoo bench -->", "<!-- /deltazoo bench -->"
_DPI = 150


def plot_curves(trainings: Mapping[str, Training], path: str | Path) -> None:
    """Plot bits per byte over steps, validation as lines and training as dots, with one colour per model.

    Raises: ConfigError: matplotlib is not installed.
    """
    figure = new_figure(8, 5)
    axes = figure.subplots()
    for n, (name, training) in enumerate(trainings.items()):
        steps = [point.step for point in training.points]
        axes.plot(steps, [point.validation_bits for point in training.points], color=f"C{n}", label=name)
        trained = [(point.step, point.train_bits) for point in training.points if point.train_bits is not None]
        axes.plot([step for step, _ in trained], [bits for _, bits in trained], ".", color=f"C{n}", alpha=0.4)
    axes.set(xlabel="steps", ylabel="bits per byte (lines: validation, dots: training)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output_path(path), dpi=_DPI)


def plot_benchmark(benchmark: Benchmark, path: str | Path) -> None:
    """Plot the medians as bars with the 20th and 80th percentiles, on a logarithmic axis, one colour per backend.

    Each case has a group of bars; mixer, shape and direction label it if there are several, or else are in the title.

    Raises: ConfigError: matplotlib is not installed, or no call was timed.
    """
    timed = benchmark.timed
    if not timed:
        raise ConfigError("there is nothing to plot: no backend ran on any shape")
    cases = list(dict.fromkeys(benchmark.case(row) for row in timed))
    backends = [name for name in benchmark.backends if any(row.backend == name for row in timed)]
    thickness = 0.8 / len(backends)
    figure = new_figure(6.0 + 0.07 * max(map(len, cases)), 1.5 + len(cases) * (0.2 + 0.2 * len(backends)))
    axes = figure.subplots()
    for n, backend in enumerate(backends):
        rows = [row for row in timed if row.backend == backend]
        positions = [cases.index(benchmark.case(row)) + (n - (len(backends) - 1) / 2) * thickness for row in rows]
        medians = [row.median_ms or 0.0 for row in rows]
        below = [(row.median_ms or 0.0) - (row.low_ms or 0.0) for row in rows]
        above = [(row.high_ms or 0.0) - (row.median_ms or 0.0) for row in rows]
        axes.barh(positions, medians, thickness, xerr=[below, above], label=backend, color=f"C{n}", error_kw={"lw": 1})
    axes.set_yticks(range(len(cases)), cases, fontsize="small")
    axes.set_ylim(len(cases) - 0.4, -0.6)  # the first case at the top
    axes.set(xscale="log", xlabel="median, ms")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle("\n".join(filter(None, [*benchmark.title(), benchmark.partial()])), fontsize="small")
    figure.savefig(output_path(path), dpi=_DPI)


def check_outputs(table: Path | None = None, plot: Path | None = None) -> None:
    """Check the output files of a benchmark before it runs, and create their folders.

    Raises: ConfigError: a path is a folder, cannot be written or has another format; a Markdown file without the
        markers exists; the plot needs matplotlib, which is not installed.
    """
    for path in filter(None, (table, plot)):
        place = output_path(path)
        if not os.access(place if place.exists() else place.parent, os.W_OK):
            raise ConfigError(f"{path} cannot be written: permission denied")
    if table is not None and table.exists():
        _split_at_markers(table)
    if plot is not None:
        formats = new_figure(1, 1).canvas.get_supported_filetypes()
        if plot.suffix[1:].lower() not in formats:
            raise ConfigError(f"{plot} must end in one of {', '.join(f'.{name}' for name in sorted(formats))}")


def save_table(markdown: str, path: Path) -> None:
    """Write a Markdown table to a file.

    An existing file must contain the markers `BEGIN` and `END`; the text between them is replaced.

    Raises: ConfigError; OSError.
    """
    before, after = _split_at_markers(path) if path.exists() else ("", "\n")
    output_path(path).write_text(f"{before}{BEGIN}\n{markdown}{END}{after}", encoding="utf-8")


def training_table(trainings: Mapping[str, Training]) -> str:
    """Format every training run as a row: the losses of its last point, its speed and its first call."""
    head = [
        "model",
        "parameters",
        "steps",
        "validation, bits per byte",
        "training, bits per byte",
        "tokens/s",
        "first call, s",
    ]
    rows = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for name, training in trainings.items():
        last = training.points[-1]
        rows.append(
            [
                name,
                f"{training.parameters:,}",
                str(last.step),
                f"{last.validation_bits:.3f}",
                "" if last.train_bits is None else f"{last.train_bits:.3f}",
                "" if training.tokens_per_second is None else f"{training.tokens_per_second:,.0f}",
                f"{training.first_call_s:.1f}",
            ]
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _split_at_markers(path: Path) -> tuple[str, str]:
    """Return the text before and after the markers of an existing file. Raises: ConfigError; OSError."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{path} exists and must contain the markers {BEGIN} and {END}, between which the table goes")
    return before, after
