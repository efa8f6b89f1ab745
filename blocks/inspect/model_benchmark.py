"""Benchmark whole language models: training step, prefill and decoding, also of models of other packages.

The models are measured one after the other, each alone in memory, so that the memory peak of one excludes the others.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from deltazoo.backends.io.errors import ConfigError, DeltazooError, UnknownNameError
from deltazoo.backends.io.frozen_config import FrozenConfig
from deltazoo.backends.io.progress import Progress, silent
from deltazoo.backends.measure.environment import Environment, environment
from deltazoo.backends.measure.table import Note, Table, group, partial_line, spread, three_digits
from deltazoo.backends.measure.timing import MIN_ROUNDS, failure_reason, peak_bytes, time_alone, time_once
from deltazoo.backends.measure.workload import DIRECTIONS, Direction
from deltazoo.backends.torch_ext.cuda_graph import Call
from deltazoo.backends.torch_ext.devices import usable_device
from deltazoo.backends.update import registry
from deltazoo.blocks.inspect.flops import PEAK_TFLOPS, TokenFlops, token_flops
from deltazoo.blocks.inspect.model_calls import DECODED, ModelCalls, OurCalls, PretrainedCalls
from deltazoo.blocks.inspect.peer_models import PEER_MODELS
from deltazoo.blocks.model.checkpointing import Checkpointing
from deltazoo.blocks.spec.stack_spec import StackSpec

OURS = "deltazoo"  # the model with the default backends
# in the order of the measurements: training first, so that its first call is not warmed up by others
_PHASES: dict[Direction, str] = {"backward": "training", "forward": "prefill", "decode": "decoding"}


class ModelBenchConfig(FrozenConfig):
    """Settings of a benchmark of models.

    Args:
        batch: sequences B.
        length: tokens per sequence T. Decoding continues sequences of this length.
        directions: "backward": a training step with fused AdamW; "forward": the prefill of a prompt; "decode": greedy
            decoding.
        device, dtype: of the weights and activations.
        checkpointing: what the training step of our models recomputes, see `LanguageModel.checkpoint_layers`.
        rounds: upper limit of timed calls.
        seconds: approximate time limit per model and direction.
        seed: random seed of the weights and tokens.
    """

    batch: int = Field(default=1, ge=1)
    length: int = Field(default=512, ge=2)
    directions: tuple[Direction, ...] = DIRECTIONS
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    checkpointing: Checkpointing = "none"
    rounds: int = Field(default=20, ge=MIN_ROUNDS)
    seconds: float = Field(default=20.0, gt=0)
    seed: int = Field(default=0, ge=0)


class ModelRow(BaseModel):
    """The figures of one model in one direction.

    Args:
        implementation: "deltazoo", a backend of deltazoo, or a model of another package.
        parameters: number of parameters of this implementation.
        first_call_s: seconds of the first call, with compilation; on CUDA with the capture of the decoding step.
        median_ms, low_ms, high_ms: median, 20th and 80th percentile of a call; for "decode" of 16 tokens per sequence.
        tokens_per_second: of the batch, at the median.
        tflops_by_parameters, tflops_all: operations per second by the two formulas of `deltazoo.blocks.inspect.flops`,
            with the operations of our model, because the models of other packages compute the same function.
        peak_gib: peak of device memory during a call, with weights, optimizer and states; CUDA only.
        refused: why there are no figures; [] if there are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    implementation: str
    direction: Direction
    parameters: int | None = None
    first_call_s: float | None = None
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    rounds: int = 0
    tokens_per_second: float | None = None
    tflops_by_parameters: float | None = None
    tflops_all: float | None = None
    peak_gib: float | None = None
    refused: list[str] = []


