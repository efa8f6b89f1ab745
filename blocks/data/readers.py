"""The documents of text, JSON lines, Parquet, Arrow and token files, in units that are read independently."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltazoo.backends.io.errors import ConfigError, cut, file_errors

UNIT_BYTES = 16 << 20  # of a file's content; the units do not depend on the number of processes
BIN_MAGIC, BIN_VERSION, BIN_HEADER = 20240520, 1, 256  # of a token file; the header is 256 int32
_CHAT_FIELDS = ("messages", "conversations", "conversation", "chat")

Kind = Literal["text", "jsonl", "parquet", "arrow", "bin"]
_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow", ".bin": "bin",
}  # fmt: skip


class Unit(NamedTuple):
    """A part of the input that one process reads.

    paths: one file, or several whole text files.
    first, last: the part of the file: bytes of text and JSON lines; row groups of Parquet, record batches of Arrow.
    size: bytes, for the progress.
    """

    kind: Kind
    paths: tuple[str, ...]
    first: int
    last: int
    size: int


class Record(NamedTuple):
    """The text of a document, and the prompt before it, if any."""

    text: str
    prompt: str | None = None


class Rules(NamedTuple):
    """How files become documents.

    fields: the field of the text, or those of prompt and answer. separator: text between the documents of a text file;
    None: a text file is one document.
    """

    fields: tuple[str, ...]
    separator: str | None


def kind_of(path: Path) -> Kind:
    """Return how a file is read: by its suffix, and as text if that is unknown."""
    return _KINDS.get(path.suffix.lower(), "text")


def plan_units(paths: list[Path], rules: Rules) -> list[Unit]:
    """Split files into units, in the order of the files; consecutive small text files share one.

    Raises: ConfigError: a file cannot be read.
    """
    units: list[Unit] = []
    for path in paths:
        with file_errors("read", path):
            size = path.stat().st_size
        kind, name = kind_of(path), str(path)
        if kind == "text" and rules.separator is None:
            if units and units[-1].kind == "text" and units[-1].size + size <= UNIT_BYTES:
                previous = units.pop()
                units.append(previous._replace(paths=(*previous.paths, name), size=previous.size + size))
            else:
                units.append(Unit(kind, (name,), 0, 0, size))
        elif kind in ("text", "jsonl"):
            bounds = [*range(0, max(size, 1), UNIT_BYTES), size]
            units += [Unit(kind, (name,), a, b, b - a) for a, b in itertools.pairwise(bounds)]
        elif kind == "bin":
            units.append(Unit(kind, (name,), 0, 0, size))
        else:
            sizes = _parquet_sizes(path) if kind == "parquet" else _arrow_sizes(path)
            units += [Unit(kind, (name,), a, b, sum(sizes[a:b])) for a, b in _groups(sizes)]
    return units


def records(unit: Unit, rules: Rules) -> Iterator[Record]:
    """Yield the documents of a unit of text. Raises: ConfigError: names the file, the line or row, and the rule."""
    if unit.kind == "text":
        yield from _text_records(unit, rules)
    elif unit.kind == "jsonl":
        yield from _json_records(unit, rules)
    else:
        yield from _table_records(unit, rules)


def _text_records(unit: Unit, rules: Rules) -> Iterator[Record]:
    if len(rules.fields) > 1:
        raise ConfigError(f"{unit.paths[0]}: a text file has no fields {', '.join(rules.fields)}: give JSON lines")
    if rules.separator is not None:
        data, start = _piece(unit, rules.separator.encode())
        for at, document in _split(data, rules.separator.encode()):
            place = _line_of(unit.paths[0], start + at)
            yield Record(_decoded(document.strip(b"\r\n"), unit.paths[0], place))
        return
    for name in unit.paths:
        with file_errors("read", name):
            data = Path(name).read_bytes()
        yield Record(_decoded(data.removeprefix(b"\xef\xbb\xbf"), name, lambda: 1))


def _json_records(unit: Unit, rules: Rules) -> Iterator[Record]:
    path = unit.paths[0]
    data, start = _piece(unit, b"\n")
    for at, line in _split(data, b"\n"):
        if not line.strip():
            continue
        try:
            yield _record(json.loads(line), rules.fields)
        except (ValueError, RecursionError) as error:  # ValueError: also UnicodeDecodeError and ConfigError
            number = _line_of(path, start + at)()
            problem = f"must be a JSON object: {error}" if not isinstance(error, ConfigError) else f"{error}"
            raise ConfigError(f"{path}, line {number}: {problem}") from error


def _table_records(unit: Unit, rules: Rules) -> Iterator[Record]:
    path, row = unit.paths[0], -1
    pyarrow = _pyarrow(path)
    first, batches = (_parquet_batches if unit.kind == "parquet" else _arrow_batches)(unit, rules.fields)
    try:
        for batch in batches:
            columns = [batch.column(name).to_pylist() for name in rules.fields]
            for number, values in enumerate(zip(*columns, strict=True)):
                row = first + number
                yield _record(dict(zip(rules.fields, values, strict=True)), rules.fields)
            first += batch.num_rows
    except ConfigError as error:
        raise ConfigError(f"{path}, row {row + 1}: {error}") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _record(value: Any, fields: tuple[str, ...]) -> Record:
    """Return the record of one JSON object or row. Raises: ConfigError: the rule and what was found."""
    if not isinstance(value, dict):
        raise ConfigError(f"must be a JSON object, got {cut(value)}")
    texts = []
    for field in fields:
        if field not in value:
            raise ConfigError(_missing(field, list(value)))
        text = value[field]
        if isinstance(text, list) and text and isinstance(text[0], dict):
            raise ConfigError(_refused_chat(field))
        if not isinstance(text, str):
            raise ConfigError(f"field {field} must be a string, got {cut(text)}")
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ConfigError(f"field {field} must be Unicode text, got a lone surrogate in {cut(text)}")
        texts.append(text)
    return Record(texts[-1], texts[0] if len(texts) > 1 else None)


def _missing(field: str, names: list[str]) -> str:
    if chats := [name for name in names if name in _CHAT_FIELDS]:
        return _refused_chat(chats[0])
    return f"has no field {field}; its fields: {', '.join(map(str, names)) or 'none'}"


def _refused_chat(field: str) -> str:
    return (
        f"chat formats (field {field}) are not read: write a field prompt, formatted as the model expects it, "
        "and a field answer"
    )


def _piece(unit: Unit, separator: bytes) -> tuple[bytes, int]:
    """Return the whole records that begin in a unit's range of bytes, and the byte where the first one begins."""
    path = unit.paths[0]
    with file_errors("read", path), open(path, "rb") as file:
        start = _next_record(file, unit.first, separator)
        stop = max(start, _next_record(file, unit.last, separator))
        file.seek(start)
        data = file.read(stop - start)
    return (data[3:], start + 3) if start == 0 and data.startswith(b"\xef\xbb\xbf") else (data, start)


