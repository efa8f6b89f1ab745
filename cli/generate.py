"""`deltazoo generate`."""

from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.options import AsJson, BackendName, Device, Seed, Trust
from deltazoo.cli.output import print_json, say, write


def command(
    checkpoint: Annotated[Path, typer.Argument(help="The folder that `deltazoo train` wrote.")],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")] = "def ",
    max_bytes: Annotated[int, typer.Option(help="The most to write.")] = 256,
    temperature: Annotated[float, typer.Option(help="Divides the logits; 0 takes the likeliest byte.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest bytes.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the fewest bytes whose mass reaches p.")] = None,
    stop: Annotated[str | None, typer.Option(help="Stop after this text.")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    backend: BackendName = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with a trained model, by cached decoding, as the bytes come."""
    from deltazoo.blocks.generation.completion import Sampling, encoded, load_writer
    from deltazoo.blocks.generation.completion import write as continue_text

    sampling = Sampling(max_bytes=max_bytes, temperature=temperature, top_k=top_k, top_p=top_p, stop=stop, seed=seed)
    model = load_writer(checkpoint, device, backend, trust)
    if as_json:
        print_json(continue_text(model, prompt, sampling))
        return
    encoded("prompt", prompt)  # refused before it is shown
    write(prompt)
    continue_text(model, prompt, sampling, write)
    say()
