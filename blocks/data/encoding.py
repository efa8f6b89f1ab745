"""From text to the tokens of a document: bytes, or the tokenizer.json of a model.

Importing this file does not import torch, so that the processes that encode start fast.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from deltazoo.backends.io.errors import ConfigError, cut, file_errors
from deltazoo.blocks.data.shards import TOKENIZER, TokenizerOrigin

BYTES_NAME = "bytes"  # in place of a file: each byte of the UTF-8 text is a token
NO_END = "none"


class Encoder(ABC):
    """Encodes texts. origin: the tokenizer, as the index of the data folder describes it."""

    origin: TokenizerOrigin

    @abstractmethod
    def encode(self, texts: Sequence[str], is_start: bool = True) -> list[NDArray[np.int64]]:
        """Return the tokens of each text. No end token is added.

        Args: is_start: add the tokens that the tokenizer puts before a text.
        """

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""


@final
class ByteEncoder(Encoder):
    """Encodes bytes. Documents have no end token."""

    def __init__(self) -> None:
        digest = hashlib.sha256(BYTES_NAME.encode()).hexdigest()
        self.origin = TokenizerOrigin(name="bytes", digest=digest, vocab=256, end=None)

    def encode(self, texts: Sequence[str], is_start: bool = True) -> list[NDArray[np.int64]]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes; bytes that are not UTF-8 become U+FFFD."""
        return bytes(tokens).decode("utf-8", "replace")


@final
class FileEncoder(Encoder):
    """Encodes with a tokenizer.json.

    Args: end: the end token's text, "none", or None for the eos_token of tokenizer_config.json in the same folder.
    Raises: ConfigError: the file cannot be read, or the end token is unknown.
    """

    def __init__(self, path: Path, end: str | None = None) -> None:
        self._tokenizer = load_tokenizer(path)
        with file_errors("read", path):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        vocab = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        token = self._end(path, end)
        self.origin = TokenizerOrigin(name="tokenizer.json", digest=digest, vocab=vocab, end=token)

    def encode(self, texts: Sequence[str], is_start: bool = True) -> list[NDArray[np.int64]]:
        """Return the tokens of each text, without an end token that the tokenizer itself appends."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=is_start)
        tokens = [np.array(encoding.ids, np.int64) for encoding in found]
        end = self.origin.end
        return [
            # the mask is 1 for the tokens that the tokenizer adds, 0 for special tokens within the text
            ids[:-1] if len(ids) and ids[-1] == end and encoding.special_tokens_mask[-1] else ids
            for ids, encoding in zip(tokens, found, strict=True)
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def _end(self, path: Path, end: str | None) -> int | None:
        if end == NO_END:
            return None
        name = _end_of_config(path.parent) if end is None else end
        special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
        known = f"its special tokens: {', '.join(special[:20]) or 'none'}"
        if name is None:
            raise ConfigError(
                f"{path} does not say which token ends a document: give its text as end, or none; {known}"
            )
        token: int | None = self._tokenizer.token_to_id(name)
        if token is None:
            raise ConfigError(f"end must be a token of {path}, got {cut(name)}; {known}")
        return token


def make_encoder(tokenizer: str, end: str | None = None) -> Encoder:
    """Return the encoder of "bytes", of a tokenizer.json, or of a folder that contains one. Raises: ConfigError."""
    if tokenizer == BYTES_NAME:
        if end not in (None, NO_END):
            raise ConfigError(f"end must be {NO_END} with the tokenizer bytes, which has no end token, got {cut(end)}")
        return ByteEncoder()
    path = Path(tokenizer)
    return FileEncoder(path / TOKENIZER if path.is_dir() else path, end)


def load_tokenizer(path: Path) -> Any:
    """Read a tokenizer.json, without the truncation and padding that it may store.

    Raises: ConfigError: it is missing or damaged, or the package tokenizers is missing.
    """
    if not path.is_file():
        raise ConfigError(f"cannot read the tokenizer {path}: no such file")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(f"{path} needs the package tokenizers: pip install 'deltazoo[data]'") from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises Exception
        raise ConfigError(f"{path} is damaged: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _end_of_config(folder: Path) -> str | None:
    """Return the eos_token of tokenizer_config.json, None without one."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    with file_errors("read", path):
        text = path.read_text(encoding="utf-8")
    try:
        token = json.loads(text).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
