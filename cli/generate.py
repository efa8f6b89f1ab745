"""`deltazoo generate`."""

from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.options import AsJson, BackendName, Device, Seed, Trust
from deltazoo.cli.output import print_json, print_line, print_piece


def command(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder written by `deltazoo train`.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    max_bytes: Annotated[int, typer.Option(help="Maximum number of bytes to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 selects the most likely byte.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely bytes.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the smallest set of bytes with total probability p.")
    ] = None,
    stop: Annotated[str | None, typer.Option(help="Stop after this text.")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    backend: BackendName = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with a trained model by cached decoding, and print the text as it is generated."""
    import deltazoo
    from deltazoo.blocks.generation.completion import encode

    sampling = deltazoo.Sampling(
        max_bytes=max_bytes, temperature=temperature, top_k=top_k, top_p=top_p, stop=stop, seed=seed
    )
    model = deltazoo.load(checkpoint, device, backend, trust)
    if as_json:
        print_json(deltazoo.generate(model, prompt, sampling))
        return
    encode("prompt", prompt)  # report an invalid prompt before it is printed
    print_piece(prompt)
    deltazoo.generate(model, prompt, sampling, print_piece)
    print_line()
