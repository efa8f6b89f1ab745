"""A training on disk: a folder with the stack, the settings, and a checkpoint that is whole or not there."""

from pathlib import Path
from typing import Any

import torch

from deltazoo.backends.devices import usable_device
from deltazoo.backends.errors import ConfigError
from deltazoo.blocks import document
from deltazoo.blocks.spec import StackSpec
from deltazoo.blocks.stack import LanguageModel
from deltazoo.blocks.trust import refuse_untrusted

STACK, SETTINGS, CHECKPOINT = "stack.yaml", "train.yaml", "checkpoint.pt"


def begin(folder: Path, spec: StackSpec, settings: dict[str, Any]) -> None:
    """Make the folder, with the stack and the settings. Raises: ConfigError, where it holds a checkpoint already."""
    if (folder / CHECKPOINT).exists():
        raise ConfigError(f"{folder} holds a checkpoint already: resume it, or choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(folder / STACK)
    document.write(folder / SETTINGS, settings)


def save(folder: Path, saved: dict[str, Any]) -> None:
    """Write the checkpoint beside its place and move it there, so that half of one is never found."""
    part = folder / f"{CHECKPOINT}.part"
    torch.save(saved, part)
    part.replace(folder / CHECKPOINT)


def load(folder: Path, trust: bool = False) -> tuple[StackSpec, dict[str, Any], dict[str, Any]]:
    """The stack, the settings and what was saved, on the CPU.

    Loading runs no code: the checkpoint is read with weights_only, and a "module:Class" in the stack or the settings
    is refused unless `trust` allows it.

    Raises: ConfigError.
    """
    missing = [name for name in (STACK, SETTINGS, CHECKPOINT) if not (folder / name).exists()]
    if missing:
        raise ConfigError(f"{folder} is no checkpoint folder: it has no {' and no '.join(missing)}")
    spec, settings = StackSpec.load(folder / STACK, trust), document.read(folder / SETTINGS)
    if not trust:
        refuse_untrusted(settings, folder / SETTINGS)
    try:
        saved = torch.load(folder / CHECKPOINT, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch raises depends on where the damage is
        raise ConfigError(f"{folder / CHECKPOINT} cannot be read: it is damaged or no checkpoint") from error
    _check_has(folder / CHECKPOINT, saved, ("model", "optimizer", "step", "points", "rng"))
    _check_has(folder / SETTINGS, settings, ("text", "train"))
    _check_has(folder / SETTINGS, settings["text"], ("path", "digest", "source"))
    return spec, settings, saved


def _check_has(path: Path, found: Any, names: tuple[str, ...]) -> None:
    """Raises: ConfigError, where what was read is not what `save` and `begin` write."""
    absent = [name for name in names if not isinstance(found, dict) or name not in found]
    if absent:
        raise ConfigError(f"{path} is not of a training: it has no {' and no '.join(absent)}")


def load_weights(model: LanguageModel, saved: dict[str, Any]) -> None:
    """Give a model the weights of a checkpoint. Raises: ConfigError, where they are of another stack."""
    try:
        model.load_state_dict(saved["model"])
    except RuntimeError as error:
        first = next((line.strip() for line in str(error).splitlines()[1:]), str(error))
        raise ConfigError(f"the weights must be those of {STACK}, got others: {first}") from error


def load_model(
    folder: str | Path, device: str = "cpu", backend: str | None = None, trust: bool = False
) -> LanguageModel:
    """Build the model of a checkpoint with its weights.

    Args: trust: as for `StackSpec.load`.
    Raises: ConfigError; UnknownNameError.
    """
    spec, _, saved = load(Path(folder), trust)
    model = spec.build(backend=backend)
    load_weights(model, saved)
    return model.to(usable_device(device)).eval()
