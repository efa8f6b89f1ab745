"""train and generate: figures of real runs, and a checkpoint that the one writes and the other reads."""

import re

import pytest
import torch

from deltazoo.blocks.spec import StackSpec
from deltazoo.blocks.training.text import load_text
from deltazoo.blocks.training.train import TrainConfig, train

QUICK = ("--length", 8, "--batch", 2, "--every", 3, "--backend", "reference", "--no-compile")


@pytest.fixture
def folder(ok, stack_file, text_file, tmp_path):
    ok("train", stack_file, "--text", text_file, "--out", tmp_path / "run", "--steps", 6, *QUICK)
    return tmp_path / "run"


def test_train_is_the_library_s_training(ok, stack_file, text_file, tmp_path):
    said = ok(
        "train", stack_file, "--text", text_file, "--out", tmp_path / "a", "--steps", 6, "--seed", 3, *QUICK, "--json"
    )
    config = TrainConfig(steps=6, length=8, batch=2, every=3, seed=3, backend="reference", compile=False)
    want = train(StackSpec.load(stack_file), load_text(text_file), config)
    for got, point in zip(said.json["points"], want.points, strict=True):
        got["tokens_per_second"] = point.tokens_per_second
        assert got == point.model_dump()
    assert said.json["config"] == config.model_dump()
    assert said.json["source"] == str(text_file)


def test_train_until_and_resume_end_where_a_straight_run_does(ok, stack_file, text_file, folder, tmp_path):
    half = tmp_path / "half"
    ok("train", stack_file, "--text", text_file, "--out", half, "--steps", 6, "--until", 4, *QUICK)
    said = ok("train", "--resume", half)
    assert "after 6 steps" in said.out
    one, other = (torch.load(path / "checkpoint.pt", weights_only=True)["model"] for path in (folder, half))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_printed_line_holds_the_last_validation(ok, folder):
    found = ok("train", "--resume", folder, "--json").json
    printed = ok("train", "--resume", folder).out
    assert f"{found['points'][-1]['validation_bits']:.3f} bits per byte on validation after 6 steps" in printed


def test_the_folder_is_named_after_the_stack_if_none_is_given(ok, stack_file, text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ok("train", stack_file, "--text", text_file, "--steps", 1, *QUICK)
    assert (tmp_path / "runs" / "tiny" / "checkpoint.pt").exists()


def test_the_defaults_that_the_help_shows_are_those_of_the_library(ok, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = dict(re.findall(r"--([a-z-]+)\s.*\[default: \(?([^\])]+)\)?\]", ok("train", "--help").out))
    fields = {"lr": "learning_rate"}
    defaults = TrainConfig()
    checked = 0
    for option, text in shown.items():
        field = fields.get(option, option.replace("-", "_"))
        if field in TrainConfig.model_fields and field != "compile":
            value = getattr(defaults, field)
            assert type(value)(text) == value, option
            checked += 1
    assert checked == 11


def test_generate_prints_the_prompt_and_what_it_writes(ok, folder):
    options = ("--prompt", "9 green", "--max-bytes", 30, "--seed", 2)
    found = ok("generate", folder, *options, "--json").json
    assert found["prompt"] == "9 green"
    assert found["bytes"] == 30
    assert ok("generate", folder, *options).out == f"9 green{found['text']}\n"
    assert ok("generate", folder, *options[:-1], 3, "--json").json["text"] != found["text"]


def test_generate_at_temperature_zero_takes_the_likeliest_byte(ok, folder):
    from deltazoo.blocks.training.checkpoint import load_model

    found = ok("generate", folder, "--prompt", "1 g", "--max-bytes", 3, "--temperature", 0, "--json").json
    model, tokens = load_model(folder, backend="reference"), list(b"1 g")
    for _ in range(3):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0][0, -1].argmax()))
    assert found["text"] == bytes(tokens[3:]).decode("utf-8", "replace")
