"""`deltazoo demo`."""

from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.options import AsJson, BackendName, Device, Seed, TextFile
from deltazoo.cli.output import print_json, print_table, progress, say
from deltazoo.cli.threads import wait_patiently


def command(
    text: TextFile = None,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("reports/demo"),
    steps: Annotated[int, typer.Option(help="Of each training.")] = 300,
    device: Device = "cpu",
    backend: BackendName = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train a small hybrid and its two pure relatives, sample, time the backends, and write a report."""
    wait_patiently()
    from deltazoo.blocks.training.demo import DemoConfig, demo
    from deltazoo.blocks.training.text import load_text

    config = DemoConfig().changed(steps=steps, device=device, backend=backend, seed=seed)
    with progress() as told:
        found = demo(load_text(text), out, config, told)
    if as_json:
        print_json(found)
        return
    say(found.environment.line())
    print_table(["model", "end"], [(name, training.line()) for name, training in found.trainings.items()])
    print_table(found.benchmark.columns, [row.cells() for row in found.benchmark.rows])
    say(f"{found.written.prompt}{found.written.text}\n")
    say(f"{found.seconds:.0f} s; the report is {out / 'report.md'}")
