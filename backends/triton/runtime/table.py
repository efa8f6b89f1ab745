"""Tables of measured launches, and the lookup of a launch config: tables first, then the heuristic.

Three tables, later ones override earlier ones: the shipped table of a device (`tuned/<device>.json`), the user's (a
file in the platform's config folder, where `deltazoo tune` writes), and those named with `use_table`. A record is used
only with the Triton version and the kernel revision it was measured with. A launch config changes nothing but the order
of floating-point operations.
"""

import contextlib
import functools
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from deltazoo.backends.io.errors import ConfigError, describe_invalid
from deltazoo.backends.io.output_path import output_path
from deltazoo.backends.torch_ext.devices import DeviceSpec, triton_version
from deltazoo.backends.triton.chunk.heuristic import heuristic
from deltazoo.backends.triton.chunk.plan import Plan, make_plan
from deltazoo.backends.triton.config import LaunchConfig, parse
from deltazoo.backends.triton.problem import Problem
from deltazoo.backends.triton.runtime.records import TUNED, Key, OperatorKey, OperatorRecord, Record, key_of
from deltazoo.backends.triton.runtime.revisions import REVISIONS, revision_of

_log = logging.getLogger("deltazoo")

# Triton versions whose records hold for each other: those that assemble with the same ptxas, here 12.8.93. Kernels
# were checked with every version of a group on the GPU; Triton 3.8 and 3.9 bring other versions of ptxas.
_SAME_PTXAS = (((3, 6), (3, 7)),)


class Table(BaseModel):
    """The records of one device. Later ones override earlier ones of the same key and Triton version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[3] = 3
    device: str
    records: tuple[Record, ...] = ()
    operators: tuple[OperatorRecord, ...] = ()

    def usable_operators(self, triton: str) -> dict[OperatorKey, OperatorRecord]:
        """Return the records of kernels beside the update, for a Triton version and their present revisions."""
        records = [
            record
            for record in self.operators
            if holds_for(record.triton, triton) and record.revision == revision_of(record.key.kernel)
        ]
        records.sort(key=lambda record: record.triton == triton)
        return {record.key: record for record in records}

    def usable(self, triton: str) -> dict[Key, Record]:
        """Return the records for a Triton version and the present kernel revisions.

        A record also holds for the versions that assemble with the same ptxas, unless there is one of `triton` itself.
        """
        records = [
            record
            for record in self.records
            if holds_for(record.triton, triton) and record.revision == REVISIONS[record.key.kernel]
        ]
        records.sort(key=lambda record: record.triton == triton)  # stable: a later record overrides an earlier one
        return {record.key: record for record in records}

    def merged(self, other: "Table") -> "Table":
        """Override records by another table's. Raises: ConfigError for a table of another device."""
        if other.device != self.device:
            raise ConfigError(f"tables of two devices do not merge: {self.device!r} and {other.device!r}")
        records = {(record.triton, record.key): record for record in (*self.records, *other.records)}
        operators = {(record.triton, record.key): record for record in (*self.operators, *other.operators)}
        return Table(
            device=self.device, records=tuple(sorted(records.values(), key=_order)),
            operators=tuple(sorted(operators.values(), key=lambda record: (record.triton, *dict(record.key).values()))),
        )  # fmt: skip

    def write(self, path: str | Path) -> None:
        """Write one record per line, atomically. Raises: OSError."""
        path = output_path(path)
        lists = {"records": self.records} | ({"operators": self.operators} if self.operators else {})
        lines = {
            name: ",\n  ".join(record.model_dump_json(exclude_none=True) for record in records)
            for name, records in lists.items()
        }
        listed = ", ".join(f'"{name}": [\n  {text}\n]' for name, text in lines.items())
        text = f'{{"version": {self.version}, "device": {json.dumps(self.device)}, {listed}}}\n'
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def holds_for(measured: str, installed: str) -> bool:
    """Whether a choice that was measured with one Triton version holds for another one."""
    pair = {triton_version(measured), triton_version(installed)}
    return measured == installed or any(pair <= set(group) for group in _SAME_PTXAS)


def read_table(path: str | Path) -> Table:
    """Read a table. Raises: ConfigError that names the file and every wrong field."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"launch table {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return _parse_table(text, str(path))


def merge_tables(paths: Iterable[str | Path], out: str | Path) -> Table:
    """Merge tables of one device, later ones over earlier ones, and write the result.

    Raises: ConfigError for no table, an invalid one, or tables of two devices; OSError.
    """
    tables = [read_table(path) for path in paths]
    if not tables:
        raise ConfigError("merging needs at least one table, got none")
    merged = functools.reduce(Table.merged, tables, Table(device=tables[0].device))
    merged.write(out)
    return merged


def user_table(device: str) -> Path:
    """Return the path of the user's table of a device, in the platform's config folder. Raises: ConfigError."""
    try:
        home = Path.home()
    except RuntimeError as error:
        raise ConfigError(f"the user's launch table needs a home folder, and there is none: {error}") from error
    folder = {"win32": home / "AppData" / "Roaming", "darwin": home / "Library" / "Application Support"}
    return folder.get(sys.platform, home / ".config") / "deltazoo" / "triton" / f"{slug(device)}.json"


def slug(device: str) -> str:
    """Return the name of a device as a file name: "NVIDIA H200" -> nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


