"""train and generate print the results of the library, and share checkpoints."""

import re
import shlex
import signal
import sys

import pytest
import torch

import deltazoo
from deltazoo.blocks.generation.generate import _step
from deltazoo.blocks.spec import StackSpec
from deltazoo.blocks.training.text import load_text
from deltazoo.blocks.training.train import TrainConfig, train

QUICK = ("--length", 8, "--batch", 2, "--every", 3, "--backend", "reference", "--no-compile")


@pytest.fixture
def folder(ok, stack_file, text_file, tmp_path):
    ok("train", stack_file, "--text", text_file, "--out", tmp_path / "run", "--steps", 6, *QUICK)
    return tmp_path / "run"


def test_train_equals_the_library_function(ok, stack_file, text_file, tmp_path):
    result = ok(
        "train", stack_file, "--text", text_file, "--out", tmp_path / "a", "--steps", 6, "--seed", 3, *QUICK, "--json"
    )
    config = TrainConfig(steps=6, length=8, batch=2, every=3, seed=3, backend="reference", compile=False)
    expected = train(StackSpec.load(stack_file), load_text(text_file), config)
    for actual, point in zip(result.json["points"], expected.points, strict=True):
        actual["tokens_per_second"] = point.tokens_per_second
        assert actual == point.model_dump()
    assert result.json["config"] == config.model_dump()
    assert result.json["source"] == str(text_file)


def test_until_and_resume_equal_an_uninterrupted_run(ok, stack_file, text_file, folder, tmp_path):
    half = tmp_path / "half"
    ok("train", stack_file, "--text", text_file, "--out", half, "--steps", 6, "--until", 4, *QUICK)
    result = ok("train", "--resume", half)
    assert "after 6 steps" in result.out
    expected, actual = (torch.load(path / "checkpoint.pt", weights_only=True)["model"] for path in (folder, half))
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_a_resumed_run_can_stop_compiling(ok, stack_file, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("deltazoo.blocks.training.train.compile_layers", lambda model: model)
    options = ("--length", 8, "--batch", 2, "--backend", "reference", "--steps", 2)
    ok("train", stack_file, "--text", text_file, "--out", tmp_path, *options, "--until", 1)
    monkeypatch.setattr("deltazoo.blocks.training.train.compile_layers", lambda model: pytest.fail("it was compiled"))
    assert ok("train", "--resume", tmp_path, "--no-compile", "--json").json["config"]["compile"] is False


def test_the_last_line_holds_the_last_validation_loss(ok, folder):
    result = ok("train", "--resume", folder, "--json").json
    printed = ok("train", "--resume", folder).out
    assert f"{result['points'][-1]['validation_bits']:.3f} bits per byte on validation after 6 steps" in printed


def test_the_default_folder_is_named_after_the_stack(ok, stack_file, text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ok("train", stack_file, "--text", text_file, "--steps", 1, *QUICK)
    assert (tmp_path / "runs" / "tiny" / "checkpoint.pt").exists()


def test_the_help_shows_the_defaults_of_the_library(ok, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    help_defaults = dict(re.findall(r"--([a-z-]+)\s.*\[default: \(?([^\])]+)\)?\]", ok("train", "--help").out))
    fields = {"lr": "learning_rate"}
    defaults = TrainConfig()
    checked = 0
    for option, text in help_defaults.items():
        field = fields.get(option, option.replace("-", "_"))
        if field in TrainConfig.model_fields and field != "compile":
            value = getattr(defaults, field)
            assert type(value)(text) == value, option
            checked += 1
    assert checked == 12


def test_generate_prints_the_prompt_and_its_completion(ok, folder):
    options = ("--prompt", "9 green", "--max-bytes", 30, "--seed", 2)
    result = ok("generate", folder, *options, "--json").json
    assert result["prompt"] == "9 green"
    assert result["bytes"] == 30
    assert ok("generate", folder, *options).out == f"9 green{result['text']}\n"
    assert ok("generate", folder, *options[:-1], 3, "--json").json["text"] != result["text"]


def test_generate_at_temperature_zero_is_greedy(ok, folder):
    from deltazoo.blocks.training.checkpoint import load_model

    result = ok("generate", folder, "--prompt", "1 g", "--max-bytes", 3, "--temperature", 0, "--json").json
    model, tokens = load_model(folder, backend="reference"), list(b"1 g")
    for _ in range(3):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0][0, -1].argmax()))
    assert result["text"] == bytes(tokens[3:]).decode("utf-8", "replace")


def test_demo_without_matplotlib_says_so_before_the_work(run, text_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("deltazoo.blocks.training.demo.train", lambda *args, **kwargs: sys.exit("training started"))
    result = run("demo", "--text", text_file, "--out", tmp_path / "demo")
    reason = "plots need matplotlib: pip install 'deltazoo[plot]'"
    assert result.err.splitlines()[0] == f"the report will have no plots: {reason}"


def test_a_signal_prints_the_command_that_continues(run, ok, stack_file, text_file, tmp_path, monkeypatch):
    folder = tmp_path / "a run"
    with monkeypatch.context() as patch:
        patch.setattr("deltazoo.blocks.training.train._Run._warm_up", lambda _: signal.raise_signal(signal.SIGTERM))
        result = run("train", stack_file, "--text", text_file, "--out", folder, "--steps", 6, *QUICK)
    assert result.code == 128 + signal.SIGTERM
    continuation = f"deltazoo train --resume '{folder}'"
    assert result.err == f"stopped by SIGTERM after step 0; checkpoint in {folder}; continue with: {continuation}\n"
    assert "after 7 steps" in ok(*shlex.split(continuation)[1:], "--steps", 7, "--device", "cpu").out


def test_a_signal_prints_one_json_document(run, stack_file, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("deltazoo.blocks.training.train._Run._warm_up", lambda _: signal.raise_signal(signal.SIGINT))
    result = run("train", stack_file, "--text", text_file, "--out", tmp_path, "--steps", 6, *QUICK, "--json")
    assert result.code == 128 + signal.SIGINT
    assert result.json["interrupted"] == {
        "message": f"SIGINT after step 0; checkpoint in {tmp_path}",
        "step": 0,
        "folder": str(tmp_path),
        "continue": f"deltazoo train --resume {tmp_path}",
    }


def test_generate_says_that_it_compiles(ok, folder, monkeypatch):
    compiled = []
    monkeypatch.setattr("deltazoo.blocks.generation.generate._compiled_step", lambda _: compiled.append(1) or _step)
    eager = ok("generate", folder, "--max-bytes", 9)
    assert (eager.err, compiled) == ("", [])
    result = ok("generate", folder, "--max-bytes", 9, "--compile")
    assert result.err.startswith("compiling the decode step")
    assert compiled == [1]
    assert result.out == eager.out


def test_evaluate_prints_the_library_result(ok, folder, text_file):
    options = ("--text", text_file, "--length", 8, "--batch", 2, "--backend", "reference")
    expected = deltazoo.evaluate(deltazoo.load(folder, backend="reference"), text_file, length=8, batch=2)
    assert ok("evaluate", folder, *options, "--json").json == expected.model_dump()
    assert ok("evaluate", folder, *options).out == f"{expected.line()}\n"
    whole = deltazoo.evaluate(deltazoo.load(folder, backend="reference"), text_file, 8, 2, batches=None)
    assert ok("evaluate", folder, *options, "--batches", 0, "--json").json == whole.model_dump()
