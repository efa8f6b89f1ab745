"""Tables of measured launches: values, files, and the look-up that goes before the heuristic.

Three kinds, the later over the earlier: the table that ships for a device (`tuned/<device>.json`), the user's (a file
in the platform's config folder, where `deltazoo tune` writes), and what `use_table` names. A record holds for the
Triton and the kernels that it was measured with. A launch changes nothing that is computed but the order of roundings.
H key heads, HV value heads, K key width, V value width
"""

import functools
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deltazoo.backends.errors import ConfigError
from deltazoo.backends.triton.config import Device, Launch, LaunchConfig, Problem, checked, device_of, heuristic
from deltazoo.backends.triton.fingerprint import source_of

_log = logging.getLogger("deltazoo")

# as they are tuned: the reverse scan decides whether anything is launched for the two after it
Kernel = Literal["split", "prepare", "scan", "reverse", "replay", "gradients", "decode", "fused_step"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
STEPS: tuple[Kernel, ...] = ("decode", "fused_step")  # of one token: of the update, of a mixer

_MOST_PROGRAMS, _MOST_CHUNKS = 256, 1024  # beyond these a device is full, and a class is one
_DTYPES = Literal["float32", "bfloat16", "float16"]


class Key(NamedTuple):
    """What a launch was measured for.

    groups: value heads a key head; parts: sequences are walked in parts; programs: how many can run at once but for the
    tile, rounded down to a power of two, at most 256; chunks: of a sequence, likewise, at most 1024 (split alone, else
    0). The rest as in `Problem`.
    """

    kernel: Kernel
    dtype: str
    K: int
    V: int
    groups: int
    delta: bool
    own: bool
    decayed: bool
    packed: bool
    precise: bool
    parts: bool
    programs: int
    chunks: int

    @property
    def code(self) -> "Key":
        """The key without what changes no kernel's text: numbers that are right once are right for all of these."""
        return self._replace(programs=0, chunks=0)

    def __str__(self) -> str:
        kind = [
            "delta" if self.delta else "additive",
            *(n for n in ("own", "packed", "precise", "parts") if getattr(self, n)),
        ]
        kind += [] if self.decayed else ["no decay"]
        sizes = f"K={self.K} V={self.V} groups={self.groups} programs={self.programs}"
        return f"{self.dtype} {' '.join(kind)} {sizes}" + (f" chunks={self.chunks}" if self.chunks else "")


def key_of(kernel: Kernel, problem: Problem, split: int) -> Key:
    """The class of a problem for one kernel, where a sequence is walked in parts of `split` chunks (0: in one)."""
    chunks = max(1, -(-problem.T // 64) // (max(1, problem.N) if problem.packed else 1))
    rows = problem.N * problem.HV
    programs = {
        "prepare": problem.N * problem.H * chunks,
        "gradients": problem.N * problem.H * chunks,
        "replay": rows * -(-chunks // LaunchConfig().every),
        "scan": rows * (-(-chunks // split) if split else 1),
        "reverse": rows * (-(-chunks // split) if split else 1),
    }.get(kernel, rows)
    kind = (problem.delta, problem.own, problem.decayed, problem.packed, problem.precise)
    parts = bool(split) and kernel not in ("split", *STEPS)
    return Key(
        kernel, str(problem.dtype).removeprefix("torch."), problem.K, problem.V, problem.HV // problem.H, *kind, parts,
        _rounded(programs, _MOST_PROGRAMS), _rounded(chunks, _MOST_CHUNKS) if kernel == "split" else 0,
    )  # fmt: skip


class Record(BaseModel):
    """One measured choice.

    Args:
        triton: the version it was measured with; source: `source_of` the kernel. With others it is not used.
        launch, split: what was chosen: a launch, or for kernel="split" the chunks a part.
        shape: of the measurement; ms: its median with the choice; heuristic_ms: with the heuristic's, the rest equal.
        tried: candidates; rejected: those of them that failed, or whose numbers were wrong.
        The rest as in `Key`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    triton: str
    source: str
    kernel: Kernel
    dtype: _DTYPES
    K: int = Field(ge=1)
    V: int = Field(ge=1)
    groups: int = Field(ge=1)
    delta: bool
    own: bool
    decayed: bool
    packed: bool
    precise: bool
    parts: bool
    programs: int = Field(ge=1)
    chunks: int = Field(ge=0)
    launch: Launch | None = None
    split: int | None = Field(default=None, ge=0)
    shape: str
    ms: float = Field(gt=0, allow_inf_nan=False)
    heuristic_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tried: int = Field(ge=1)
    rejected: int = Field(ge=0)

    @model_validator(mode="after")
    def _says_what_was_chosen(self) -> Self:
        if (self.split is None) != (self.kernel != "split") or (self.launch is None) != (self.kernel == "split"):
            raise ValueError(f"kernel={self.kernel!r} needs {'split' if self.kernel == 'split' else 'launch'} alone")
        if self.split:
            LaunchConfig(split=self.split)
        if self.launch is not None and self.launch.replays and (self.kernel != "reverse" or self.parts):
            raise ValueError(f"replays must be false but for kernel='reverse' without parts, got {self.kernel!r}")
        if self.launch is not None:
            LaunchConfig(**{self.kernel: self.launch})
        return self

    @property
    def key(self) -> Key:
        """The class it holds for."""
        return Key(**{name: getattr(self, name) for name in Key._fields})

    @property
    def gain(self) -> float | None:
        """The heuristic's time over this one; None where the heuristic's choice does not run, or is wrong."""
        return None if self.heuristic_ms is None else self.heuristic_ms / self.ms

    def cells(self) -> list[str]:
        """The record as words, under `COLUMNS`."""
        launch = self.launch
        chosen = (
            f"{self.split} chunks" if launch is None else f"tile {launch.tile}, {launch.warps} w, {launch.stages} st"
        )
        chosen += f", {launch.keys} keys" if launch is not None and launch.keys else ""
        if launch is not None and launch.hopper:
            chosen = "for Hopper" + (", with the replay" if launch.replays else "")
        gain = "" if self.gain is None else f"{self.gain:.2f}"
        measured = [f"{self.ms:.3f}", gain, f"{self.tried}", f"{self.rejected}"]
        return [self.kernel, self.shape, str(self.key), chosen, *measured]


COLUMNS = ("kernel", "shape", "class", "chosen", ">ms", ">gain", ">tried", ">rejected")


class Table(BaseModel):
    """The records of one device, the later over the earlier where their class and Triton version are the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    device: str
    records: tuple[Record, ...] = ()

    def of(self, triton: str) -> dict[Key, Record]:
        """The records that hold with a Triton version and the kernels as they are."""
        return {
            record.key: record
            for record in self.records
            if record.triton == triton and record.source == source_of(record.kernel)
        }

    def merged(self, other: "Table") -> "Table":
        """This table with another's records over it. Raises: ConfigError for another device's."""
        if other.device != self.device:
            raise ConfigError(f"tables of two devices do not merge: {self.device!r} and {other.device!r}")
        found = {(record.triton, record.key): record for record in (*self.records, *other.records)}
        return Table(device=self.device, records=tuple(found[at] for at in sorted(found, key=_order)))

    def write(self, path: str | Path) -> None:
        """Write a record a line, all or nothing: a reader never sees half of it. Raises: OSError."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n  ".join(record.model_dump_json(exclude_none=True) for record in self.records)
        text = f'{{"version": {self.version}, "device": {json.dumps(self.device)}, "records": [\n  {lines}\n]}}\n'
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def read_table(path: str | Path) -> Table:
    """Read a table. Raises: ConfigError, naming the file and every field that is wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"launch table {path} cannot be read: {error}") from error
    return _parsed(text, str(path))


def merge_tables(paths: Iterable[str | Path], out: str | Path) -> Table:
    """Merge tables of one device, the later over the earlier, and write the result.

    Raises: ConfigError for no tables, a broken one, and tables of two devices; OSError.
    """
    tables = [read_table(path) for path in paths]
    if not tables:
        raise ConfigError("merging needs at least one table, got none")
    merged = functools.reduce(Table.merged, tables, Table(device=tables[0].device))
    merged.write(out)
    return merged


def user_table(device: str) -> Path:
    """Where the user's table of a device lies: a file in the platform's config folder. Raises: ConfigError."""
    try:
        home = Path.home()
    except RuntimeError as error:
        raise ConfigError(f"the user's launch table needs a home folder, and there is none: {error}") from error
    folder = {"win32": home / "AppData" / "Roaming", "darwin": home / "Library" / "Application Support"}
    return folder.get(sys.platform, home / ".config") / "deltazoo" / "triton" / f"{slug(device)}.json"


def slug(device: str) -> str:
    """A device's name as a file's: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


_named: list[Table] = []


def use_table(path: str | Path | None) -> None:
    """Put a table over the shipped and the user's for this process; None takes back all that were put there.

    Raises: ConfigError.
    """
    if path is None:
        _named.clear()
    else:
        _named.append(read_table(path))
    forget()


def forget() -> None:
    """Read the tables again at the next look-up."""
    tuned_config.cache_clear()
    records_of.cache_clear()


@functools.lru_cache(maxsize=4096)
def tuned_config(problem: Problem, index: int | None) -> LaunchConfig:
    """The launch config for a problem on a CUDA device: the tables', and the heuristic's where they say nothing.

    Runs on every call from eager code: once a problem was seen, a look-up in a dict.

    Raises: ConfigError for a broken table.
    """
    device = device_of(index)
    if index is None:
        return heuristic(problem, device)
    import triton

    return configured(problem, device, records_of(device.name, triton.__version__))


def configured(problem: Problem, device: Device, records: dict[Key, Record]) -> LaunchConfig:
    """The heuristic's config with what the records say in its place; chunk and every stay, they shape what is saved.

    A record that asks for a kernel for Hopper GPUs where that does not take the problem is left out, with a warning."""
    found = records.get(key_of("split", problem, 0))
    config = heuristic(problem, device, None if found is None else found.split)
    for kernel in KERNELS[1:]:
        record = records.get(key_of(kernel, problem, config.split))
        if record is None:
            continue
        try:
            config = checked(config.changed(**{kernel: record.launch}), problem, device)
        except ConfigError as error:
            _log.warning("a record of a launch table for %s is ignored: %s", device.name, error)
    return config


@functools.cache
def records_of(device: str, triton: str) -> dict[Key, Record]:
    """The records in force for a device and a version of Triton: of the table that ships, under the user's, under those
    that `use_table` named.

    Raises: ConfigError for a broken table.
    """
    shipped = files("deltazoo.backends.triton") / "tuned" / f"{slug(device)}.json"
    tables = [_parsed(shipped.read_text(encoding="utf-8"), str(shipped))] if shipped.is_file() else []
    own = [*_of_user(device), *(table for table in _named if table.device == device)]
    found = {key: record for table in (*tables, *own) for key, record in table.of(triton).items()}
    stale = {record.key for table in own for record in table.records} - found.keys()
    if stale:
        _log.warning(
            "%d records of launch tables for %s are for another Triton than %s, or other kernels, and are ignored: "
            "`deltazoo tune` measures again", len(stale), device, triton,
        )  # fmt: skip
    return found


def _of_user(device: str) -> list[Table]:
    """The user's table, where there is one: a home that is missing, or may not be looked into, has none."""
    try:
        path = user_table(device)
    except ConfigError:
        return []
    return [read_table(path)] if os.path.isfile(path) else []  # where that is denied, Path.is_file raises


def _parsed(text: str, name: str) -> Table:
    try:
        return Table.model_validate_json(text)
    except ValidationError as error:
        wrong = [(".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")) for e in error.errors()]
        sentences = "; ".join(f"{where}: {message}" if where else message for where, message in wrong)
        raise ConfigError(f"{name} is not a launch table: {sentences}") from error


def _order(at: tuple[str, Key]) -> tuple[object, ...]:
    triton, key = at
    return (triton, *key[1:-2], KERNELS.index(key.kernel), *key[-2:])


def _rounded(n: int, most: int) -> int:
    """Down to a power of two."""
    return min(most, 1 << (max(n, 1).bit_length() - 1))
