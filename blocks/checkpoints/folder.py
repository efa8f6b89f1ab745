"""The folder of a training run: its stack and settings as YAML, its records, and its checkpoints."""

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor
from torch.distributed.tensor import DTensor

from deltazoo.backends.io.errors import ConfigError, PatternError, cut, file_errors
from deltazoo.backends.io.output_path import output_folder
from deltazoo.backends.torch_ext.devices import usable_device
from deltazoo.blocks.checkpoints.sharded import CHECKPOINTS, Loaded, load_tensors, read_state, saved_steps, step_folder
from deltazoo.blocks.data.shards import TOKENIZER
from deltazoo.blocks.data.tokenizer import read_tokenizer
from deltazoo.blocks.inspect.diff import diff
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.parallel.ranks import Ranks
from deltazoo.blocks.spec import document
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.spec.trust import refuse_untrusted
from deltazoo.blocks.training.config import RunSettings
from deltazoo.blocks.training.records import Point
from deltazoo.blocks.training.rules import differences, refused

STACK, SETTINGS, METRICS = "stack.yaml", "train.yaml", "metrics.jsonl"


class Saved(NamedTuple):
    """The folder of a run: the stack, the settings in train.yaml, those of the trained run, and a checkpoint."""

    spec: StackSpec
    settings: RunSettings
    trained: RunSettings
    loaded: Loaded


def create(folder: Path, spec: StackSpec, settings: RunSettings) -> None:
    """Create the folder with the stack and the settings. Raises: ConfigError: it already contains a checkpoint."""
    if saved_steps(folder):
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


def read_points(folder: Path) -> list[Point]:
    """Read the points in metrics.jsonl; a line that is torn, because a process was killed, is left out."""
    path, points = folder / METRICS, []
    with file_errors("read", path):
        lines = path.read_text(encoding="utf-8").splitlines()
    for line in lines:
        with suppress(ValidationError):  # a change of a setting, or a torn line
            points.append(Point.model_validate_json(line))
    return points


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
    """Raise ConfigError unless the folder has the files of a run."""
    if not folder.is_dir():
        problem = f"it is a file; its folder is {folder.parent}" if folder.exists() else "it does not exist"
        raise ConfigError(f"{folder} is not a checkpoint folder: {problem}")
    missing = [name for name in (STACK, SETTINGS) if not (folder / name).exists()]
    missing += [] if saved_steps(folder) else [f"complete checkpoint in {CHECKPOINTS}"]
    if missing:
        raise ConfigError(f"{folder} is not a checkpoint folder: it has no {' and no '.join(missing)}")


def load(folder: Path, trust: bool = False, step: int | None = None, ranks: Ranks | None = None) -> Saved:
    """Read the folder of a run, and the plain data of a checkpoint, whose files are compared with their digests.

    Loading runs no code: the tensors are read with weights_only=True, the metadata with the classes of metadata only,
    and a "module:Class" in the stack or the settings is refused without `trust`.

    Args: trust: allow "module:Class" names, as for `StackSpec.load`; step: of the checkpoint, None: the last; ranks:
        processes that share the reading of files.
    Raises: ConfigError: a file is missing or damaged, the stack is not the one that was trained, or a setting differs
        that a resumed run cannot change.
    """
    check_folder(folder)
    ranks = ranks or Ranks()
    steps = saved_steps(folder)
    spec, edited = StackSpec.load(folder / STACK, trust), document.read(folder / SETTINGS)
    path = step_folder(folder, steps[-1] if step is None else step)
    try:
        loaded = read_state(path, lambda number, count: number % ranks.size == ranks.rank)
    except ConfigError as error:
        good = [each for each in steps if each < int(path.name.removeprefix("step-"))]
        raise ConfigError(f"{error}" + (f"; the checkpoint before it is of step {good[-1]}" if good else "")) from error
    file, state = path / "state.json", loaded.state
    _check_has(file, state, tuple(_STATE_TYPES))
    _check_types(file, state, _STATE_TYPES)
    if not trust:
        refuse_untrusted(edited, folder / SETTINGS)
        for name in ("stack", "settings"):
            refuse_untrusted(state[name], file)
    _check_stack(folder, file, spec, state["stack"])
    trained = RunSettings.parse(state["settings"], file)
    settings = RunSettings.parse(edited, folder / SETTINGS, defaults=trained)
    changes = differences(trained.train.model_dump(), settings.train.model_dump())
    if problem := refused(changes, folder / STACK):
        raise ConfigError(f"{folder / SETTINGS}: {problem}")
    if settings.text.digest != trained.text.digest:
        raise ConfigError(
            f"{folder / SETTINGS}: text.digest must stay that of the text that was trained, {trained.text.digest}, "
            f"got {settings.text.digest}"
        )
    return Saved(spec, settings, trained, loaded)


