"""Encode one unit of the input into a file of its own: the work of one process of `write_shards`."""

import hashlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import parent_process
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltazoo.backends.io.errors import ConfigError, file_errors
from deltazoo.blocks.data.encoding import Encoder, make_encoder
from deltazoo.blocks.data.readers import Record, Rules, Unit, read_tokens, records

_SLAB = 1 << 20  # characters of text that are encoded at once


class UnitTask(NamedTuple):
    """One unit and the file of its tokens.

    is_validation: whether its documents are held out; None: the key of each document decides.
    """

    unit: Unit
    is_validation: bool | None
    target: Path


class Encoding(NamedTuple):
    """How units are encoded.

    tokenizer, end: as for `make_encoder`.
    """

    tokenizer: str
    end: str | None
    rules: Rules


class EncodedUnit(NamedTuple):
    """The documents of one unit, n of them.

    tokens: [sum of lengths] uint16 or uint32; lengths: [n] with the end token; prompts: [n] tokens of the prompts;
    text_bytes: [n] UTF-8 bytes of the texts, 0 for token files; keys: [n] in [0, 1), equal for equal texts; skipped:
    number of documents without text.
    """

    tokens: NDArray[np.uint16 | np.uint32]
    lengths: NDArray[np.int64]
    prompts: NDArray[np.uint32]
    text_bytes: NDArray[np.int64]
    keys: NDArray[np.float64]
    skipped: int


class _Document(NamedTuple):
    tokens: NDArray[np.int64]
    prompt: int
    text_bytes: int
    key: bytes


def encode_unit(task: UnitTask, encoder: Encoder, encoding: Encoding) -> int:
    """Write the file of one unit, at once, and return the number of its documents. Raises: ConfigError."""
    origin = encoder.origin
    dtype = token_dtype(origin.vocab)
    tokens: list[NDArray[np.uint16 | np.uint32]] = []
    counts: list[tuple[int, int, int]] = []
    keys: list[float] = []
    skipped = 0
    for document in _documents(task.unit, encoder, encoding.rules):
        if not len(document.tokens):
            skipped += 1
            continue
        is_ended = origin.end is None or document.tokens[-1] == origin.end
        ending = np.array([] if is_ended else [origin.end], dtype)
        tokens += [document.tokens.astype(dtype), ending]
        counts.append((len(document.tokens) + len(ending), document.prompt, document.text_bytes))
        keys.append(_fraction(document.key))
    columns = np.array(counts, np.int64).reshape(-1, 3)
    partial = task.target.with_suffix(".partial")
    with file_errors("write", partial), partial.open("wb") as file:
        np.savez(
            file,
            tokens=np.concatenate([np.zeros(0, dtype), *tokens]),
            lengths=columns[:, 0],
            prompts=columns[:, 1].astype(np.uint32),
            text_bytes=columns[:, 2],
            keys=np.array(keys, np.float64),
            skipped=np.array(skipped),
        )
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, task.target)
    return len(counts)


def read_unit(path: Path) -> EncodedUnit:
    """Read the file of one unit."""
    with file_errors("read", path), np.load(path) as data:
        fields = {name: data[name] for name in EncodedUnit._fields}
    return EncodedUnit(**{**fields, "skipped": int(fields["skipped"])})


def token_dtype(vocab: int) -> np.dtype[np.uint16 | np.uint32]:
    """Return the smallest dtype of a shard that holds every token."""
    return np.dtype(np.uint16 if vocab <= 1 << 16 else np.uint32)


def _documents(unit: Unit, encoder: Encoder, rules: Rules) -> Iterator[_Document]:
    if unit.kind == "bin":
        for tokens in read_tokens(unit, encoder.origin.vocab, encoder.origin.end):
            yield _Document(tokens, 0, 0, tokens.tobytes())
        return
    for slab in _slabs(records(unit, rules)):
        texts = [record.text.encode() for record in slab]
        if len(rules.fields) == 1:
            encoded = encoder.encode([record.text for record in slab])
            for tokens, text in zip(encoded, texts, strict=True):
                yield _Document(tokens if text else tokens[:0], 0, len(text), text)
            continue
        prompts = [record.prompt or "" for record in slab]
        before, after = encoder.encode(prompts), encoder.encode([record.text for record in slab], is_start=False)
        for prompt, first, rest, text in zip(prompts, before, after, texts, strict=True):
            tokens = np.concatenate([first, rest]) if text else rest
            yield _Document(tokens, len(first), len(text), prompt.encode())


def _slabs(found: Iterator[Record]) -> Iterator[Sequence[Record]]:
    slab, size = list[Record](), 0
    for record in found:
        slab.append(record)
        size += len(record.text) + len(record.prompt or "")
        if size >= _SLAB:
            yield slab
            slab, size = [], 0
    if slab:
        yield slab


def _fraction(key: bytes) -> float:
    """Return a hash of a document's text as a number in [0, 1), so that equal documents are in the same part."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "little") / 2**48


class _Worker:
    """What a process keeps between units."""

    encoder: Encoder
    encoding: Encoding


def start_worker(encoding: Encoding) -> None:
    """Prepare a process that encodes with one thread, and that leaves Ctrl-C to its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _Worker.encoding = encoding
    _Worker.encoder = make_encoder(encoding.tokenizer, encoding.end)


def _exit_with_parent() -> None:
    """End this process when its parent has been killed; it would wait for work forever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def work(task: UnitTask) -> int:
    """Encode one unit in a process of `start_worker`. Raises: ConfigError."""
    try:
        return encode_unit(task, _Worker.encoder, _Worker.encoding)
    except MemoryError as error:
        raise ConfigError(f"{task.unit.paths[0]} does not fit into memory: use fewer processes") from error
