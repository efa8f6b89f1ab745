"""`deltazoo bench`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Generic, TypeVar

import typer

from deltazoo.cli.terminal.completion import complete_mixer
from deltazoo.cli.terminal.measurements import LiveTable, print_header, print_measurements
from deltazoo.cli.terminal.options import (
    AsJson,
    BackendNames,
    Checkpointing,
    CheckpointingMode,
    Device,
    Directions,
    Dtype,
    OperandDtype,
    Seed,
    split,
)
from deltazoo.cli.terminal.output import print_json, print_line, print_note, progress

if TYPE_CHECKING:
    from deltazoo.backends.io.progress import Progress
    from deltazoo.backends.measure.benchmark import BenchConfig, Benchmark
    from deltazoo.backends.measure.table import Table
    from deltazoo.blocks.inspect.layer_benchmark import LayerBenchmark
    from deltazoo.blocks.inspect.model_benchmark import ModelBenchmark
    from deltazoo.blocks.inspect.serve_benchmark import ServeBenchmark


class Peer(StrEnum):
    """A library whose layers are timed beside ours."""

    fla = "fla"


_B = TypeVar("_B", bound="Benchmark | LayerBenchmark | ModelBenchmark | ServeBenchmark")

NOTHING_RAN_OR_REGRESSED = 1  # exit code


def command(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help='Named shape, or sizes such as "B=4 T=1000 H=8 K=64"; repeatable. Default: cpu. With --model the '
            'sequences and their tokens, by default "B=1 T=512".'
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|PRESET",
            help="Time a whole model instead: training step, prefill and decoding. --backends then lists deltazoo (the "
            "default), backends, transformers_model and fla_model.",
        ),
    ] = None,
    serve: Annotated[
        bool,
        typer.Option(
            "--serve",
            help="With --model, time the engine instead: throughput, time to the first token and time per token. B of "
            "--shape is the number of slots, T the longest prompt.",
        ),
    ] = False,
    loads: Annotated[
        str | None, typer.Option(help="With --serve: comma-separated numbers of clients. Default: 1,4,16.")
    ] = None,
    speculate: Annotated[
        int | None, typer.Option(min=1, help="With --serve: number of tokens that a step drafts for each request.")
    ] = None,
    layer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MIXER|all",
            help="Time a whole layer instead, compiled: forward, backward and decoding. Changed fields are in "
            'parentheses, "gla(heads=4)"; repeatable. --shape is that of --model.',
            autocompletion=complete_mixer,
        ),
    ] = None,
    peer: Annotated[
        Peer | None,
        typer.Option(help="With --layer, also time the layer of this library with equal sizes and options."),
    ] = None,
    width: Annotated[int | None, typer.Option(help="With --layer: features of the layer. Default: 256.")] = None,
    mixer: Annotated[
        list[str] | None,
        typer.Option(
            help='Mixer whose update is timed, with changed fields in parentheses: "kda(reparam=efla)"; repeatable. '
            "Default: gated_deltanet, with --matrix all.",
            autocompletion=complete_mixer,
        ),
    ] = None,
    backends: BackendNames = None,
    directions: Directions = "forward,backward,decode",
    device: Device = "cpu",
    dtype: OperandDtype = Dtype.float32,
    rounds: Annotated[int, typer.Option(help="Maximum number of timed calls per backend.")] = 20,
    seconds: Annotated[float, typer.Option(help="Time budget in seconds per mixer, shape and direction.")] = 20.0,
    baseline: Annotated[
        str | None, typer.Option(help="Backend that the ratios are relative to. Default: the first one.")
    ] = None,
    seed: Seed = 0,
    errors: Annotated[bool, typer.Option(help="Measure the error relative to float64.")] = True,
    graphs: Annotated[bool, typer.Option(help="Time replays of CUDA graphs.")] = False,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Print one table of medians with a column per backend.")
    ] = False,
    checkpointing: CheckpointingMode = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="Output of an earlier run with --json. Exit code 1 if a case became worse."),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(help="Write the table to this Markdown file; an existing file must contain the table's markers."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the medians to this PNG, SVG or PDF file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time backends on the updates of mixers, interleaved; with --layer or --model, layers or models.

    Rows are printed as they are measured. Ctrl-C and SIGTERM keep them, also in files, which say that they are partial.

    Exit code 1: no backend ran, or a case became worse than in --compare. 130, 143: Ctrl-C, SIGTERM.
    """
    from deltazoo.backends.io.errors import ConfigError
    from deltazoo.backends.measure.benchmark import BenchConfig
    from deltazoo.backends.measure.compare import read_earlier
    from deltazoo.backends.measure.environment import environment
    from deltazoo.blocks.inspect.benchmark import DEFAULT_SHAPE, measure
    from deltazoo.blocks.training.report import check_outputs, plot_benchmark, save_table

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
    check_outputs(markdown, plot)
    only_updates: dict[str, object] = {
        "--mixer": mixer, "--baseline": baseline, "--graphs": graphs, "--matrix": matrix, "--compare": compare,
        "--plot": plot,
    }  # fmt: skip
    only_layers: dict[str, object] = {"--peer": peer, "--width": width}
    if model is not None:
        _refuse("--model", only_updates | only_layers | {"--layer": layer})
        if serve:
            _refuse("--serve", {"--backends": backends, "--checkpointing": checkpointing})
            _bench_serve(model, shape, {"loads": split(loads), "speculate": speculate}, config, markdown, as_json)
            return
        _refuse("without --serve, bench", {"--loads": loads, "--speculate": speculate})
        _bench_model(model, shape, split(backends), config, checkpointing, markdown, as_json)
        return
    if checkpointing is not None:
        raise ConfigError("--checkpointing needs --model")
    if serve or loads or speculate:
        raise ConfigError("--serve, --loads and --speculate need --model")
    if layer:
        _refuse("--layer", only_updates | {"--backends": backends})
        sizes = {"width": width, "peer": peer and peer.value}
        _bench_layers(layer, shape, {name: x for name, x in sizes.items() if x is not None}, config, markdown, as_json)
        return
    _refuse("without --layer, bench", only_layers)
    earlier = None if compare is None else read_earlier(compare)
    if earlier is not None:
        earlier.check(config, environment(device))
    mixers = mixer or (None if matrix else ["gated_deltanet"])
    live = _Live["Benchmark"](as_json, lambda part: part.matrix() if matrix else part.table())
    with live.interruptible():
        measure(mixers, shape or [DEFAULT_SHAPE], split(backends), config, live.progress, live.report)
    benchmark = live.result()
    comparison = None if earlier is None else earlier.compare(benchmark)
    if as_json:
        print_json(benchmark if comparison is None else {"benchmark": benchmark, "comparison": comparison})
    elif comparison is not None:
        print_header(["", f"compared with {comparison.before.line()}"])
        print_measurements(comparison.table())
        print_line(comparison.line())
    if markdown is not None:
        save_table(benchmark.markdown(matrix), markdown)
    if plot is not None and benchmark.timed:
        plot_benchmark(benchmark, plot)
    live.exit_if_interrupted()
    if not benchmark.timed or (comparison is not None and comparison.regressions):
        raise typer.Exit(NOTHING_RAN_OR_REGRESSED)


