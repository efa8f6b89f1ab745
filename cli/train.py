"""`deltazoo train`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.options import AsJson, BackendName, OptionalStack, TextFile, Trust
from deltazoo.cli.output import print_json, print_table, progress, say
from deltazoo.cli.threads import wait_patiently


class WeightDtype(StrEnum):
    """What training computes in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def command(
    context: typer.Context,
    stack: OptionalStack = None,
    text: TextFile = None,
    out: Annotated[Path | None, typer.Option(show_default="runs/NAME", help="Folder of the checkpoint.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on from this folder, with its stack and settings.")] = None,
    until: Annotated[int | None, typer.Option(min=1, help="Stop after this step; --resume goes on.")] = None,
    steps: Annotated[int | None, typer.Option(show_default="300", help="Of the whole schedule.")] = None,
    batch: Annotated[int | None, typer.Option(show_default="8", help="Rows a step.")] = None,
    length: Annotated[int | None, typer.Option(show_default="256", help="Bytes a row.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--lr", show_default="0.002", help="The highest.")] = None,
    warmup: Annotated[int | None, typer.Option(show_default="20", help="Steps up to it.")] = None,
    weight_decay: Annotated[float | None, typer.Option(show_default="0.1", help="On matrices.")] = None,
    clip: Annotated[float | None, typer.Option(show_default="1.0", help="The gradients' largest norm.")] = None,
    seed: Annotated[int | None, typer.Option(show_default="0", help="Of weights and crops.")] = None,
    every: Annotated[int | None, typer.Option(show_default="25", help="Steps between checkpoints.")] = None,
    device: Annotated[str | None, typer.Option(show_default="cpu", help="cpu, cuda, cuda:1, mps.")] = None,
    dtype: Annotated[WeightDtype | None, typer.Option(show_default="float32", help="bfloat16 is autocast.")] = None,
    backend: BackendName = None,
    compile: Annotated[bool | None, typer.Option("--compile/--no-compile", show_default="compile")] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Train a stack on bytes of text: validation, bits per byte, and a checkpoint that goes on bit for bit."""
    wait_patiently()
    from deltazoo.blocks.spec import StackSpec
    from deltazoo.blocks.training.text import load_text
    from deltazoo.blocks.training.train import TrainConfig, train
    from deltazoo.blocks.training.train import resume as go_on

    given = {name: context.params[name] for name in TrainConfig.model_fields if context.params.get(name) is not None}
    if resume is not None and (stack or out or given):
        raise typer.BadParameter(f"--resume takes stack and settings from the checkpoint, got {stack or out or given}")
    with progress() as told:
        if resume is not None:
            found = go_on(resume, load_text(text) if text else None, until, told, trust)
        elif stack is not None:
            spec, out = StackSpec.load(stack, trust), out or Path("runs") / Path(stack).stem
            found = train(spec, load_text(text), TrainConfig(**given), out, until, told)
        else:
            raise typer.BadParameter("give a FILE or a PRESET, or --resume FOLDER")
    if as_json:
        print_json(found)
        return
    print_table(
        [">step", ">train", ">validation, bits per byte", ">tokens/s"], [point.cells() for point in found.points]
    )
    say(found.line() + f"; checkpoint in {resume or out}")
