"""The state of a training run: steps, validations, and checkpoints that resume bit for bit on as many processes."""

import functools
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor
from torch.distributed.tensor import DTensor

from deltazoo.backends.io.errors import ConfigError, ValueRangeError
from deltazoo.backends.io.frozen_config import describe_errors
from deltazoo.backends.io.progress import Progress
from deltazoo.blocks.checkpoints import folder as checkpoint
from deltazoo.blocks.checkpoints.sharded import Loaded, Writer, decoded, encoded, load_tensors
from deltazoo.blocks.inspect.describe import parameter_count
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.parallel.context import ContextParallel
from deltazoo.blocks.parallel.ranks import Ranks
from deltazoo.blocks.parallel.watchdog import Watchdog
from deltazoo.blocks.parallel.wrapping import wrap
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.training.config import RunSettings, TrainConfig
from deltazoo.blocks.training.health import Health
from deltazoo.blocks.training.interrupts import Interrupts, TrainingInterrupted
from deltazoo.blocks.training.metrics import MetricFiles, Speed
from deltazoo.blocks.training.objective import LossTerms
from deltazoo.blocks.training.optimizer import Optimizer, learning_rate
from deltazoo.blocks.training.records import Change, Point, Training, now
from deltazoo.blocks.training.source import Place, Rows, RowSource
from deltazoo.blocks.training.step import Figures, Pending, Stepper
from deltazoo.blocks.training.validation import validate
from deltazoo.blocks.training.warm_up import compile_with_progress
from deltazoo.blocks.training.watching import check_watchable, recurrent_statistics

_log = logging.getLogger("deltazoo")

PRETRAINED = "pretrained"  # folder of the weights for transformers
_NARROW = (torch.float16, torch.bfloat16)

OnPoint = Callable[[Point], None]


class _Figures(BaseModel):
    """The figures in a checkpoint: the points, the changes, and the steps since the last point."""

    points: list[Point]
    changes: list[Change]
    recent: list[Figures]
    skipped: int


