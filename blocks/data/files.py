"""Which files the sources of data name: files, folders, and folders of the library datasets."""

import fnmatch
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from deltazoo.backends.io.errors import ConfigError, file_errors

_DATASET = "state.json"  # in a folder that datasets.Dataset.save_to_disk has written


def listed_files(sources: Iterable[str | Path], only: str | None, unfinished: Path) -> dict[Path, Path]:
    """Return the files of sources in their order, those of a folder by name, each under its resolved path.

    Names that begin with a dot are left out in folders. Links are followed; a folder reads each of its files once.

    Args: only: pattern of the names of files in folders; unfinished: folder whose files are left out.
    Raises: ConfigError: a source does not exist or has no files, or two sources name the same file.
    """
    found, unfinished = dict[Path, Path](), unfinished.resolve()
    for source in map(Path, sources):
        if not source.exists():
            raise ConfigError(f"cannot read {source}: no such file or folder")
        files = {path.resolve(): path for path in (_in_folder(source, only) if source.is_dir() else [source])}
        if not files:
            pattern = f" of the pattern {only}" if only else ""
            raise ConfigError(f"{source} must contain files{pattern}, got none")
        if twice := found.keys() & files.keys():
            path = min(twice)
            raise ConfigError(f"{files[path]} must be named once, got it before as {found[path]}")
        found |= files
    return {path: name for path, name in found.items() if unfinished not in path.parents}


def _in_folder(folder: Path, only: str | None) -> Iterator[Path]:
    seen = set[str]()
    for name, subfolders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(name)) in seen:  # a link to a folder above it would lead here again
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(subfolder for subfolder in subfolders if not subfolder.startswith("."))
        if _DATASET in names and any(file.endswith(".arrow") for file in names):
            names = _files_of_dataset(Path(name, _DATASET))
        elif "dataset_dict.json" in names:  # of several datasets, each in a subfolder
            names.remove("dataset_dict.json")
        for file in sorted(names):
            if not file.startswith(".") and (only is None or fnmatch.fnmatchcase(file, only)):
                yield Path(name, file)


def _files_of_dataset(path: Path) -> list[str]:
    """Return the data files of a dataset; the folder may also hold files of a cache."""
    with file_errors("read", path):
        text = path.read_text(encoding="utf-8")
    try:
        return [str(file["filename"]) for file in json.loads(text)["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} must list the files of a dataset, got: {error}") from error
