"""Tune the kernels beside the updates of a model, and measure what all tables gain in its steps.

B batch, T time
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict

from deltazoo.backends.io.progress import Progress, silent
from deltazoo.backends.measure.timing import time_interleaved
from deltazoo.backends.torch_ext.cuda_graph import Call
from deltazoo.backends.torch_ext.devices import DeviceSpec, usable_device
from deltazoo.backends.triton.runtime.simulation import simulated_launches
from deltazoo.backends.triton.runtime.table import use_table, without_tables
from deltazoo.backends.tuning.operators import (
    CudaOperatorRunner,
    OperatorsTuned,
    Tunable,
    candidates,
    captured_tunables,
    tune_operators,
)
from deltazoo.backends.tuning.tune import Planned, TuneConfig
from deltazoo.blocks.inspect.model_calls import DECODED, OurCalls
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec.stack_spec import StackSpec

_ROUNDS = 11
_SECONDS = 5.0


class StepGain(BaseModel):
    """Median times of a whole step with the heuristics' launches and with those of the tables.

    Args:
        step: "training": forward, backward and optimizer of a batch; "decoding": one token of every row.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: Literal["training", "decoding"]
    heuristic_ms: float
    tuned_ms: float

    def cells(self) -> list[str]:
        """Format a table row: step, both times, the heuristics' time over the tuned one."""
        times = f"{self.heuristic_ms:.3f}", f"{self.tuned_ms:.3f}"
        return [self.step, *times, f"{self.heuristic_ms / self.tuned_ms:.3f}"]


class ModelTuned(BaseModel):
    """The result of tuning a model in a dtype: the kernels beside the updates, and the gain of all tables in a step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: str
    operators: OperatorsTuned
    steps: list[StepGain]


def tune_model_operators(
    spec: StackSpec, size: tuple[int, int], dtype: torch.dtype, device: str, config: TuneConfig, out: Path | None,
    progress: Progress = silent,
) -> OperatorsTuned:  # fmt: skip
    """Tune warps and stages of every kernel beside the updates that a model launches in training and in decoding.

    Args: size: B and T of the training batch, and of the decoded rows and their prompt.
    """
    cuda = torch.device("cuda", usable_device(device).index or 0)
    with cuda:
        model = spec.build().to(dtype)
    tunables = model_tunables(model, *size)
    return tune_operators(tunables, CudaOperatorRunner(cuda), config, out, progress)


def model_tunables(model: LanguageModel, batch: int, length: int) -> list[Tunable]:
    """Run a training step, a prompt and a decoding step, and return the classes of launches, each with a call."""
    tokens = torch.randint(model.spec.vocab, (batch, length), device=model.device)
    with captured_tunables() as found:
        model.train()
        model.loss(tokens, tokens.roll(-1, 1)).backward()
        model.zero_grad(set_to_none=True)
        model.eval()
        with torch.no_grad():
            state = model.init_state(batch, length + 1)
            state = model(tokens, state)[1]
            model(tokens[:, :1], state)
    return list(found.values())


def plan_model_operators(
    spec: StackSpec, size: tuple[int, int], dtype: torch.dtype, device: DeviceSpec, config: TuneConfig
) -> list[Planned]:
    """List what `tune_model_operators` would measure on a device. No GPU is needed."""
    with torch.device("meta"):
        model = spec.build().to(dtype)
    with simulated_launches(device):
        tunables = model_tunables(model, *size)
    return [
        Planned(
            kernel=tunable.key.kernel, shape=f"{size[0]}x{size[1]}", key=str(tunable.key), done=False,
            candidates=[f"warps={x.warps} stages={x.stages}" for x in candidates(tunable.options, config.effort)],
        )
        for tunable in tunables
    ]  # fmt: skip


def step_gains(
    spec: StackSpec, size: tuple[int, int], dtype: torch.dtype, device: str, measure: Callable[[Call], float],
    table: Path | None = None,
) -> list[StepGain]:  # fmt: skip
    """Measure a training step and a decoding step of a compiled model without and with the tables.

    Args:
        measure: returns the seconds of a call; see `cuda_seconds`.
        table: a table to use besides those of the device; it stays in use.
    """
    if table is not None and table.exists():
        use_table(table)
    cuda = usable_device(device)
    tokens = torch.randint(spec.vocab, size, device=cuda)
    calls = OurCalls(spec, None, tokens, dtype)
    training = calls.training_step()
    with without_tables():
        plain_training = measure(training)
        plain_decoding = measure(calls.decoding(_ROUNDS)) / DECODED
    tuned = {"training": measure(training), "decoding": measure(calls.decoding(_ROUNDS)) / DECODED}
    plain = {"training": plain_training, "decoding": plain_decoding}
    return [
        StepGain(step=step, heuristic_ms=1e3 * plain[step], tuned_ms=1e3 * tuned[step])
        for step in ("training", "decoding")
    ]


def cuda_seconds(device: str) -> Callable[[Call], float]:
    """Return a function that runs a call twice untimed, and returns the median seconds of the next ones."""

    def measure(call: Call) -> float:
        call()
        cuda = usable_device(device)
        return median(time_interleaved({"step": call}, cuda, _ROUNDS, _SECONDS, lambda *_: None)["step"].seconds)

    return measure