def _bench_model(
    model: str,
    shapes: list[str] | None,
    implementations: list[str] | None,
    config: "BenchConfig",
    checkpointing: Checkpointing | None,
    markdown: Path | None,
    as_json: bool,
) -> None:
    from deltazoo.blocks.inspect.benchmark import parse_batch
    from deltazoo.blocks.inspect.model_benchmark import OURS, ModelBenchConfig, ModelBenchmark, bench_model
    from deltazoo.blocks.spec.stack_spec import StackSpec

    batch, length = parse_batch(shapes or ["B=1 T=512"])
    settings = config.model_dump(include={"directions", "device", "dtype", "rounds", "seconds", "seed"})
    if checkpointing is not None:
        settings["checkpointing"] = checkpointing.value
    model_config = ModelBenchConfig(batch=batch, length=length, **settings)
    spec = StackSpec.load(model)
    live = _Live["ModelBenchmark"](as_json, ModelBenchmark.table)
    with live.interruptible():
        bench_model(model, spec, implementations or [OURS], model_config, live.progress, live.report)
    _finish(live, markdown)


def _bench_serve(
    model: str,
    shapes: list[str] | None,
    of_engine: dict[str, object],
    config: "BenchConfig",
    markdown: Path | None,
    as_json: bool,
) -> None:
    from deltazoo.blocks.inspect.benchmark import parse_batch
    from deltazoo.blocks.inspect.serve_benchmark import ServeBenchConfig, ServeBenchmark, bench_serve
    from deltazoo.blocks.spec.stack_spec import StackSpec

    slots, prompt = parse_batch(shapes or ["B=16 T=512"])
    settings = {**config.model_dump(include={"device", "dtype", "seed"}), "slots": slots, "prompt": prompt}
    settings |= {name: value for name, value in of_engine.items() if value is not None}
    serve_config = ServeBenchConfig.model_validate(settings)
    spec = StackSpec.load(model)
    live = _Live["ServeBenchmark"](as_json, ServeBenchmark.table)
    with live.interruptible():
        bench_serve(model, spec, serve_config, live.progress, live.report)
    _finish(live, markdown)


