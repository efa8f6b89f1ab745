"""A training on disk: a folder with the stack, the settings, and a checkpoint that is whole or not there."""

from pathlib import Path
from typing import Any

import torch

from deltazoo.backends.environment import usable_device
from deltazoo.backends.errors import ConfigError
from deltazoo.blocks import document
from deltazoo.blocks.spec import StackSpec
from deltazoo.blocks.stack import LanguageModel

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


def load(folder: Path) -> tuple[StackSpec, dict[str, Any], dict[str, Any]]:
    """The stack, the settings and what was saved, on the CPU. Raises: ConfigError."""
    missing = [name for name in (STACK, SETTINGS, CHECKPOINT) if not (folder / name).exists()]
    if missing:
        raise ConfigError(f"{folder} is no checkpoint folder: it has no {' and no '.join(missing)}")
    spec, settings = StackSpec.load(folder / STACK), document.read(folder / SETTINGS)
    try:
        return spec, settings, torch.load(folder / CHECKPOINT, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch raises depends on where the damage is
        raise ConfigError(f"{folder / CHECKPOINT} cannot be read: it is damaged or no checkpoint") from error


def load_model(folder: str | Path, device: str = "cpu", backend: str | None = None) -> LanguageModel:
    """Build the model of a checkpoint with its weights. Raises: ConfigError; UnknownNameError."""
    spec, _, saved = load(Path(folder))
    model = spec.build(backend=backend)
    model.load_state_dict(saved["model"])
    return model.to(usable_device(device)).eval()
