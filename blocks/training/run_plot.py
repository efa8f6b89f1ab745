"""A picture that compares training runs: their losses and their speed over the tokens."""

from collections.abc import Sequence
from pathlib import Path

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.io.output_path import output_path
from deltazoo.blocks.checkpoints.folder import METRICS, read_points
from deltazoo.blocks.inspect.figure import check_suffix, new_figure
from deltazoo.blocks.training.records import Point


def plot_runs(folders: Sequence[str | Path], path: str | Path) -> dict[str, Point]:
    """Plot validation (lines) and training (dots) losses, and tokens per second, with one colour per run.

    Runs that still train can be plotted. The runs are named by their folders, as far as the names differ.

    Args: folders: of runs, or their metrics.jsonl; path: of the picture, such as runs.png.
    Returns: the last point of each run.
    Raises: ConfigError: a folder has no points, the picture has another suffix than .svg, .png or .pdf, or matplotlib
        is not installed.
    """
    check_suffix(Path(path))
    places = [Path(folder).parent if Path(folder).name == METRICS else Path(folder) for folder in folders]
    curves = {name: read_points(place) for name, place in zip(_names(places), places, strict=True)}
    for name, points in curves.items():
        if not points:
            raise ConfigError(f"{name} has no points yet: its {METRICS} is empty")
    figure = new_figure(9, 7)
    losses, speeds = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for n, (name, points) in enumerate(curves.items()):
        tokens = [point.tokens for point in points]
        losses.plot(tokens, [point.validation_bits for point in points], color=f"C{n}", label=name)
        trained = [(point.tokens, point.train_bits) for point in points if point.train_bits is not None]
        losses.plot([x for x, _ in trained], [bits for _, bits in trained], ".", color=f"C{n}", alpha=0.4)
        timed = [(point.tokens, point.tokens_per_second) for point in points if point.tokens_per_second is not None]
        speeds.plot([x for x, _ in timed], [speed for _, speed in timed], color=f"C{n}")
    losses.set(ylabel="bits per token (lines: validation, dots: training)")
    speeds.set(xlabel="tokens", ylabel="tokens/s", ylim=(0, None))
    losses.legend(fontsize="small")
    for axes in (losses, speeds):
        axes.grid(alpha=0.3)
    figure.savefig(output_path(path), dpi=150)
    return {name: points[-1] for name, points in curves.items()}


def _names(places: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths, as many as the names need to differ."""
    whole = [place.absolute() for place in places]
    for parts in range(1, max(len(place.parts) for place in whole) + 1):
        names = [Path(*place.parts[-parts:]).as_posix() for place in whole]
        if len({*names}) == len(names):
            return names
    raise ConfigError(f"each run must be given once, got {', '.join(map(str, places))}")
