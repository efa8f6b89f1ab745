"""Checkpoint folders: stack and settings as YAML, tensors with a digest, and records; each is written atomically."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel

from deltazoo.backends.io.errors import ConfigError, PatternError, cut, file_errors
from deltazoo.backends.io.output_path import output_folder
from deltazoo.backends.torch_ext.devices import usable_device
from deltazoo.blocks.checkpoints.digest import append_digest, has_its_digest
from deltazoo.blocks.inspect.diff import diff
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec import document
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.spec.trust import refuse_untrusted
from deltazoo.blocks.training.config import RunSettings
from deltazoo.blocks.training.rules import differences, refused

STACK, SETTINGS, CHECKPOINT, METRICS = "stack.yaml", "train.yaml", "checkpoint.pt", "metrics.jsonl"


class Saved(NamedTuple):
    """A checkpoint folder: the stack, the settings in train.yaml, those of the trained run, and the checkpoint."""

    spec: StackSpec
    settings: RunSettings
    trained: RunSettings
    checkpoint: dict[str, Any]


def create(folder: Path, spec: StackSpec, settings: RunSettings) -> None:
    """Create the folder with the stack and the settings. Raises: ConfigError: it already contains a checkpoint."""
    if (folder / CHECKPOINT).exists():
        raise ConfigError(f"{folder} already contains a checkpoint: resume it, or choose another folder")
    output_folder(folder)
    with _complete_file(folder / STACK) as temporary:
        document.write(temporary, spec.model_dump(mode="json"))  # every field: a later default must not change the run
    write_settings(folder, settings)
    write_records(folder, [])


def write_settings(folder: Path, settings: RunSettings) -> None:
    """Replace the settings. Raises: ConfigError: the file cannot be written; the old one is kept."""
    with _complete_file(folder / SETTINGS) as temporary:
        document.write(temporary, settings.model_dump())


def write_records(folder: Path, records: Iterable[BaseModel]) -> None:
    """Replace the records, one JSON object per line. Raises: as `write_settings`."""
    with _complete_file(folder / METRICS) as temporary:
        temporary.write_text("".join(_line(record) for record in records), encoding="utf-8")


def append_record(folder: Path, record: BaseModel) -> None:
    """Append a record. Raises: ConfigError: the file cannot be written."""
    with file_errors("write", folder / METRICS), (folder / METRICS).open("a", encoding="utf-8") as file:
        file.write(_line(record))


def _line(record: BaseModel) -> str:
    return record.model_dump_json() + "\n"


def save(folder: Path, checkpoint: dict[str, Any]) -> None:
    """Replace the checkpoint.

    Raises: ConfigError: a weight is NaN or infinite, or the file cannot be written, for example on a full disk; the old
        checkpoint is kept.
    """
    _check_finite(folder / CHECKPOINT, checkpoint["model"])
    # torch.save reports a full disk as a RuntimeError, which has the OSError as context if it writes to a file object.
    with _complete_file(folder / CHECKPOINT) as temporary:
        with temporary.open("wb") as file:
            torch.save(checkpoint, file)
        append_digest(temporary)


@contextmanager
def _complete_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path and rename it to `path` if the block succeeds, else remove it and keep the old file.

    The file is on the disk before the rename, so that a loss of power leaves the old or the new file.

    Raises: ConfigError, which names `path`, if a file cannot be written.
    """
    temporary = path.with_name(f"part.{path.name}")
    try:
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())  # some file systems report a full disk only here
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):  # a read-only file system refuses to remove even a file that does not exist
            temporary.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(error, Exception) or not isinstance(cause, OSError):
            raise
        old = f"the previous {path.name} is kept" if path.exists() else f"there is no {path.name} yet"
        raise ConfigError(f"cannot write {path}: {cause.strerror}; {old}") from error


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless the folder has the files of a checkpoint."""
    if not folder.is_dir():
        problem = f"it is a file; its folder is {folder.parent}" if folder.exists() else "it does not exist"
        raise ConfigError(f"{folder} is not a checkpoint folder: {problem}")
    missing = [name for name in (STACK, SETTINGS, CHECKPOINT) if not (folder / name).exists()]
    if missing:
        raise ConfigError(f"{folder} is not a checkpoint folder: it has no {' and no '.join(missing)}")


def load(folder: Path, trust: bool = False) -> Saved:
    """Read a checkpoint folder, with its tensors on the CPU.

    Loading runs no code: torch.load reads with weights_only=True, and a "module:Class" in the stack or the settings is
    refused.

    Args: trust: allow "module:Class" names, as for `StackSpec.load`.
    Raises: ConfigError: a file is missing or damaged, a weight is NaN or infinite, the stack is not the one that was
        trained, or a setting differs that a resumed run cannot change.
    """
    check_folder(folder)
    spec, edited = StackSpec.load(folder / STACK, trust), document.read(folder / SETTINGS)
    checkpoint = _read(folder / CHECKPOINT)
    _check_has(folder / CHECKPOINT, checkpoint, tuple(_CHECKPOINT_TYPES))
    _check_types(folder / CHECKPOINT, checkpoint, _CHECKPOINT_TYPES)
    if not trust:
        refuse_untrusted(edited, folder / SETTINGS)
        for name in ("stack", "settings"):
            refuse_untrusted(checkpoint[name], folder / CHECKPOINT)
    _check_finite(folder / CHECKPOINT, checkpoint["model"])
    _check_stack(folder, spec, checkpoint["stack"])
    trained = RunSettings.parse(checkpoint["settings"], folder / CHECKPOINT)
    settings = RunSettings.parse(edited, folder / SETTINGS, defaults=trained)
    changes = differences(trained.train.model_dump(), settings.train.model_dump())
    if problem := refused(changes, folder / STACK):
        raise ConfigError(f"{folder / SETTINGS}: {problem}")
    if settings.text.digest != trained.text.digest:
        raise ConfigError(
            f"{folder / SETTINGS}: text.digest must stay that of the text that was trained, {trained.text.digest}, "
            f"got {settings.text.digest}"
        )
    return Saved(spec, settings, trained, checkpoint)


def _read(path: Path) -> Any:
    """Read a file of `save`. Raises: ConfigError: it is damaged."""
    try:
        with path.open("rb") as file:
            if not has_its_digest(file):
                raise ConfigError(
                    f"{path} cannot be read: it is damaged or not a checkpoint (its digest is wrong or missing)"
                )
            return torch.load(file, map_location="cpu", weights_only=True)
    except ConfigError:
        raise
    except Exception as error:  # the type of torch's error depends on the content
        raise ConfigError(f"{path} cannot be read: it is damaged or not a checkpoint") from error


def load_weights(model: LanguageModel, checkpoint: dict[str, Any]) -> None:
    """Load the weights of a checkpoint into a model.

    Raises: ConfigError: they belong to another stack, or have another dtype, which torch would convert silently.
    """
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError as error:
        first = next((line.strip() for line in str(error).splitlines()[1:]), str(error))
        raise ConfigError(f"the weights in {CHECKPOINT} do not fit {STACK}: {first}") from error
    except Exception as error:  # the entries are no tensors
        raise ConfigError(f"the weights in {CHECKPOINT} do not fit {STACK}: {error}") from error
    for name, weight in model.state_dict().items():
        dtype = checkpoint["model"][name].dtype
        if dtype != weight.dtype:
            raise ConfigError(f"{name} in {CHECKPOINT} must be {weight.dtype} like the model, got {dtype}")


def load_optimizer(optimizer: torch.optim.Optimizer, checkpoint: dict[str, Any]) -> None:
    """Load the state of a checkpoint's optimizer. Raises: ConfigError: it belongs to other weights."""
    try:
        optimizer.load_state_dict(checkpoint["optimizer"])
    except Exception as error:  # the type of torch's error depends on what differs
        raise ConfigError(f"the optimizer's state must be that of the weights of {STACK}: {error}") from error


