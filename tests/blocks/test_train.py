"""Training: the loss falls, a resumed run equals an uninterrupted one bit for bit, and errors are clear."""

import errno
import io
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.filesystem import FileSystem
from training_cases import CONFIG, SPEC, changed

from deltazoo.backends.io.errors import ConfigError, UnsupportedError, ValueRangeError
from deltazoo.backends.io.progress import silent
from deltazoo.blocks.checkpoints.folder import METRICS, SETTINGS, STACK, load_model
from deltazoo.blocks.checkpoints.sharded import (
    STATE,
    Writer,
    encoded,
    load_tensors,
    read_state,
    saved_steps,
    step_folder,
)
from deltazoo.blocks.data.text import even_crops, load_text, random_crops
from deltazoo.blocks.model.compilation import compile_layers
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.parallel.ranks import Ranks
from deltazoo.blocks.spec.stack_spec import StackSpec, preset
from deltazoo.blocks.training import tasks
from deltazoo.blocks.training.config import TrainConfig
from deltazoo.blocks.training.interrupts import TrainingInterrupted
from deltazoo.blocks.training.nested import flat
from deltazoo.blocks.training.optimizer import Optimizer, learning_rate
from deltazoo.blocks.training.rules import RESUMABLE, RULES
from deltazoo.blocks.training.run import Run
from deltazoo.blocks.training.tasks import resume
from deltazoo.mixers import LinearAttention, MoM

pytestmark = pytest.mark.runs


def train(spec, text, config, folder=None, **options):
    return tasks.train(spec, folder, text, config, **{"progress": silent, **options})


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(f"{n} bottles, {n} green bottles hanging on the wall\n" for n in range(400)))
    return load_text(path)


@pytest.fixture(scope="module")
def uninterrupted(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    return folder, train(SPEC, text, CONFIG, folder)


def _last(folder):
    return step_folder(folder, saved_steps(folder)[-1])


def _checkpoint(folder):
    """Return the state and the tensors of the last checkpoint."""
    loaded = read_state(_last(folder))
    tensors = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in loaded.entries.items()}
    load_tensors(loaded, tensors, (), Ranks())
    return loaded.state, tensors


def _write(folder, state, tensors=None):
    """Replace the last checkpoint by one that a run would not write."""
    if tensors is None:
        tensors = _checkpoint(folder)[1]
    writer = Writer(folder, Ranks(), background=False)
    writer.save(int(_last(folder).name.removeprefix("step-")), tensors, state, set)


def _copy(source, folder):
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    shutil.copytree(source, folder, dirs_exist_ok=True)


def _records(folder):
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def validation_bits(model, text):
    """The validation loss of a model in bits per token, on the batches of CONFIG."""
    batches = even_crops(text.validation, 2, 12, 2)
    with torch.no_grad():
        return fmean(float(model.loss(*batch)) for batch in batches) / math.log(2)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(text, uninterrupted, tmp_path):
    (expected_state, expected), expected_points = _checkpoint(uninterrupted[0]), uninterrupted[1].points
    half = train(SPEC, text, CONFIG, tmp_path / "run", until=4)
    assert half.points[-1].step == 4
    torch.rand(3)  # resuming does not depend on random numbers drawn in between
    resumed = resume(tmp_path / "run", text)
    state, actual = _checkpoint(tmp_path / "run")
    assert resumed.points[-1].step == state["step"] == expected_state["step"] == 8
    assert expected.keys() == actual.keys()
    assert sum(name.startswith("optimizer.") for name in expected) == 3 * sum(1 for _ in SPEC.build().parameters())
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name
    validation = {point.step: point.validation_bits for point in expected_points}
    assert {point.step: point.validation_bits for point in resumed.points if point.step != 4} == validation


def test_resume_restores_the_random_generator(text, tmp_path):
    train(SPEC, text, CONFIG, tmp_path, until=1)
    saved, _ = _checkpoint(tmp_path)
    drawn = encoded(torch.Generator().manual_seed(7).get_state())  # as if a layer had drawn random numbers
    _write(tmp_path, {**saved, "rng": [{"cpu": drawn, "cuda": None}]})
    resume(tmp_path, text, until=2)
    assert _checkpoint(tmp_path)[0]["rng"][0]["cpu"] == drawn


def test_resume_reads_the_text_from_its_path_and_refuses_another(text, tmp_path):
    train(SPEC, text, CONFIG, tmp_path / "run", until=1)
    assert resume(tmp_path / "run", until=2).points[-1].step == 2
    other = tmp_path / "other.txt"
    other.write_text("another text altogether\n" * 100)
    with pytest.raises(ConfigError, match=r"run was trained on another text \(.*words\.txt\), got .*other\.txt"):
        resume(tmp_path / "run", load_text(other))


