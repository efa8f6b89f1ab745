"""`deltazoo bench`."""

from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.options import AsJson, BackendNames, Device, Directions, Dtype, OperandDtype, Seed, split
from deltazoo.cli.output import print_json, print_line, print_table, progress


def command(
    shape: Annotated[
        list[str] | None,
        typer.Option(help='Named shape, or sizes such as "B=4 T=1000 H=8 K=64"; repeatable. Default: cpu.'),
    ] = None,
    mixer: Annotated[str, typer.Option(help="Mixer whose update is timed, with default fields.")] = "gated_deltanet",
    backends: BackendNames = None,
    directions: Directions = "forward,backward,decode",
    device: Device = "cpu",
    dtype: OperandDtype = Dtype.float32,
    rounds: Annotated[int, typer.Option(help="Maximum number of timed calls per backend.")] = 20,
    seconds: Annotated[float, typer.Option(help="Time budget in seconds per shape and direction.")] = 20.0,
    baseline: Annotated[
        str | None, typer.Option(help="Backend that the ratios are relative to. Default: the first one.")
    ] = None,
    seed: Seed = 0,
    errors: Annotated[bool, typer.Option(help="Measure the error relative to float64.")] = True,
    graphs: Annotated[bool, typer.Option(help="Time replays of CUDA graphs.")] = False,
    markdown: Annotated[
        Path | None,
        typer.Option(help="Write the table to this Markdown file; an existing file must contain the table's markers."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the medians to this PNG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time backends on the update of a mixer, interleaved; report times, ratios and errors."""
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
    with progress() as report_progress:
        benchmark = measure(mixer, shape or [DEFAULT_SHAPE], split(backends), config, report_progress)
    if as_json:
        print_json(benchmark)
    else:
        print_line(benchmark.header())
        columns = [*benchmark.columns[:3], *(f">{column}" for column in benchmark.columns[3:])]
        print_table(columns, [row.cells() for row in benchmark.rows])
    save_benchmark(benchmark, markdown, plot)