def _bench_layers(
    layers: list[str],
    shapes: list[str] | None,
    sizes: dict[str, object],
    config: "BenchConfig",
    markdown: Path | None,
    as_json: bool,
) -> None:
    from deltazoo.blocks.inspect.benchmark import parse_batch
    from deltazoo.blocks.inspect.layer_benchmark import LayerBenchConfig, LayerBenchmark, bench_layers

    batch, length = parse_batch(shapes or ["B=1 T=512"])
    settings = config.model_dump(include={"directions", "device", "dtype", "rounds", "seconds", "seed"})
    layer_config = LayerBenchConfig.model_validate({"batch": batch, "length": length, **sizes, **settings})
    live = _Live["LayerBenchmark"](as_json, LayerBenchmark.table)
    with live.interruptible():
        bench_layers(layers, layer_config, live.progress, live.report)
    _finish(live, markdown)


def _finish(
    live: "_Live[LayerBenchmark] | _Live[ModelBenchmark] | _Live[ServeBenchmark]", markdown: Path | None
) -> None:
    """Print the benchmark as JSON if that is asked for, write its table, and raise the exit code of a failure."""
    from deltazoo.blocks.training.report import save_table

    benchmark = live.result()
    if live.as_json:
        print_json(benchmark)
    if markdown is not None:
        save_table(benchmark.markdown(), markdown)
    live.exit_if_interrupted()
    if not benchmark.timed:
        raise typer.Exit(NOTHING_RAN_OR_REGRESSED)


def _refuse(given: str, others: dict[str, object]) -> None:
    """Raise an error if any of the options of another kind of benchmark is set."""
    from deltazoo.backends.io.errors import ConfigError

    if wrong := [name for name, value in others.items() if value]:
        raise ConfigError(f"{given} does not take {', '.join(wrong)}")


class _Live(Generic[_B]):
    """A benchmark that is printed while it runs, and whose measured part survives Ctrl-C and SIGTERM."""

    def __init__(self, as_json: bool, table: "Callable[[_B], Table]") -> None:
        self.as_json, self.table = as_json, table
        self.progress: Progress
        self.signum: int | None = None
        self._latest: _B | None = None
        self._rows = LiveTable()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Show the progress, and print the end of the table, also after an interruption that left some of its rows."""
        from deltazoo.blocks.training.interrupts import Interrupts

        interrupts = Interrupts()
        try:
            with interrupts.catch(), progress() as self.progress:
                yield
        except KeyboardInterrupt:
            self.signum = interrupts.signum
            if self._latest is None or not self._latest.rows:
                self.exit_if_interrupted()
        if not self.as_json:
            benchmark = self.result()
            self._rows.print_end(self.table(benchmark))
            print_header(filter(None, [benchmark.partial()]))

    def report(self, benchmark: _B) -> None:
        """Print the rows measured since the last call, unless the benchmark is printed as JSON at the end."""
        if not self.as_json:
            if self._latest is None:
                print_header(benchmark.header())
            self._rows.print_new_rows(self.table(benchmark))
        self._latest = benchmark

    def result(self) -> _B:
        """Return the benchmark, or its measured part."""
        assert self._latest is not None  # reported before the first case
        return self._latest

    def exit_if_interrupted(self) -> None:
        """Raise the exit code of an interruption."""
        if self.signum is not None:
            print_note("\ndeltazoo: interrupted")
            raise typer.Exit(128 + self.signum)