def test_weight_decay_applies_to_matrices_unless_excluded():
    pattern = "mamba + rg_lru + s4d + rwkv6"
    model = StackSpec(width=32, depth=4, vocab=256, pattern=pattern, mlp={"width": 16}).build("reference")
    groups = list(Optimizer(model, CONFIG.optimizer, sharded=False).groups)
    assert [group["weight_decay"] for group in groups] == [CONFIG.optimizer.weight_decay, 0]
    decayed, others = ({id(x) for x in group["params"]} for group in groups)
    is_decayed = {name: id(x) in decayed for name, x in model.named_parameters()}
    assert len(decayed) + len(others) == len(is_decayed)
    for suffix in ("A_log", "real.bias", "log_real", "imaginary", "log_dt", "bonus.u", ".mix", "norm.weight"):
        assert {value for name, value in is_decayed.items() if name.endswith(suffix)} == {False}, suffix
    for suffix in ("to_qkv.weight", "real.weight", "mix_up", "embedding.weight", "conv.weight"):
        assert {value for name, value in is_decayed.items() if name.endswith(suffix)} <= {True}, suffix
    assert sum(is_decayed.values()) > len(is_decayed) / 3


def test_the_first_step_equals_adamw_on_the_first_crops(text):
    config = changed(CONFIG, steps=1, optimizer__clip=1e9, schedule__warmup=0)
    torch.manual_seed(config.seed)
    model = SPEC.build(backend="reference")
    before = validation_bits(model, text)
    batch = random_crops(text.train, 2, 12, config.seed, 0)
    loss = model.loss(*batch)
    loss.backward()
    with torch.no_grad():  # the first step of AdamW moves every weight by the rate against the gradient's sign
        for weight in model.parameters():
            step = weight.grad / (weight.grad.abs() + 1e-8)
            rate, decay = config.optimizer.learning_rate, config.optimizer.weight_decay
            weight.mul_(1 - (rate * decay if weight.dim() >= 2 else 0))
            weight.sub_(rate * step)
    after = validation_bits(model, text)
    start, end = train(SPEC, text, config).points
    assert start.validation_bits == pytest.approx(before, rel=1e-6)
    assert end.train_bits == pytest.approx(float(loss.detach()) / math.log(2), rel=1e-6)
    assert end.validation_bits == pytest.approx(after, rel=1e-4)


def test_the_validation_loss_falls(text):
    config = changed(CONFIG, steps=40, evaluation__every=40)
    start, end = train(SPEC, text, config).points
    assert 7 < start.validation_bits < 9
    assert end.validation_bits < start.validation_bits - 2


def test_compiled_training_equals_eager_training_and_reports_each_layer(text, monkeypatch, caplog):
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(
        "deltazoo.blocks.training.preparation.compile_layers", partial(compile_layers, compiler=counter)
    )
    spec = StackSpec(width=16, depth=2, vocab=256, pattern="sliding_window(heads=1, window=4)", mlp={"width": 16})
    config = CONFIG.model_copy(update={"steps": 2})
    eager = train(spec, text, config).points
    caplog.set_level("INFO", "deltazoo")
    reports = []
    with torch.device("cpu"):  # an active torch function mode
        compiled = train(
            spec, text, config.model_copy(update={"compile": True}), progress=lambda *report: reports.append(report)
        ).points
    assert [note for _, done, _, *notes in reports if done == 0 for note in notes] == [
        "timing a step without compilation",
        "compiling layer 1 of 1 (sliding_window)",
        "compiling the backward of layer 1 of 1 (sliding_window)",
    ]
    assert counter.frame_count == 2  # of the layers, of the last norm: reporting compiles nothing again
    estimate, total = (record.getMessage() for record in caplog.records if record.name == "deltazoo")
    assert re.fullmatch(
        r"compiling 1 kind of layer; without compilation \(--no-compile\) 2 steps take [\d.]+ s, [\d.]+ s each",
        estimate,
    )
    assert re.fullmatch(r"compiled in [\d.]+ s", total)
    for actual, expected in zip(compiled, eager, strict=True):
        assert actual.validation_bits == pytest.approx(expected.validation_bits, rel=1e-5)


@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
def test_bfloat16_keeps_float32_weights_and_a_close_loss(text, uninterrupted, tmp_path, precision):
    points = train(SPEC, text, changed(CONFIG, precision=precision), tmp_path / "bf16").points
    float32_points = uninterrupted[1].points
    assert all(tensor.dtype == torch.float32 for tensor in _checkpoint(tmp_path / "bf16")[1].values())
    assert points[-1].validation_bits != float32_points[-1].validation_bits
    assert points[-1].validation_bits == pytest.approx(float32_points[-1].validation_bits, rel=0.02)


