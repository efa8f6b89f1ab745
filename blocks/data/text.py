"""Text as bytes: disjoint training and validation parts, and batches of crops.

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

from deltazoo.backends.io.errors import ConfigError, file_errors
from deltazoo.backends.update.check import check_type

BYTES = 256  # smallest vocabulary of a model of bytes
_BLOCKS = 20  # a single file is cut into this many blocks
_VALIDATION_PERIOD = 10  # every tenth block, or file of the standard library, is validation text
_NOT_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Text(NamedTuple):
    """A text that is split into a training and a validation part.

    train, validation: uint8 [n], disjoint parts of the text.
    digest: SHA-256 of both parts.
    source: description of the origin.
    path: absolute path of the file, or None for the sources of the standard library.
    """

    train: Tensor
    validation: Tensor
    digest: str
    source: str
    path: str | None


class Batch(NamedTuple):
    """inputs and targets: int64 [B, T]; the targets are the inputs shifted by one byte."""

    inputs: Tensor
    targets: Tensor


def load_text(path: str | Path | None = None) -> Text:
    """Read a text file, the files of a folder, or the sources of Python's standard library if there is no path.

    Of several files, in the order of their paths, every tenth is validation text. A single file is cut into twenty
    blocks, of which the tenth and the twentieth are validation text. The split depends only on the text.

    Raises: ConfigError: the file cannot be read, is binary, or is too short to split; InputError: wrong type.
    """
    check_type("text", path, str | Path | None, "a path, a Text or None")
    if path is None:
        return _standard_library()
    if Path(path).is_dir():
        return _folder(Path(path))
    data = _read(Path(path))
    if len(data) < _BLOCKS:
        raise ConfigError(f"text file {path} must contain at least {_BLOCKS} bytes, got {len(data)}")
    bounds = np.linspace(0, len(data), _BLOCKS + 1).astype(int)
    blocks = [data[start:stop] for start, stop in itertools.pairwise(bounds)]
    return _split(blocks, str(path), str(Path(path).absolute()))


def as_text(text: Text | str | Path | None) -> Text:
    """Return a text unchanged, and read that of a path; errors as for `load_text`."""
    return text if isinstance(text, Text) else load_text(text)


def random_crops(tokens: Tensor, batch: int, length: int, seed: int, step: int) -> Batch:
    """Cut `batch` random windows. The windows depend only on the seed and the step.

    Args: tokens: uint8 [n] with n > length.
    Raises: ConfigError: the text is too short.
    """
    _check_length(tokens, length)
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - length, size=batch)
    return _windows(tokens, starts, length)


def even_crops(tokens: Tensor, batch: int, length: int, batches: int) -> list[Batch]:
    """Cut windows that are evenly spaced over the whole text, for validation.

    Raises: ConfigError: the text is too short.
    """
    _check_length(tokens, length)
    starts = np.linspace(0, len(tokens) - length - 1, batch * batches).astype(np.int64)
    return [_windows(tokens, row, length) for row in starts.reshape(batches, batch)]


def covering_crops(tokens: Tensor, batch: int, length: int) -> list[Batch]:
    """Cut consecutive windows from the start of the text; a rest shorter than a window is left out.

    Raises: ConfigError: the text is too short.
    """
    _check_length(tokens, length)
    starts = np.arange(0, len(tokens) - length, length)
    return [_windows(tokens, starts[first : first + batch], length) for first in range(0, len(starts), batch)]


def _standard_library() -> Text:
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_SOURCES]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort(key=lambda path: path.relative_to(root).as_posix())
    if len(files) < _VALIDATION_PERIOD:
        raise ConfigError(f"this Python has no sources of its standard library in {root}; give a text file")
    source = f"sources of the standard library of Python {sysconfig.get_python_version()}"
    return _split([path.read_bytes() for path in files], source, None)


def _folder(root: Path) -> Text:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    if len(files) < _VALIDATION_PERIOD:
        raise ConfigError(f"folder {root} must have at least {_VALIDATION_PERIOD} text files, got {len(files)}")
    return _split([_read(path) for path in files], str(root), str(root.absolute()))


def _read(path: Path) -> bytes:
    with file_errors("read", path):
        data = path.read_bytes()
    if (zero := data.find(b"\0")) >= 0:
        raise ConfigError(f"text file {path} must contain text, got a binary file: byte {zero} is 0")
    return data


def _split(blocks: list[bytes], source: str, path: str | None) -> Text:
    validation = b"".join(block for n, block in enumerate(blocks, 1) if n % _VALIDATION_PERIOD == 0)
    train = b"".join(block for n, block in enumerate(blocks, 1) if n % _VALIDATION_PERIOD)
    digest = hashlib.sha256(validation + b"\0" + train).hexdigest()
    return Text(_tensor(train), _tensor(validation), digest, source, path)


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def _check_length(tokens: Tensor, length: int) -> None:
    if len(tokens) <= length:
        raise ConfigError(f"length {length} must be shorter than each part of the text, got a part of {len(tokens)}")


def _windows(tokens: Tensor, starts: np.ndarray[tuple[int, ...], np.dtype[np.int64]], length: int) -> Batch:
    index = torch.from_numpy(starts)[:, None] + torch.arange(length + 1)
    window = tokens[index].long()
    return Batch(window[:, :-1].contiguous(), window[:, 1:].contiguous())
