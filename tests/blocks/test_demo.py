"""The demo: every figure of the report is that of the run, and the checkpoint writes the sample again."""

import json

import matplotlib.image
import pytest

from deltazoo.backends.errors import ConfigError
from deltazoo.backends.measure.benchmark import BenchConfig
from deltazoo.blocks.generation.completion import Sampling, load_writer, write
from deltazoo.blocks.spec import StackSpec
from deltazoo.blocks.training import demo as demo_module
from deltazoo.blocks.training.demo import HYBRID, PURE, Demo, DemoConfig, demo
from deltazoo.blocks.training.text import load_text
from deltazoo.blocks.training.train import TrainConfig

TINY = "{{width: 16, depth: 2, vocab: 256, pattern: '{}', mlp: {{width: 16}}}}"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    (folder / "text.txt").write_text("".join(f"{n} green bottles hanging on the wall\n" for n in range(300)))
    hybrid = "gated_deltanet(heads=1) + sliding_window(heads=1, window=4)"
    for name, pattern in {"hybrid": hybrid, "pure": "attention(heads=1)"}.items():
        (folder / f"{name}.yaml").write_text(TINY.format(pattern))
    config = DemoConfig(
        stacks=(str(folder / "hybrid.yaml"), str(folder / "pure.yaml")),
        train=TrainConfig(
            steps=6, batch=2, length=8, every=3, validation_batches=1, backend="reference", compile=False
        ),
        sampling=Sampling(max_bytes=20),
        bench=BenchConfig(rounds=3, seconds=0.1),
    )
    heard = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_module, "BACKENDS", ("reference",))
        found = demo(load_text(folder / "text.txt"), folder / "out", config, lambda *said: heard.append(said))
    return found, folder / "out", heard


def test_the_report_holds_the_run(ran):
    found, folder, _ = ran
    report = (folder / "report.md").read_text()
    for training in found.trainings.values():
        assert f"{training.validation_bits:.3f}" in report
        assert f"{training.parameters:,}" in report
    for row in found.benchmark.rows:
        assert f"| {' | '.join(row.cells())} |" in report
        assert f"{row.median_ms:.3g}" in row.cells()
    assert found.written.prompt + found.written.text in report
    assert found.environment.line() in report
    assert "seed 0" in report
    assert (folder / "sample.txt").read_text() == found.written.prompt + found.written.text


def test_the_json_is_the_run_and_the_pictures_decode(ran):
    found, folder, _ = ran
    assert Demo.model_validate(json.loads((folder / "report.json").read_text())) == found
    for name in ("curves.png", "benchmark.png"):
        assert matplotlib.image.imread(folder / name).std() > 0.01


def test_the_checkpoint_of_the_hybrid_writes_the_sample_again(ran):
    found, folder, _ = ran
    again = write(load_writer(folder / "hybrid", backend="reference"), found.written.prompt, found.written.sampling)
    assert again.text == found.written.text
    assert StackSpec.load(folder / "hybrid" / "stack.yaml") == StackSpec.load(found.config.stacks[0])


def test_every_task_is_told_to_its_end(ran):
    _, _, heard = ran
    ends = {task for task, done, total, *_ in heard if done == total}
    assert ends >= {"train hybrid", "train pure", "write", "training forward", "training backward", "training decode"}


def test_it_runs_again_over_its_own_report(ran, monkeypatch):
    found, folder, _ = ran
    monkeypatch.setattr(demo_module, "BACKENDS", ("reference",))
    again = demo(load_text(folder.parent / "text.txt"), folder, found.config)
    for name, training in found.trainings.items():
        assert [p.validation_bits for p in again.trainings[name].points] == [p.validation_bits for p in training.points]


def test_a_hybrid_without_an_update_is_refused_in_words(ran):
    found, folder, _ = ran
    config = found.config.model_copy(update={"stacks": (found.config.stacks[1],)})
    with pytest.raises(ConfigError, match=r"the first stack must hold a mixer with an update to time, got .*pure"):
        demo(load_text(folder.parent / "text.txt"), folder / "other", config)


def test_the_models_of_the_demo_are_a_hybrid_and_its_relatives_of_one_size():
    hybrid, *pure = (StackSpec.load(name) for name in (HYBRID, *PURE))
    mixers = [{type(config).name for layer in spec.expand() for config in layer.mixers} for spec in (hybrid, *pure)]
    assert mixers == [{"gated_deltanet", "sliding_window"}, {"attention"}, {"gated_deltanet"}]
    sizes = [spec.describe().parameters for spec in (hybrid, *pure)]
    assert max(sizes) < 1.01 * min(sizes)
    assert {spec.vocab for spec in (hybrid, *pure)} == {256}


def test_one_seed_and_device_reach_every_part():
    config = DemoConfig().changed(steps=7, seed=5, device="mps", backend="compile")
    assert (config.train.steps, config.train.seed, config.sampling.seed, config.bench.seed) == (7, 5, 5, 5)
    assert (config.train.device, config.bench.device, config.train.backend) == ("mps", "mps", "compile")
    assert config.train.learning_rate == DemoConfig().train.learning_rate
