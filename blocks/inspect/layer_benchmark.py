"""Benchmark single layers: forward, forward and backward, and decoding of whole mixers, beside layers of FLA.

The layers are measured one after the other, each alone in memory. B batch, T time, D width
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from deltazoo.backends.io.errors import ConfigError, DeltazooError
from deltazoo.backends.io.frozen_config import FrozenConfig
from deltazoo.backends.io.progress import Progress, silent
from deltazoo.backends.measure.environment import Environment, environment
from deltazoo.backends.measure.table import Note, Table, group, partial_line, spread, three_digits
from deltazoo.backends.measure.timing import (
    MIN_ROUNDS,
    failure_reason,
    peak_bytes,
    time_alone,
    time_interleaved,
    time_once,
)
from deltazoo.backends.measure.workload import DIRECTIONS, Direction
from deltazoo.backends.torch_ext.cuda_graph import Call
from deltazoo.backends.torch_ext.devices import usable_device
from deltazoo.backends.update import registry
from deltazoo.blocks.inspect.benchmark import parse_config
from deltazoo.blocks.inspect.describe import parameter_count
from deltazoo.blocks.inspect.layer_calls import FlaLayer, LayerCalls, LayerInput, OurLayer
from deltazoo.mixers.core.mixer import MixerConfig

Library = Literal["deltazoo", "fla"]
OURS: Library = "deltazoo"
FLA: Library = "fla"
_COPIED = 2**30  # bytes of the copy that measures the speed of the memory
_ORDER: tuple[Direction, ...] = ("backward", "forward", "decode")  # training first: nothing warms up its first call


class LayerBenchConfig(FrozenConfig):
    """Settings of a benchmark of layers.

    Args:
        width: D, features of the layer.
        batch: sequences B.
        length: tokens per sequence T. Decoding continues sequences of this length by one token.
        peer: "fla" also times the layer of flash-linear-attention with the same sizes and options, eagerly.
        directions: "forward": without gradients. "backward": forward and backward. "decode": one token with a state, as
            a CUDA graph on CUDA.
        device, dtype: of weights and activations.
        rounds: upper limit of timed calls.
        seconds: approximate time limit per layer and direction.
        seed: random seed of the weights and the input.
    """

    width: int = Field(default=256, ge=1)
    batch: int = Field(default=1, ge=1)
    length: int = Field(default=512, ge=1)
    peer: Literal["fla"] | None = None
    directions: tuple[Direction, ...] = DIRECTIONS
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    rounds: int = Field(default=20, ge=MIN_ROUNDS)
    seconds: float = Field(default=20.0, gt=0)
    seed: int = Field(default=0, ge=0)

    @property
    def libraries(self) -> tuple[Library, ...]:
        """The libraries that are timed."""
        return (OURS,) if self.peer is None else (OURS, self.peer)


class LayerRow(BaseModel):
    """The figures of one layer in one direction.

    Args:
        layer: the mixer as given by the user; library: whose layer.
        first_call_s: seconds of the first call, with compilation; on CUDA with the capture of the decoding step.
        median_ms, low_ms, high_ms: median, 20th and 80th percentile of a call.
        ratio: the peer's median divided by ours; above 1 ours is faster.
        floor_ms: time to read the weights and the caches, and to read and write the other states, at the measured speed
            of a copy; only of decoding on CUDA.
        peak_mib: peak of device memory that a call allocates; CUDA only.
        refused: why there are no figures; [] if there are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer: str
    library: Library
    direction: Direction
    parameters: int | None = None
    first_call_s: float | None = None
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    rounds: int = 0
    ratio: float | None = None
    floor_ms: float | None = None
    peak_mib: float | None = None
    refused: list[str] = []


