"""Text with the tokenizer of a folder of transformers."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import deltazoo
from deltazoo import LanguageModel, Sampling, StackSpec
from deltazoo.backends.io.errors import ConfigError
from deltazoo.cli import app
from deltazoo.mixers import Attention

pytest.importorskip("tokenizers")

WORDS = ["<end>", "<unk>", "red", "green", "blue", "é", "."]
END = 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose model continues each word with the next one of `WORDS`, and ends after the last."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.decoder = decoders.Fuse()
    spec = StackSpec(
        width=len(WORDS), depth=1, vocab=len(WORDS), pattern=Attention(heads=1, key_value_heads=1, head_width=4),
        mlp={"width": 3}, tied=False,
    )  # fmt: skip
    model = spec.build()
    with torch.no_grad():
        for parameter in model.stack.layers.parameters():
            parameter.zero_()  # the layers add nothing
        model.embedding.weight.copy_(torch.eye(len(WORDS)))
        model.head.weight.copy_(torch.eye(len(WORDS)).roll(1, 0))
    model.save_pretrained(tmp_path / "a", model_type="llama")
    tokenizer.save(str(tmp_path / "a" / "tokenizer.json"))
    (tmp_path / "a" / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, 77]}))
    return tmp_path / "a"


def greedy(model: LanguageModel, prompt: str, **fields: object) -> tuple[str, str, int]:
    pieces: list[str] = []
    result = deltazoo.generate(model, prompt, Sampling(temperature=0, **fields), pieces.append)
    assert "".join(pieces) == result.text
    return result.text, result.reason, result.tokens


def test_a_text_is_continued_up_to_the_end_token_a_stop_text_or_the_limit(folder: Path) -> None:
    model = deltazoo.from_pretrained(folder)
    assert model.tokenizer.end == (END, 77)
    assert model.tokenizer.decode(model.tokenizer.encode("red")) == "red"
    assert greedy(model, "red") == ("greenblueé.", "end", 5)
    assert greedy(model, "red", max_tokens=2) == ("greenblue", "max_tokens", 2)
    assert greedy(model, "red", stop=("x", "bl")) == ("greenbl", "stop", 2)


def test_the_end_tokens_of_config_json_serve_without_a_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 6}))
    assert greedy(deltazoo.from_pretrained(folder), "red") == ("greenblueé", "end", 4)


def test_a_saved_folder_keeps_the_tokenizer_and_the_command_generates(folder: Path, tmp_path: Path) -> None:
    deltazoo.from_pretrained(folder).save_pretrained(tmp_path / "b")
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (folder / name).read_bytes()
    result = CliRunner().invoke(app, ["generate", str(tmp_path / "b"), "--prompt", "red", "--temperature", "0"])
    assert result.exit_code == 0, result.output
    assert result.stdout == "redgreenblueé.\n"
    assert "the model ended the text after 5 tokens" in result.stderr


def test_missing_and_damaged_tokenizers_are_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    model = deltazoo.from_pretrained(folder)
    with pytest.raises(ConfigError, match=r"tokenizer.json is damaged"):
        deltazoo.generate(model, "red")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer.json, which text needs: give tokens"):
        deltazoo.generate(model, "red")
    assert model.generate(torch.tensor([[2]]), Sampling(max_tokens=2, temperature=0)).tolist() == [[3, 4]]
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ConfigError, match="must be a token or a list of tokens, got 'x'"):
        deltazoo.from_pretrained(folder)


def test_a_folder_of_256_tokens_without_a_tokenizer_is_one_of_bytes(tmp_path: Path) -> None:
    layer = Attention(heads=1, key_value_heads=1, head_width=4)
    spec = StackSpec(width=4, depth=1, vocab=256, pattern=layer, mlp={"width": 3})
    spec.build().save_pretrained(tmp_path / "a", model_type="llama")
    model = deltazoo.load(tmp_path / "a")
    assert model.tokenizer is None
    assert deltazoo.generate(model, "ab", Sampling(max_tokens=3)).bytes == 3


LLAMA_WORDS = ["<end>", "<unk>", "▁red", "▁green", "▁blue", "<0xE2>", "."]


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({}, " green blue\ufffd.", "end"),
        ({"max_tokens": 3}, " green blue\ufffd", "max_tokens"),
        ({"stop": (" green",)}, " green", "stop"),
        ({"stop": ("x", "e\ufffd")}, " green blue\ufffd", "stop"),
    ],
)
def test_generate_and_the_engine_give_the_text_that_follows_the_prompt(
    folder: Path, fields: dict[str, object], text: str, reason: str
) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {word: i for i, word in enumerate(LLAMA_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.save(str(folder / "tokenizer.json"))
    model = deltazoo.from_pretrained(folder)
    assert greedy(model, "red", **fields)[:2] == (text, reason)
    engine = deltazoo.Engine(model, slots=1, cache_tokens=64)
    request = engine.submit("red", Sampling(temperature=0, **{"max_tokens": 9, **fields}))
    assert "".join(event.text for event in engine) == request.text == text
    assert request.reason == reason
