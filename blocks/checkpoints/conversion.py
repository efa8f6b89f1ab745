"""Conversion of a folder of weights, ours or transformers', to one of transformers."""

from pathlib import Path
from typing import NamedTuple

import torch

from deltazoo.blocks.checkpoints import folder as checkpoint
from deltazoo.blocks.checkpoints.bare import is_pretrained
from deltazoo.blocks.checkpoints.family import CONFIG
from deltazoo.blocks.checkpoints.pretrained import from_pretrained
from deltazoo.blocks.checkpoints.tensor_files import read_json


class Converted(NamedTuple):
    """What was written: the family, and the number of parameters."""

    model_type: str
    parameters: int


def convert(
    source: str | Path,
    target: str | Path,
    model_type: str | None = None,
    dtype: torch.dtype | None = None,
    trust: bool = False,
) -> Converted:
    """Read a folder of transformers or of a training run, and write a folder of transformers.

    Args: dtype: as for `from_pretrained`; for a run, of all weights. trust: as for `deltazoo.load`.
    Raises: ConfigError.
    """
    source, target = Path(source), Path(target)
    if is_pretrained(source):
        model = from_pretrained(source, dtype=dtype)
    else:
        model = checkpoint.load_model(source, trust=trust).to(dtype=dtype)
    model.save_pretrained(target, model_type=model_type)
    return Converted(read_json(target / CONFIG)["model_type"], sum(x.numel() for x in model.parameters()))
