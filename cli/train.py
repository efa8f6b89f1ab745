"""`deltazoo train`."""

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deltazoo.blocks.training.rules import resumable_options
from deltazoo.cli.terminal.options import (
    DEVICE_HELP,
    AsJson,
    BackendName,
    CheckpointingMode,
    OptionalStack,
    TextFile,
    Trust,
)
from deltazoo.cli.terminal.output import print_json, print_line, print_note, progress
from deltazoo.cli.terminal.threads import let_idle_threads_sleep
from deltazoo.cli.terminal.training_rows import TrainingRows


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
            help="Continue the run in this folder, with its stack and settings. Of these, only "
            f"{', '.join(resumable_options())} can change.",
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

    Each validation prints a row at once, and appends it to metrics.jsonl in the folder of the checkpoint.

    Ctrl-C and SIGTERM save a checkpoint and print the command that continues the run, also with --json.
    """
    let_idle_threads_sleep()
    import deltazoo
    from deltazoo.blocks.training.interrupts import TrainingInterrupted

    fields = deltazoo.TrainConfig.model_fields
    settings = {name: context.params[name] for name in fields if context.params.get(name) is not None}
    surplus = [*([stack] if stack else []), *(["--out"] if out else [])]
    if resume is not None and surplus:
        raise typer.BadParameter(
            f"--resume takes the stack and the folder of the run, so omit {' and '.join(surplus)}; to branch a run, "
            "resume a copy of its folder"
        )
    on_point = None if as_json else TrainingRows()
    try:
        with progress() as report_progress, _printed_log():
            if resume is not None:
                training = deltazoo.resume(resume, text, until, report_progress, trust, settings, on_point)
            elif stack is not None:
                out = out or Path("runs") / Path(stack).stem
                config = deltazoo.TrainConfig(**settings)
                training = deltazoo.train(stack, out, text, config, until, report_progress, trust, on_point)
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
    print_line(training.line() + f"; checkpoint in {resume or out}")


@contextmanager
def _printed_log() -> Iterator[None]:
    """Print what the package logs, such as changed settings, on stderr."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print_note(record.getMessage())

    logger, handler = logging.getLogger("deltazoo"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
