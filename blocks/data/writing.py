"""Write token shards from texts: in parallel, resumable, and equal for any number of processes.

Each unit of the input is encoded into a file in `FOLDER.unfinished`. When all are done, their tokens are joined to the
shards there, and the finished folder is renamed to its place: a reader sees all of it or nothing.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from pydantic import Field, field_validator

from deltazoo.backends.io.errors import ConfigError, count, file_errors
from deltazoo.backends.io.frozen_config import FrozenConfig
from deltazoo.backends.io.output_path import output_folder
from deltazoo.backends.io.progress import Progress, silent
from deltazoo.blocks.data.encoded_unit import (
    EncodedUnit,
    Encoding,
    UnitTask,
    encode_unit,
    read_unit,
    start_worker,
    token_dtype,
    work,
)
from deltazoo.blocks.data.encoding import BYTES_NAME, Encoder, make_encoder
from deltazoo.blocks.data.files import listed_files
from deltazoo.blocks.data.part_writer import PartWriter
from deltazoo.blocks.data.readers import Rules, Unit, plan_units
from deltazoo.blocks.data.shards import FORMAT, INDEX, PARTS, TOKENIZER, Part, PartIndex, ShardIndex

ENCODING = 2  # of a unit; raise it when equal settings give other tokens, so that units of before are not reused


class ShardConfig(FrozenConfig):
    """How texts become token shards.

    Args:
        tokenizer: "bytes", a tokenizer.json, or a folder that contains one.
        end: text of the token after each document, or "none"; None: the eos_token of tokenizer_config.json beside
            tokenizer.json; bytes have none.
        fields: field of the text in JSON lines, Parquet and Arrow; two fields: prompt and answer, with the loss on the
            answer alone.
        separator: text between the documents of a text file, such as "<|endoftext|>", which is removed with the line
            breaks next to it; None: a text file is one document.
        held_out: share of the documents that are validation, in [0, 1). The hash of a document's text, or of its
            prompt, decides, so that equal ones are in the same part.
        validation: files and folders whose documents are validation, also where a source contains them.
        only: pattern of the names of files in folders, such as "*.md".
    """

    tokenizer: str
    end: str | None = None
    fields: tuple[str, ...] = Field(default=("text",), min_length=1, max_length=2)
    separator: str | None = Field(default=None, min_length=1)
    held_out: float = Field(default=0.0, ge=0, lt=1)
    validation: tuple[str, ...] = ()
    only: str | None = None

    @field_validator("validation")
    @classmethod
    def _check_validation(cls, validation: tuple[str, ...], info: Any) -> tuple[str, ...]:
        if validation and info.data.get("held_out"):
            raise ValueError("give files or a share (held_out) that are held out, not both")
        return validation


def write_shards(
    sources: Sequence[str | Path],
    out: str | Path,
    config: ShardConfig,
    processes: int | None = None,
    progress: Progress = silent,
) -> ShardIndex:
    """Encode texts and write them as a data folder. A call that was interrupted continues when it is repeated.

    With several processes, a script must call this below `if __name__ == "__main__":`, as multiprocessing requires.

    Args:
        sources: files and folders. A folder of the library datasets (`save_to_disk`), *.jsonl, *.parquet, *.arrow and
            *.bin are read as such, all other files as text.
        out: folder to create.
        processes: that encode; None: one for each CPU core. The result does not depend on it.
    Raises: ConfigError: a file cannot be read or breaks a rule, `out` exists, or no document is found.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists: choose a new or empty folder")
    encoder = make_encoder(config.tokenizer, config.end)
    rules = Rules(config.fields, config.separator)
    unfinished = out.parent / f"{out.name}.unfinished"
    held = listed_files(config.validation, config.only, unfinished)
    files = listed_files(sources, config.only, unfinished)
    files = {path: name for path, name in files.items() if path not in held}
    stats = {str(name): _stat(name) for name in (*files.values(), *held.values())}
    of_train = None if config.held_out else False
    units = [(unit, of_train) for unit in plan_units([*files.values()], rules)]
    units += [(unit, True) for unit in plan_units([*held.values()], rules)]
    work_folder = output_folder(unfinished)
    with _only_process(work_folder):
        unit_folder = output_folder(work_folder / "units")
        names = [_unit_name(unit, stats, f"{ENCODING} {encoder.origin} {rules}") for unit, _ in units]
        tasks = [UnitTask(*unit, unit_folder / f"{name}.npz") for unit, name in zip(units, names, strict=True)]
        encoding = Encoding(config.tokenizer, config.end, rules)
        _encode_all(tasks, encoder, encoding, processes, progress)
        if changed := [name for name, stat in stats.items() if _stat(Path(name)) != stat]:
            raise ConfigError(f"{changed[0]} has changed while it was read: repeat the command")
        finished = _joined(work_folder / "finished", tasks, encoder, config, [str(source) for source in sources])
        with file_errors("write", out):
            if out.exists():
                out.rmdir()  # Windows replaces no folder
            os.replace(work_folder / "finished", out)
    shutil.rmtree(work_folder, ignore_errors=True)
    return finished


