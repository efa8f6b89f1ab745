"""Text: disjoint training and validation parts, and crops that depend only on the seed and the step."""

import pytest
import torch

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.data.text import even_crops, load_text, random_crops


@pytest.fixture
def numbered(tmp_path):
    """A file of 3,000 distinct three-byte words, so that the content of a window gives its position."""
    path = tmp_path / "numbered.txt"
    path.write_bytes(b"".join(bytes([1 + n // 200, 1 + n % 200, 255]) for n in range(3000)))
    return path


def _words(tokens):
    return {tuple(tokens[i : i + 2].tolist()) for i in range(len(tokens) - 2) if tokens[i + 2] == 255}


def test_the_parts_are_disjoint_and_cover_the_file(numbered):
    text = load_text(numbered)
    assert not _words(text.train) & _words(text.validation)
    assert len(text.train) + len(text.validation) == 9000
    assert len(text.validation) == 900
    whole = sorted(text.train.tolist() + text.validation.tolist())
    assert whole == sorted(numbered.read_bytes())


def test_split_and_digest_depend_only_on_the_text(numbered, tmp_path):
    copy = tmp_path / "elsewhere.txt"
    copy.write_bytes(numbered.read_bytes())
    one, two = load_text(numbered), load_text(copy)
    assert torch.equal(one.train, two.train)
    assert torch.equal(one.validation, two.validation)
    assert one.digest == two.digest
    copy.write_bytes(numbered.read_bytes()[:-1] + b"x")
    assert load_text(copy).digest != one.digest


def test_the_default_text_is_python_source_without_tests():
    text = load_text()
    train, held_out = bytes(text.train.numpy()), bytes(text.validation.numpy())
    assert len(train) > 3_000_000
    assert 0.03 < len(held_out) / len(train) < 0.3
    assert train.count(b"def ") > 10_000
    assert b"class BaseHTTPRequestHandler" in train + held_out


def test_targets_are_the_inputs_shifted_by_one_byte(numbered):
    text = load_text(numbered)
    batch = random_crops(text.train, 4, 50, seed=3, step=7)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    data = bytes(text.train.numpy())
    for row, target in zip(batch.inputs, batch.targets, strict=True):
        assert bytes([*row.tolist(), int(target[-1])]) in data


def test_crops_depend_only_on_seed_and_step(numbered):
    tokens = load_text(numbered).train
    first = random_crops(tokens, 8, 32, seed=1, step=5).inputs
    random_crops(tokens, 8, 32, seed=1, step=6)
    torch.rand(3)
    assert torch.equal(first, random_crops(tokens, 8, 32, seed=1, step=5).inputs)
    assert not torch.equal(first, random_crops(tokens, 8, 32, seed=1, step=6).inputs)
    assert not torch.equal(first, random_crops(tokens, 8, 32, seed=2, step=5).inputs)


def test_even_crops_reach_from_the_first_byte_to_the_last(numbered):
    tokens = load_text(numbered).validation
    batches = even_crops(tokens, batch=3, length=40, batches=4)
    assert len(batches) == 4
    assert batches[0].inputs[0].tolist() == tokens[:40].tolist()
    assert batches[-1].targets[-1].tolist() == tokens[-40:].tolist()


@pytest.mark.parametrize("data", [b"", b"too short"])
def test_a_text_too_short_to_split_is_refused(tmp_path, data):
    path = tmp_path / "short.txt"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"short\.txt must contain at least 20 bytes, got {len(data)}"):
        load_text(path)


def test_a_binary_file_is_refused(tmp_path):
    path = tmp_path / "image.png"
    path.write_bytes(b"\x89PNG\r\n" + bytes(100))
    with pytest.raises(ConfigError, match="must contain text, got a binary file: byte 6 is 0"):
        load_text(path)


def test_a_part_shorter_than_a_window_is_refused(numbered):
    text = load_text(numbered)
    with pytest.raises(ConfigError, match="length 900 must be shorter than each part of the text, got a part of 900"):
        even_crops(text.validation, 1, 900, 1)
    with pytest.raises(ConfigError, match="got a part of 8100"):
        random_crops(text.train, 1, 9000, 0, 0)
