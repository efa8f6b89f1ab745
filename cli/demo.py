"""`deltazoo demo`."""

from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.terminal.measurements import print_measurements
from deltazoo.cli.terminal.options import AsJson, BackendName, Device, Seed, TextFile
from deltazoo.cli.terminal.output import print_json, print_line, print_note, print_table, progress
from deltazoo.cli.terminal.threads import let_idle_threads_sleep
from deltazoo.cli.terminal.training_rows import TrainingRows


def command(
    text: TextFile = None,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("reports/demo"),
    steps: Annotated[int, typer.Option(help="Training steps per model.")] = 300,
    device: Device = "cpu",
    backend: BackendName = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train a small hybrid and two baselines, sample from the hybrid, time the backends, and write a report.

    Each validation prints a row at once.
    """
    let_idle_threads_sleep()
    from deltazoo.blocks.data.text import load_text
    from deltazoo.blocks.inspect.figure import why_no_plots
    from deltazoo.blocks.training.demo import DemoConfig, demo

    config = DemoConfig().with_options(steps=steps, device=device, backend=backend, seed=seed)
    if reason := why_no_plots():
        print_note(f"the report will have no plots: {reason}")
    with progress() as report_progress:
        on_training = (lambda name: None) if as_json else TrainingRows
        result = demo(load_text(text), out, config, report_progress, on_training)
    if as_json:
        print_json(result)
        return
    print_line(result.environment.line())
    print_table(["model", "result"], [(name, training.line()) for name, training in result.trainings.items()])
    print_measurements(result.benchmark.table())
    print_line(f"{result.completion.prompt}{result.completion.text}\n")
    print_line(f"{result.seconds:.0f} s; the report is {out / 'report.md'}")
