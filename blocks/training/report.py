"""Reports: plots and Markdown tables of training runs and benchmarks."""

from collections.abc import Mapping
from pathlib import Path

from deltazoo.backends.errors import ConfigError
from deltazoo.backends.measure.benchmark import Benchmark
from deltazoo.backends.output_path import output_path
from deltazoo.blocks.inspect.describe import Description
from deltazoo.blocks.inspect.figure import new_figure
from deltazoo.blocks.training.train import Training

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

    Raises: ConfigError: matplotlib is not installed, or no call was timed.
    """
    rows = [row for row in benchmark.rows if row.median_ms is not None]
    if not rows:
        raise ConfigError("there is nothing to plot: no backend ran on any shape")
    groups = list(dict.fromkeys((row.shape, row.direction) for row in rows))
    backends = list(dict.fromkeys(row.backend for row in rows))
    figure = new_figure(max(6.0, 1.6 * len(groups)), 4.5)
    axes = figure.subplots()
    bar_width = 0.8 / len(backends)
    for n, backend in enumerate(backends):
        bars = {(row.shape, row.direction): row for row in rows if row.backend == backend}
        positions = [groups.index(group) + (n - (len(backends) - 1) / 2) * bar_width for group in bars]
        medians = [row.median_ms or 0.0 for row in bars.values()]
        below = [(row.median_ms or 0.0) - (row.low_ms or 0.0) for row in bars.values()]
        above = [(row.high_ms or 0.0) - (row.median_ms or 0.0) for row in bars.values()]
        axes.bar(positions, medians, bar_width, yerr=[below, above], label=backend, color=f"C{n}", capsize=2)
    axes.set_xticks(range(len(groups)), [f"{shape}\n{direction}" for shape, direction in groups], fontsize="small")
    axes.set(yscale="log", ylabel="median, ms")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    environment = benchmark.environment
    axes.set_title(f"{environment.device}, torch {environment.torch}, {benchmark.config.dtype}", fontsize="small")
    figure.savefig(output_path(path), dpi=_DPI)


def save_benchmark(benchmark: Benchmark, table: Path | None = None, plot: Path | None = None) -> None:
    """Write the table to a Markdown file and the plot to a PNG file, if their paths are given.

    An existing Markdown file must contain the markers `BEGIN` and `END`; the text between them is replaced.

    Raises: ConfigError; OSError.
    """
    if table is not None:
        _insert(benchmark.markdown(), table)
    if plot is not None:
        plot_benchmark(benchmark, plot)


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


def layers_table(description: Description) -> str:
    """Format the costs of every layer, and the totals, as a Markdown table."""
    figures = {
        "parameters": "parameters", "flops": "FLOPs/token", "flops_context": "FLOPs/token per context token",
        "state_bytes": "state, bytes", "cache_bytes": "KV cache, bytes/token",
    }  # fmt: skip
    rows = [["layer", "mixer", *figures.values()], ["---:", "---"] + ["---:"] * len(figures)]
    for layer in description.layers:
        rows.append([str(layer.layer), layer.mixer, *(f"{getattr(layer, name):,}" for name in figures)])
    rows.append(["all", "with embedding and head", *(f"{getattr(description, name):,}" for name in figures)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _insert(table: str, path: Path) -> None:
    if not path.exists():
        output_path(path).write_text(f"{BEGIN}\n{table}{END}\n", encoding="utf-8")
        return
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{path} exists and must contain the markers {BEGIN} and {END}, between which the table goes")
    path.write_text(f"{before}{BEGIN}\n{table}{END}{after}", encoding="utf-8")
