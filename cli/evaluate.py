"""`deltazoo evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.terminal.options import AsJson, BackendName, Device, Trust
from deltazoo.cli.terminal.output import print_json, print_line
from deltazoo.cli.terminal.threads import let_idle_threads_sleep

_AS_RUN = "as in the run"


def command(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder written by `deltazoo train`.")],
    text: Annotated[
        Path | None,
        typer.Option(show_default="the text of the run", help="Text file, or a folder of `deltazoo data`."),
    ] = None,
    length: Annotated[int | None, typer.Option(min=1, show_default=_AS_RUN, help="Tokens per window.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, show_default=_AS_RUN, help="Windows per forward pass.")] = None,
    batches: Annotated[
        int | None,
        typer.Option(min=0, show_default=_AS_RUN, help="Batches of windows; 0: the whole validation part."),
    ] = None,
    device: Device = "cpu",
    backend: BackendName = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Compute the loss of a trained model in bits per token, on the part of a text that is held out from training.

    The defaults give the last validation loss of the run.
    """
    let_idle_threads_sleep()
    import deltazoo

    model = deltazoo.load(checkpoint, device, backend, trust)
    evaluation = deltazoo.evaluate(model, text, length, batch, batches)
    if as_json:
        print_json(evaluation)
        return
    print_line(evaluation.line())