class LayerBenchmark(BaseModel):
    """The figures of a benchmark of layers, with its environment and settings.

    Args:
        layers: the mixers as given by the user.
        copy_gb_per_s: bytes read and written per second by a copy, 1e9; CUDA only.
        missing: number of cases that are not measured yet, or that an interruption has left out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: Environment
    layers: list[str]
    config: LayerBenchConfig
    copy_gb_per_s: float | None = None
    rows: list[LayerRow]
    missing: int = 0

    @property
    def timed(self) -> list[LayerRow]:
        """The rows with figures."""
        return [row for row in self.rows if row.median_ms is not None]

    def header(self) -> list[str]:
        """Describe environment and settings, one sentence per line."""
        config = self.config
        copied = "" if self.copy_gb_per_s is None else f"; copy {self.copy_gb_per_s:,.0f} GB/s"
        return [
            self.environment.line(),
            f"layers of width {config.width}, {config.batch} x {config.length} tokens, {config.dtype}, seed "
            f"{config.seed}; each compiled as one graph" + (", those of fla eager" if config.peer else "") + copied,
        ]

    def partial(self) -> str:
        """Say how many of the cases were measured, if some are missing."""
        return partial_line(len(self.rows), self.missing)

    def table(self) -> Table:
        """Return a table with a row per layer, library and direction."""
        is_cuda = self.config.device.startswith("cuda")
        legend = [
            ("ms", "median of a call", True),
            ("20-80 %", "percentiles, %", True),
            ("ratio", "fla's median divided by ours", self.config.peer is not None),
            ("x floor", "decoding: median divided by the time to read and write weights, caches and states", is_cuda),
            ("MiB", "peak memory of a call", is_cuda),
            ("first s", "first call, with compilation", True),
        ]
        shown = [(title, text) for title, text, measured in legend if measured]
        columns = ["layer", "library", "direction", *(f">{title}" for title, _ in shown)]
        rows = []
        for row in self.timed:
            texts = dict(zip((title for title, *_ in legend), self._figures(row), strict=True))
            rows.append([row.layer, row.library, row.direction, *(texts[title] for title, _ in shown)])
        places = [(layer, direction) for layer in self.layers for direction in self.config.directions]
        notes = group(
            (Note(row.library, (row.layer, row.direction), reason) for row in self.rows for reason in row.refused),
            places,
        )
        widths = [max(map(len, self.layers)), 8, 9, *(9 if title == "20-80 %" else 6 for title, _ in shown)]
        return Table(columns, rows, [*self._parameters(), *notes], shown, widths)

    def markdown(self) -> str:
        """Format the header and the table with its legend as Markdown."""
        return self.table().markdown([*self.header(), *filter(None, [self.partial()])])

    def _figures(self, row: LayerRow) -> list[str]:
        assert row.median_ms is not None and row.low_ms is not None and row.high_ms is not None
        return [
            three_digits(row.median_ms),
            spread(row.low_ms, row.median_ms, row.high_ms),
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.floor_ms is None else f"{row.median_ms / row.floor_ms:.2f}",
            "" if row.peak_mib is None else f"{row.peak_mib:,.0f}",
            "" if row.first_call_s is None else f"{row.first_call_s:.2f}",
        ]

    def _parameters(self) -> list[tuple[str, str]]:
        """Say which layers of the peer have another number of parameters than ours."""
        counts = {(row.layer, row.library): row.parameters for row in self.rows if row.parameters is not None}
        return [
            (layer, f"fla's layer has {counts[layer, FLA]:,} parameters, ours {counts[layer, OURS]:,}")
            for layer in self.layers
            if {(layer, OURS), (layer, FLA)} <= {*counts}
            and abs(counts[layer, FLA] / counts[layer, OURS] - 1) > 0.005
        ]  # fmt: skip


def bench_layers(
    layers: Sequence[str],
    config: LayerBenchConfig | None = None,
    progress: Progress = silent,
    report: Callable[[LayerBenchmark], None] = lambda benchmark: None,
) -> LayerBenchmark:
    """Time layers forward, backward and decoding one token.

    If a layer cannot be built or fails, its rows have the reason instead of figures.

    Args:
        layers: names of mixers, with fields as in a pattern, "gla(heads=4)"; ["all"] selects every registered mixer.
        report: receives the benchmark before the first case and after each.
    Raises: ConfigError; PatternError; UnknownNameError; PluginError.
    """
    config = config or LayerBenchConfig()
    device = usable_device(config.device)
    if not layers or not config.directions:
        raise ConfigError("a benchmark of layers needs a mixer and a direction, got none")
    names = registry.names(registry.MIXERS) if list(layers) == ["all"] else list(layers)
    configs = {name: parse_config(name) for name in names}
    cases = len(configs) * len(config.libraries) * len(config.directions)
    speed = _copy_speed(device) if device.type == "cuda" else None
    benchmark = LayerBenchmark(
        environment=environment(device), layers=list(configs), config=config, copy_gb_per_s=speed, rows=[],
        missing=cases,
    )  # fmt: skip
    report(benchmark)
    for name, mixer in configs.items():
        ours: dict[Direction, float | None] = {}
        for library in config.libraries:
            for row in _measure(LayerRow(layer=name, library=library, direction="forward"), mixer, benchmark, progress):
                base = ours.setdefault(row.direction, row.median_ms)
                if library != OURS and base is not None and row.median_ms is not None:
                    row = row.model_copy(update={"ratio": row.median_ms / base})
                rows = [*benchmark.rows, row]
                benchmark = benchmark.model_copy(update={"rows": rows, "missing": cases - len(rows)})
                report(benchmark)
            gc.collect()
            torch.compiler.reset()  # all mixers share the code of `Mixer.__call__`, whose number of graphs is limited
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return benchmark


def _copy_speed(device: torch.device) -> float:
    """Return the bytes that a copy reads and writes per nanosecond."""
    source = torch.zeros(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    call = {"copy": lambda: target.copy_(source)}
    _, middle, _ = time_interleaved(call, device, 10, 5.0, lambda *_: None)["copy"].percentiles_ms()
    return 2 * _COPIED / (1e6 * middle)


def _measure(row: LayerRow, mixer: MixerConfig, benchmark: LayerBenchmark, progress: Progress) -> Iterator[LayerRow]:
    """Measure one layer in all directions. Args: row: names the layer and the library."""
    config, task = benchmark.config, f"{row.layer} {row.library}"
    try:
        size = LayerInput(
            config.batch,
            config.length,
            config.width,
            usable_device(config.device),
            getattr(torch, config.dtype),
            config.seed,
        )
        calls: LayerCalls = (OurLayer if row.library == OURS else FlaLayer)(mixer, size)
    except Exception as failure:  # other packages raise ImportError for their optional requirements
        reason = str(failure) if isinstance(failure, DeltazooError) else failure_reason(failure)
        yield from (
            row.model_copy(update={"direction": direction, "refused": [reason]}) for direction in config.directions
        )
        return
    for direction in sorted(config.directions, key=_ORDER.index):
        figures: dict[str, Any] = {"direction": direction, "parameters": parameter_count(calls.module)}
        try:
            figures |= _time(calls, direction, config, progress, f"{task} {direction}")
        except Exception as failure:  # one layer's failure must not end the benchmark
            figures["refused"] = [failure_reason(failure)]
        else:
            if isinstance(calls, OurLayer) and direction == "decode" and benchmark.copy_gb_per_s is not None:
                figures["floor_ms"] = 1e-6 * calls.decoded_bytes() / benchmark.copy_gb_per_s
        yield row.model_copy(update=figures)


def _time(
    calls: LayerCalls, direction: Direction, config: LayerBenchConfig, progress: Progress, task: str
) -> dict[str, float]:
    device = calls.x.device
    progress(task, 0, config.rounds, "first call")
    timed: list[Call] = []
    first = time_once(lambda: timed.append(calls.begin(direction)), device)
    peak = peak_bytes(timed[0], device)
    figures = {"first_call_s": first} | time_alone(task, timed[0], device, config.rounds, config.seconds, progress)
    return figures | ({} if peak is None else {"peak_mib": peak / 2**20})