def test_the_learning_rate_warms_up_and_decays_to_a_tenth():
    config = TrainConfig(steps=110, schedule={"warmup": 10}, optimizer={"learning_rate": 1.0})
    assert [learning_rate(config, step) for step in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert learning_rate(config, 60) == pytest.approx(0.55)
    assert learning_rate(config, 110) == pytest.approx(0.1)
    rates = {
        name: [learning_rate(changed(config, schedule__name=name), step) for step in (4, 60, 88, 110)]
        for name in ("linear", "wsd", "constant")
    }
    assert rates["linear"] == pytest.approx([0.5, 0.55, 0.298, 0.1])
    assert rates["wsd"] == pytest.approx([0.5, 1.0, 1.0, 0.1])
    assert rates["constant"] == pytest.approx([0.5, 1.0, 1.0, 1.0])
    late = changed(config, schedule__name="wsd", schedule__final=0.0)
    assert learning_rate(late, 99) == pytest.approx(0.5)


def test_points_hold_the_figures_of_their_steps(uninterrupted):
    points = uninterrupted[1].points
    assert [point.step for point in points] == [0, 3, 6, 8]
    assert points[0].train_bits is None
    for point in points[1:]:
        assert point.learning_rate == pytest.approx(learning_rate(CONFIG, point.step - 1))
        assert point.gradient_norm > 0
        assert point.tokens_per_second > 0
    weights = {name: x for name, x in _checkpoint(uninterrupted[0])[1].items() if name.startswith("model.")}
    assert uninterrupted[1].parameters == sum(weight.numel() for weight in weights.values())


def test_a_loaded_model_has_the_validation_loss_of_the_run(text, uninterrupted):
    folder, training = uninterrupted
    model = load_model(folder, backend="reference")
    assert validation_bits(model, text) == pytest.approx(training.validation_bits, rel=1e-6)


def test_auxiliary_losses_are_logged_and_left_out_of_bits_per_token(text):
    mom = MoM(memory=LinearAttention(heads=1), memories=2, active=1, balance=0.5)
    spec = StackSpec(width=16, depth=2, vocab=256, pattern=mom, mlp={"width": 16})
    config = changed(CONFIG, steps=2, evaluation__every=2)
    torch.manual_seed(config.seed)
    model = spec.build(backend="reference")
    before = model.losses(*random_crops(text.train, 2, 12, config.seed, 0))
    validation = [float(model.losses(*batch).cross_entropy.detach()) for batch in even_crops(text.validation, 2, 12, 2)]
    first = train(spec, text, config.model_copy(update={"steps": 1})).points
    assert first[0].auxiliary == {}
    assert first[0].validation_bits == pytest.approx(fmean(validation) / math.log(2), rel=1e-6)
    assert first[1].train_bits == pytest.approx(float(before.cross_entropy.detach()) / math.log(2), rel=1e-6)
    assert first[1].auxiliary == pytest.approx({"mom_balance": before.auxiliary["mom_balance"].item()}, rel=1e-6)
    training = train(spec, text, config)
    assert list(training.points[-1].auxiliary) == ["mom_balance"]


def test_an_existing_checkpoint_is_not_overwritten(text, uninterrupted):
    with pytest.raises(ConfigError, match="already contains a checkpoint: resume it, or choose another folder"):
        train(SPEC, text, CONFIG, uninterrupted[0])


def test_a_missing_or_damaged_checkpoint_is_reported(text, uninterrupted, tmp_path):
    with pytest.raises(
        ConfigError,
        match=rf"{tmp_path} is not a checkpoint folder: it has no {STACK} and no {SETTINGS} and no complete",
    ):
        load_model(tmp_path)
    _copy(uninterrupted[0], tmp_path)
    with pytest.raises(ConfigError, match=rf"{STACK} is not a checkpoint folder: it is a file; its folder is"):
        load_model(tmp_path / STACK)
    for step in saved_steps(tmp_path)[:-1]:
        shutil.rmtree(step_folder(tmp_path, step))
    for name, message in (("__0_0.distcp", "it must have"), (".metadata", "it must have"), (STATE, "not a checkpoint")):
        whole = (_last(tmp_path) / name).read_bytes()
        (_last(tmp_path) / name).write_bytes(whole[: len(whole) // 2])
        for read in (lambda: load_model(tmp_path), lambda: resume(tmp_path, text)):
            with pytest.raises(ConfigError, match=rf"{name} cannot be read: it is damaged.*{message}"):
                read()
        (_last(tmp_path) / name).write_bytes(whole)


def test_a_run_continues_from_the_checkpoint_before_a_damaged_one_and_says_so(text, uninterrupted, tmp_path, caplog):
    _copy(uninterrupted[0], tmp_path)
    assert saved_steps(tmp_path) == [6, 8]
    file = _last(tmp_path) / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"it is damaged.*; the checkpoint before it is of step 6$"):
        load_model(tmp_path)
    resumed = resume(tmp_path, text)
    assert [record.getMessage().split("; ")[-1] for record in caplog.records if record.name == "deltazoo"] == [
        "the checkpoint before it is of step 6: continuing from it"
    ]
    assert resumed.validation_bits == uninterrupted[1].validation_bits


def test_files_of_different_runs_are_reported(text, uninterrupted, tmp_path):
    _copy(uninterrupted[0], tmp_path)
    (tmp_path / STACK).write_text((tmp_path / STACK).read_text().replace(f"width: {SPEC.width}", "width: 64"))
    state, _ = _checkpoint(tmp_path)
    _write(tmp_path, {**state, "stack": StackSpec.load(tmp_path / STACK).model_dump(mode="json")})
    for read in (lambda: load_model(tmp_path), lambda: resume(tmp_path, text)):
        with pytest.raises(
            ConfigError, match=r"the weights in step-000000008 do not fit stack\.yaml: .* must have shape"
        ):
            read()
    (tmp_path / SETTINGS).write_text("train: {}\ntext: 4\n")
    with pytest.raises(ConfigError, match=r"train\.yaml: text must be a mapping with names as keys, got 4"):
        load_model(tmp_path)
    _write(tmp_path, {"step": 8})
    with pytest.raises(ConfigError, match=r"state\.json is not from a training run: it has no stack and no settings"):
        load_model(tmp_path)


def test_a_stack_that_was_changed_after_the_training_is_refused(text, tmp_path):
    spec = SPEC.model_copy(update={"pattern": "sliding_window(heads=1, window=16)"})
    train(spec, text, CONFIG, tmp_path, until=1)
    loaded = load_model(tmp_path)
    stack = (tmp_path / STACK).read_text()
    (tmp_path / STACK).write_text(stack.replace("window=16", "window=8"))
    for read in (lambda: load_model(tmp_path), lambda: resume(tmp_path, text, until=2)):
        with pytest.raises(
            ConfigError, match=r"stack\.yaml must be the stack that was trained, got other values of pattern"
        ):
            read()
    (tmp_path / STACK).write_text(stack)
    assert load_model(tmp_path).spec == loaded.spec == spec


def test_a_checkpoint_imports_no_code(text, uninterrupted, tmp_path):
    _copy(uninterrupted[0], tmp_path)
    saved, _ = _checkpoint(tmp_path)
    saved["stack"]["backend"] = "module_of_a_stranger:Backend"
    _write(tmp_path, saved)
    with pytest.raises(ConfigError, match=r"state\.json: backend: .* would import and run the code"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"step": "ten"}, r"state\.json is not from a training run: step must have the type int, got 'ten'"),
        ({"stack": 3}, "stack must have the type dict, got 3"),
        ({"stack": {"width": 0}}, r"state\.json is not from a training run: stack: width must be at least 1"),
        ({"settings": {"train": {}}}, r"state\.json: text must be a mapping with names as keys, got None"),
        ({"changes": [3]}, r"changes\.0 must be a mapping.*, got 3"),
        ({"recent": "zzz"}, "recent must have the type list, got 'zzz'"),
        ({"recent": ["zzz"]}, r"step-000000008 is not from a training run: recent\.0 must be .*, got 'zzz'"),
        ({"recent": [{"bits": "zzz"}]}, r"recent\.0\.bits must be a number.*, got 'zzz'"),
        ({"points": [3]}, r"points\.0 must be a mapping.*, got 3"),
        (
            {"rng": [{"cpu": "AAAA", "cuda": None}]},
            r"step-000000008 is not from a training run: Expected a CPUGenerator",
        ),
    ],
)
def test_an_edited_checkpoint_is_reported(text, uninterrupted, tmp_path, edit, message):
    _copy(uninterrupted[0], tmp_path)
    _write(tmp_path, {**_checkpoint(tmp_path)[0], **edit})
    with pytest.raises(ConfigError, match=message):
        resume(tmp_path, text)


