"""The tensors of a checkpoint in the format of torch.distributed.checkpoint, written by all processes of a run.

A checkpoint is a folder. `state.json` holds plain data and the SHA-256 digest of every other file; it is written last,
and then the folder gets its name, so that a folder with that name is complete.
"""

import base64
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Collection, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from deltazoo.backends.io.errors import ConfigError, file_errors
from deltazoo.blocks.checkpoints.staging import Staging
from deltazoo.blocks.parallel.ranks import Ranks

CHECKPOINTS, STATE = "checkpoints", "state.json"
_PART = "part."
_METADATA = ".metadata"
# Files of each process, each written by a thread. With digests four threads write 1.2 GB/s, eight as much, one 0.4.
_FILES = 4
_NAME = re.compile(r"step-(\d{9})")
# What a metadata file may name: anything else in a pickle could run code.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}  # fmt: skip


class Entry(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


class Loaded(NamedTuple):
    """A checkpoint's plain data, and its tensors. Its files have their digests."""

    folder: Path
    state: dict[str, Any]
    entries: dict[str, Entry]


def step_folder(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint after a step."""
    return run / CHECKPOINTS / f"step-{step:09d}"


def saved_steps(run: Path) -> list[int]:
    """Return the steps of the complete checkpoints of a run, in order."""
    folder = run / CHECKPOINTS
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)


class Writer:
    """Write checkpoints, one at a time, in a thread of its own if `background`.

    `save` copies the tensors to main memory, and returns. An error of the thread is raised by the next call of `save`
    or `finish`, on every process.

    Attributes: staging: the copies, which are kept for the next checkpoint.
    """

    def __init__(self, run: Path, ranks: Ranks, background: bool) -> None:
        self.run, self.ranks, self.background = run, ranks, background
        self.staging = Staging()
        self._thread: threading.Thread | None = None
        self._problem: str | None = None

    def save(
        self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], keep: Callable[[list[int]], set[int]]
    ) -> None:
        """Write the checkpoint of a step.

        Args: tensors: the same names on all processes; state: plain data, of rank 0; keep: takes the steps of the
            checkpoints after this one is complete, and returns those that stay.
        Raises: ConfigError: this one or the one before cannot be written, for example on a full disk; complete ones
            stay.
        """
        self.finish()
        copies = self.staging.copy(tensors)
        if not self.background:
            self._write(step, copies, state, keep)
            self.finish()
            return
        self._thread = threading.Thread(
            target=self._write, args=(step, copies, state, keep), name="deltazoo checkpoint"
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written. Raises: ConfigError."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise ConfigError(problem)

    @contextmanager
    def finished_on_error(self) -> Iterator[None]:
        """Wait for the checkpoint that is being written if the block raises an error of the run."""
        try:
            yield
        except ConfigError:
            with suppress(ConfigError):
                self.finish()
            raise

    def close(self) -> None:
        """Unpin the memory, unless a checkpoint is still being written, perhaps because another process is gone."""
        if self._thread is None:
            self.staging.release()

    def _write(
        self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], keep: Callable[[list[int]], set[int]]
    ) -> None:
        """Write, and leave the sentence of a failure in `_problem`, equal on all processes."""
        target = step_folder(self.run, step)
        part = target.with_name(f"{_PART}{target.name}")
        problem: str | None = None
        try:
            problem = self._agreed(_problem_of(lambda: _prepare(part) if self.ranks.is_first else None))
            problem = problem or self._agreed(self._save_tensors(part, tensors))
            digests = self._digests(part) if problem is None else []
            whole = {**state, "files": dict(sorted(digests))}
            if problem is None:
                problem = self._agreed(
                    _problem_of(lambda: _complete(part, target, whole, keep) if self.ranks.is_first else None)
                )
        except Exception as error:  # the thread must not die silently
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if problem is not None:
            if self.ranks.is_first:
                shutil.rmtree(part, ignore_errors=True)
            kept = saved_steps(self.run)
            last = f"the checkpoint of step {kept[-1]} is kept" if kept else "there is no checkpoint yet"
            self._problem = f"cannot write {target}: {problem}; {last}"

    def _save_tensors(self, part: Path, tensors: dict[str, Tensor]) -> str | None:
        """Write this process's tensors. Returns: the sentence of its own failure, "" of another's, or None."""
        writer = _Writer(part)
        group, alone = self.ranks.writers, self.ranks.size == 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problem = _problem_of(
                lambda: save(dict(tensors), storage_writer=writer, process_group=group, no_dist=alone)
            )
        if problem is None:
            return None
        return writer.problem or (problem if alone else "")

    def _digests(self, part: Path) -> list[tuple[str, list[Any]]]:
        """Return size and digest of each file; every process reads those that it wrote."""
        mine = [
            path for path in part.iterdir()
            if path.name.startswith(f"__{self.ranks.rank}_") or (self.ranks.is_first and path.name == _METADATA)
        ]  # fmt: skip
        with ThreadPoolExecutor(_FILES) as pool:
            found = [
                (path.name, [path.stat().st_size, digest])
                for path, digest in zip(mine, pool.map(_digest, mine), strict=True)
            ]
        return [pair for pairs in self._all(found) for pair in pairs]

    def _agreed(self, problem: str | None) -> str | None:
        found = [(rank, each) for rank, each in enumerate(self._all(problem)) if each is not None]
        if not found:
            return None
        rank, sentence = next((pair for pair in found if pair[1]), found[0])
        return sentence if self.ranks.size == 1 else f"rank {rank}: {sentence}"

    def _all(self, value: Any) -> list[Any]:
        """Gather on the group of writers, which no other thread uses."""
        if self.ranks.size == 1:
            return [value]
        values: list[Any] = [None] * self.ranks.size
        dist.all_gather_object(values, value, group=self.ranks.writers)
        return values


def _prepare(part: Path) -> None:
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)


def _complete(part: Path, target: Path, state: dict[str, Any], keep: Callable[[list[int]], set[int]]) -> None:
    """Write the state, rename the folder, and delete the checkpoints that are no longer kept."""
    text = json.dumps(state)
    with (part / STATE).open("w", encoding="utf-8") as file:
        file.write(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest()}) + "\n" + text + "\n")
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(target.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    steps = saved_steps(target.parent.parent)
    for step in {*steps} - keep(steps):
        shutil.rmtree(step_folder(target.parent.parent, step), ignore_errors=True)


def _problem_of(call: Callable[[], object]) -> str | None:
    """Return the sentence of an error, or None."""
    try:
        call()
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        inner: BaseException | None = error
        while inner is not None:
            if isinstance(inner, OSError):
                return inner.strerror or str(inner)
            inner = inner.__cause__ or inner.__context__
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_state(folder: Path, check: Callable[[int, int], bool] = lambda number, count: True) -> Loaded:
    """Read the plain data of a checkpoint, and compare its files with their digests. No code runs.

    Args: check: whether this process reads file `number` of `count`, so that processes can share the work.
    Raises: ConfigError: a file is missing or damaged.
    """
    try:
        first, second = (folder / STATE).read_text(encoding="utf-8").splitlines()
        if json.loads(first)["sha256"] != hashlib.sha256(second.encode()).hexdigest():
            raise ValueError("its digest is wrong")
        state: dict[str, Any] = json.loads(second)
        files: dict[str, list[Any]] = state["files"]
    except OSError as error:
        raise ConfigError(f"cannot read {folder / STATE}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / STATE} cannot be read: it is damaged or not a checkpoint") from error
    for number, (name, (size, digest)) in enumerate(files.items()):
        path = folder / name
        with file_errors("read", path):
            actual = path.stat().st_size
            if actual != size:
                raise ConfigError(f"{path} cannot be read: it is damaged, it must have {size} bytes, got {actual}")
            if check(number, len(files)) and _digest(path) != digest:
                raise ConfigError(f"{path} cannot be read: it is damaged (its digest is wrong)")
    metadata = _Reader(folder).read_metadata()
    entries: dict[str, Entry] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ConfigError(f"{folder} is not from a training run: {name} is no tensor")
        entries[name] = Entry(entry.size, entry.properties.dtype)
    return Loaded(folder, state, entries)


_WIDE = (torch.float32, torch.float64)


def load_tensors(loaded: Loaded, tensors: dict[str, Tensor], buffers: Collection[str], ranks: Ranks) -> None:
    """Read tensors in place, sharded or not, on any number of processes.

    Args: buffers: names of those that earlier versions saved in bfloat16; they are converted.
    Raises: ConfigError: a tensor is missing, or has another shape or dtype; of float32 and float64 either is converted.
    """
    for name, tensor in tensors.items():
        entry, short = loaded.entries.get(name), name.removeprefix("model.")
        if entry is None or entry.shape != tensor.shape:
            problem = (
                "is missing" if entry is None else f"must have shape {list(tensor.shape)}, got {list(entry.shape)}"
            )
            raise ConfigError(f"the weights in {loaded.folder.name} do not fit stack.yaml: {short} {problem}")
        readable = (*_WIDE, torch.bfloat16) if name in buffers else _WIDE
        if entry.dtype != tensor.dtype and not (entry.dtype in readable and tensor.dtype in _WIDE):
            raise ConfigError(
                f"{short} in {loaded.folder.name} must be {tensor.dtype} like the model, got {entry.dtype}"
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(dict(tensors), storage_reader=_Reader(loaded.folder), process_group=ranks.control, no_dist=ranks.size == 1)


class _Files(FileSystem):
    """Keeps an error of a thread that writes a file. dcp raises only those of the thread that calls it."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._caller = threading.current_thread()

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except Exception as error:
            self.error = error
            if threading.current_thread() is self._caller:
                raise

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


class _Writer(FileSystemWriter):
    """Keeps the sentence of an error of this process, whose cause the exception of dcp lacks."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, thread_count=_FILES, sync_files=True)
        self.fs = self._files = _Files()
        self.problem: str | None = None

    def write_data(self, plan: Any, planner: Any) -> Any:
        written: list[Any] = []
        self.problem = _problem_of(lambda: written.append(super(_Writer, self).write_data(plan, planner)))
        self.problem = self.problem or _problem_of(self._files.raise_error)
        if self.problem is not None:
            raise RuntimeError(self.problem)
        return written[0]


class _Reader(FileSystemReader):
    """Reads the metadata, a pickle, with the classes of metadata only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / _METADATA
        try:
            with path.open("rb") as file:
                metadata = cast("Metadata", _Unpickler(file).load())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except Exception as error:  # the type of pickle's error depends on the content
            raise ConfigError(f"{path} cannot be read: it is damaged or not a checkpoint ({error})") from error
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def encoded(tensor: Tensor) -> str:
    """Return a uint8 tensor, the state of a generator, as text."""
    return base64.b64encode(tensor.cpu().numpy().tobytes()).decode()


def decoded(text: str) -> Tensor:
    """Return the tensor of `encoded`. Raises: ValueError."""
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
