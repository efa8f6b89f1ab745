"""Writing: the text is what the decoder draws, in pieces that add up."""

import pytest
import torch

from deltazoo.backends.errors import ConfigError
from deltazoo.blocks.generation.completion import Sampling, write
from deltazoo.blocks.generation.generate import generate
from deltazoo.blocks.spec import StackSpec

SPEC = StackSpec(
    width=16,
    depth=2,
    vocab=256,
    pattern="gated_deltanet(heads=1) + attention(heads=1)",
    mlp={"width": 16},
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    found = SPEC.build(backend="reference")
    with torch.no_grad():
        found.embedding.weight.normal_()
    return found


def test_pieces_add_up_to_the_bytes_that_generate_draws(model):
    sampling = Sampling(max_bytes=60, temperature=1.3, top_k=100, top_p=0.95, seed=3)
    pieces = []
    written = write(model, "naïve ", sampling, pieces.append)
    tokens = torch.tensor([list("naïve ".encode())])
    drawn = generate(model, tokens, 60, temperature=1.3, top_k=100, top_p=0.95, generator=3)[0]
    assert written.text == bytes(drawn.tolist()).decode("utf-8", "replace")
    assert "".join(pieces) == written.text
    assert all(pieces)
    assert written.bytes == 60
    assert written.bytes_per_second > 0


def test_characters_of_several_bytes_come_whole(model, monkeypatch):
    drawn = [torch.tensor([byte]) for byte in "é€😀".encode() + b"\xff\xf0"]
    monkeypatch.setattr("deltazoo.blocks.generation.completion.stream", lambda *args: iter(drawn))
    pieces = []
    assert write(model, "x", hear=pieces.append).text == "é€😀\ufffd\ufffd"
    assert pieces == ["é", "€", "😀", "\ufffd", "\ufffd"]


def test_it_stops_after_the_stop_text(model):
    whole = write(model, "a", Sampling(max_bytes=40, temperature=0)).text
    stop = whole[3:5]
    written = write(model, "a", Sampling(max_bytes=40, temperature=0, stop=stop))
    assert written.text == whole[: whole.index(stop) + 2]


def test_an_empty_prompt_and_a_small_vocabulary_are_refused_in_words(model):
    with pytest.raises(ConfigError, match="prompt must hold at least one character, got ''"):
        write(model, "")
    with pytest.raises(ConfigError, match="prompt must be text in UTF-8, got"):
        write(model, b"\xff\xfe".decode(errors="surrogateescape"))
    small = StackSpec(width=16, depth=1, vocab=100, pattern="attention(heads=1)").build()
    with pytest.raises(ConfigError, match="vocab must be at least 256 to write bytes, got 100"):
        write(small, "a")
