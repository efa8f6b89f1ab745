"""Token shards: the files that sources name, and the tokens of their documents."""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from training_cases import SPEC

import deltazoo
from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.data import readers, writing
from deltazoo.blocks.data.preview import summary_lines
from deltazoo.blocks.data.shards import TokenShards, open_shards
from deltazoo.blocks.data.tokenizer import Tokenizer
from deltazoo.blocks.data.writing import ShardConfig, write_shards

WORDS = ("<end>", "<unk>", "red", "green", "blue")
END, RED, GREEN, BLUE = 0, 2, 3, 4


@pytest.fixture
def tokenizer() -> Any:
    """A tokenizer of `WORDS`, which adds nothing to a text."""
    tokenizers = pytest.importorskip("tokenizers", reason="deltazoo[data] is not installed")
    vocabulary = {word: n for n, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def written(folder: Path, tokenizer: Any, *lines: dict[str, str]) -> TokenShards:
    """Write the JSON lines, the tokenizer and the data folder of both."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = ShardConfig(tokenizer=str(folder), end="<end>", fields=tuple(lines[0]))
    write_shards([folder / "a.jsonl"], folder / "data", config, processes=1)
    return open_shards(folder / "data")


def write_tokens(path: Path, tokens: list[int]) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = readers.BIN_MAGIC, readers.BIN_VERSION, len(tokens)
    path.write_bytes(header.tobytes() + np.array(tokens, "<u2").tobytes())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files a.txt and b.txt, and beside it a link to it."""
    (tmp_path / "in").mkdir()
    for name in "ab":
        (tmp_path / "in" / f"{name}.txt").write_text(f"text {name}")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    return tmp_path / "in"


def texts(folder: Path, part: Literal["train", "validation"] = "train") -> list[str]:
    return [bytes(tokens).decode() for tokens in documents(open_shards(folder, part))]


def documents(shards: TokenShards) -> list[list[int]]:
    return [shards.document(n).tolist() for n in range(shards.documents)]


def test_truncation_and_padding_of_a_tokenizer_are_ignored(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=3, pad_id=BLUE)
    shards = written(tmp_path, tokenizer, {"text": "red green blue green"}, {"text": "red"})
    assert documents(shards) == [[RED, GREEN, BLUE, GREEN, END], [RED, END]]
    assert Tokenizer(tmp_path).encode("red green blue green") == [RED, GREEN, BLUE, GREEN]
    assert Tokenizer(tmp_path).encode("red") == [RED]


@pytest.mark.parametrize("appends", [False, True])
def test_end_tokens_within_texts_are_kept_and_documents_end_in_one(
    tmp_path: Path, tokenizer: Any, appends: bool
) -> None:
    if appends:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(single="$A <end>", special_tokens=[("<end>", END)])
    shards = written(
        tmp_path, tokenizer, {"prompt": "red <end>", "answer": "green blue"}, {"prompt": "red", "answer": "blue <end>"}
    )
    assert documents(shards) == [[RED, END, GREEN, BLUE, END], [RED, BLUE, END]]
    assert [shards.prompt(n) for n in range(2)] == [2, 1]
    (tmp_path / "texts").mkdir()
    shards = written(tmp_path / "texts", tokenizer, {"text": "red <end> green"}, {"text": "blue <end>"}, {"text": ""})
    assert documents(shards) == [[RED, END, GREEN, END], [BLUE, END]]


@pytest.mark.parametrize("name", ["in/../in/b.txt", "link/b.txt"])
def test_a_file_is_one_file_by_any_of_its_paths(tmp_path: Path, folder: Path, name: str) -> None:
    held = str(tmp_path / name)
    write_shards([folder], tmp_path / "data", ShardConfig(tokenizer="bytes", validation=(held,)), processes=1)
    assert texts(tmp_path / "data") == ["text a"]
    assert texts(tmp_path / "data", "validation") == ["text b"]
    with pytest.raises(ConfigError, match=rf"{name} must be named once, got it before as {folder / 'b.txt'}"):
        write_shards([folder, held], tmp_path / "twice", ShardConfig(tokenizer="bytes"), processes=1)
    (folder / "c.txt").symlink_to("b.txt")
    write_shards([folder], tmp_path / "once", ShardConfig(tokenizer="bytes"), processes=1)
    assert texts(tmp_path / "once") == ["text a", "text b"]


def test_an_interrupted_call_continues_inside_its_source(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(writing, "_joined", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_shards([folder], folder / "data", ShardConfig(tokenizer="bytes"), processes=1)
    assert [*(folder / "data.unfinished" / "units").iterdir()]
    write_shards([folder], folder / "data", ShardConfig(tokenizer="bytes"), processes=1)
    assert texts(folder / "data") == ["text a", "text b"]


def test_links_to_folders_are_followed_once(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "c.txt").write_text("text c")
    (tmp_path / "other" / "back").symlink_to(folder)
    for name in ("x", "y"):
        (folder / name).symlink_to(tmp_path / "other")
    write_shards([folder], tmp_path / "data", ShardConfig(tokenizer="bytes"), processes=1)
    assert texts(tmp_path / "data") == ["text a", "text b", "text c"]


@pytest.mark.parametrize(
    ("tokens", "skipped"),
    [
        ([END, RED, END, BLUE], 0),
        ([RED, END, BLUE, END], 0),
        ([END, RED, END, BLUE, END], 0),
        ([RED, END, END, BLUE], 1),
    ],
)
def test_an_end_token_at_either_end_of_a_token_file_is_no_document(
    tmp_path: Path, tokenizer: Any, tokens: list[int], skipped: int
) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_tokens(tmp_path / "a.bin", tokens)
    config = ShardConfig(tokenizer=str(tmp_path), end="<end>")
    assert write_shards([tmp_path / "a.bin"], tmp_path / "data", config, processes=1).skipped == skipped
    assert documents(open_shards(tmp_path / "data")) == [[RED, END], [BLUE, END]]


@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_part_with_a_token_file_has_no_bits_per_byte(tmp_path: Path, tokenizer: Any, has_tokens: bool) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("red green blue")
    write_tokens(tmp_path / "b.bin", [RED, GREEN, BLUE] * 50)
    held = tuple(str(tmp_path / name) for name in (["a.txt", "b.bin"] if has_tokens else ["a.txt"]))
    (tmp_path / "c.txt").write_text("green")
    config = ShardConfig(tokenizer=str(tmp_path), end="<end>", validation=held)
    index = write_shards([tmp_path / "c.txt"], tmp_path / "data", config, processes=1)
    train, validation = list(summary_lines(tmp_path / "data", index))[:2]
    assert train.endswith("5 bytes of text")
    assert validation.endswith("bytes of text unknown" if has_tokens else "14 bytes of text")
    evaluation = deltazoo.evaluate(SPEC.build("reference"), tmp_path / "data", length=8, batch=1, batches=0)
    expected = None if has_tokens else pytest.approx(evaluation.bits_per_token * 3 / 14)
    assert evaluation.bits_per_byte == expected
    assert ("(per byte: unknown)" in evaluation.line()) == has_tokens
