"""Files of prompts are continued line by line, and an interrupted run is resumed."""

import json

import pytest
import torch

from deltazoo import Sampling
from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.generation.completion import generate
from deltazoo.blocks.generation.engine import prompt_file
from deltazoo.blocks.generation.engine.prompt_file import generate_file
from deltazoo.blocks.generation.generate import generate_tokens

SAMPLING = Sampling(max_tokens=6, seed=10)


@pytest.fixture
def model(build, spec):
    return build(spec.model_copy(update={"vocab": 256})).float()


def write(path, *lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def read(path):
    return {entry["id"]: entry for entry in map(json.loads, path.read_text().splitlines())}


def test_each_prompt_has_the_continuation_of_a_call_alone(model, tmp_path):
    tokens, nan = [5, 6, 7], [1, 2]
    prompts = write(
        tmp_path / "in.jsonl",
        {"prompt": "some\u2028text"},
        {"prompt": "other", "id": "b", "max_tokens": 3, "seed": 2},
        "",
        {"prompt": tokens, "temperature": 0},
        {"prompt": nan, "logprobs": 1},
    )
    calls = []
    result = generate_file(
        model, prompts, tmp_path / "new" / "out.jsonl", SAMPLING, 2, progress=lambda *x: calls.append(x)
    )
    entries = read(tmp_path / "new" / "out.jsonl")
    first = generate(model, "some\u2028text", SAMPLING)
    assert first.text.startswith(entries[0]["text"])
    assert entries[0]["reason"] == "max_tokens"
    assert generate(model, "other", Sampling(max_tokens=3, seed=2)).text.startswith(entries["b"]["text"])
    greedy = generate_tokens(model, torch.tensor([tokens]), Sampling(max_tokens=6, temperature=0))
    assert entries[2]["tokens"] == greedy[0].tolist()
    sampled = generate_tokens(model, torch.tensor([nan]), SAMPLING.model_copy(update={"seed": 13}))
    assert entries[3]["tokens"] == sampled[0].tolist()
    assert len(entries[3]["logprobs"]) == 6
    assert (result.completed, result.failed, result.skipped, result.tokens) == (4, 0, 0, 6 + 3 + 6 + 6)
    assert [call[:3] for call in calls] == [("prompts", n, 4) for n in range(5)]


def test_short_prompts_use_all_slots(model, tmp_path, monkeypatch):
    """The caches have whole pages for each slot."""
    in_progress = []

    class Counting(prompt_file.Engine):
        def step(self):
            events = super().step()
            in_progress.append(len(self._decoding))
            return events

    monkeypatch.setattr(prompt_file, "Engine", Counting)
    prompts = write(tmp_path / "in.jsonl", *({"prompt": [n, n + 1, 3]} for n in range(12)))
    generate_file(model, prompts, tmp_path / "out.jsonl", SAMPLING.model_copy(update={"max_tokens": 20}), slots=10)
    assert max(in_progress) == 10


def test_an_interrupted_file_is_resumed(model, tmp_path, monkeypatch):
    prompts = write(tmp_path / "in.jsonl", *({"prompt": [n, n], "max_tokens": n + 1} for n in range(6)))
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    generate_file(model, prompts, whole, SAMPLING)
    step, calls = prompt_file.Engine.step, []

    def interrupted(engine):
        calls.append(engine)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(engine)

    with monkeypatch.context() as patched:
        patched.setattr(prompt_file.Engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate_file(model, prompts, out, SAMPLING, 2)
    done = len(read(out))
    assert 0 < done < 6
    with out.open("a") as file:
        file.write('{"id": 5, "tok')  # cut in the middle of a line
    result = generate_file(model, prompts, out, SAMPLING, 2)
    assert (result.completed, result.skipped) == (6 - done, done)
    assert read(out) == read(whole)
    assert generate_file(model, prompts, out, SAMPLING).completed == 0


@pytest.mark.parametrize(
    ("sentence", "lines"),
    [
        ("line 2 is not JSON", [{"prompt": "a"}, "{"]),
        ("line 1 must be a JSON object", ["[]"]),
        ("line 1 has unknown fields promt", [{"promt": "a"}]),
        ("line 1: prompt must be a text or a list of tokens, not empty, got ''", [{"prompt": ""}]),
        ("line 1: prompt must be a text or a list of tokens", [{"prompt": [1, "a"]}]),
        ("line 2: two prompts have the id 1", [{"prompt": "a", "id": 1}, {"prompt": "b"}]),
        ("line 1: id must be a text or an integer", [{"prompt": "a", "id": 1.5}]),
        ("line 1: Sampling: temperature must be at least 0", [{"prompt": "a", "temperature": -1}]),
        (
            r"line 2: the tokens of a prompt must be integers in \[0, 256\), got 999",
            [{"prompt": "a"}, {"prompt": [999]}],
        ),
        ("line 2: seed must be a number or None", [{"prompt": "a"}, {"prompt": "a", "seed": [1]}]),
        (r"line 1: stop must contain tokens in \[0, 256\)", [{"prompt": "a", "stop": [999]}, {"prompt": "a"}]),
        (r"line 1: prompt must be text in UTF-8, got '\\ud800'", [{"prompt": "\ud800"}]),
        ("temperature must be 0 or at least 1e-30, got 1e-40", [{"prompt": "a", "temperature": 1e-40}]),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_with_its_number(model, tmp_path, sentence, lines):
    with pytest.raises(ConfigError, match=sentence):
        generate_file(model, write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    "text",
    ["my notes", "first line\nmy notes", '{"id": 1, "reason": "stop"}\nmy notes', '{"id": "a", "prompt": "x"}\n'],
)
def test_a_file_that_is_no_output_is_refused_and_kept(model, tmp_path, text):
    out = tmp_path / "out.jsonl"
    out.write_text(text)
    with pytest.raises(ConfigError, match=r"out\.jsonl, (last )?line"):
        generate_file(model, write(tmp_path / "in.jsonl", {"prompt": "abc"}), out, SAMPLING)
    assert out.read_text() == text


def test_the_prompts_are_not_the_output(model, tmp_path):
    prompts = write(tmp_path / "in.jsonl", {"id": "a", "prompt": "abc"})
    with pytest.raises(ConfigError, match=r"the output must be another file than the prompts, got"):
        generate_file(model, prompts, prompts, SAMPLING)


def test_a_text_without_tokens_and_a_text_without_a_vocabulary_are_refused(model, build, spec, tmp_path):
    class Empty:
        end = ()

        def encode(self, text):
            return []

        decode_stream = None

    prompts = write(tmp_path / "in.jsonl", {"prompt": [1]}, {"prompt": "a"})
    model.tokenizer = Empty()
    with pytest.raises(ConfigError, match=r"in\.jsonl, line 2: a prompt must have at least one token, got none"):
        generate_file(model, prompts, tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match=r"in\.jsonl, line 2: a prompt of text needs a vocabulary of bytes"):
        generate_file(build(spec), prompts, tmp_path / "out.jsonl")


def test_a_file_of_other_bytes_is_refused_and_a_byte_order_mark_is_skipped(model, tmp_path):
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"in\.jsonl must be text in UTF-8: invalid start byte at byte 12"):
        generate_file(model, prompts, out, SAMPLING)
    prompts.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert generate_file(model, prompts, out, SAMPLING).completed == 2
