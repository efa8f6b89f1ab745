"""`deltazoo train`."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.options import DEVICE_HELP, AsJson, BackendName, CheckpointingMode, OptionalStack, TextFile, Trust
from deltazoo.cli.output import print_json, print_line, print_note, print_table, progress
from deltazoo.cli.threads import let_idle_threads_sleep


class ComputeDtype(StrEnum):
    """The dtypes of the forward and backward pass."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def command(
    context: typer.Context,
    stack: OptionalStack = None,
    text: TextFile = None,
    out: Annotated[Path | None, typer.Option(show_default="runs/NAME", help="Folder for the checkpoint.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Continue the run in this folder, with its stack and settings. Only --steps, --device, --backend, "
            "--compile and --checkpointing can change.",
        ),
    ] = None,
    until: Annotated[
        int | None, typer.Option(min=1, help="Stop after this step; --resume continues the schedule.")
    ] = None,
    steps: Annotated[int | None, typer.Option(show_default="300", help="Steps of the whole schedule.")] = None,
    batch: Annotated[int | None, typer.Option(show_default="8", help="Batch size in sequences.")] = None,
    length: Annotated[int | None, typer.Option(show_default="256", help="Sequence length in bytes.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--lr", show_default="0.002", help="Peak learning rate.")
    ] = None,
    warmup: Annotated[int | None, typer.Option(show_default="20", help="Warm-up steps of the learning rate.")] = None,
    weight_decay: Annotated[float | None, typer.Option(show_default="0.1", help="Weight decay of matrices.")] = None,
    clip: Annotated[float | None, typer.Option(show_default="1.0", help="Maximum norm of the gradient.")] = None,
    seed: Annotated[int | None, typer.Option(show_default="0", help="Random seed of the weights and crops.")] = None,
    every: Annotated[
        int | None, typer.Option(show_default="25", help="Steps between validations, each with a checkpoint.")
    ] = None,
    device: Annotated[str | None, typer.Option(show_default="cpu", help=DEVICE_HELP)] = None,
    dtype: Annotated[
        ComputeDtype | None, typer.Option(show_default="float32", help="Compute dtype; bfloat16 uses autocast.")
    ] = None,
    backend: BackendName = None,
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            show_default="compile",
            help="Compile the model with torch.compile; without it the first step starts at once and each is slower.",
        ),
    ] = None,
    checkpointing: CheckpointingMode = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Train a stack on the bytes of a text. Losses are in bits per byte; checkpoints resume bit for bit.

    Ctrl-C and SIGTERM save a checkpoint and print the command that continues the run, also with --json.
    """
    let_idle_threads_sleep()
    import deltazoo
    from deltazoo.blocks.training.interrupts import TrainingInterrupted
    from deltazoo.blocks.training.train import RESUMABLE

    fields = deltazoo.TrainConfig.model_fields
    settings = {name: context.params[name] for name in fields if context.params.get(name) is not None}
    if resume is not None:
        flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
        fixed = [name for name in ("out", *settings) if context.params[name] is not None and name not in RESUMABLE]
        conflicts = [*([stack] if stack else []), *(flags[name] for name in fixed)]
        if conflicts:
            got = ", ".join(conflicts)
            raise typer.BadParameter(f"--resume takes stack, folder and settings from the checkpoint, got {got}")
    try:
        with progress() as report_progress:
            if resume is not None:
                training = deltazoo.resume(resume, text, until, report_progress, trust, settings)
            elif stack is not None:
                out = out or Path("runs") / Path(stack).stem
                config = deltazoo.TrainConfig(**settings)
                training = deltazoo.train(stack, out, text, config, until, report_progress, trust)
            else:
                raise typer.BadParameter("give a FILE or a PRESET, or --resume FOLDER")
    except TrainingInterrupted as interrupted:
        options = ["--resume", str(interrupted.folder), *(["--until", str(until)] if until else [])]
        continuation = shlex.join(["deltazoo", "train", *options, *(["--trust"] if trust else [])])
        print_note(f"stopped by {interrupted}; continue with: {continuation}")
        if as_json:
            interruption = {"message": str(interrupted), "step": interrupted.step, "folder": str(interrupted.folder)}
            print_json({"interrupted": {**interruption, "continue": continuation}})
        raise typer.Exit(128 + interrupted.signum) from interrupted
    if as_json:
        print_json(training)
        return
    names = training.auxiliary
    columns = [">step", ">train", ">validation, bits per byte", *(f">{name}" for name in names), ">tokens/s"]
    print_table(columns, [point.cells(names) for point in training.points])
    print_line(training.line() + f"; checkpoint in {resume or out}")
