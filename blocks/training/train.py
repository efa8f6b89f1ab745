"""Train a stack on bytes: AdamW, cosine with warm-up, and a checkpoint that goes on bit for bit."""

import math
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from deltazoo.backends.devices import cxx_compiler, usable_device
from deltazoo.backends.errors import ConfigError
from deltazoo.backends.progress import Progress, silent
from deltazoo.blocks.compilation import compile_layers
from deltazoo.blocks.spec import StackSpec
from deltazoo.blocks.stack import LanguageModel
from deltazoo.blocks.training import checkpoint
from deltazoo.blocks.training.text import BYTES, Batch, Text, crops, load_text, sweep
from deltazoo.mixers.core.delta_mixer import Update


class TrainConfig(BaseModel):
    """How to train.

    Args:
        steps: of the whole schedule; batch: rows a step; length: bytes a row.
        learning_rate: the highest; it rises over `warmup` steps and falls as a cosine to a tenth.
        weight_decay: on matrices; clip: the largest norm of all gradients together.
        seed: of the weights and of the crops.
        every: steps between two validations, each followed by a checkpoint; validation_batches: in each.
        dtype: "bfloat16" is autocast, and the weights stay float32.
        backend: as for `deltazoo.bind`; compile: see `deltazoo.blocks.compilation`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(default=300, ge=1)
    batch: int = Field(default=8, ge=1)
    length: int = Field(default=256, ge=1)
    learning_rate: float = Field(default=2e-3, gt=0, allow_inf_nan=False)
    warmup: int = Field(default=20, ge=0)
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    clip: float = Field(default=1.0, gt=0)
    seed: int = Field(default=0, ge=0, lt=2**63)
    every: int = Field(default=25, ge=1)
    validation_batches: int = Field(default=4, ge=1)
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    backend: str | None = None
    compile: bool = True


class Point(BaseModel):
    """One point of the curves, after `step` steps; None where no step was taken yet.

    train_bits: mean since the last point; validation_bits: at this one; both in bits per byte.
    gradient_norm: before clipping.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    train_bits: float | None = None
    validation_bits: float
    learning_rate: float | None = None
    gradient_norm: float | None = None
    tokens_per_second: float | None = None

    def cells(self) -> list[str]:
        """Step, bits in training and validation, and speed, as words."""
        train_bits = "" if self.train_bits is None else f"{self.train_bits:.3f}"
        speed = "" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f}"
        return [f"{self.step}", train_bits, f"{self.validation_bits:.3f}", speed]


class Training(BaseModel):
    """What a training did.

    Args:
        parameters: their number; source: of the text.
        points: the first one before any step.
        first_call_s: seconds of this process's first forward and backward, compilation included; in no other figure.
        tokens_per_second: the median of this process's steps, validation left out; None where there were none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: TrainConfig
    parameters: int
    source: str
    points: list[Point]
    first_call_s: float
    tokens_per_second: float | None

    @property
    def validation_bits(self) -> float:
        """Bits per byte on the validation part, at the end."""
        return self.points[-1].validation_bits

    def line(self) -> str:
        """The end in one line."""
        speed = "" if self.tokens_per_second is None else f", {self.tokens_per_second:,.0f} tokens/s"
        end = self.points[-1]
        return f"{end.validation_bits:.3f} bits per byte on validation after {end.step} steps{speed}"


def train(
    spec: StackSpec,
    text: Text,
    config: TrainConfig | None = None,
    folder: str | Path | None = None,
    until: int | None = None,
    progress: Progress = silent,
) -> Training:
    """Train from the beginning.

    Args:
        folder: where the checkpoint goes; None keeps none.
        until: stop after so many steps; `resume` goes on with the same schedule.
    Raises: ConfigError, also where the folder holds a checkpoint already, and where the loss is no number.
    """
    config = config or TrainConfig()
    run = _Run(spec, text, config)
    if folder is not None:
        about = {"source": text.source, "path": text.path, "digest": text.digest}
        checkpoint.begin(Path(folder), spec, {"train": config.model_dump(), "text": about})
    return run.go(until, folder, progress)


def resume(
    folder: str | Path,
    text: Text | None = None,
    until: int | None = None,
    progress: Progress = silent,
    trust: bool = False,
) -> Training:
    """Go on from a checkpoint, bit for bit as if there had been no stop, on the same machine and versions.

    Args: text: that of before; None reads it where it was read; trust: as for `StackSpec.load`.
    Raises: ConfigError, also where the text is another; OSError, where it cannot be read.
    """
    spec, settings, saved = checkpoint.load(Path(folder), trust)
    about = settings["text"]
    text = load_text(about["path"]) if text is None else text
    if about["digest"] != text.digest:
        raise ConfigError(f"{folder} was trained on another text ({about['source']}), got {text.source}")
    run = _Run(spec, text, TrainConfig(**settings["train"]))
    run.restore(saved)
    return run.go(until, folder, progress)


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of step `step`, from 0."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


class _Step(NamedTuple):
    """bits: per byte, of the step's crops before it."""

    bits: float
    learning_rate: float
    gradient_norm: float


