"""The text of tokens that arrive one by one equals that of all tokens together."""

from pathlib import Path

import pytest

from deltazoo.blocks.data.text_stream import ByteStream
from deltazoo.blocks.data.tokenizer import Tokenizer

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁world", "a", "b", "▁a"]
LLAMA = {word: token for token, word in enumerate(WORDS)}


@pytest.fixture
def llama(tmp_path: Path) -> Tokenizer:
    """A tokenizer with the decoder of Llama: words start with a space, and unknown characters are bytes."""
    decoders, models = tokenizers.decoders, tokenizers.models
    made = tokenizers.Tokenizer(models.BPE(LLAMA, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(WORDS[:3])
    (tmp_path / "llama").mkdir()
    made.save(str(tmp_path / "llama" / "tokenizer.json"))
    return Tokenizer(tmp_path / "llama")


@pytest.fixture
def gpt(tmp_path: Path) -> Tokenizer:
    """A tokenizer with the decoder of GPT-2, whose tokens are the 256 bytes."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    (tmp_path / "gpt").mkdir()
    made.save(str(tmp_path / "gpt" / "tokenizer.json"))
    return Tokenizer(tmp_path / "gpt")


def pieces(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    stream = tokenizer.decode_stream(prompt)
    return [stream.step(token) for token in tokens]


def bytes_of(text: str | bytes) -> list[int]:
    return [LLAMA[f"<0x{byte:02X}>"] for byte in (text.encode() if isinstance(text, str) else text)]


@pytest.mark.parametrize(
    "prompt", [["a"], ["<s>", "a", "</s>", *5 * ["<s>"]], ["▁world", *6 * ["<0x0A>"]], ["<0xE2>", "<0x82>", "<0xAC>"]]
)
def test_the_first_word_after_a_prompt_keeps_its_space(llama: Tokenizer, prompt: list[str]) -> None:
    assert pieces(llama, [LLAMA[word] for word in prompt], [LLAMA[w] for w in ("▁world", "▁a", "b")]) == [
        " world", " a", "b"
    ]  # fmt: skip


@pytest.mark.parametrize("prompt", [[], [LLAMA["<s>"]]])
def test_the_first_word_of_a_text_has_no_space(llama: Tokenizer, prompt: list[int]) -> None:
    words = [LLAMA[word] for word in ("▁world", "</s>", "▁", "▁a")]
    assert pieces(llama, prompt, words) == ["world", "", " ", " a"]
    assert "".join(pieces(llama, prompt, words)) == llama.decode([*prompt, *words])


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_invalid_bytes_are_replaced_and_the_text_continues(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    alphabet = dict(tokenizers.Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json")).get_vocab())
    texts = (
        b"\n\xe2bc",
        b"x\xff\xe2\x82\xacy",
        "€".encode() + b"\xff" + "😀!".encode(),
        b"\xff" * 40 + b"z",
        b"\xed\xa0x",
    )
    for data in texts:
        tokens = bytes_of(data) if name == "llama" else [alphabet[_letter(byte)] for byte in data]
        stream = tokenizer.decode_stream(tokens[:0])
        assert "".join(map(stream.step, tokens)) == data.decode("utf-8", "replace"), data


def test_characters_are_not_split(llama: Tokenizer, gpt: Tokenizer) -> None:
    assert pieces(llama, [LLAMA["a"]], bytes_of("é€😀")) == ["", "é", "", "", "€", "", "", "", "😀"]
    tokens = gpt.encode("é€😀b")
    assert pieces(gpt, tokens[-1:], tokens) == ["", "é", "", "", "€", "", "", "", "😀", "b"]
    assert pieces(gpt, tokens[:3], tokens[3:5]) == ["", "€"]


def test_tokens_without_text_do_not_slow_the_stream(llama: Tokenizer) -> None:
    stream = llama.decode_stream([LLAMA["a"]])
    assert [stream.step(9999) for _ in range(100)] == [""] * 100
    assert len(stream._new) < 20
    assert stream.step(LLAMA["▁a"]) == " a"


def _letter(byte: int) -> str:
    """The letter of a byte in the vocabulary of GPT-2."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in shown else chr(256 + sum(other not in shown for other in range(byte)))


def test_an_incomplete_last_character_is_replaced(llama: Tokenizer, gpt: Tokenizer) -> None:
    cut = "€".encode()[:2]
    byte_level = [gpt.encode("€")[0], gpt.encode("€")[1]]
    for stream, tokens in (
        (ByteStream(), list(cut)),
        (llama.decode_stream([]), bytes_of(cut)),
        (gpt.decode_stream([]), byte_level),
    ):
        assert [stream.step(token) for token in tokens] == ["", ""]
        assert [stream.flush(), stream.flush()] == ["\ufffd", ""]
