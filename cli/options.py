"""Options that several commands take, each declared once."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
        """The dtype itself."""
        import torch

        found = getattr(torch, self.value)
        assert isinstance(found, torch.dtype)
        return found


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
OperandDtype = Annotated[Dtype, typer.Option(help="Of the operands.")]
BackendName = Annotated[
    str | None, typer.Option("--backend", help="A backend's name or module:Class; the device's default if none.")
]
BackendNames = Annotated[
    str | None, typer.Option("--backends", help="Names or module:Class, with commas between; all installed if none.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of all that is drawn.")]
OptionalStack = Annotated[
    str | None, typer.Argument(metavar="FILE|PRESET", help="A YAML or JSON file of a stack, or a preset's name.")
]
TextFile = Annotated[
    Path | None, typer.Option("--text", help="A text file; the standard library's own sources if none.")
]


Trust = Annotated[
    bool, typer.Option("--trust", help='Allow "module:Class" names in files; importing them runs their code.')
]


def split(listed: str | None) -> list[str] | None:
    """What stands between commas."""
    return None if listed is None else [name.strip() for name in listed.split(",") if name.strip()]