@pytest.mark.parametrize("key", ["recent", "rng"])
def test_a_checkpoint_without_a_key_is_reported(text, uninterrupted, tmp_path, key):
    _copy(uninterrupted[0], tmp_path)
    saved, _ = _checkpoint(tmp_path)
    del saved[key]
    _write(tmp_path, saved)
    with pytest.raises(ConfigError, match=rf"state\.json is not from a training run: it has no {key}"):
        resume(tmp_path, text)


def test_a_flipped_byte_anywhere_in_a_checkpoint_is_reported(text, uninterrupted, tmp_path):
    _copy(uninterrupted[0], tmp_path)
    shutil.rmtree(step_folder(tmp_path, saved_steps(tmp_path)[0]))
    for file in sorted(_last(tmp_path).iterdir()):
        data = file.read_bytes()
        for position in range(0, len(data) - 1, len(data) // 4):
            damaged = bytearray(data)
            damaged[position] ^= 1
            file.write_bytes(damaged)
            for read in (lambda: load_model(tmp_path), lambda: resume(tmp_path, text)):
                with pytest.raises(ConfigError, match=r"cannot be read: it is damaged"):
                    read()
        file.write_bytes(data)
    load_model(tmp_path)


def _edit(folder, old, new):
    settings = (folder / SETTINGS).read_text()
    assert old in settings
    (folder / SETTINGS).write_text(settings.replace(old, new))


def test_edited_settings_are_reported(text, uninterrupted, tmp_path):
    edits = {
        (
            "warmup:",
            "warmpu:",
        ): r"ScheduleConfig: schedule\.warmpu: unknown field; did you mean 'warmup'\?",
        ("train:", "train: 4\nother:"): r"train\.yaml: other: unknown field",
        ("\ntext:", "\ntrian: 4\ntext:"): r"train\.yaml: trian: unknown field; did you mean 'train'\?",
        (
            "  digest:",
            "  digset: 3\n  digest:",
        ): r"train\.yaml: TextOrigin: digset: unknown field; did you mean 'digest'\?",
        ("  steps: 8", "  4: 8"): r"train\.yaml: train must be a mapping with names as keys",
    }
    for (old, new), message in edits.items():
        _copy(uninterrupted[0], tmp_path)
        _edit(tmp_path, old, new)
        for read in (lambda: load_model(tmp_path), lambda: resume(tmp_path, text)):
            with pytest.raises(ConfigError, match=message):
                read()


def test_every_setting_has_a_rule():
    assert set(RULES) == set(flat(TrainConfig().model_dump()))
    fixed = {"batch.rows", "batch.length", "batch.tokens", "schedule.warmup", "seed", "evaluation.batches", "model"}
    assert set(RULES) - set(RESUMABLE) == fixed | {"optimizer.name"}


@pytest.mark.parametrize(
    ("name", "old", "new", "line"),
    [
        ("batch.rows", 2, 3, "rows: "),
        ("batch.length", 12, 13, "length: "),
        ("schedule.warmup", 2, 3, "warmup: "),
        ("seed", 0, 5, "  seed: "),
        ("evaluation.batches", 2, 1, "batches: "),
    ],
    ids=["rows", "length", "warmup", "seed", "batches"],
)
def test_a_fixed_setting_changes_neither_by_an_argument_nor_in_the_file(
    text, uninterrupted, tmp_path, name, old, new, line
):
    _copy(uninterrupted[0], tmp_path)
    sentence = (
        rf"{name} must stay {old} in a resumed run, got {new}: {RULES[name].reason}; a new run can: deltazoo train "
    )
    with pytest.raises(ConfigError, match=rf"^{sentence}{tmp_path / STACK} "):
        resume(tmp_path, text, changes={name: new})
    resume(tmp_path, text, changes={name: old})  # no change
    _edit(tmp_path, f"{line}{old}", f"{line}{new}")
    for read in (lambda: resume(tmp_path, text), lambda: load_model(tmp_path)):
        with pytest.raises(ConfigError, match=rf"^{tmp_path / SETTINGS}: {sentence}"):
            read()


def test_the_digest_of_the_text_is_fixed(text, uninterrupted, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("another text altogether\n" * 100)
    _copy(uninterrupted[0], tmp_path)
    _edit(tmp_path, text.digest, load_text(other).digest)
    with pytest.raises(ConfigError, match=r"train\.yaml: text\.digest must stay that of the text that was trained"):
        resume(tmp_path, other)


def test_changes_are_logged_and_take_effect(text, tmp_path, caplog):
    caplog.set_level("INFO", "deltazoo")
    train(SPEC, text, CONFIG, tmp_path, until=3)
    changes = {
        "optimizer.learning_rate": 1e-3, "optimizer.weight_decay": 0.5, "evaluation.every": 1, "optimizer.clip": 2.0,
    }  # fmt: skip
    points = resume(tmp_path, text, until=5, changes=changes).points
    assert [point.step for point in points] == [0, 3, 4, 5]
    after = changed(CONFIG, optimizer__learning_rate=1e-3)
    assert points[-1].learning_rate == pytest.approx(learning_rate(after, 4))
    _edit(tmp_path, "every: 1,", "every: 2,")  # an edit of a setting that may change is a change, too
    _edit(tmp_path, "    clip: 2.0\n", "")  # a missing one is none
    resume(tmp_path, text)
    lines = [
        "optimizer.learning_rate: 0.01 -> 0.001 from step 3 on",
        "optimizer.weight_decay: 0.1 -> 0.5 from step 3 on",
        "optimizer.clip: 1.0 -> 2.0 from step 3 on",
        "evaluation.every: 3 -> 1 from step 3 on",
        "evaluation.every: 1 -> 2 from step 5 on, as in train.yaml",
    ]
    assert [record.getMessage() for record in caplog.records if record.name == "deltazoo"] == lines
    records = _records(tmp_path)
    assert [(record["step"], record.get("setting")) for record in records] == [
        *((0, None), (3, None), *((3, line.split(":")[0]) for line in lines[:4]), (4, None)),
        *((5, None), (5, "evaluation.every"), (6, None), (8, None)),
    ]
    assert records[2] == {**records[2], "setting": "optimizer.learning_rate", "old": 1e-2, "new": 1e-3}
    assert "clip: 2.0" in (tmp_path / SETTINGS).read_text()


def test_metrics_hold_each_point_once_as_soon_as_it_is_measured(text, tmp_path, monkeypatch):
    seen = []

    def on_point(point):
        seen.append(point)
        assert _records(tmp_path)[-1] == point.model_dump()
        assert point.step == 0 or saved_steps(tmp_path)[-1] == point.step

    with monkeypatch.context() as patch:
        _send_after(patch, signal.SIGINT, steps=5)
        with pytest.raises(TrainingInterrupted):
            train(SPEC, text, CONFIG, tmp_path, on_point=on_point)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 6, "torn')  # as if the process had been killed while it wrote
    resume(tmp_path, text, on_point=on_point)
    records = _records(tmp_path)
    assert [record["step"] for record in records] == [point.step for point in seen] == [0, 3, 6, 8]
    assert [record["tokens"] for record in records] == [0, 72, 144, 192]
    assert records == [point.model_dump() for point in seen]
    assert [record["time"] for record in records] == sorted(record["time"] for record in records)


def test_a_second_process_in_a_folder_is_refused_and_the_first_one_named(text, tmp_path, monkeypatch):
    monkeypatch.setattr("deltazoo.blocks.checkpoints.lock._PATIENCE", 0.05)
    train(SPEC, text, CONFIG, tmp_path / "run", until=1)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "locked\n"
    name = f"process {other.pid} on {platform.node()}, since 2026-03-01T12:00:00"
    for start in (lambda: resume(tmp_path / "run", text), lambda: train(SPEC, text, CONFIG, tmp_path / "run")):
        with pytest.raises(ConfigError, match=f"another process trains in {tmp_path / 'run'}: {name}"):
            start()
    load_model(tmp_path / "run")
    other.kill()
    other.wait()
    assert resume(tmp_path / "run", text, until=2).points[-1].step == 2


# Holds the lock of a folder until it is killed, as a training process does, but without importing torch.
HOLD = """
import json, os, platform, sys, time
from filelock import FileLock
with FileLock(sys.argv[1] + "/train.lock"):
    owner = {"pid": os.getpid(), "host": platform.node(), "started": "2026-03-01T12:00:00+00:00"}
    open(sys.argv[1] + "/train.owner.json", "w").write(json.dumps(owner))
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_training_that_diverges_names_the_learning_rate_and_keeps_the_last_checkpoint(text, tmp_path):
    with pytest.raises(
        ConfigError, match=r"the training diverged after step \d: .*; lower learning_rate \(--lr\), got 1e\+30"
    ):
        train(SPEC, text, changed(CONFIG, optimizer__learning_rate=1e30, schedule__warmup=0, optimizer__skips=1))
    config = changed(CONFIG, evaluation__every=1)
    train(SPEC, text, config, tmp_path, until=2)
    kept = (
        rf"got 1e\+30; the checkpoint holds step \d: deltazoo train --resume {tmp_path} --lr RATE continues from there"
    )
    with pytest.raises(ConfigError, match=kept):
        resume(tmp_path, text, changes={"optimizer.learning_rate": 1e30, "optimizer.skips": 1})
    load_model(tmp_path)
    assert resume(tmp_path, text, changes={"optimizer.learning_rate": 1e-2}).points[-1].step == 8


def test_an_operand_that_is_not_finite_is_a_divergence(text, monkeypatch):
    def fail_later(model, *batch):
        if run_step() == 2:
            raise ValueRangeError("log_decay must be finite, got -inf.")
        return losses(model, *batch)

    losses, run_step = LanguageModel.losses, lambda: steps[-1]
    steps = [0]
    take_step = Run._take_step

    def count_step(run, stop):
        take_step(run, stop)
        steps.append(run.step)

    monkeypatch.setattr(LanguageModel, "losses", fail_later)
    monkeypatch.setattr(Run, "_take_step", count_step)
    problem = "the training diverged after step 2: log_decay must be finite, got -inf"
    sentence = rf"^{problem}; lower learning_rate \(--lr\), got 0.01$"
    for every in (2, 3):  # in validation, in training
        steps.append(0)
        with pytest.raises(ConfigError, match=sentence):
            train(SPEC, text, changed(CONFIG, evaluation__every=every))


def _send_after(monkeypatch, signum, steps):
    """Send a signal to this process during the step with this number."""
    take_step = Run._take_step

    def step_and_send(run, stop):
        if run.step == steps - 1:
            signal.raise_signal(signum)
        take_step(run, stop)

    monkeypatch.setattr(Run, "_take_step", step_and_send)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_after_the_step_and_the_resumed_run_equals_an_uninterrupted_one(
    text, uninterrupted, tmp_path, monkeypatch, signum
):
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        _send_after(patch, signum, steps=5)
        with pytest.raises(TrainingInterrupted, match=rf"{signum.name} after step 5; checkpoint in ") as caught:
            train(SPEC, text, CONFIG, tmp_path)
    assert (caught.value.step, caught.value.folder, caught.value.signum) == (5, tmp_path, signum)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    resumed = resume(tmp_path, text)
    expected, actual = _checkpoint(uninterrupted[0])[1], _checkpoint(tmp_path)[1]
    assert all(torch.equal(tensor, actual[name]) for name, tensor in expected.items())
    for point, uninterrupted_point in zip(resumed.points, uninterrupted[1].points, strict=True):
        measured = {name: getattr(point, name) for name in ("tokens_per_second", "data_share", "time")}
        assert point == uninterrupted_point.model_copy(update=measured)


def test_a_signal_before_the_first_step_saves_the_initial_state(text, uninterrupted, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_warm_up", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(TrainingInterrupted, match="SIGINT after step 0"):
            train(SPEC, text, CONFIG, tmp_path)
    assert resume(tmp_path, text).validation_bits == uninterrupted[1].validation_bits


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_keeps_the_last_checkpoint_and_leaves_no_temporary_file(text, tmp_path, background):
    config = changed(CONFIG, checkpoint__background=background)
    train(SPEC, text, config, tmp_path, until=2)

    def contents():  # the metrics have a point more, which the next resume drops
        files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith("metrics")]
        return {path: path.read_bytes() for path in files}

    before = contents()
    resource = pytest.importorskip("resource")  # POSIX
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))  # fails as a full disk does, with another errno
    try:
        with pytest.raises(ConfigError, match=r"step-0+3: File too large; the checkpoint of step 2 is kept$"):
            resume(tmp_path, text)
        with pytest.raises(ConfigError, match=r"step-0+2: File too large; there is no checkpoint yet$"):
            train(SPEC, text, config, tmp_path.with_name("first"), until=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert contents() == before


def test_a_disk_that_is_full_for_one_of_the_files_refuses_the_checkpoint(text, tmp_path, monkeypatch):
    train(SPEC, text, CONFIG, tmp_path, until=1)
    create_stream, others_failed = FileSystem.create_stream, threading.Event()

    class Full(io.RawIOBase):
        def tell(self):
            return 0

        def write(self, data):
            others_failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def full_for_others(files, path, mode):
        is_other = mode == "wb" and threading.current_thread().name != "deltazoo checkpoint"
        if mode == "wb" and not is_other:
            assert others_failed.wait(10)
        with create_stream(files, path, mode) as stream:
            yield Full() if is_other else stream

    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "create_stream", full_for_others)
        with pytest.raises(ConfigError, match=r"step-0+2: No space left on device; the checkpoint of step 1 is kept$"):
            resume(tmp_path, text, until=2)
    assert resume(tmp_path, text, until=2).points[-1].step == 2


def test_a_read_only_disk_is_reported_with_the_name_of_the_file(text, tmp_path, monkeypatch):
    train(SPEC, text, CONFIG, tmp_path, until=1)

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system", "part.train.yaml")

    monkeypatch.setattr("deltazoo.blocks.spec.document.write", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    kept = r"Read-only file system; the previous train\.yaml is kept"
    with pytest.raises(ConfigError, match=rf"^cannot write {tmp_path}/train\.yaml: {kept}$"):
        resume(tmp_path, text, changes={"steps": 11})


def test_resume_with_more_steps_follows_the_schedule_of_the_longer_run(text, tmp_path):
    train(SPEC, text, CONFIG, tmp_path)
    longer = resume(tmp_path, text, changes={"steps": 11})
    assert longer.points[-1].step == longer.config.steps == 11
    assert longer.points[-1].learning_rate == learning_rate(changed(CONFIG, steps=11), 10)
    assert resume(tmp_path, text).config.steps == 11  # the folder keeps the new settings
    with pytest.raises(ConfigError, match="steps must be at least 11, which the run has taken, got 8"):
        resume(tmp_path, text, changes={"steps": 8})
    with pytest.raises(ConfigError, match=r"stepz: unknown field; did you mean 'steps'\?"):
        resume(tmp_path, text, changes={"stepz": 8})


def test_resume_continues_a_run_of_another_device(text, uninterrupted, tmp_path):
    train(SPEC, text, CONFIG, tmp_path, until=4)
    settings = (tmp_path / SETTINGS).read_text()
    (tmp_path / SETTINGS).write_text(settings.replace("device: cpu", "device: cuda:7"))
    with pytest.raises(ConfigError, match="device must be available"):
        resume(tmp_path, text)
    resumed = resume(tmp_path, text, changes={"device": "cpu"})
    assert resumed.validation_bits == uninterrupted[1].validation_bits
    assert (tmp_path / SETTINGS).read_text() == settings


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_of_the_cpu_continues_compiled_in_bfloat16_on_a_gpu(text, uninterrupted, tmp_path):
    train(SPEC, text, CONFIG, tmp_path, until=4)
    changes = {"device": "cuda", "precision": "autocast", "backend": None, "compile": True}
    notes = []
    resumed = resume(tmp_path, text, changes=changes, progress=lambda *report: notes.extend(report[3:]))
    assert notes[:2] == ["compiling layer 1 of 2 (gated_deltanet)", "compiling layer 2 of 2 (sliding_window)"]
    assert resumed.validation_bits == pytest.approx(uninterrupted[1].validation_bits, rel=0.02)
    assert [record["setting"] for record in _records(tmp_path) if "setting" in record] == [
        *("device", "precision", "backend", "compile")
    ]


def test_weights_that_are_nan_are_refused(text, tmp_path):
    train(SPEC, text, CONFIG, tmp_path, until=1)
    state, tensors = _checkpoint(tmp_path)
    tensors["model.stack.norm.weight"][3] = float("nan")
    _write(tmp_path, state, tensors)
    for read in (lambda: load_model(tmp_path), lambda: resume(tmp_path, text)):
        with pytest.raises(ConfigError, match=r"step-0+1 must be finite, got NaN or inf in stack\.norm\.weight"):
            read()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bfloat16])
def test_weights_of_another_dtype_are_refused(text, uninterrupted, tmp_path, dtype):
    _copy(uninterrupted[0], tmp_path)
    state, tensors = _checkpoint(tmp_path)
    _write(tmp_path, state, tensors | {"model.embedding.weight": tensors["model.embedding.weight"].to(dtype)})
    for read in (lambda: load_model(tmp_path), lambda: resume(tmp_path, text)):
        with pytest.raises(ConfigError, match=rf"embedding\.weight .* must be torch\.float32 .*, got {dtype}"):
            read()


def test_a_buffer_that_an_earlier_version_saved_in_bfloat16_is_converted(text, tmp_path):
    train(preset("kimi-linear-tiny"), text, changed(CONFIG, steps=2), tmp_path)
    state, tensors = _checkpoint(tmp_path)
    narrow = {name: x.bfloat16() for name, x in tensors.items() if name.endswith("router.bias")}
    assert narrow
    _write(tmp_path, state, tensors | narrow)
    weights = load_model(tmp_path).state_dict()
    for name, buffer in narrow.items():
        assert torch.equal(weights[name.removeprefix("model.")], buffer.float())


def test_a_vocabulary_below_256_is_refused(text):
    small = StackSpec(width=16, depth=1, vocab=100, pattern="attention(heads=1)")
    with pytest.raises(ConfigError, match="vocab must be at least 256 to train on bytes, got 100"):
        train(small, text, CONFIG)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_unsupported_backend_is_refused_before_compilation(text, compiled):
    config = CONFIG.model_copy(update={"backend": "fla", "compile": compiled})
    with pytest.raises(UnsupportedError, match="backend 'fla' cannot compute this update: "):
        train(SPEC, text, config)


def test_a_missing_cxx_compiler_is_reported(text, monkeypatch):
    monkeypatch.setattr("deltazoo.blocks.training.preparation.cxx_compiler", lambda: None)
    with pytest.raises(ConfigError, match="needs a C\\+\\+ compiler on the CPU, got none"):
        train(SPEC, text, CONFIG.model_copy(update={"compile": True}))
