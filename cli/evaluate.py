"""`deltazoo evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.options import AsJson, BackendName, Device, TextFile, Trust
from deltazoo.cli.output import print_json, print_line
from deltazoo.cli.threads import let_idle_threads_sleep


def command(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder written by `deltazoo train`.")],
    text: TextFile = None,
    length: Annotated[int, typer.Option(min=1, help="Bytes per window.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Windows per forward pass.")] = 8,
    batches: Annotated[
        int, typer.Option(min=0, help="Batches of evenly spaced windows; 0: the whole validation part.")
    ] = 4,
    device: Device = "cpu",
    backend: BackendName = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Compute the bits per byte of a trained model on the validation part of a text."""
    let_idle_threads_sleep()
    import deltazoo

    model = deltazoo.load(checkpoint, device, backend, trust)
    evaluation = deltazoo.evaluate(model, text, length, batch, batches or None)
    if as_json:
        print_json(evaluation)
        return
    print_line(evaluation.line())
