"""Benchmark the engine at several loads: throughput, time to the first token and time per token."""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from deltazoo.backends.io.frozen_config import FrozenConfig
from deltazoo.backends.io.progress import Progress, silent
from deltazoo.backends.measure.environment import Environment, environment
from deltazoo.backends.measure.table import Table, partial_line, three_digits
from deltazoo.backends.torch_ext.devices import usable_device
from deltazoo.blocks.generation.engine.engine import Engine, EngineCounts
from deltazoo.blocks.generation.engine.pages import whole_pages
from deltazoo.blocks.generation.engine.request import Request
from deltazoo.blocks.generation.sampling import Sampling
from deltazoo.blocks.model.compilation import run_eagerly
from deltazoo.blocks.model.interface import TokenModel
from deltazoo.blocks.spec.stack_spec import StackSpec

_LEAST = 8  # tokens of a prompt and of a continuation


class ServeBenchConfig(FrozenConfig):
    """Settings of a benchmark of the engine.

    Args:
        loads: numbers of clients, each of which submits a request as soon as its last one has ended.
        requests: number of requests per load; at least one per client.
        slots: of the engine.
        prompt, output: the longest prompt and continuation in tokens. Lengths are log-uniform from an eighth of them.
        compile: compile the decoding step.
        speculate: number of tokens that the engine drafts per step and request.
        device, dtype: of the weights and activations.
        seed: random seed of the weights, tokens and lengths.
    """

    loads: tuple[int, ...] = (1, 4, 16)
    requests: int = Field(default=32, ge=1)
    slots: int = Field(default=16, ge=1)
    prompt: int = Field(default=512, ge=_LEAST)
    output: int = Field(default=128, ge=_LEAST)
    compile: bool = False
    speculate: int = Field(default=0, ge=0)
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int = Field(default=0, ge=0)


class ServeRow(BaseModel):
    """The figures of one load.

    Args:
        load: number of clients; requests: that have ended.
        tokens_per_second: of all continuations.
        first_ms, first_p95_ms: median and 95th percentile of the time from `submit` to the first token.
        token_ms, token_p95_ms: of the mean time per further token of a request.
        tokens_per_pass: mean number of tokens that a pass with drafts gave a request; None: without drafts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    load: int
    requests: int
    tokens_per_second: float
    first_ms: float
    first_p95_ms: float
    token_ms: float
    token_p95_ms: float
    tokens_per_pass: float | None = None


class ServeBenchmark(BaseModel):
    """The figures of a benchmark of the engine, with its environment and settings.

    Args: missing: number of loads that are not measured yet, or that an interruption has left out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: Environment
    model: str
    config: ServeBenchConfig
    rows: list[ServeRow]
    missing: int = 0

    @property
    def timed(self) -> list[ServeRow]:
        """The measured rows."""
        return self.rows

    def header(self) -> list[str]:
        """Describe environment and settings, one sentence per line."""
        config = self.config
        return [
            self.environment.line(),
            f"{self.model}, random weights, {config.dtype}, {config.slots} slots, prompts of up to {config.prompt} and "
            f"continuations of up to {config.output} tokens, "
            f"{'compiled, ' if config.compile else ''}"
            f"{f'{config.speculate} drafts per step, ' if config.speculate else ''}greedy, seed {config.seed}",
        ]

    def partial(self) -> str:
        """Say how many of the loads were measured, if some are missing."""
        return partial_line(len(self.rows), self.missing)

    def table(self) -> Table:
        """Return a table with a row per load."""
        legend = [
            ("clients", "requests in progress, each client submits the next one when its last one has ended"),
            ("tokens/s", "of all continuations"),
            ("first ms", "median from the submission to the first token"),
            ("first p95", "95th percentile of it"),
            ("token ms", "median of a request's mean time per further token"),
            ("token p95", "95th percentile of it"),
        ]
        if self.config.speculate:
            legend.append(("per pass", "mean tokens of a request per pass with drafts"))
        rows = [
            [str(row.load), str(row.requests), f"{row.tokens_per_second:,.0f}"]
            + [three_digits(x) for x in (row.first_ms, row.first_p95_ms, row.token_ms, row.token_p95_ms)]
            + ([f"{row.tokens_per_pass or 1:.2f}"] if self.config.speculate else [])
            for row in self.rows
        ]
        titles = [title for title, _ in legend]
        columns = [">clients", ">requests", *(f">{title}" for title in titles[1:])]
        return Table(columns, rows, (), legend, [8] * len(columns))

    def markdown(self) -> str:
        """Format the header and the table with its legend as Markdown."""
        return self.table().markdown([*self.header(), *filter(None, [self.partial()])])


