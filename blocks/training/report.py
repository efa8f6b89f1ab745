"""Figures of training and benchmarks as pictures and Markdown."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from deltazoo.backends.errors import ConfigError
from deltazoo.backends.measure.benchmark import Benchmark
from deltazoo.blocks.inspect.describe import Description
from deltazoo.blocks.training.train import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEGIN, END = "<!-- deltazoo bench -->", "<!-- /deltazoo bench -->"
_DPI = 150


def plot_curves(trainings: Mapping[str, Training], path: str | Path) -> None:
    """Draw bits per byte over steps, validation as lines and training as dots, one colour a model.

    Raises: ConfigError, where matplotlib is not installed.
    """
    figure = _figure(8, 5)
    axes = figure.subplots()
    for n, (name, training) in enumerate(trainings.items()):
        steps = [point.step for point in training.points]
        axes.plot(steps, [point.validation_bits for point in training.points], color=f"C{n}", label=name)
        trained = [(point.step, point.train_bits) for point in training.points if point.train_bits is not None]
        axes.plot([step for step, _ in trained], [bits for _, bits in trained], ".", color=f"C{n}", alpha=0.4)
    axes.set(xlabel="steps", ylabel="bits per byte (lines: validation, dots: training)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=_DPI)


def plot_benchmark(benchmark: Benchmark, path: str | Path) -> None:
    """Draw the medians as bars on a logarithmic axis, with the 20th and 80th percentiles, one colour a backend.

    Raises: ConfigError, where matplotlib is not installed, and where there is no figure to draw.
    """
    rows = [row for row in benchmark.rows if row.median_ms is not None]
    if not rows:
        raise ConfigError("there is nothing to plot: every backend refused every shape")
    groups = list(dict.fromkeys((row.shape, row.direction) for row in rows))
    backends = list(dict.fromkeys(row.backend for row in rows))
    figure = _figure(max(6.0, 1.6 * len(groups)), 4.5)
    axes = figure.subplots()
    wide = 0.8 / len(backends)
    for n, backend in enumerate(backends):
        found = {(row.shape, row.direction): row for row in rows if row.backend == backend}
        at = [groups.index(group) + (n - (len(backends) - 1) / 2) * wide for group in found]
        middle = [row.median_ms or 0.0 for row in found.values()]
        below = [(row.median_ms or 0.0) - (row.low_ms or 0.0) for row in found.values()]
        above = [(row.high_ms or 0.0) - (row.median_ms or 0.0) for row in found.values()]
        axes.bar(at, middle, wide, yerr=[below, above], label=backend, color=f"C{n}", capsize=2)
    axes.set_xticks(range(len(groups)), [f"{shape}\n{direction}" for shape, direction in groups], fontsize="small")
    axes.set(yscale="log", ylabel="median, ms")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    environment = benchmark.environment
    axes.set_title(f"{environment.device}, torch {environment.torch}, {benchmark.config.dtype}", fontsize="small")
    figure.savefig(path, dpi=_DPI)


def save_benchmark(benchmark: Benchmark, table: Path | None = None, picture: Path | None = None) -> None:
    """Write the table to a Markdown file, and draw the picture, where asked for.

    A file that exists must hold the two marks `BEGIN` and `END`; what stands between them is replaced.

    Raises: ConfigError; OSError.
    """
    if table is not None:
        _insert(benchmark.markdown(), table)
    if picture is not None:
        plot_benchmark(benchmark, picture)


def curves_table(trainings: Mapping[str, Training]) -> str:
    """Write the end of every training as a Markdown table."""
    head = ["model", "parameters", "steps", "validation, bits per byte", "training", "tokens/s", "first call s"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for name, training in trainings.items():
        last = training.points[-1]
        lines.append(
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
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def layers_table(description: Description) -> str:
    """Write a row a layer, and the sums, as a Markdown table."""
    figures = ["parameters", "flops", "flops_context", "state_bytes", "cache_bytes"]
    lines = [["layer", "mixer", *figures], ["---:", "---"] + ["---:"] * len(figures)]
    for row in description.layers:
        lines.append([str(row.layer), row.mixer, *(f"{getattr(row, name):,}" for name in figures)])
    lines.append(["all", "with embedding and head", *(f"{getattr(description, name):,}" for name in figures)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _insert(text: str, path: Path) -> None:
    if not path.exists():
        path.write_text(f"{BEGIN}\n{text}{END}\n", encoding="utf-8")
        return
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{path} exists and must hold the marks {BEGIN} and {END}, between which the table goes")
    path.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'deltazoo[bench]'") from error
    return Figure(figsize=(width, height), layout="constrained")
