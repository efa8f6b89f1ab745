"""Text as bytes: a training part and a validation part that share nothing, and crops of them.

B batch, T time
"""

import hashlib
import itertools
import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deltazoo.backends.errors import ConfigError

BYTES = 256  # the least vocabulary of a model that reads them
_BLOCKS = 20  # a single file is cut into so many blocks
_EVERY = 10  # and every tenth of them, or of the files, is validation
_NOT_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Text(NamedTuple):
    """train, validation: uint8 [n], bytes that share no position; digest: of both.

    source: where from, in words; path: absolute, or None for the standard library's sources.
    """

    train: Tensor
    validation: Tensor
    digest: str
    source: str
    path: str | None


class Batch(NamedTuple):
    """inputs and targets: int64 [B, T]; targets are the inputs one byte later."""

    inputs: Tensor
    targets: Tensor


def load_text(path: str | Path | None = None) -> Text:
    """Read a text file, or the standard library's own sources where there is no path.

    The sources are split by file, every tenth to validation; a single file is cut into twenty blocks, of which
    the tenth and the twentieth are validation. The split depends on nothing but the text.

    Raises: ConfigError, for a binary file and one too short to be split; OSError, where it cannot be read.
    """
    if path is None:
        return _standard_library()
    data = Path(path).read_bytes()
    if (zero := data.find(b"\0")) >= 0:
        raise ConfigError(f"text file {path} must hold text, got a binary file: byte {zero} is 0")
    if len(data) < _BLOCKS:
        raise ConfigError(f"text file {path} must hold at least {_BLOCKS} bytes, got {len(data)}")
    bounds = np.linspace(0, len(data), _BLOCKS + 1).astype(int)
    return _split(
        [data[start:stop] for start, stop in itertools.pairwise(bounds)], str(path), str(Path(path).absolute())
    )


def crops(tokens: Tensor, batch: int, length: int, seed: int, step: int) -> Batch:
    """Take `batch` random windows; the same (seed, step) gives the same windows, whatever came before.

    Args: tokens: uint8 [n] with n > length.
    Raises: ConfigError where the text is too short.
    """
    _long_enough(tokens, length)
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - length, size=batch)
    return _windows(tokens, starts, length)


def sweep(tokens: Tensor, batch: int, length: int, batches: int) -> list[Batch]:
    """Take windows spread evenly over the whole text, always the same ones: for validation."""
    _long_enough(tokens, length)
    starts = np.linspace(0, len(tokens) - length - 1, batch * batches).astype(np.int64)
    return [_windows(tokens, part, length) for part in starts.reshape(batches, batch)]


def _standard_library() -> Text:
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _NOT_SOURCES]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort(key=lambda path: path.relative_to(root).as_posix())
    if len(files) < _EVERY:
        raise ConfigError(f"this Python carries no sources of its standard library in {root}; give a text file")
    source = f"sources of the standard library of Python {sysconfig.get_python_version()}"
    return _split([path.read_bytes() for path in files], source, None)


def _split(pieces: list[bytes], source: str, path: str | None) -> Text:
    held_out = b"".join(piece for n, piece in enumerate(pieces, 1) if n % _EVERY == 0)
    train = b"".join(piece for n, piece in enumerate(pieces, 1) if n % _EVERY)
    digest = hashlib.sha256(held_out + b"\0" + train).hexdigest()
    return Text(_tensor(train), _tensor(held_out), digest, source, path)


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def _long_enough(tokens: Tensor, length: int) -> None:
    if len(tokens) <= length:
        raise ConfigError(f"length {length} must be shorter than each part of the text, got a part of {len(tokens)}")


def _windows(tokens: Tensor, starts: np.ndarray[tuple[int, ...], np.dtype[np.int64]], length: int) -> Batch:
    at = torch.from_numpy(starts)[:, None] + torch.arange(length + 1)
    window = tokens[at].long()
    return Batch(window[:, :-1].contiguous(), window[:, 1:].contiguous())
