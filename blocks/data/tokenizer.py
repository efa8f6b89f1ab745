"""The tokenizer of a folder of transformers: text to tokens and back, and the tokens that end a text."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deltazoo.backends.io.errors import ConfigError, cut, file_errors
from deltazoo.blocks.data.encoding import load_tokenizer
from deltazoo.blocks.data.shards import TOKENIZER
from deltazoo.blocks.data.text import BYTES
from deltazoo.blocks.data.text_stream import TextStream, TokenStream, Vocabulary

GENERATION = "generation_config.json"
# What a folder has beside its weights: the tokenizer, and what other programs need of it
_FILES = (
    TOKENIZER, GENERATION, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip


class Tokenizer:
    """Encode and decode text by the tokenizer.json of a folder, which the package tokenizers reads at the first use.

    Attributes: end: the tokens that end a text.
    """

    def __init__(self, folder: Path, end: tuple[int, ...] = ()) -> None:
        self.folder, self.end = folder, end
        self._loaded: Any = None
        self._vocabulary: Vocabulary | None = None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the tokenizer puts around a text. Raises: ConfigError."""
        tokens: list[int] = self._tokenizer().encode(text).ids
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, without special tokens. Raises: ConfigError."""
        text: str = self._tokenizer().decode(tokens, skip_special_tokens=True)
        return text

    def decode_stream(self, prompt: Sequence[int]) -> TextStream:
        """Return the text of the tokens that follow a prompt, without special tokens. Raises: ConfigError."""
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._tokenizer())
        return TokenStream(self._vocabulary, prompt)

    def copy_files(self, target: Path) -> None:
        """Copy the files of the tokenizer and of generation. Raises: ConfigError: one cannot be copied."""
        for name in _FILES:
            if (self.folder / name).is_file():
                with file_errors("write", target / name):
                    shutil.copyfile(self.folder / name, target / name)

    def _tokenizer(self) -> Any:
        if self._loaded is None:
            path = self.folder / TOKENIZER
            if not path.is_file():
                raise ConfigError(f"{self.folder} has no {TOKENIZER}, which text needs: give tokens")
            self._loaded = load_tokenizer(path)
        return self._loaded


def read_tokenizer(folder: Path, config: Mapping[str, Any], vocab: int) -> Tokenizer | None:
    """Return the tokenizer of a folder; None for a vocabulary of 256 without a tokenizer.json, which is one of bytes.

    The end tokens are those of generation_config.json, or else of config.json.

    Raises: ConfigError: generation_config.json is damaged, or an end token is no integer.
    """
    if vocab == BYTES and not (folder / TOKENIZER).is_file():
        return None
    path, fields = folder / GENERATION, dict(config)
    if path.is_file():
        with file_errors("read", path):
            text = path.read_text(encoding="utf-8")
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from None
        if isinstance(found, dict) and found.get("eos_token_id") is not None:
            fields = found
    end = fields.get("eos_token_id")
    tokens = [] if end is None else end if isinstance(end, list) else [end]
    if not all(type(token) is int for token in tokens):
        raise ConfigError(f"eos_token_id in {folder} must be a token or a list of tokens, got {cut(end)}")
    return Tokenizer(folder, tuple(tokens))