def bench_serve(
    model: str,
    spec: StackSpec,
    config: ServeBenchConfig | None = None,
    progress: Progress = silent,
    report: Callable[[ServeBenchmark], None] = lambda benchmark: None,
) -> ServeBenchmark:
    """Measure the engine at each load, after a warm-up with all sizes of its steps.

    Args:
        model: the name under which the result is reported; spec: the model, with random weights.
        report: receives the benchmark before the first load and after each.
    """
    config = config or ServeBenchConfig()
    device = usable_device(config.device)
    loads = config.loads
    benchmark = ServeBenchmark(environment=environment(device), model=model, config=config, rows=[], missing=len(loads))
    report(benchmark)
    torch.manual_seed(config.seed)
    with run_eagerly(device), device:
        built = spec.build().to(getattr(torch, config.dtype)).eval()
    engine = _engine(built, config)
    progress("warm-up", 0, 1)
    engine.warm_up()
    _serve(engine, 1, [([0] * _LEAST, _LEAST)], silent)
    progress("warm-up", 1, 1)
    for load in loads:
        row = _serve(engine, load, _work(spec.vocab, max(config.requests, load), config), progress)
        rows = [*benchmark.rows, row]
        benchmark = benchmark.model_copy(update={"rows": rows, "missing": len(loads) - len(rows)})
        report(benchmark)
    return benchmark


def _engine(model: TokenModel, config: ServeBenchConfig) -> Engine:
    cache_tokens = config.slots * whole_pages(config.prompt + config.output + config.speculate)
    return Engine(model, config.slots, None, cache_tokens, 0, config.compile, config.speculate)


def _work(vocab: int, count: int, config: ServeBenchConfig) -> list[tuple[list[int], int]]:
    """Draw prompts, and the numbers of tokens that continue them."""
    rng = random.Random(config.seed)

    def length(most: int) -> int:
        return max(round(math.exp(rng.uniform(math.log(most / 8), math.log(most)))), 1)

    return [([rng.randrange(vocab) for _ in range(length(config.prompt))], length(config.output)) for _ in range(count)]


def _serve(engine: Engine, load: int, work: Sequence[tuple[list[int], int]], progress: Progress) -> ServeRow:
    requests: list[Request] = []
    before = engine.counts
    waiting = iter(work)
    start = time.perf_counter()
    while True:
        while engine.pending < load and (next_one := next(waiting, None)) is not None:
            prompt, limit = next_one
            requests.append(engine.submit(prompt, Sampling(temperature=0, max_tokens=limit)))
        if not engine.pending:
            break
        engine.step()
        progress(f"{load} clients", len(requests) - engine.pending, len(work))
    seconds = time.perf_counter() - start
    if error := next((request.error for request in requests if request.error is not None), None):
        raise error
    first = [1e3 * (_time(request.first_s) - request.submitted_s) for request in requests]
    done = EngineCounts(*(new - old for new, old in zip(engine.counts, before, strict=True)))
    token = [
        1e3 * (_time(request.ended_s) - _time(request.first_s)) / max(len(request.tokens) - 1, 1)
        for request in requests
    ]
    return ServeRow(
        load=load,
        requests=len(requests),
        tokens_per_second=sum(len(request.tokens) for request in requests) / seconds,
        first_ms=statistics.median(first),
        first_p95_ms=_percentile_95(first),
        token_ms=statistics.median(token),
        token_p95_ms=_percentile_95(token),
        tokens_per_pass=done.tokens_per_pass,
    )


def _time(seconds: float | None) -> float:
    assert seconds is not None  # the request has ended
    return seconds


def _percentile_95(values: Sequence[float]) -> float:
    return sorted(values)[max(math.ceil(0.95 * len(values)) - 1, 0)]
