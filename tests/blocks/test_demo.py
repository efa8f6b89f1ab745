"""The demo: the report holds the figures of the run, and the checkpoint reproduces the sample."""

import json
import sys

import matplotlib.image
import pytest

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.measure.benchmark import BenchConfig
from deltazoo.backends.measure.table import three_digits
from deltazoo.blocks.data.text import load_text
from deltazoo.blocks.generation.completion import generate, load_for_completion
from deltazoo.blocks.generation.sampling import Sampling
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.training import demo as demo_module
from deltazoo.blocks.training.config import TrainConfig
from deltazoo.blocks.training.demo import BASELINES, HYBRID, Demo, DemoConfig, demo

TINY = "{{width: 16, depth: 2, vocab: 256, pattern: '{}', mlp: {{width: 16}}}}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    (folder / "text.txt").write_text("".join(f"{n} green bottles hanging on the wall\n" for n in range(300)))
    hybrid = "gated_deltanet(heads=1) + sliding_window(heads=1, window=4)"
    for name, pattern in {"hybrid": hybrid, "pure": "attention(heads=1)"}.items():
        (folder / f"{name}.yaml").write_text(TINY.format(pattern))
    config = DemoConfig(
        stacks=(str(folder / "hybrid.yaml"), str(folder / "pure.yaml")),
        train=TrainConfig(
            steps=6,
            batch={"rows": 2, "length": 8},
            evaluation={"every": 3, "batches": 1},
            backend="reference",
            compile=False,
        ),
        sampling=Sampling(max_tokens=20),
        bench=BenchConfig(rounds=3, seconds=0.1),
    )
    progress = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_module, "BACKENDS", ("reference",))
        result = demo(load_text(folder / "text.txt"), folder / "out", config, lambda *call: progress.append(call))
    return result, folder / "out", progress


def test_the_report_holds_the_figures_of_the_run(finished):
    result, folder, _ = finished
    report = (folder / "report.md").read_text()
    for training in result.trainings.values():
        assert f"{training.validation_bits:.3f}" in report
        assert f"{training.parameters:,}" in report
    for row, cells in zip(result.benchmark.timed, result.benchmark.table().rows, strict=True):
        assert f"| {' | '.join(cells)} |" in report
        assert three_digits(row.median_ms) in cells
    assert result.completion.prompt + result.completion.text in report
    assert result.environment.line() in report
    assert "seed 0" in report
    assert StackSpec.load(folder / "hybrid" / "stack.yaml").describe().markdown() in report
    assert (folder / "sample.txt").read_text() == result.completion.prompt + result.completion.text


def test_the_json_holds_the_run_and_the_plots_are_valid_images(finished):
    result, folder, _ = finished
    assert Demo.model_validate(json.loads((folder / "report.json").read_text())) == result
    for name in ("curves.png", "benchmark.png"):
        assert matplotlib.image.imread(folder / name).std() > 0.01


def test_the_checkpoint_of_the_hybrid_reproduces_the_sample(finished):
    result, folder, _ = finished
    model = load_for_completion(folder / "hybrid", backend="reference")
    again = generate(model, result.completion.prompt, result.completion.sampling)
    assert again.text == result.completion.text
    assert StackSpec.load(folder / "hybrid" / "stack.yaml") == StackSpec.load(result.config.stacks[0])


def test_progress_reports_the_end_of_every_task(finished):
    _, _, progress = finished
    ends = {task for task, done, total, *_ in progress if done == total}
    assert ends >= {"train hybrid", "train pure", "generate", "bench"}


def test_a_second_run_overwrites_the_report_with_equal_figures(finished, monkeypatch):
    result, folder, _ = finished
    monkeypatch.setattr(demo_module, "BACKENDS", ("reference",))
    again = demo(load_text(folder.parent / "text.txt"), folder, result.config)
    for name, training in result.trainings.items():
        assert [p.validation_bits for p in again.trainings[name].points] == [p.validation_bits for p in training.points]


def test_a_hybrid_without_an_update_is_refused(finished):
    result, folder, _ = finished
    config = result.config.model_copy(update={"stacks": (result.config.stacks[1],)})
    with pytest.raises(ConfigError, match=r"the first stack must contain a mixer with an update to time, got .*pure"):
        demo(load_text(folder.parent / "text.txt"), folder / "other", config)
    assert not list((folder / "other").iterdir())  # refused before the training


def test_without_matplotlib_the_report_has_no_plots(finished, monkeypatch, tmp_path):
    result, folder, _ = finished
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(demo_module, "BACKENDS", ("reference",))
    (tmp_path / "curves.png").write_text("the plot of an earlier demo")
    again = demo(load_text(folder.parent / "text.txt"), tmp_path, result.config)
    assert again.completion.text == result.completion.text
    assert not (tmp_path / "curves.png").exists()
    report = (tmp_path / "report.md").read_text()
    assert "## Backends" in report
    assert ".png" not in report


def test_the_demo_compares_models_of_equal_size():
    specs = [StackSpec.load(name) for name in (HYBRID, *BASELINES)]
    mixers = [{type(config).name for layer in spec.expand() for config in layer.mixers} for spec in specs]
    assert mixers == [{"gated_deltanet", "sliding_window"}, {"attention"}, {"gated_deltanet"}]
    sizes = [spec.describe().parameters for spec in specs]
    assert max(sizes) < 1.01 * min(sizes)
    assert {spec.vocab for spec in specs} == {256}


def test_options_reach_every_part_of_the_config():
    config = DemoConfig().with_options(steps=7, seed=5, device="mps", backend="compile")
    assert (config.train.steps, config.train.seed, config.sampling.seed, config.bench.seed) == (7, 5, 5, 5)
    assert (config.train.device, config.bench.device, config.train.backend) == ("mps", "mps", "compile")
    assert config.train.optimizer == DemoConfig().train.optimizer
