"""The lock of a run's folder: one process at a time trains in it."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError

from deltazoo.backends.io.errors import ConfigError, file_errors
from deltazoo.backends.io.output_path import output_folder
from deltazoo.blocks.training.records import now

LOCK, OWNER = "train.lock", "train.owner.json"
_PATIENCE = 1.0  # seconds in which the process that has the lock writes its name


class _Owner(BaseModel):
    pid: int
    host: str
    started: str


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created.

    The operating system releases the lock of a process that ends, however it ends. The name of the process is in a file
    of its own, because a process that tries to lock a file may empty it. The lock's file stays, as another process may
    wait for it; but folders that were created for it are removed if they hold nothing else, as after a refused command.

    Raises: ConfigError: another process has the lock, which the message names; the folder cannot be written.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = FileLock(output_folder(folder) / LOCK, timeout=_PATIENCE)
    with file_errors("lock", folder):
        try:
            lock.acquire()
        except Timeout as error:  # an OSError
            raise ConfigError(
                f"another process trains in {folder}: {_owner(folder)}; stop it, wait for it, or choose another folder"
            ) from error
        except NotImplementedError as error:
            raise ConfigError(f"cannot lock {folder}: its file system has no locks; choose another folder") from error
    try:
        owner = _Owner(pid=os.getpid(), host=platform.node(), started=now())
        with file_errors("write", folder / OWNER):
            (folder / OWNER).write_text(owner.model_dump_json() + "\n", encoding="utf-8")
        yield
    finally:
        with suppress(OSError):
            (folder / OWNER).unlink(missing_ok=True)
        with suppress(OSError):  # Windows removes a locked file in the release
            if created and [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
        lock.release()
        with suppress(OSError):
            for path in created:
                path.rmdir()


def _owner(folder: Path) -> str:
    """Describe the process that has the lock."""
    try:
        owner = _Owner.model_validate_json((folder / OWNER).read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return "its name is unknown"
    return f"process {owner.pid} on {owner.host}, since {owner.started}"
