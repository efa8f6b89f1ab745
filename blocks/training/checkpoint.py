"""Checkpoint folders: the stack and the settings as YAML, and the tensors, which are written atomically."""

from pathlib import Path
from typing import Any

import torch

from deltazoo.backends.devices import usable_device
from deltazoo.backends.errors import ConfigError
from deltazoo.backends.output_path import output_folder
from deltazoo.blocks import document
from deltazoo.blocks.spec import StackSpec
from deltazoo.blocks.stack import LanguageModel
from deltazoo.blocks.trust import refuse_untrusted

STACK, SETTINGS, CHECKPOINT = "stack.yaml", "train.yaml", "checkpoint.pt"


def create(folder: Path, spec: StackSpec, settings: dict[str, Any]) -> None:
    """Create the folder with the stack and the settings. Raises: ConfigError: it already contains a checkpoint."""
    if (folder / CHECKPOINT).exists():
        raise ConfigError(f"{folder} already contains a checkpoint: resume it, or choose another folder")
    output_folder(folder)
    spec.save(folder / STACK)
    document.write(folder / SETTINGS, settings)


def save(folder: Path, checkpoint: dict[str, Any]) -> None:
    """Write the checkpoint to a temporary file and rename it, so that an interrupted write leaves the old one."""
    temporary = folder / f"{CHECKPOINT}.part"
    torch.save(checkpoint, temporary)
    temporary.replace(folder / CHECKPOINT)


def load(folder: Path, trust: bool = False) -> tuple[StackSpec, dict[str, Any], dict[str, Any]]:
    """Return the stack, the settings and the checkpoint, with its tensors on the CPU.

    Loading runs no code: torch.load reads with weights_only=True, and a "module:Class" in the stack or the settings is
    refused.

    Args: trust: allow "module:Class" names, as for `StackSpec.load`.
    Raises: ConfigError.
    """
    missing = [name for name in (STACK, SETTINGS, CHECKPOINT) if not (folder / name).exists()]
    if missing:
        raise ConfigError(f"{folder} is not a checkpoint folder: it has no {' and no '.join(missing)}")
    spec, settings = StackSpec.load(folder / STACK, trust), document.read(folder / SETTINGS)
    if not trust:
        refuse_untrusted(settings, folder / SETTINGS)
    try:
        checkpoint = torch.load(folder / CHECKPOINT, map_location="cpu", weights_only=True)
    except Exception as error:  # the type of torch's error depends on the damage
        raise ConfigError(f"{folder / CHECKPOINT} cannot be read: it is damaged or not a checkpoint") from error
    _check_has(folder / CHECKPOINT, checkpoint, ("model", "optimizer", "step", "points", "rng"))
    _check_has(folder / SETTINGS, settings, ("text", "train"))
    _check_has(folder / SETTINGS, settings["text"], ("path", "digest", "source"))
    return spec, settings, checkpoint


def load_weights(model: LanguageModel, checkpoint: dict[str, Any]) -> None:
    """Load the weights of a checkpoint into a model. Raises: ConfigError: they belong to another stack."""
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError as error:
        first = next((line.strip() for line in str(error).splitlines()[1:]), str(error))
        raise ConfigError(f"the weights must be those of {STACK}, got others: {first}") from error


def load_model(
    folder: str | Path, device: str = "cpu", backend: str | None = None, trust: bool = False
) -> LanguageModel:
    """Build the model of a checkpoint with its weights, in evaluation mode.

    Args: trust: as for `StackSpec.load`.
    Raises: ConfigError; UnknownNameError.
    """
    spec, _, checkpoint = load(Path(folder), trust)
    model = spec.build(backend=backend)
    load_weights(model, checkpoint)
    return model.to(usable_device(device)).eval()


def _check_has(path: Path, data: Any, keys: tuple[str, ...]) -> None:
    """Raise ConfigError if keys that `save` and `create` write are missing."""
    missing = [key for key in keys if not isinstance(data, dict) or key not in data]
    if missing:
        raise ConfigError(f"{path} is not from a training run: it has no {' and no '.join(missing)}")