def _encode_all(
    tasks: list[UnitTask], encoder: Encoder, encoding: Encoding, processes: int | None, progress: Progress
) -> None:
    """Encode the units that have no file yet."""
    missing = [task for task in tasks if not task.target.is_file()]
    start, size, done = perf_counter(), 0, len(tasks) - len(missing)

    def report(task: UnitTask) -> None:
        nonlocal done, size
        done, size = done + 1, size + task.unit.size
        progress("encoding", done, len(tasks), f"{size / 1e6 / (perf_counter() - start):.1f} MB/s")

    progress("encoding", done, len(tasks))
    processes = min(_cores() if processes is None else processes, len(missing))
    if processes <= 1:
        for task in missing:
            encode_unit(task, encoder, encoding)
            report(task)
        return
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=start_worker, initargs=(encoding,))
    try:
        futures = [pool.submit(work, task) for task in missing]
        for future, task in zip(futures, missing, strict=True):  # in order: of several errors the first is raised
            future.result()
            report(task)
    except BrokenProcessPool as error:
        raise ConfigError(
            "a process that encodes has ended early, perhaps for lack of memory: use fewer processes; the same command "
            "continues"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _joined(
    folder: Path, tasks: Sequence[UnitTask], encoder: Encoder, config: ShardConfig, sources: list[str]
) -> ShardIndex:
    """Write the finished folder from the files of all units, and return its index."""
    shutil.rmtree(folder, ignore_errors=True)  # of a call that was interrupted here
    output_folder(folder)
    has_prompts = len(config.fields) == 2
    writers = {part: PartWriter(folder, part, has_prompts) for part in PARTS}
    skipped = 0
    for task in tasks:
        unit = read_unit(task.target)
        skipped += unit.skipped
        is_validation = unit.keys < config.held_out if task.is_validation is None else task.is_validation
        is_validation = np.broadcast_to(is_validation, unit.keys.shape)
        writers["train"].add(_selected(unit, ~is_validation))
        writers["validation"].add(_selected(unit, is_validation))
    parts = {part: writer.finish() for part, writer in writers.items()}
    _check_parts(parts, config, skipped)
    index = ShardIndex(
        format=FORMAT,
        dtype="uint16" if token_dtype(encoder.origin.vocab) == np.uint16 else "uint32",
        tokenizer=encoder.origin,
        prompts=has_prompts,
        skipped=skipped,
        sources=tuple(sources),
        parts={part: counts for part, counts in parts.items() if counts.documents},
    )
    if config.tokenizer != BYTES_NAME:
        path = Path(config.tokenizer)
        path = path / TOKENIZER if path.is_dir() else path
        with file_errors("write", folder):
            shutil.copyfile(path, folder / TOKENIZER)
            if (settings := path.with_name("tokenizer_config.json")).is_file():
                shutil.copyfile(settings, folder / settings.name)
    with file_errors("write", folder / INDEX):
        (folder / INDEX).write_text(index.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return index


def _selected(unit: EncodedUnit, chosen: NDArray[np.bool_]) -> EncodedUnit:
    if chosen.all():
        return unit
    return EncodedUnit(
        tokens=unit.tokens[np.repeat(chosen, unit.lengths)],
        lengths=unit.lengths[chosen],
        prompts=unit.prompts[chosen],
        text_bytes=unit.text_bytes[chosen],
        keys=unit.keys[chosen],
        skipped=0,
    )


def _check_parts(parts: Mapping[Part, PartIndex], config: ShardConfig, skipped: int) -> None:
    if not parts["train"].documents:
        raise ConfigError(f"the sources must have a document to train on, got none and {skipped} without text")
    if (config.held_out or config.validation) and not parts["validation"].documents:
        documents = count(parts["train"].documents, "document")
        raise ConfigError(
            f"held_out {config.held_out:g} selects none of {documents}: raise it, hold out files (validation), or "
            "split text files into documents (separator)"
            if config.held_out
            else "the files that are held out must have a document, got none"
        )


def _stat(path: Path) -> tuple[int, int]:
    with file_errors("read", path):
        stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _unit_name(unit: Unit, stats: Mapping[str, tuple[int, int]], settings: str) -> str:
    """Return a name that changes with all on which the tokens of a unit depend."""
    origin = [[str(Path(path).absolute()), *stats[path]] for path in unit.paths]
    content = json.dumps([settings, unit.kind, unit.first, unit.last, origin])
    return hashlib.sha256(content.encode()).hexdigest()


@contextmanager
def _only_process(folder: Path) -> Iterator[None]:
    """Hold the lock of the unfinished folder. Raises: ConfigError: another process has it."""
    lock = FileLock(folder / "lock", timeout=0)
    with file_errors("lock", folder):
        try:
            lock.acquire()
        except Timeout as error:
            raise ConfigError(f"another process writes {folder}: wait for it, or stop it") from error
    try:
        yield
    finally:
        lock.release()
        if not any((folder / "units").glob("*.npz")):
            shutil.rmtree(folder, ignore_errors=True)


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