_named_tables: list[Table] = []
_ignored: list[bool] = []
_clears: list[Callable[[], None]] = []


def cleared_with_tables(clear: Callable[[], None]) -> Callable[[], None]:
    """Register a function that clears a cache of results derived from the tables; `clear_caches` calls it."""
    _clears.append(clear)
    return clear


def use_table(path: str | Path | None) -> None:
    """Add a table over the shipped and the user's for this process; None removes all that were added.

    Raises: ConfigError.
    """
    if path is None:
        _named_tables.clear()
    else:
        _named_tables.append(read_table(path))
    clear_caches()


def clear_caches() -> None:
    """Read the tables again at the next lookup."""
    look_up.cache_clear()
    launch_config.cache_clear()
    records_of.cache_clear()
    operator_records_of.cache_clear()
    for clear in _clears:
        clear()


@contextlib.contextmanager
def without_tables() -> Iterator[None]:
    """Ignore all tables inside the block: the heuristics choose every launch."""
    _ignored.append(True)
    clear_caches()
    try:
        yield
    finally:
        _ignored.pop()
        clear_caches()


@functools.lru_cache(maxsize=4096)
def look_up(requested: str, problem: Problem, device: DeviceSpec, grad: bool) -> Plan:
    """Look up the plan of a problem. Runs on every eager call that is not replayed: a dict lookup after the first.

    Args: requested: a launch config as JSON; "": that of the tables, else of the heuristic.
    Raises: ConfigError for an invalid table, or a requested kernel that does not take the problem.
    """
    config = parse(requested) if requested else launch_config(problem, device)
    return make_plan(problem, device, config, grad)


@functools.lru_cache(maxsize=4096)
def launch_config(problem: Problem, device: DeviceSpec) -> LaunchConfig:
    """Look up the launch config of a problem. Raises: ConfigError for an invalid table."""
    if device.platform != "cuda":
        return heuristic(problem, device)
    return configured(problem, device, records_of(device.name, device.triton))


def configured(problem: Problem, device: DeviceSpec, records: dict[Key, Record]) -> LaunchConfig:
    """Return the heuristic's config with the choices of the records.

    Records do not change `chunk` and `checkpoint_chunks`, which determine the shapes of saved tensors. A record that
    asks for a kernel that does not take the problem is ignored with a warning.
    """
    record = records.get(key_of("segment_chunks", problem, 0))
    config = heuristic(problem, device, None if record is None else record.segment_chunks)
    for kernel in TUNED[1:]:
        record = records.get(key_of(kernel, problem, config.segment_chunks))
        if record is None:
            continue
        try:
            changed = config.changed(**{kernel: record.launch})
            make_plan(problem, device, changed, grad=True)
            config = changed
        except ConfigError as error:
            _log.warning("a record of a launch table for %s is ignored: %s", device.name, error)
    return config


@functools.cache
def records_of(device: str, triton: str) -> dict[Key, Record]:
    """Return the usable records of all tables for a device and a Triton version.

    Raises: ConfigError for an invalid table.
    """
    tables, own = _tables(device)
    records = {key: record for table in (*tables, *own) for key, record in table.usable(triton).items()}
    stale = {record.key for table in own for record in table.records} - records.keys()
    if stale:
        _log.warning(
            "%d records of launch tables for %s are ignored: they were measured with another Triton version than %s or "
            "other kernel revisions; `deltazoo tune` measures them again", len(stale), device, triton,
        )  # fmt: skip
    return records


@functools.cache
def operator_records_of(device: str, triton: str) -> dict[OperatorKey, OperatorRecord]:
    """Return the usable records of all tables for kernels beside the update.

    Raises: ConfigError for an invalid table.
    """
    tables, own = _tables(device)
    return {key: x for table in (*tables, *own) for key, x in table.usable_operators(triton).items()}


def _tables(device: str) -> tuple[list[Table], list[Table]]:
    """Return the shipped table of a device, if there is one, and those of the user."""
    if _ignored:
        return [], []
    shipped = files("deltazoo.backends.triton.runtime") / "tuned" / f"{slug(device)}.json"
    tables = [_parse_table(shipped.read_text(encoding="utf-8"), str(shipped))] if shipped.is_file() else []
    return tables, [*_of_user(device), *(table for table in _named_tables if table.device == device)]


def _of_user(device: str) -> list[Table]:
    """Return the user's table; none if the home folder is missing or may not be read."""
    try:
        path = user_table(device)
    except ConfigError:
        return []
    return [read_table(path)] if os.path.isfile(path) else []  # Path.is_file raises where access is denied


def _parse_table(text: str, name: str) -> Table:
    if match := re.match(r'\s*{\s*"version":\s*(\d+)', text):
        found, read = int(match[1]), Table.model_fields["version"].default
        if found < read:
            raise ConfigError(
                f"{name} is a launch table of version {found}, and this deltazoo reads version {read}: remove the "
                "file, and measure again with `deltazoo tune`"
            )
    try:
        return Table.model_validate_json(text)
    except ValidationError as error:
        sentences = "; ".join(describe_invalid(".".join(map(str, e["loc"])), e["msg"]) for e in error.errors())
        raise ConfigError(f"{name} is not a launch table: {sentences}") from error


def _order(record: Record) -> tuple[object, ...]:
    kernel, *traits, programs, chunks = (value for _, value in record.key)
    return record.triton, *traits, TUNED.index(kernel), programs, chunks
