"""`deltazoo bench`."""

from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.options import AsJson, BackendNames, Device, Dtype, OperandDtype, Seed, split
from deltazoo.cli.output import print_json, print_table, progress, say


def command(
    shape: Annotated[
        list[str] | None,
        typer.Option(help='A named shape, or sizes as "B=4 T=1000 H=8 K=64"; may stand several times. cpu if none.'),
    ] = None,
    mixer: Annotated[str, typer.Option(help="Whose update, with its default fields.")] = "gated_deltanet",
    backends: BackendNames = None,
    directions: Annotated[str, typer.Option(help="With commas between.")] = "forward,backward,decode",
    device: Device = "cpu",
    dtype: OperandDtype = Dtype.float32,
    rounds: Annotated[int, typer.Option(help="Timed calls of each backend, at most.")] = 20,
    seconds: Annotated[float, typer.Option(help="For one shape and direction, about.")] = 20.0,
    baseline: Annotated[str | None, typer.Option(help="Ratios are over this backend; the first if none.")] = None,
    seed: Seed = 0,
    errors: Annotated[bool, typer.Option(help="Compare with float64.")] = True,
    graphs: Annotated[bool, typer.Option(help="Time replays of CUDA graphs.")] = False,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the table there, between its marks if it has any.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the medians to this PNG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time backends against each other in turns: forward, forward and backward, decode; with ratio and error."""
    from deltazoo.backends.measure.benchmark import BenchConfig
    from deltazoo.blocks.inspect.benchmark import DEFAULT_SHAPE, measure
    from deltazoo.blocks.training.report import save_benchmark

    config = BenchConfig(
        directions=split(directions),
        device=device,
        dtype=dtype,
        rounds=rounds,
        seconds=seconds,
        baseline=baseline,
        seed=seed,
        errors=errors,
        graphs=graphs,
    )
    with progress() as told:
        found = measure(mixer, shape or [DEFAULT_SHAPE], split(backends), config, told)
    if as_json:
        print_json(found)
    else:
        say(found.header())
        columns = [*found.columns[:3], *(f">{column}" for column in found.columns[3:])]
        print_table(columns, [row.cells() for row in found.rows])
    save_benchmark(found, markdown, plot)