class ModelBenchmark(BaseModel):
    """The figures of a benchmark of models, with its environment and settings.

    Args:
        model: a file or the name of a preset; stack: its fields.
        flops: operations per token of each direction.
        peak_tflops: of the device in this dtype; None if unknown.
        missing: number of cases that are not measured yet, or that an interruption has left out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: Environment
    model: str
    stack: StackSpec
    config: ModelBenchConfig
    flops: dict[Direction, TokenFlops]
    peak_tflops: float | None
    rows: list[ModelRow]
    missing: int = 0

    @property
    def timed(self) -> list[ModelRow]:
        """The rows with figures."""
        return [row for row in self.rows if row.median_ms is not None]

    def header(self) -> list[str]:
        """Describe environment, settings and operations, one sentence per line."""
        config = self.config
        counts = ", ".join(
            f"{_PHASES[direction]} {flops.by_parameters / 1e6:,.4g} and {flops.all / 1e6:,.4g}"
            for direction, flops in self.flops.items()
        )
        peak = "" if self.peak_tflops is None else f"; peak {self.peak_tflops:g} TFLOP/s"
        return [
            self.environment.line(),
            f"{self.model}, {config.batch} x {config.length} tokens, {config.dtype}, fused AdamW, seed {config.seed}"
            + ("" if config.checkpointing == "none" else f", {config.checkpointing} checkpointing"),
            f"MFLOP per token by parameters and all: {counts}{peak}",
        ]

    def partial(self) -> str:
        """Say how many of the cases were measured, if some are missing."""
        return partial_line(len(self.rows), self.missing)

    def table(self) -> Table:
        """Return a table with a row per implementation and direction."""
        share = "share of the peak" if self.peak_tflops else "GFLOP/s"
        titles = ("6N %", "all %") if self.peak_tflops else ("6N", "all")
        legend = [
            ("tokens/s", "of the batch"),
            ("ms", f"median of a call, decoding {DECODED} tokens per sequence"),
            ("20-80 %", "percentiles, %"),
            (titles[0], f"{share} by 6 FLOPs per parameter and trained token, 2 per token without a backward pass"),
            (titles[1], f"{share} with recurrences and attention"),
            ("GiB", "peak memory"),
            ("first s", "first call, with compilation"),
        ]
        if not self.config.device.startswith("cuda"):
            legend = [(title, text) for title, text in legend if title != "GiB"]
        columns = ["model", "phase", *(f">{title}" for title, _ in legend)]
        rows = [[_label(row.implementation), _PHASES[row.direction], *self._figures(row)] for row in self.timed]
        notes = group(
            (
                Note(_label(row.implementation), (_PHASES[row.direction],), reason)
                for row in self.rows
                for reason in row.refused
            ),
            [(_PHASES[direction],) for direction in self.flops],
        )
        parameters = {_label(row.implementation): row.parameters for row in self.rows if row.parameters is not None}
        notes = [(name, f"{count:,} parameters") for name, count in parameters.items()] + notes
        phase = max(len(_PHASES[direction]) for direction in self.flops)
        widths = [12, phase, *(9 if title == "20-80 %" else 6 for title, _ in legend)]
        return Table(columns, rows, notes, legend, widths)

    def markdown(self) -> str:
        """Format the header and the table with its legend as Markdown."""
        return self.table().markdown([*self.header(), *filter(None, [self.partial()])])

    def _figures(self, row: ModelRow) -> list[str]:
        assert row.median_ms is not None and row.low_ms is not None and row.high_ms is not None
        assert row.tflops_by_parameters is not None and row.tflops_all is not None
        speeds = (row.tflops_by_parameters, row.tflops_all)
        return [
            f"{row.tokens_per_second:,.0f}",
            three_digits(row.median_ms),
            spread(row.low_ms, row.median_ms, row.high_ms),
            *(f"{100 * x / self.peak_tflops:.1f}" if self.peak_tflops else _gflops(x) for x in speeds),
            *([] if row.peak_gib is None else [f"{row.peak_gib:.1f}"]),
            "" if row.first_call_s is None else f"{row.first_call_s:.2f}",
        ]


def _gflops(tflops: float) -> str:
    """Format a speed in GFLOP/s, so that that of a tiny model is not too wide for the table."""
    return three_digits(round(1e3 * tflops, 3))


def _label(name: str) -> str:
    """Return the printed name of an implementation: its package, and the backend of ours unless it is the default."""
    if name in PEER_MODELS:
        return name.removesuffix("_model")
    return OURS if name == OURS else f"{OURS} ({name})"


def bench_model(
    model: str,
    spec: StackSpec,
    implementations: Sequence[str] = (OURS,),
    config: ModelBenchConfig | None = None,
    progress: Progress = silent,
    report: Callable[[ModelBenchmark], None] = lambda benchmark: None,
) -> ModelBenchmark:
    """Time training steps, prefills and decoding of a model.

    If an implementation cannot be built or fails, its rows have the reason instead of figures.

    Args:
        model: the name under which the result is reported.
        implementations: "deltazoo", the names of backends for our model, "transformers_model", "fla_model".
        report: receives the benchmark before the first case and after each.
    Raises: ConfigError; UnknownNameError.
    """
    config = config or ModelBenchConfig()
    device = usable_device(config.device)
    known = [OURS, *PEER_MODELS, *registry.names(registry.BACKENDS)]
    for name in implementations:
        if name not in known and ":" not in name:
            raise UnknownNameError("model or backend", name, known)
    if not implementations or not config.directions:
        raise ConfigError("a benchmark of models needs a model and a direction, got none")
    with torch.device("meta"):
        meta = spec.build()
    description = spec.describe()
    flops = {
        direction: token_flops(meta, description, config.length, direction)
        for direction in sorted(config.directions, key=list(_PHASES).index)
    }
    here, cases = environment(device), len(implementations) * len(flops)
    benchmark = ModelBenchmark(
        environment=here, model=model, stack=spec, config=config, flops=flops,
        peak_tflops=None if config.dtype == "float32" else PEAK_TFLOPS.get(here.device), rows=[], missing=cases,
    )  # fmt: skip
    report(benchmark)
    for name in implementations:
        for row in _measure(spec, name, config, device, flops, progress):
            rows = [*benchmark.rows, row]
            benchmark = benchmark.model_copy(update={"rows": rows, "missing": cases - len(rows)})
            report(benchmark)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return benchmark


def _measure(
    spec: StackSpec,
    name: str,
    config: ModelBenchConfig,
    device: torch.device,
    flops: dict[Direction, TokenFlops],
    progress: Progress,
) -> Iterator[ModelRow]:
    progress(f"{name} build", 0, 1)
    try:
        calls = _build(spec, name, config, device)
    except Exception as failure:  # other packages raise ImportError for their optional requirements
        reason = str(failure) if isinstance(failure, DeltazooError) else failure_reason(failure)
        yield from (ModelRow(implementation=name, direction=direction, refused=[reason]) for direction in flops)
        return
    progress(f"{name} build", 1, 1)
    for direction, counts in flops.items():
        row = ModelRow(implementation=name, direction=direction, parameters=calls.parameters)
        try:
            figures = _measure_direction(calls, direction, config, device, progress, f"{name} {_PHASES[direction]}")
        except Exception as failure:  # one model's failure must not end the benchmark
            yield row.model_copy(update={"refused": [failure_reason(failure)]})
            continue
        speed = figures["tokens_per_second"]
        operations = {
            "tflops_by_parameters": 1e-12 * speed * counts.by_parameters, "tflops_all": 1e-12 * speed * counts.all,
        }  # fmt: skip
        yield row.model_copy(update=figures | operations)


def _build(spec: StackSpec, name: str, config: ModelBenchConfig, device: torch.device) -> ModelCalls:
    torch.manual_seed(config.seed)
    tokens = torch.randint(spec.vocab, (config.batch, config.length), device=device)
    dtype: torch.dtype = getattr(torch, config.dtype)
    if name not in PEER_MODELS:
        return OurCalls(spec, None if name == OURS else name, tokens, dtype, config.checkpointing)
    with device:
        peer = PEER_MODELS[name](spec, device.type)
    return PretrainedCalls(peer.to(device, dtype), tokens)


def _measure_direction(
    calls: ModelCalls,
    direction: Direction,
    config: ModelBenchConfig,
    device: torch.device,
    progress: Progress,
    task: str,
) -> dict[str, float]:
    progress(task, 0, config.rounds, "first call")
    call = _call(calls, direction, config.rounds)
    first = time_once(call, device)
    resident = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    peak = peak_bytes(call, device)
    figures = time_alone(task, call, device, config.rounds, config.seconds, progress)
    tokens = config.batch * (DECODED if direction == "decode" else config.length)
    figures |= {"first_call_s": first, "tokens_per_second": 1e3 * tokens / figures["median_ms"]}
    return figures | ({} if peak is None else {"peak_gib": (resident + peak) / 2**30})


def _call(calls: ModelCalls, direction: Direction, rounds: int) -> Call:
    if direction == "backward":
        return calls.training_step()
    return calls.prefill() if direction == "forward" else calls.decoding(rounds)
