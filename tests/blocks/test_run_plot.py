"""`plot_runs` draws every run, and names them by what differs in their folders."""

from pathlib import Path

import pytest

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.training.records import Point, now
from deltazoo.blocks.training.run_plot import plot_runs

image = pytest.importorskip("matplotlib.image")


def write(folder: Path, *bits: float) -> Path:
    folder.mkdir(parents=True)
    points = [
        Point(step=n, tokens=9 * n, time=now(), validation_bits=x, train_bits=x, tokens_per_second=5.0)
        for n, x in enumerate(bits)
    ]
    change = '{"step": 1, "time": "", "setting": "steps", "old": 1, "new": 2}\n'
    lines = "".join(point.model_dump_json() + "\n" for point in points)
    (folder / "metrics.jsonl").write_text(lines + change + '{"step": 3, "torn')
    return folder


def test_each_run_has_a_colour_and_a_name_that_differs(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a" / "run", 8, 4), write(tmp_path / "b" / "run", 7, 3, 2)
    assert plot_runs([first], tmp_path / "one.png").keys() == {"run"}
    last = plot_runs([first / "metrics.jsonl", second], tmp_path / "two.png")
    assert {name: point.validation_bits for name, point in last.items()} == {"a/run": 4, "b/run": 2}
    one, two = (image.imread(tmp_path / name) for name in ("one.png", "two.png"))
    orange = [(abs(picture[..., :3] - (1.0, 127 / 255, 14 / 255)) < 0.02).all(-1).sum() for picture in (one, two)]
    assert orange[0] == 0
    assert orange[1] > 100


def test_a_run_without_points_and_a_run_given_twice_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", 8.0)
    with pytest.raises(ConfigError, match="each run must be given once"):
        plot_runs([folder, folder], tmp_path / "x.png")
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="run has no points yet"):
        plot_runs([folder], tmp_path / "x.png")
    with pytest.raises(ConfigError, match=r"cannot read .*metrics\.jsonl"):
        plot_runs([tmp_path / "no"], tmp_path / "x.png")


def test_a_suffix_that_no_picture_has_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"a plot must end in \.svg, \.png, \.pdf, got '.*runs\.jpgg'"):
        plot_runs([tmp_path], tmp_path / "runs.jpgg")