class Run:
    """The state of a training run after `step` steps.

    Args: folder: of the checkpoints, None: there is none.
    Raises: ConfigError: a setting is invalid.
    """

    def __init__(
        self, spec: StackSpec, model: LanguageModel, source: RowSource, config: TrainConfig, ranks: Ranks,
        folder: Path | None,
    ) -> None:  # fmt: skip
        self.spec, self.model, self.source, self.config = spec, model, source, config
        self.ranks, self.folder = ranks, folder
        self.settings = RunSettings(train=config, text=source.origin)
        self.device = next(model.parameters()).device
        self.step = 0
        self.health = Health(config.optimizer.skips, ranks.size > 1)
        self.saved_step: int | None = None  # of the last checkpoint in the folder
        self.place = Place.of(config.batch, ranks.data_rank, ranks.data_ranks)
        self.parameters = parameter_count(model)
        fsdp = config.parallel.mode == "fsdp" and ranks.size > 1
        self.objective = LossTerms(model, config.z_loss)
        dtype = torch.bfloat16 if config.precision == "bfloat16" else None
        self.module = wrap(self.objective, list(model.stack.layers), ranks, config.parallel, dtype)
        if config.logging.watch:
            check_watchable(model)
        self.optimizer = Optimizer(model, config.optimizer, fsdp)
        context = None
        if config.parallel.context > 1:
            assert ranks.mesh is not None
            context = ContextParallel(ranks.mesh["context"], config.parallel.layout)
            if ranks.is_first and self.device.type == "cuda":
                _log.info("%s", context)
        self.stepper = Stepper(self.module, model, self.optimizer, config, ranks, context)
        self.speed = Speed(spec, config, ranks, self.device)
        self.files = MetricFiles(folder if ranks.is_first else None, config.logging)
        self.writer = None if folder is None else Writer(folder, ranks, config.checkpoint.background)
        waiting = ("wait_for_figures", "_pre_forward")  # the second: DDP reads times of the last exchange from the GPU
        self.watchdog = Watchdog(ranks, config.parallel.timeout, self._report_hang, waiting)
        self.points: list[Point] = []
        self.changes: list[Change] = []
        self.recent: list[Figures] = []  # the steps since the last point
        self._pending: list[Pending] = []  # steps whose figures the device has not computed yet
        self._ahead: tuple[dict[str, Any], list[Rows]] | None = None  # the next step's rows, and the state before them
        self._stop = False
        self.started = time.perf_counter()  # of the call that this run belongs to
        self.settle: Callable[[], None] = lambda: None  # called after the first step
        self.first_step_s: float | None = None
        self.stops_s: list[float] = []
        source.begin(config, self.place, None)

    def train(self, until: int | None, progress: Progress, on_point: OnPoint | None) -> Training:
        """Train up to step `until` or the end of the schedule, with validations and checkpoints on the way."""
        config = self.config
        last = config.steps if until is None else min(until, config.steps)
        save_every = config.checkpoint.every or config.evaluation.every
        first_call_s = 0.0
        writing = nullcontext() if self.writer is None else self.writer.finished_on_error()
        with self._saved_on_interrupt() as interrupts, self.watchdog, writing:
            progress("training", self.step, last)
            if self.step < last or not self.points:
                first_call_s = self._warm_up(last, progress)
            # A signal stops a run before the validation of its step.
            due = self.step % config.evaluation.every == 0 or self.step == last
            if not self.points or (due and self.points[-1].step != self.step):
                self._add_point(on_point)
            interrupts.deferred = True
            self.speed.begin()
            while self.step < last and not self._stop:
                self._take_step(interrupts.signum is not None)
                if self.ranks.size == 1 and interrupts.signum is not None:
                    self._stop = True
                ends = self.step == last or self._stop
                saves = self.step % save_every == 0 or self.step == last
                if saves or self.step % config.evaluation.every == 0 or ends:
                    self._read_figures(0)
                if not self._stop and (self.step % config.evaluation.every == 0 or self.step == last):
                    self._add_point(on_point, saves)
                elif saves and not self._stop:
                    self._save()
                progress("training", self.step, last, self._note())
            interrupts.deferred = False
            self.watchdog.agree()
            if self._stop:
                raise KeyboardInterrupt
            if self.writer is not None:
                self.writer.finish()
        self.files.close()
        return Training(
            config=config,
            parameters=self.parameters,
            source=self.source.origin.source,
            points=self.points,
            first_call_s=first_call_s,
            tokens_per_second=self.speed.median(),
            first_step_s=self.first_step_s,
            checkpoint_stops_s=self.stops_s,
        )

    def save_pretrained(self) -> None:
        """Write the weights to the folder `pretrained` of the run. Raises: ConfigError."""
        assert self.folder is not None
        weights = {name: x for name, x in self._tensors().items() if name.startswith("model.")}
        whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in weights.items()}

        def write() -> None:
            assert self.folder is not None
            with torch.device("meta"):
                model = self.spec.build()
            model.load_state_dict({name.removeprefix("model."): x.cpu() for name, x in whole.items()}, assign=True)
            model.origin, model.tokenizer = self.model.origin, self.model.tokenizer
            shutil.rmtree(self.folder / PRETRAINED, ignore_errors=True)
            model.save_pretrained(self.folder / PRETRAINED)

        self.ranks.first(write)

    def restore(self, loaded: Loaded) -> None:
        """Load everything that a checkpoint holds, on any number of processes."""
        state = loaded.state
        self.optimizer.allocate({name: entry.shape for name, entry in loaded.entries.items()})
        tensors = self._tensors()
        buffers = checkpoint.buffers_of(self.model)
        load_tensors(loaded, tensors, buffers, self.ranks)
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(tensors[name])
        self.optimizer.copy_to_model()
        self._check_finite(loaded.folder, tensors)
        self.step = self.saved_step = state["step"]
        try:
            figures = _Figures(**{name: state[name] for name in _Figures.model_fields})
            self._set_random_state(state["rng"])
        except (ValidationError, TypeError, ValueError, RuntimeError, KeyError, IndexError) as error:
            problem = describe_errors((), error) if isinstance(error, ValidationError) else error
            raise ConfigError(f"{loaded.folder} is not from a training run: {problem}") from error
        self.points, self.changes, self.recent = figures.points, figures.changes, figures.recent
        self.health.skipped = figures.skipped
        self.source.begin(self.config, self.place, state["data"])

    def _set_random_state(self, states: list[dict[str, Any]]) -> None:
        """Set this process's generators; those of a process that the run did not have are those of rank 0."""
        mine = states[self.ranks.rank] if self.ranks.rank < len(states) else states[0]
        torch.set_rng_state(decoded(mine["cpu"]))
        if self.device.type == "cuda" and mine["cuda"] is not None:  # None: the run was on another device
            torch.cuda.set_rng_state(decoded(mine["cuda"]), self.device)

    def _tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds, none of it in 16 bits."""
        buffers = checkpoint.buffers_of(self.model)
        return self.optimizer.state() | {name: x.float() if x.dtype in _NARROW else x for name, x in buffers.items()}

    def _save(self) -> None:
        """Write a checkpoint: the tensors are copied here, and written while the training continues."""
        if self.writer is None or self.saved_step == self.step:
            return
        self.watchdog.beat(f"while the checkpoint of step {self.step} is copied")
        start = time.perf_counter()
        data = self.source.state() if self._ahead is None else self._ahead[0]
        cuda = encoded(torch.cuda.get_rng_state(self.device)) if self.device.type == "cuda" else None
        state = {
            "stack": self.spec.model_dump(mode="json"),
            "settings": self.settings.model_dump(mode="json"),
            "step": self.step,
            "skipped": self.health.skipped,
            "points": [point.model_dump() for point in self.points],
            "changes": [change.model_dump() for change in self.changes],
            "recent": [figures._asdict() for figures in self.recent],
            "data": data,
            "rng": self.ranks.gather({"cpu": encoded(torch.get_rng_state()), "cuda": cuda}),
        }
        tensors = self._tensors()
        self._check_finite(self.folder, tensors)
        self.writer.save(self.step, tensors, state, functools.partial(self._kept, self.step))
        self.stops_s.append(time.perf_counter() - start)
        self.saved_step = self.step

    def _check_finite(self, place: object, tensors: dict[str, Tensor]) -> None:
        weights = {name: x for name, x in tensors.items() if name.startswith("model.")}
        self.ranks.agree(checkpoint.not_finite(place, weights))

    def _kept(self, saved: int, steps: list[int]) -> set[int]:
        """Return the checkpoints that stay: the last ones up to the one just saved, later damaged ones, the best."""
        until = sum(step <= saved for step in steps)
        kept = {*steps[max(until - self.config.checkpoint.keep, 0) :]}
        losses = {point.step: point.validation_bits for point in self.points if point.step in steps}
        if self.config.checkpoint.best and losses:
            kept.add(min(losses, key=lambda step: losses[step]))
        return kept

    @contextmanager
    def _saved_on_interrupt(self) -> Iterator[Interrupts]:
        """Save the state if a signal interrupts the block, and raise TrainingInterrupted; not without a folder."""
        interrupts = Interrupts()
        if self.folder is None:
            yield interrupts
            return
        with interrupts.catch():
            try:
                yield interrupts
            except KeyboardInterrupt as error:
                signum = interrupts.signum or (15 if self._stop else None)  # another process received the signal
                if signum is None or interrupts.deferred:
                    raise  # a second signal, perhaps in the middle of a step
                if self._stop or self.ranks.size == 1:  # else the processes are at different places
                    self._save()
                    assert self.writer is not None
                    self.writer.finish()
                raise TrainingInterrupted(signum, self.folder, self.step) from error

    def _take_step(self, stop: bool) -> None:
        rate = learning_rate(self.config, self.step)
        batches = self._next_rows()
        self._ahead = None
        pending = self._guarded(lambda: self.stepper.take(batches, self.source.dense, rate, stop, self._beat))
        self.step += 1
        self._pending.append(pending)
        first = self.first_step_s is None
        self._read_figures(1 if self.device.type == "cuda" and not first else 0)
        if first:
            self.settle()
            if self.writer is not None:
                self.writer.staging.reserve(self._tensors())  # this step has created the state of the optimizer

    def _beat(self, state: str) -> None:
        self.watchdog.beat(f"{state} of step {self.step + 1}")

    def _next_rows(self) -> list[Rows]:
        """Return this process's rows of the next step."""
        if self._ahead is None:
            self._beat("in reading the rows")
            start, state = time.perf_counter(), self.source.state()
            self._ahead = state, [self.source.rows(self.step, index) for index in range(self.place.passes)]
            self.speed.waited += time.perf_counter() - start
        return self._ahead[1]

    def _read_figures(self, left: int) -> None:
        """Read the figures of all steps but the last ones, which the device may still compute."""
        while len(self._pending) > left:
            figures = self._pending.pop(0).read()
            if self.first_step_s is None:
                self.first_step_s = time.perf_counter() - self.started
            self.speed.step_ended()
            step = self.step - len(self._pending)
            problem = self.health.note(figures, step)
            if problem is not None:
                raise self._diverged(problem, step)
            self.recent.append(figures)
            self._stop |= figures.stop

    def _diverged(self, problem: str, step: int) -> ConfigError:
        """Return the error for weights whose loss cannot be computed or is not finite, after `step` steps."""
        kept = ""
        if self.saved_step is not None and self.saved_step < step:
            command = f"deltazoo train --resume {self.folder} --lr RATE"
            kept = f"; the checkpoint holds step {self.saved_step}: {command} continues from there"
        return ConfigError(
            f"the training diverged after step {step}: {problem.rstrip('.')}; lower learning_rate (--lr), "
            f"got {self.config.optimizer.learning_rate:g}{kept}"
        )

    def _report_hang(self, sentence: str) -> None:
        kept = "" if self.saved_step is None else f"; the last checkpoint is of step {self.saved_step} in {self.folder}"
        checkpoint.report_line(f"{sentence}{kept}")

    def _add_point(self, on_point: OnPoint | None, saves: bool = False) -> None:
        """Validate, and average the steps since the previous point; log the point, and save a checkpoint."""
        steps = [figures for figures in self.recent if not figures.skipped]
        bits, positions = self._validate()
        if not math.isfinite(bits):
            raise self._diverged(f"the loss on validation is {bits:g}", self.step)
        figures: dict[str, Any] = {}
        if steps:
            figures = {
                "train_bits": fmean(step.bits for step in steps),
                "auxiliary": {name: fmean(step.auxiliary[name] for step in steps) for name in steps[0].auxiliary},
                "learning_rate": steps[-1].learning_rate,
                "gradient_norm": steps[-1].gradient_norm,
                "gradient_norms": steps[-1].group_norms,
                **self.speed.figures(),
            }
        point = Point(
            step=self.step, tokens=self.step * self.config.batch.step_tokens, time=now(), validation_bits=bits,
            skipped=self.health.skipped, positions=positions, watched=self._watched(), **figures,
        )  # fmt: skip
        self.files.append(point)
        self.points.append(point)
        self.recent = []
        if saves:
            self._save()
        if on_point is not None and self.ranks.is_first:
            on_point(point)
        self.speed.begin()

    def _validate(self) -> tuple[float, dict[str, float]]:
        """Return the validation loss in bits per token, and by range of positions."""
        self._beat("in the validation before a step")
        rows = self.source.validation(self.config, self.place)
        return validate(self.stepper, rows, self.config, self._losses)

    def _watched(self) -> dict[str, dict[str, float]]:
        if not self.config.logging.watch:
            return {}
        rows = next(iter(self.source.validation(self.config, self.place)))
        return recurrent_statistics(self.model, rows.to(self.device).tokens)

    def _warm_up(self, last: int, progress: Progress) -> float:
        """Run a forward and backward pass, which compiles the graphs of training and validation; return its seconds."""

        def call() -> None:
            rows = self._next_rows()[0]
            self._losses(rows).total.backward()
            for weight in self.optimizer.weights:
                weight.parameter.grad = None

        def report(note: str) -> None:
            self.watchdog.beat(note)
            progress("training", self.step, last, note)

        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            if self.config.compile:
                return compile_with_progress(self.model, call, last - self.step, report)
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

    def _losses(self, rows: Rows, by_token: bool = False) -> Any:
        return self._guarded(lambda: self.stepper.losses(rows, by_token))

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Call, and raise the error of a divergence if an operand of an update is NaN or infinite."""
        try:
            return call()
        except ValueRangeError as error:
            if self.step == 0:
                raise
            raise self._diverged(str(error), self.step) from error

    def _note(self) -> str:
        speed = self.speed.median(20)
        return f"{self.points[-1].validation_bits:.2f} bits per token" + (f", {speed:,.0f} tokens/s" if speed else "")
