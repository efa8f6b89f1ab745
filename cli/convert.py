"""`deltazoo convert`."""

from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.terminal.options import Dtype, Trust
from deltazoo.cli.terminal.output import print_line


def command(
    source: Annotated[
        Path, typer.Argument(help="Folder of transformers, or checkpoint folder written by `deltazoo train`.")
    ],
    target: Annotated[Path, typer.Argument(help="New or empty folder, which transformers can load.")],
    model_type: Annotated[
        str | None,
        typer.Option(help="Family, such as qwen3_next. Default: that of the source, or the first that fits the stack."),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype of the weights. Default: that of the source.")] = None,
    trust: Trust = False,
) -> None:
    """Write the model of a folder as a folder of transformers: config.json and safetensors."""
    from deltazoo.blocks.checkpoints.conversion import convert

    written = convert(source, target, model_type, None if dtype is None else dtype.torch, trust)
    print_line(f"wrote {target}: {written.model_type}, {written.parameters:,} parameters")
