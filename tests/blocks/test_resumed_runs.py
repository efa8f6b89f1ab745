"""Runs that continue: after a signal, a damaged checkpoint, or with other settings, data and precision."""

import json
import signal
from functools import partial

import pytest
import training_cases
from training_cases import SPEC

import deltazoo
from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.io.progress import silent
from deltazoo.blocks.checkpoints.sharded import saved_steps
from deltazoo.blocks.data.writing import ShardConfig, write_shards
from deltazoo.blocks.training.interrupts import TrainingInterrupted
from deltazoo.blocks.training.source import ShardSource
from deltazoo.blocks.training.tasks import resume

pytestmark = pytest.mark.runs
CONFIG = training_cases.changed(
    training_cases.CONFIG, steps=8, batch__rows=2, batch__length=32, schedule__warmup=0, evaluation__every=4,
    evaluation__batches=1,
)  # fmt: skip
changed = partial(training_cases.changed, CONFIG)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "bottles.txt"
    path.write_text("".join(f"{n} green bottles hanging on the wall\n" for n in range(300)))
    return path


def shards(folder, name, documents, **options):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    config = ShardConfig(tokenizer="bytes", held_out=0.2, **options)
    write_shards([folder / f"{name}.jsonl"], folder / name, config, 1)
    return folder / name


def terminate_after(step):
    """Return a progress function that sends SIGTERM while the step after this one runs."""

    def progress(task, done, total, note=None):
        if done == step:
            signal.raise_signal(signal.SIGTERM)

    return progress


def test_a_run_that_was_stopped_in_its_last_step_is_validated(text, tmp_path):
    config = changed(steps=7)
    with pytest.raises(TrainingInterrupted, match="after step 7"):
        deltazoo.train(SPEC, tmp_path / "run", text, config, progress=terminate_after(6))
    resumed = resume(tmp_path / "run", progress=silent)
    whole = deltazoo.train(SPEC, None, text, config, progress=silent)
    assert [(p.step, p.validation_bits) for p in resumed.points] == [(p.step, p.validation_bits) for p in whole.points]
    assert resumed.points[-1].step == 7


def test_a_damaged_later_checkpoint_does_not_displace_a_new_one(text, tmp_path, caplog):
    folder = tmp_path / "run"
    deltazoo.train(SPEC, folder, text, changed(checkpoint__keep=1, checkpoint__best=True), until=4, progress=silent)
    resume(folder, changes={"checkpoint.keep": 2}, progress=silent)
    assert saved_steps(folder) == [4, 8]
    damaged = next((folder / "checkpoints" / "step-000000008").glob("__0_*"))
    damaged.write_bytes(damaged.read_bytes()[:-5])
    with pytest.raises(TrainingInterrupted, match="after step 6"):
        resume(folder, changes={"checkpoint.keep": 1}, progress=terminate_after(5))
    assert 6 in saved_steps(folder)


def test_changed_data_settings_hold_from_the_first_step(tmp_path, monkeypatch):
    first = shards(tmp_path, "first", [{"text": f"{n} a"} for n in range(40)])
    second = shards(tmp_path, "second", [{"text": f"{n} b"} for n in range(40)])
    read = []
    rows = ShardSource.rows
    monkeypatch.setattr(ShardSource, "rows", lambda self, *place: read.append(self.weights) or rows(self, *place))
    config = changed(data__mixture={str(first): 1.0, str(second): 1.0})
    deltazoo.train(SPEC, tmp_path / "run", None, config, until=4, progress=silent)
    read.clear()
    resume(tmp_path / "run", changes={"data.mixture": {str(first): 9.0, str(second): 1.0}}, until=5, progress=silent)
    assert {*read} == {(9.0, 1.0)}


def test_a_text_that_moved_is_read_from_its_new_path(text, tmp_path):
    (tmp_path / "old.txt").write_bytes(text.read_bytes())
    deltazoo.train(SPEC, tmp_path / "run", tmp_path / "old.txt", CONFIG, until=4, progress=silent)
    (tmp_path / "old.txt").rename(tmp_path / "new.txt")
    resumed = resume(tmp_path / "run", changes={"data.path": str(tmp_path / "new.txt")}, progress=silent)
    assert resumed.points[-1].step == 8
    with pytest.raises(ConfigError, match=r"nothing\.txt"):
        resume(tmp_path / "run", changes={"data.path": str(tmp_path / "nothing.txt"), "steps": 9}, progress=silent)


def test_a_step_of_prompts_alone_changes_no_loss(tmp_path):
    documents = [{"question": f"{n} " + "long " * (30 if n % 2 else 0), "answer": f"{n}\n"} for n in range(40)]
    folder = shards(tmp_path, "sums", documents, fields=("question", "answer"))
    config = changed(batch__rows=1, batch__length=64, evaluation__every=8)
    trained = deltazoo.train(SPEC, None, folder, config, progress=silent)
    assert trained.points[-1].step == 8


def test_a_run_with_a_buffer_in_bfloat16_is_loaded_and_resumed_in_float32(text, tmp_path):
    spec = deltazoo.preset("kimi-linear-tiny")
    deltazoo.train(spec, tmp_path / "run", text, changed(precision="bfloat16"), until=4, progress=silent)
    assert {x.dtype.itemsize for x in deltazoo.load(tmp_path / "run").state_dict().values()} == {4}
    resumed = resume(tmp_path / "run", changes={"precision": "float32"}, progress=silent)
    assert resumed.points[-1].step == 8