def load_model(
    folder: str | Path, device: str = "cpu", backend: str | None = None, trust: bool = False
) -> LanguageModel:
    """Build the model of a checkpoint with its weights, in evaluation mode.

    Args: trust: as for `StackSpec.load`.
    Raises: ConfigError; UnknownNameError.
    """
    spec, settings, _, checkpoint = load(Path(folder), trust)
    model = spec.build(backend=backend)
    load_weights(model, checkpoint)
    model.run_settings = settings
    return model.to(usable_device(device)).eval()


_CHECKPOINT_TYPES = {
    "stack": dict,
    "settings": dict,
    "model": dict,
    "optimizer": dict,
    "step": int,
    "points": list,
    "changes": list,
    "recent": list,
    "rng": torch.Tensor,
    "cuda_rng": torch.Tensor | None,
}


def _check_finite(path: Path, weights: dict[str, Any]) -> None:
    """Raise ConfigError if a weight is NaN or infinite."""
    for name, weight in weights.items():
        if isinstance(weight, torch.Tensor) and not bool(weight.isfinite().all()):
            raise ConfigError(f"the weights in {path} must be finite, got NaN or inf in {name}")


def _check_stack(folder: Path, spec: StackSpec, stack: dict[str, Any]) -> None:
    """Raise ConfigError if `spec` is not the stack of the checkpoint: equal weights may belong to another model."""
    try:
        trained = StackSpec(**stack)
    except (ConfigError, PatternError) as error:
        raise ConfigError(f"{folder / CHECKPOINT} is not from a training run: stack: {error}") from error
    if trained != spec:
        changed = ", ".join(difference.path for difference in diff(trained, spec).differences)
        raise ConfigError(f"{folder / STACK} must be the stack that was trained, got other values of {changed}")


def _check_types(path: Path, data: dict[str, Any], types: Mapping[str, Any]) -> None:
    """Raise ConfigError if a value has another type than `save` and `create` write."""
    for key, expected in types.items():
        if not isinstance(data[key], expected):
            name = getattr(expected, "__name__", str(expected))
            raise ConfigError(
                f"{path} is not from a training run: {key} must have the type {name}, got {cut(data[key])}"
            )


def _check_has(path: Path, data: Any, keys: tuple[str, ...]) -> None:
    """Raise ConfigError if keys that `save` and `create` write are missing."""
    missing = [key for key in keys if not isinstance(data, dict) or key not in data]
    if missing:
        raise ConfigError(f"{path} is not from a training run: it has no {' and no '.join(missing)}")
