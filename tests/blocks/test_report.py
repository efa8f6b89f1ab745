"""Reports: valid images, and tables with the figures of the run."""

import matplotlib.image
import pytest

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.measure.benchmark import BenchConfig, bench
from deltazoo.backends.measure.shapes import TINY
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.blocks.training import report
from deltazoo.blocks.training.config import TrainConfig
from deltazoo.blocks.training.records import Point, Training, now


def _training(*bits):
    points = [
        Point(step=10 * n, tokens=0, time=now(), train_bits=b + 0.1 if n else None, validation_bits=b)
        for n, b in enumerate(bits)
    ]
    return Training(
        config=TrainConfig(),
        parameters=54321,
        source="a text",
        points=points,
        first_call_s=7.25,
        tokens_per_second=999.4,
    )


@pytest.fixture(scope="module")
def benchmark_result():
    config = BenchConfig(rounds=3, seconds=0.1, directions=("forward", "decode"))
    return bench(UpdateSpec(decay="head", beta="head"), [TINY[0]], ["reference"], config)


def test_each_model_has_a_curve_in_a_separate_colour(tmp_path):
    one = {"a": _training(8, 4, 3)}
    report.plot_curves(one, tmp_path / "one.png")
    report.plot_curves(one | {"b": _training(7, 5, 2)}, tmp_path / "two.png")
    first, second = (matplotlib.image.imread(tmp_path / name) for name in ("one.png", "two.png"))
    assert first.shape == second.shape == (750, 1200, 4)
    assert first.std() > 0.05
    blue, orange = (0.12, 0.47, 0.71), (1.0, 0.50, 0.05)
    assert _has(first, blue)
    assert not _has(first, orange)
    assert _has(second, orange)


def _has(image, colour):
    return bool((abs(image[..., :3] - colour).max(-1) < 0.02).any())


def test_the_benchmark_plot_shows_bars(benchmark_result, tmp_path):
    report.plot_benchmark(benchmark_result, tmp_path / "bench.png")
    assert _has(matplotlib.image.imread(tmp_path / "bench.png"), (0.12, 0.47, 0.71))


def test_a_benchmark_without_figures_cannot_be_plotted(benchmark_result, tmp_path):
    nothing = [row.model_copy(update={"median_ms": None, "refused": ["no"]}) for row in benchmark_result.rows]
    with pytest.raises(ConfigError, match="nothing to plot: no backend ran on any shape"):
        report.plot_benchmark(benchmark_result.model_copy(update={"rows": nothing}), tmp_path / "none.png")


def test_the_training_table_holds_the_last_points():
    lines = report.training_table({"a": _training(8, 4, 3.25)}).splitlines()
    assert lines[2] == "| a | 54,321 | 20 | 3.250 | 3.350 | 999 | 7.2 |"


def test_a_table_replaces_only_the_text_between_the_markers(benchmark_result, tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"# Title\n{report.BEGIN}\nold\n{report.END}\nend\n")
    report.save_table(benchmark_result.markdown(), path)
    expected = f"# Title\n{report.BEGIN}\n{benchmark_result.markdown()}{report.END}\nend\n"
    assert path.read_text() == expected
    report.save_table(benchmark_result.markdown(), path)
    assert path.read_text() == expected
    new = tmp_path / "new.md"
    report.save_table(benchmark_result.markdown(), new)
    assert benchmark_result.markdown() in new.read_text()
    path.write_text("no marks")
    with pytest.raises(ConfigError, match="exists and must contain the markers"):
        report.save_table(benchmark_result.markdown(), path)
    assert path.read_text() == "no marks"


def test_without_matplotlib_the_error_names_the_package(benchmark_result, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"plots need matplotlib: pip install 'deltazoo\[plot\]'"):
        report.plot_benchmark(benchmark_result, tmp_path / "bench.png")
