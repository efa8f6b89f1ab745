"""Options that several commands share."""

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltazoo.cli.terminal.completion import complete_backend, complete_backends, complete_device, complete_stack

if TYPE_CHECKING:
    import torch


class Dtype(StrEnum):
    """The dtypes of operands."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    @property
    def torch(self) -> "torch.dtype":
        """The torch dtype of this name."""
        import torch

        dtype = getattr(torch, self.value)
        assert isinstance(dtype, torch.dtype)
        return dtype


class Checkpointing(StrEnum):
    """What the backward pass of a model recomputes."""

    none = "none"
    selective = "selective"
    full = "full"


DEVICE_HELP = "Device: cpu, cuda, cuda:1 or mps."

AsJson = Annotated[bool, typer.Option("--json", help="Print the result, or the error, as one JSON document.")]
Device = Annotated[str, typer.Option(help=DEVICE_HELP, autocompletion=complete_device)]
OperandDtype = Annotated[Dtype, typer.Option(help="Dtype of the operands.")]
BackendName = Annotated[
    str | None,
    typer.Option(
        "--backend",
        help="Backend of the updates, a name or module:Class. Default: chosen for the device.",
        autocompletion=complete_backend,
    ),
]
BackendNames = Annotated[
    str | None,
    typer.Option(
        "--backends",
        help="Comma-separated backends, names or module:Class. Default: all installed.",
        autocompletion=complete_backends,
    ),
]
Directions = Annotated[
    str, typer.Option(help="Comma-separated list of forward, backward (includes forward) and decode.")
]
CheckpointingMode = Annotated[
    Checkpointing | None,
    typer.Option(
        "--checkpointing",
        show_default="none",
        help="What a model's backward pass recomputes to save memory: nothing, cheap operators (selective), or whole "
        "layers (full).",
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Random seed.")]
OptionalStack = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE|PRESET",
        help="Stack file (YAML or JSON), or the name of a preset.",
        autocompletion=complete_stack,
    ),
]
TextFile = Annotated[
    Path | None, typer.Option("--text", help="Text file. Default: the sources of Python's standard library.")
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Allow files to name code as module:Class. Importing it runs the code.")
]


def split(names: str | None) -> list[str] | None:
    """Split a list at its commas, except those in parentheses; None stays None."""
    return None if names is None else [name.strip() for name in re.split(r",(?![^()]*\))", names) if name.strip()]
