"""Write the shards of one part of a data folder from the documents of its units."""

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from deltazoo.backends.io.errors import file_errors
from deltazoo.blocks.data.encoded_unit import EncodedUnit
from deltazoo.blocks.data.shards import Part, PartIndex, Shard

SHARD_TOKENS = 1 << 27  # a shard ends with the unit that reaches this number


class PartWriter:
    """Writes the shards of one part."""

    def __init__(self, folder: Path, part: Part, has_prompts: bool) -> None:
        self._folder, self._part, self._has_prompts = folder, part, has_prompts
        self._shards: list[Shard] = []
        self._text_bytes, self._has_token_files = 0, False
        self._file: BinaryIO | None = None

    def add(self, unit: EncodedUnit) -> None:
        """Append documents."""
        if not len(unit.lengths):
            return
        with file_errors("write", self._folder):
            if self._file is None:
                self._start()
            assert self._file is not None
            data = unit.tokens.astype(unit.tokens.dtype.newbyteorder("<")).tobytes()
            self._file.write(data)
            self._digest.update(data)
            self._lengths.append(unit.lengths)
            self._prompts.append(unit.prompts)
            self._text_bytes += int(unit.text_bytes.sum())
            self._has_token_files |= not unit.text_bytes.all()
            self._tokens += len(unit.tokens)
            if self._tokens >= SHARD_TOKENS:
                self._end()

    def finish(self) -> PartIndex:
        """Close the last shard, and return the counts."""
        if self._file is not None:
            with file_errors("write", self._folder):
                self._end()
        return PartIndex(
            documents=sum(shard.documents for shard in self._shards),
            tokens=sum(shard.tokens for shard in self._shards),
            text_bytes=0 if self._has_token_files else self._text_bytes,
            shards=tuple(self._shards),
        )

    def _start(self) -> None:
        self._name = f"{self._part}-{len(self._shards):05d}"
        self._file = self._path(".tokens").open("wb")
        self._digest, self._tokens = hashlib.sha256(), 0
        self._lengths: list[NDArray[np.int64]] = []
        self._prompts: list[NDArray[np.uint32]] = []

    def _end(self) -> None:
        assert self._file is not None
        _close(self._file)
        self._file = None
        lengths = np.concatenate(self._lengths)
        columns = {".offsets": np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")}
        if self._has_prompts:
            columns[".prompts"] = np.concatenate(self._prompts).astype("<u4")
        for suffix, values in columns.items():
            file = self._path(suffix).open("wb")
            file.write(values.tobytes())
            self._digest.update(values.tobytes())
            _close(file)
        digest = self._digest.hexdigest()
        self._shards.append(Shard(name=self._name, documents=len(lengths), tokens=self._tokens, digest=digest))

    def _path(self, suffix: str) -> Path:
        return self._folder / f"{self._name}{suffix}"


def _close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
