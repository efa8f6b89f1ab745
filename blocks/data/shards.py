"""Token shards: a folder of memory-mapped tokens and document offsets, and the index that describes it.

`NAME.tokens` holds the tokens of consecutive documents as little-endian uint16 or uint32. `NAME.offsets`, int64 of the
number of documents plus one, holds where each begins, in tokens. `NAME.prompts`, uint32, holds the number of tokens of
each document's prompt, which get no loss; data without prompts has no such file.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from deltazoo.backends.io.errors import ConfigError, cut, file_errors
from deltazoo.backends.io.frozen_config import FrozenConfig, describe_errors

INDEX, TOKENIZER = "index.json", "tokenizer.json"
FORMAT = 1  # of the folder; readers refuse others
Part = Literal["train", "validation"]
PARTS: tuple[Part, ...] = ("train", "validation")


class TokenizerOrigin(FrozenConfig):
    """The tokenizer of a data folder.

    Args: name: "bytes" or "tokenizer.json", which the folder contains; digest: SHA-256 of the file; vocab: number of
        tokens; end: the token after each document, None: there is none.
    """

    name: Literal["bytes", "tokenizer.json"]
    digest: str
    vocab: int
    end: int | None


class Shard(FrozenConfig):
    """One shard. Args: name: of its files, without the suffix; digest: SHA-256 of the bytes of its files."""

    name: str
    documents: int
    tokens: int
    digest: str


class PartIndex(FrozenConfig):
    """The counts of a part.

    Args: text_bytes: UTF-8 bytes of the text that was encoded; 0 if any document is from a token file.
    """

    documents: int
    tokens: int
    text_bytes: int
    shards: tuple[Shard, ...]


class ShardIndex(FrozenConfig):
    """The file index.json of a data folder.

    Args:
        dtype: of the tokens.
        prompts: whether documents have a prompt.
        skipped: number of documents without text, which are left out.
        sources: what was encoded, for the reader.
        parts: "train" and "validation".
    """

    format: int
    dtype: Literal["uint16", "uint32"]
    tokenizer: TokenizerOrigin
    prompts: bool
    skipped: int
    sources: tuple[str, ...]
    parts: dict[Part, PartIndex]

    @property
    def digest(self) -> str:
        """SHA-256 of all but the sources: equal for equal data, wherever it was read from."""
        content = json.dumps(self.model_dump(mode="json", exclude={"sources"}), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


class Places(NamedTuple):
    """Where documents are. file: [n] index of `TokenShards.files`; begin, length, prompt: [n] in tokens."""

    file: NDArray[np.int64]
    begin: NDArray[np.int64]
    length: NDArray[np.int64]
    prompt: NDArray[np.int64]


class TokenShards:
    """The memory-mapped documents of one part of a data folder.

    Attributes:
        index: the index of the folder.
        digest: of the folder's data, see `ShardIndex.digest`.
        documents, tokens: their numbers in this part. `tokens` includes the end token of each document.
        text_bytes: UTF-8 bytes of the text, for bits per byte; 0 if unknown.
        files: the tokens of each shard, [n] uint16 or uint32.
    """

    def __init__(self, folder: Path, index: ShardIndex, part: Part) -> None:
        self.folder, self.index, self.part = folder, index, part
        counts = index.parts[part]
        self.digest = index.digest
        self.documents, self.tokens, self.text_bytes = counts.documents, counts.tokens, counts.text_bytes
        self.files, self._offsets, self._prompts = [], list[NDArray[np.int64]](), list[NDArray[np.uint32]]()
        for shard in counts.shards:
            path = folder / shard.name
            self.files.append(_mapped(path.with_suffix(".tokens"), np.dtype(index.dtype), shard.tokens))
            self._offsets.append(_mapped(path.with_suffix(".offsets"), np.dtype(np.int64), shard.documents + 1))
            if index.prompts:
                self._prompts.append(_mapped(path.with_suffix(".prompts"), np.dtype(np.uint32), shard.documents))
        self._first = np.cumsum([0, *(shard.documents for shard in counts.shards)])  # document of each shard

    def locate(self, documents: NDArray[np.int64]) -> Places:
        """Return where documents are. Args: documents: [n], each in [0, self.documents)."""
        file = np.searchsorted(self._first, documents, side="right") - 1
        local = documents - self._first[file]
        begin, end, prompt = (np.zeros(len(documents), np.int64) for _ in range(3))
        for number in np.unique(file):
            of_file = file == number
            begin[of_file] = self._offsets[number][local[of_file]]
            end[of_file] = self._offsets[number][local[of_file] + 1]
            if self._prompts:
                prompt[of_file] = self._prompts[number][local[of_file]]
        return Places(file, begin, end - begin, prompt)

    def document(self, number: int) -> NDArray[np.int64]:
        """Return the tokens of a document, with its end token. Raises: IndexError."""
        if not 0 <= number < self.documents:
            raise IndexError(f"document must be in [0, {self.documents}), got {number}")
        place = self.locate(np.array([number]))
        begin, length = int(place.begin[0]), int(place.length[0])
        return self.files[place.file[0]][begin : begin + length].astype(np.int64)

    def prompt(self, number: int) -> int:
        """Return the number of tokens of a document's prompt, 0 without one."""
        return int(self.locate(np.array([number])).prompt[0])

    @cached_property
    def positions(self) -> int:
        """Number of tokens that have a next token in their document: the inputs of one epoch."""
        return self.tokens - self.documents

    def verify(self) -> None:
        """Read all files, and compare them with the digests of the index. Raises: ConfigError: a file has changed."""
        for shard in self.index.parts[self.part].shards:
            if shard_digest(self.folder / shard.name, self.index.prompts) != shard.digest:
                raise ConfigError(f"the files of shard {self.folder / shard.name} have changed since they were written")