def weights_of(model: LanguageModel) -> dict[str, Tensor]:
    """Return the parameters, each once, and the buffers that a state dict has."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    known = {id(x) for x in parameters.values()}
    saved = {name for name in model.state_dict() if name not in parameters}
    buffers = {name: x for name, x in model.named_buffers() if name in saved and id(x) not in known}
    return parameters | buffers


def buffers_of(model: LanguageModel) -> dict[str, Tensor]:
    """Return the buffers that a state dict has, with the prefix of their names in a checkpoint."""
    return {f"model.{name}": x for name, x in weights_of(model).items() if not isinstance(x, torch.nn.Parameter)}


def load_weights(model: LanguageModel, loaded: Loaded) -> None:
    """Load the weights of a checkpoint into a model of one process.

    Raises: ConfigError: they belong to another stack, are of another dtype, or are NaN or infinite.
    """
    weights = {f"model.{name}": x.detach() for name, x in weights_of(model).items()}
    surplus = sorted({name for name in loaded.entries if name.startswith("model.")} - {*weights})
    if surplus:
        raise ConfigError(f"the weights in {loaded.folder.name} do not fit {STACK}: {surplus[0]} is unknown")
    load_tensors(loaded, weights, buffers_of(model), Ranks())
    if problem := not_finite(loaded.folder, weights):
        raise ConfigError(problem)


def load_model(
    folder: str | Path, device: str = "cpu", backend: str | None = None, trust: bool = False
) -> LanguageModel:
    """Build the model of a run with the weights of its last checkpoint, in evaluation mode.

    Args: trust: as for `StackSpec.load`.
    Raises: ConfigError; UnknownNameError.
    """
    spec, settings, _, loaded = load(Path(folder), trust)
    model = spec.build(backend=backend)
    load_weights(model, loaded)
    model.run_settings = settings
    if (Path(folder) / TOKENIZER).is_file():
        model.tokenizer = read_tokenizer(Path(folder), {}, spec.vocab)
    return model.to(usable_device(device)).eval()


def report_line(sentence: str) -> None:
    """Print a sentence on stderr as a command does, from any thread."""
    sys.stderr.write(f"deltazoo: {sentence}\n")
    sys.stderr.flush()


_STATE_TYPES = {
    "stack": dict,
    "settings": dict,
    "step": int,
    "skipped": int,
    "points": list,
    "changes": list,
    "recent": list,
    "data": dict,
    "rng": list,
}


def not_finite(path: object, weights: Mapping[str, Tensor]) -> str | None:
    """Return the sentence for a weight that is NaN or infinite, or None; one wait for the device."""
    parts = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in weights.items()}
    locals_ = {name: x for name, x in parts.items() if x.is_floating_point() and x.numel()}  # a shard may be empty
    if not locals_:
        return None
    norms = torch.stack(torch._foreach_norm([x.detach() for x in locals_.values()], math.inf))
    if bool(norms.isfinite().all()):
        return None
    name = next(name for name, norm in zip(locals_, norms, strict=True) if not norm.isfinite())
    return f"the weights in {path} must be finite, got NaN or inf in {name.removeprefix('model.')}"


def _check_stack(folder: Path, file: Path, spec: StackSpec, stack: dict[str, Any]) -> None:
    """Raise ConfigError if `spec` is not the stack of the checkpoint: equal weights may belong to another model."""
    try:
        trained = StackSpec(**stack)
    except (ConfigError, PatternError) as error:
        raise ConfigError(f"{file} is not from a training run: stack: {error}") from error
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