def _next_record(file: Any, position: int, separator: bytes) -> int:
    """Return where the first record begins at or after a position: 0, after a separator, or the end of the file."""
    if position == 0:
        return 0
    position -= len(separator)
    base = max(0, position)
    rest = b""
    file.seek(base)
    while block := file.read(1 << 16):
        data = rest + block
        if (found := data.find(separator)) >= 0:
            return base + found + len(separator)
        rest = data[len(data) - len(separator) + 1 :] if len(separator) > 1 else b""
        base += len(data) - len(rest)
    end: int = file.seek(0, 2)
    return end


def _split(data: bytes, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield each record and where it begins. The last separator ends a record; nothing follows it."""
    at = 0
    while at < len(data):
        stop = data.find(separator, at)
        stop = len(data) if stop < 0 else stop
        yield at, data[at:stop]
        at = stop + len(separator)


def _line_of(path: str, position: int) -> Callable[[], int]:
    """Return a function that counts the lines up to a byte of a file, from 1; only errors need it."""

    def line() -> int:
        lines, left = 1, position
        with file_errors("read", path), open(path, "rb") as file:
            while left and (block := file.read(min(left, 1 << 20))):
                lines, left = lines + block.count(b"\n"), left - len(block)
        return lines

    return line


def _decoded(data: bytes, path: str, first_line: Callable[[], int]) -> str:
    if (zero := data.find(b"\0")) >= 0:
        line = first_line() + data.count(b"\n", 0, zero)
        raise ConfigError(f"{path}, line {line}: must be text, got a binary file: a byte is 0")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = first_line() + data.count(b"\n", 0, error.start)
        raise ConfigError(f"{path}, line {line}: must be UTF-8 text, got byte 0x{data[error.start]:02x}") from error


def _pyarrow(path: str | Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(f"{path} needs the package pyarrow: pip install 'deltazoo[data]'") from error
    return pyarrow


def _groups(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of consecutive parts of at most UNIT_BYTES together, or of one part."""
    first, total = 0, 0
    for n, size in enumerate(sizes):
        if n > first and total + size > UNIT_BYTES:
            yield first, n
            first, total = n, 0
        total += size
    if sizes:
        yield first, len(sizes)


def _parquet_sizes(path: Path) -> list[int]:
    with _parquet(path) as file:
        return [file.metadata.row_group(n).total_byte_size for n in range(file.num_row_groups)]


def _parquet(path: str | Path) -> Any:
    pyarrow = _pyarrow(path)
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _parquet_batches(unit: Unit, fields: tuple[str, ...]) -> tuple[int, Iterator[Any]]:
    """Return the number of the first row, and the batches of rows."""
    file = _parquet(unit.paths[0])
    _check_columns(unit.paths[0], file.schema_arrow.names, fields)
    first = sum(file.metadata.row_group(n).num_rows for n in range(unit.first))
    groups = range(unit.first, unit.last)
    return first, file.iter_batches(batch_size=1024, row_groups=groups, columns=list(fields))


def _arrow(path: str | Path) -> Iterator[Any]:
    """Yield the record batches of an Arrow file or stream, which is memory-mapped."""
    pyarrow = _pyarrow(path)
    try:
        with pyarrow.memory_map(str(path)) as mapped:
            try:
                file = pyarrow.ipc.open_file(mapped)
            except pyarrow.ArrowInvalid:  # a stream, such as those of the library datasets
                mapped.seek(0)
                yield from pyarrow.ipc.open_stream(mapped)
            else:
                yield from (file.get_batch(n) for n in range(file.num_record_batches))
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _arrow_sizes(path: Path) -> list[int]:
    return [max(1, batch.nbytes) for batch in _arrow(path)]


def _arrow_batches(unit: Unit, fields: tuple[str, ...]) -> tuple[int, Iterator[Any]]:
    """Return the number of the first row, and the record batches."""
    batches = _arrow(unit.paths[0])
    first = 0
    for batch in itertools.islice(batches, unit.first):
        first += batch.num_rows
    batch = next(batches)
    _check_columns(unit.paths[0], batch.schema.names, fields)
    return first, itertools.chain([batch], itertools.islice(batches, unit.last - unit.first - 1))


def _check_columns(path: str, names: list[str], fields: tuple[str, ...]) -> None:
    for field in fields:
        if field not in names:
            raise ConfigError(f"{path}: {_missing(field, names)}")


def read_tokens(unit: Unit, vocab: int, end: int | None) -> list[NDArray[np.int64]]:
    """Return the documents of a token file, without end tokens. An end token is before or after each document.

    Raises: ConfigError: the file is no token file, is cut off, or has a token outside the vocabulary.
    """
    path = unit.paths[0]
    with file_errors("read", path):
        data = Path(path).read_bytes()
    header = np.frombuffer(data[: 4 * BIN_HEADER], "<i4")
    if len(header) < BIN_HEADER or header[0] != BIN_MAGIC or header[1] != BIN_VERSION:
        raise ConfigError(
            f"{path}: a .bin file must begin with {BIN_HEADER} int32 of which the first are {BIN_MAGIC} and "
            f"{BIN_VERSION}, got {header[:2].tolist()}"
        )
    count, bytes_left = int(header[2]), len(data) - 4 * BIN_HEADER
    if bytes_left != 2 * count:
        raise ConfigError(f"{path}: must have {2 * count} bytes after its header, which counts {count} tokens of two "
                          f"bytes, got {bytes_left}")  # fmt: skip
    if end is None:
        raise ConfigError(f"{path}: the end token separates documents in a .bin file: give a tokenizer that has one")
    tokens = np.frombuffer(data, "<u2", offset=4 * BIN_HEADER).astype(np.int64)
    if len(outside := np.flatnonzero(tokens >= vocab)):
        at = int(outside[0])
        raise ConfigError(f"{path}, token {at + 1}: must be below {vocab}, the vocabulary of the tokenizer, "
                          f"got {tokens[at]}")  # fmt: skip
    pieces = np.split(tokens, np.flatnonzero(tokens == end))
    documents = [piece[1:] if len(piece) and piece[0] == end else piece for piece in pieces]
    # before an end token at the beginning of the file, and after one at its end, is no document
    return documents[not len(documents[0]) : len(documents) - (not len(documents[-1]))]
