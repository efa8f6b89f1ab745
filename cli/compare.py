"""`deltazoo compare`."""

from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.terminal.options import AsJson
from deltazoo.cli.terminal.output import print_json, print_line, print_table


def command(
    folder: Annotated[Path, typer.Argument(help="Folder of transformers: config.json and weights.")],
    tokens: Annotated[int, typer.Option(min=1, help="Greedy tokens to decode.")] = 16,
    as_json: AsJson = False,
) -> None:
    """Compare the model of a folder with transformers' model of it, in float32 on the CPU.

    The exit code is 1 if the logits differ by more than 1e-4 (relative RMS error) or a greedy token differs.
    """
    from deltazoo.blocks.checkpoints.comparison import compare

    result = compare(folder, tokens=tokens)
    if as_json:
        print_json(result)
    else:
        print_table(["layer", "error"], [[str(i), f"{error:.1e}"] for i, error in enumerate(result.layers)])
        print_line(f"logits: error {result.logits:.1e}; loss {result.loss:.4f}, transformers {result.their_loss:.4f}")
        print_line(f"greedy tokens: {result.equal_tokens} of {result.tokens} equal")
        if result.first_different_layer is not None:
            print_line(f"the first layer that differs is {result.first_different_layer}")
    if not result.equal:
        raise typer.Exit(1)