def open_shards(folder: str | Path, part: Part = "train") -> TokenShards:
    """Open a folder that `deltazoo data` wrote. The files are memory-mapped: only documents that are used are read.

    Args: part: "train" or "validation".
    Raises: ConfigError: the folder is no data folder, is unfinished or damaged, or has no such part.
    """
    folder = Path(folder)
    index = read_index(folder)
    if part not in index.parts:
        raise ConfigError(f"part must be one of {', '.join(index.parts)} of {folder}, got {cut(part)}")
    return TokenShards(folder, index, part)


def read_index(folder: Path) -> ShardIndex:
    """Read the index of a data folder. Raises: ConfigError."""
    path = folder / INDEX
    if not path.is_file():
        raise ConfigError(f"{folder} is not a data folder, it has no {INDEX}: write one with deltazoo data")
    with file_errors("read", path):
        text = path.read_text(encoding="utf-8")
    try:
        fields = json.loads(text)
        if isinstance(fields, dict) and fields.get("format") != FORMAT:
            raise ConfigError(f"{path}: format must be {FORMAT}, got {cut(fields.get('format'))}: write the data again")
        return ShardIndex.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe_errors((), error, ShardIndex)}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


def shard_digest(path: Path, prompts: bool) -> str:
    """Return the SHA-256 of the bytes of a shard's files. Args: path: without suffix. Raises: ConfigError."""
    digest = hashlib.sha256()
    for suffix in (".tokens", ".offsets", *([".prompts"] if prompts else [])):
        with file_errors("read", path.with_suffix(suffix)), path.with_suffix(suffix).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Map a file of `count` numbers. Raises: ConfigError: it is missing or has another size."""
    with file_errors("read", path):
        size = path.stat().st_size
        if size != count * dtype.itemsize:
            raise ConfigError(f"{path} is damaged: it must have {count * dtype.itemsize} bytes, got {size}")
        # slices of a plain array are several times as fast as those of np.memmap
        return np.asarray(np.memmap(path, dtype.newbyteorder("<"), mode="r")) if size else np.zeros(0, dtype)
