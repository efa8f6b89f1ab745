"""One rule for every file that is written: folders of its path that do not exist are created."""

from pathlib import Path

from deltazoo.backends.io.errors import ConfigError


def output_path(path: str | Path) -> Path:
    """Create the parent folder of a file to write, and return the path of the file.

    Raises: ConfigError: the path is a folder, or a part of its folder is a file; OSError: for example no permission.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: give the path of a file to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{path} cannot be written: {path.parent} is not a folder") from error
    return path


def output_folder(path: str | Path) -> Path:
    """Create a folder to write files into, and return its path. Raises: as for `output_path`."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{path} cannot be created: it, or a part of its path, is a file") from error
    return path
