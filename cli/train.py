"""`deltazoo train`."""

import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.training.rules import RULES, resumable_options
from deltazoo.cli.terminal.options import (
    DEVICE_HELP,
    AsJson,
    BackendName,
    CheckpointingMode,
    OptionalStack,
    Trust,
)
from deltazoo.cli.terminal.output import print_json, print_line, print_note, progress
from deltazoo.cli.terminal.threads import let_idle_threads_sleep
from deltazoo.cli.terminal.training_rows import TrainingRows

if TYPE_CHECKING:
    from deltazoo.blocks.training.interrupts import TrainingInterrupted


class PrecisionName(StrEnum):
    """The dtypes of weights and computation."""

    float64 = "float64"
    float32 = "float32"
    autocast = "autocast"
    bfloat16 = "bfloat16"


class ParallelMode(StrEnum):
    """How processes share the weights."""

    ddp = "ddp"
    fsdp = "fsdp"


def command(
    context: typer.Context,
    stack: OptionalStack = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML or JSON file of settings, see TrainConfig. Options override it.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="Set any field, such as schedule.name=wsd; values are YAML. Repeatable.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            help="Text file, or a folder of `deltazoo data`. Default: the sources of Python's standard library.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(show_default="runs/NAME", help="Folder for the checkpoints.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Continue the run in this folder, with its stack and settings. Of these, only "
            f"{', '.join(resumable_options())} can change, and with --set others that the documentation lists.",
        ),
    ] = None,
    until: Annotated[
        int | None, typer.Option(min=1, help="Stop after this step; --resume continues the schedule.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes, one per GPU of this host; with --device cpu, of CPU processes."),
    ] = None,
    parallel: Annotated[
        ParallelMode | None,
        typer.Option("--parallel", show_default="ddp", help="Copies of the model, or shards by FSDP2."),
    ] = None,
    context_parallel: Annotated[
        int | None, typer.Option(show_default="1", help="Processes that share the tokens of each sequence.")
    ] = None,
    steps: Annotated[int | None, typer.Option(show_default="300", help="Steps of the whole schedule.")] = None,
    batch: Annotated[int | None, typer.Option(show_default="8", help="Sequences per step, over all processes.")] = None,
    length: Annotated[int | None, typer.Option(show_default="256", help="Sequence length in tokens.")] = None,
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
    precision: Annotated[
        PrecisionName | None,
        typer.Option(show_default="float32", help="Dtype; bfloat16 keeps float32 weights in the optimizer."),
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
    watch: Annotated[
        bool | None, typer.Option("--watch", help="Log norms of states and decays of recurrent layers.")
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Train a stack on the bytes of a text, or on encoded data. Checkpoints resume bit for bit.

    Each validation prints a row at once, and appends it to metrics.jsonl and metrics.csv in the folder of the run.
    Losses are in bits per token, which is a byte of a text file.

    Ctrl-C and SIGTERM save a checkpoint and print the command that continues the run, also with --json.

    On several GPUs: --gpus 4, or torchrun --nproc-per-node 4 -m deltazoo train ...
    """
    let_idle_threads_sleep()
    from deltazoo.blocks.parallel.ranks import expected_ranks, reported_once
    from deltazoo.blocks.training.interrupts import TrainingInterrupted
    from deltazoo.blocks.training.settings import read_config

    surplus = [*([stack] if stack else []), *(["--out"] if out else [])]
    if resume is not None and surplus:
        raise typer.BadParameter(
            f"--resume takes the stack and the folder of the run, so omit {' and '.join(surplus)}; to branch a run, "
            "resume a copy of its folder"
        )
    if gpus is not None and gpus > 1 and expected_ranks() == 1:
        _launch(gpus, resume or out)
        return
    changes = _changes(context.params)
    is_first = reported_once.is_first()
    on_point = TrainingRows() if is_first and not as_json else None
    try:
        with progress() as report_progress, _printed_log(), reported_once:
            import deltazoo

            if resume is not None:
                training = deltazoo.resume(
                    resume, text, until, report_progress, trust, read_config(config, settings, changes, True), on_point
                )
            else:
                read = deltazoo.TrainConfig(**read_config(config, settings, changes))
                if stack is None and read.model is None:
                    raise ConfigError("give a FILE or a PRESET, model in --config, or --resume FOLDER")
                out = out or Path("runs") / Path(stack or str(read.model)).stem
                training = deltazoo.train(stack, out, text, read, until, report_progress, trust, on_point)
    except TrainingInterrupted as interrupted:
        if is_first:
            _print_interruption(interrupted, until, trust, as_json)
        reported_once.end(128 + interrupted.signum)
        raise typer.Exit(128 + interrupted.signum) from interrupted
    if is_first and as_json:
        print_json(training)
    elif is_first:
        print_line(training.line() + f"; checkpoint in {resume or out}")
    reported_once.end(0)


def _changes(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that options set, by their paths."""
    changes = {}
    for path, rule in RULES.items():
        name = None if rule.option is None else _PARAMETERS.get(rule.option, rule.option[2:].replace("-", "_"))
        if name is not None and parameters.get(name) is not None:
            changes[path] = parameters[name]
    return changes


_PARAMETERS = {"--lr": "learning_rate"}


def _launch(gpus: int, folder: Path | None) -> None:
    """Run this command in several processes, and report how they ended."""
    from deltazoo.blocks.parallel.launch import RanksFailedError, launch

    try:
        launch("deltazoo", sys.argv[1:], gpus)
    except RanksFailedError as failed:
        if failed.sentence is not None:
            continues = "" if folder is None else f"; continue with: deltazoo train --resume {folder} --gpus {gpus}"
            print_note(f"deltazoo: {failed.sentence}{continues}")
        raise typer.Exit(failed.code) from failed


def _print_interruption(interrupted: "TrainingInterrupted", until: int | None, trust: bool, as_json: bool) -> None:
    options = ["--resume", str(interrupted.folder), *(["--until", str(until)] if until else [])]
    continuation = shlex.join(["deltazoo", "train", *options, *(["--trust"] if trust else [])])
    print_note(f"stopped by {interrupted}; continue with: {continuation}")
    if as_json:
        interruption = {"message": str(interrupted), "step": interrupted.step, "folder": str(interrupted.folder)}
        print_json({"interrupted": {**interruption, "continue": continuation}})


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
