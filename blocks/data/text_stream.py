"""The text of tokens that arrive one by one, in pieces of whole characters."""

import codecs
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

from deltazoo.blocks.data.text import BYTES

_REPLACEMENT = "\ufffd"
_PROMPT_TOKENS = 4  # at the end of a prompt that are read, as many as a character has bytes
_MOST_NEW = 16  # tokens without a whole character that are decoded together


class TextStream(ABC):
    """Returns the text of tokens as they arrive. Bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def step(self, token: int) -> str:
        """Return the text that a token completes, or ""."""

    @abstractmethod
    def flush(self) -> str:
        """Return the text of an incomplete last character: U+FFFD, or "" if there is none."""


@final
class ByteStream(TextStream):
    """The text of tokens that are bytes; those above 255 count as 255."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token: int) -> str:
        """Return the text that a byte completes, or ""."""
        return self._decoder.decode(bytes([min(token, BYTES - 1)]))

    def flush(self) -> str:
        """Return the text of an incomplete last character."""
        return self._decoder.decode(b"", final=True)


@final
class Vocabulary:
    """The tokens of a tokenizer of the package tokenizers.

    Attributes:
        special: the tokens without text.
        bytes: the tokens that are single bytes, and their values. The package replaces all bytes of a run if one of
            them is invalid, so a stream does not decode them with it.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token for token, entry in added.items() if entry.special)
        self._decode, self._lengths = tokenizer.decode, dict[int, int]()
        found = ((tokenizer.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(BYTES))
        self.bytes = {
            token: byte for token, byte in found if token is not None and self.decode([token]) != f"<0x{byte:02X}>"
        }

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        text: str = self._decode(tokens, skip_special_tokens=True)
        return text

    def length(self, tokens: list[int]) -> int:
        """Return the length of the text of tokens."""
        if len(tokens) != 1:
            return len(self.decode(tokens))
        length = self._lengths.get(tokens[0])
        if length is None:
            length = self._lengths[tokens[0]] = len(self.decode(tokens))
        return length


@final
class TokenStream(TextStream):
    """The text of the tokens that follow a prompt.

    The text of a token may depend on the one before: tokenizers such as Llama's drop the space before the first word of
    a text. Therefore new tokens are decoded after those of the last piece, at first after the end of the prompt.
    """

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._last: list[int] = []  # the tokens of the last piece
        self._new: list[int] = []  # the tokens after them
        self._start = 0  # of the text that has not been returned, in the text of both
        text = (token for token in reversed(prompt) if token not in vocabulary.special)
        for token in reversed(list(itertools.islice(text, _PROMPT_TOKENS))):
            self.step(token)

    def step(self, token: int) -> str:
        """Return the text that a token completes, or ""."""
        if token in self._vocabulary.special:
            return ""
        byte = self._vocabulary.bytes.get(token)
        if byte is None:
            self._new.append(token)
            return self._decoder.decode(b"", final=True) + self._take()
        piece = self._take(final=True) if self._new else ""
        self._keep([token])
        return piece + self._decoder.decode(bytes([byte]))

    def flush(self) -> str:
        """Return the text of an incomplete last character."""
        return self._decoder.decode(b"", final=True) + self._take(final=True)

    def _take(self, final: bool = False) -> str:
        """Return the new text without a U+FFFD at its end, which may be the start of a character."""
        text = self._vocabulary.decode([*self._last, *self._new])
        is_full = final or len(self._new) >= _MOST_NEW
        is_whole = is_full or not text.endswith(_REPLACEMENT)
        piece = text[self._start : len(text) - (not is_whole)]
        if is_whole and piece:
            self._keep(self._new)
        elif is_full:  # none of them has text
            self._new = []
        else:
            self._start += len(piece)
        return piece

    def _keep(self, tokens: list[int]) -> None:
        """Decode later tokens after these."""
        self._last, self._new = tokens, []
        self._start = self._vocabulary.length(tokens)