class _Run:
    """A training under way, after `step` steps."""

    def __init__(self, spec: StackSpec, text: Text, config: TrainConfig) -> None:
        self.config, self.text, self.step = config, text, 0
        if spec.vocab < BYTES:
            raise ConfigError(f"vocab must be at least {BYTES} to train on bytes, got {spec.vocab}")
        self.device = usable_device(config.device)
        if config.compile and self.device.type == "cpu" and cxx_compiler() is None:
            raise ConfigError(
                "torch.compile needs a C++ compiler on the CPU and found none: install g++ or clang++ (Windows: cl), "
                "or train with compile=False and backend='reference'"
            )
        torch.manual_seed(config.seed)
        self.model = spec.build(backend=config.backend).to(self.device)
        for update in self.model.modules():
            if isinstance(update, Update):  # what no backend takes is a sentence here, and a page in a graph
                update.bound.backend_for(update.meta(self.device.type, getattr(torch, config.dtype), grad=True))
        if config.compile:
            compile_layers(self.model)
        self.optimizer = _adamw(self.model, config)
        held_out = sweep(text.validation, config.batch, config.length, config.validation_batches)
        self.held_out = [self._here(batch) for batch in held_out]
        self.points: list[Point] = []

    def go(self, until: int | None, folder: str | Path | None, progress: Progress) -> Training:
        """Take steps to `until` or the end of the schedule, with a point and a checkpoint after every `every`."""
        last = self.config.steps if until is None else min(until, self.config.steps)
        progress("training", self.step, last, "compiling" if self.config.compile else "")
        first_call_s = self._warm_up()
        if not self.points:
            self._point([], [])
        seconds: list[float] = []
        steps: list[_Step] = []
        while self.step < last:
            start = time.perf_counter()
            steps.append(self._take_step())
            seconds.append(time.perf_counter() - start)
            if self.step % self.config.every == 0 or self.step == last:
                self._point(steps, seconds[-len(steps) :])
                steps = []
                if folder is not None:
                    checkpoint.save(Path(folder), self.saved())
            progress("training", self.step, last, self._note(seconds))
        return Training(
            config=self.config,
            parameters=sum(x.numel() for x in self.model.parameters()),
            source=self.text.source,
            points=self.points,
            first_call_s=first_call_s,
            tokens_per_second=self._speed(seconds),
        )

    def restore(self, saved: dict[str, Any]) -> None:
        """Be where the checkpoint was written."""
        checkpoint.load_weights(self.model, saved)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]
        self.points = [Point(**point) for point in saved["points"]]
        torch.set_rng_state(saved["rng"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(saved["cuda_rng"], self.device)

    def saved(self) -> dict[str, Any]:
        """All that `restore` needs."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "points": [point.model_dump() for point in self.points],
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }

    def _take_step(self) -> _Step:
        config = self.config
        rate = learning_rate(config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self._loss(self._crops())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        bits = float(loss.detach()) / math.log(2)
        if not math.isfinite(bits):
            raise ConfigError(
                f"the loss is {bits} at step {self.step}: lower learning_rate, got {config.learning_rate}"
            )
        return _Step(bits, rate, float(norm))

    def _point(self, steps: list[_Step], seconds: list[float]) -> None:
        held_out = fmean(float(self._loss(batch).detach()) for batch in self.held_out) / math.log(2)
        measured = {}
        if steps:
            measured = {
                "train_bits": fmean(step.bits for step in steps),
                "learning_rate": steps[-1].learning_rate,
                "gradient_norm": steps[-1].gradient_norm,
                "tokens_per_second": self._speed(seconds),
            }
        self.points.append(Point(step=self.step, validation_bits=held_out, **measured))

    def _warm_up(self) -> float:
        """Seconds of a step that changes nothing: it compiles the graphs that training and validation share."""
        start = time.perf_counter()
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self._loss(self._crops()).backward()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    def _loss(self, batch: Batch) -> Tensor:
        """The mean loss in nats."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
            return self.model.loss(batch.inputs, batch.targets)

    def _crops(self) -> Batch:
        config = self.config
        return self._here(crops(self.text.train, config.batch, config.length, config.seed, self.step))

    def _here(self, batch: Batch) -> Batch:
        return Batch(batch.inputs.to(self.device), batch.targets.to(self.device))

    def _speed(self, seconds: list[float]) -> float | None:
        return self.config.batch * self.config.length / median(seconds) if seconds else None

    def _note(self, seconds: list[float]) -> str:
        return f"{self.points[-1].validation_bits:.2f} bits per byte, {self._speed(seconds[-20:]):,.0f} tokens/s"


def _adamw(model: LanguageModel, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices alone: norms, biases, and what a module calls `no_weight_decay` are left as they are."""
    left = {id(getattr(module, name)) for module in model.modules() for name in getattr(module, "no_weight_decay", ())}
    matrices = [x for x in model.parameters() if x.dim() >= 2 and id(x) not in left]
    others = [x for x in model.parameters() if x.dim() < 2 or id(x) in left]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
