"""Cells in progress: the runs of a mixer on a task, which a GPU trains at the same time."""

import gc
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.measure.environment import environment
from deltazoo.backends.update.dispatch import requested_backend, use_backend
from deltazoo.blocks.model.compilation import CompiledLayers
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.probes.model import Decoder, OneHotEmbedding, probe_stack
from deltazoo.blocks.probes.records import SOLVED, Point, Run, cells
from deltazoo.blocks.probes.task import Task
from deltazoo.blocks.probes.tasks import task as task_of
from deltazoo.blocks.probes.trainer import EAGER_STEPS, Trainer
from deltazoo.blocks.spec.stack_spec import StackSpec

_POINTS = 10  # evaluations during a run
_TURN = 25  # steps of a run on a GPU before the next run continues
_CHECK_TOKENS = 2**14  # of an evaluation during a run, at each length
_layers: dict[Hashable, CompiledLayers] = {}  # by kinds of layers and width


class Member:
    """A run in progress; `accuracy` is empty until it ends."""

    def __init__(self, stack: StackSpec, task: Task, rate: float, seed: int, device: str) -> None:
        self.compiles = device != "cpu"
        with torch.random.fork_rng(devices=[]), nullcontext() if self.compiles else _in_plain_torch():
            torch.manual_seed(seed)
            model = stack.build()
            Decoder.replace_head(model, task)
        if self.compiles:
            OneHotEmbedding.replace_in(model)
        self.trainer = Trainer(model.to(device), task, rate, seed)
        self.rate, self.seed = rate, seed
        self.bounds = sorted({-(-task.steps * n // _POINTS) for n in range(1, _POINTS + 1)})
        self.curve: list[Point] = []
        self.accuracy: dict[int, float] = {}
        self.bits: dict[int, float] = {}
        self.seconds = 0.0
        self.queued: Tensor | None = None  # scores that are being computed

    def set_up(self) -> None:
        """Take the first steps on a GPU and evaluate each length, which compiles kernels and captures the graphs."""
        if self.trainer.is_cuda:
            self.trainer.compile()
            self.trainer.train(min(EAGER_STEPS, self.bounds[0] - 1))
            self.trainer.read(self.trainer.queue_scores(_CHECK_TOKENS))

    def queue_steps(self) -> None:
        """Take a turn of steps, up to the next evaluation. A CPU takes one, so that a budget ends in time."""
        step = self.trainer.step
        turn = _TURN if self.trainer.is_cuda else 1
        self.trainer.train(min(step + turn, next(bound for bound in self.bounds if bound > step)))

    def queue_evaluation(self) -> None:
        """Evaluate the model if that is due. On a GPU the call returns before the figures are computed."""
        if self.trainer.step in self.bounds:
            self.queued = self.trainer.queue_scores(min(_CHECK_TOKENS, self.trainer.task.evaluation_tokens))

    def read_evaluation(self) -> None:
        """Add a point to the curve, and end the run if it is complete, diverged or solves the task."""
        if self.queued is None:
            return
        trainer, task = self.trainer, self.trainer.task
        loss, (accuracies, _) = trainer.last_loss(), trainer.read(self.queued)
        self.queued = None
        self.curve.append(Point(trainer.step, loss, accuracies[0]))
        is_last = trainer.step == task.steps or not math.isfinite(loss)
        if is_last or min(accuracies) >= SOLVED:
            final, bits = trainer.read(trainer.queue_scores(task.evaluation_tokens))
            if is_last or min(final) >= SOLVED:
                self.accuracy, self.bits = (dict(zip(task.lengths, each, strict=True)) for each in (final, bits))

    def note(self) -> str:
        """Describe the progress. On a GPU the loss is that of the last evaluation, because a read waits for steps."""
        trainer = self.trainer
        losses = [point.loss for point in self.curve[-1:]] if trainer.is_cuda else [trainer.last_loss()]
        loss = "".join(f"loss {each:.3f}, " for each in losses)
        return (
            f"rate {self.rate:g}, seed {self.seed}, step {trainer.step:,} of {trainer.task.steps:,}, {loss}"
            f"{self.seconds:.0f} s"
        )


class CellInProgress:
    """The runs of a mixer on a task: every rate with seed 0, then the other seeds at the best rate.

    Args:
        task, mixer: as typed; done: finished runs.
        at_once: runs that are trained at the same time; None: all rates, then all seeds.
    """

    def __init__(
        self, task: str, mixer: str, done: Iterable[Run], seeds: int, device: str, at_once: int | None = None
    ) -> None:
        self.task, self.mixer, self.seeds, self.device, self.at_once = task, mixer, seeds, device, at_once
        self.done = [run for run in done if (run.task, run.mixer) == (task, mixer)]
        self.stack = probe_stack(mixer, task_of(task))
        self.members: list[Member] = []
        self.setup_seconds = 0.0

    def pending(self) -> list[tuple[float, int]]:
        """Return the next runs that can be trained at the same time: rates, then the seeds of the best rate.

        As soon as a rate solves the task, the others are not needed.
        """
        task = task_of(self.task)
        finished = {(run.rate, run.seed): run for run in self.done if run.rate in task.rates}
        if not any(run.is_solved for run in finished.values() if run.seed == 0):
            rates = [(rate, 0) for rate in task.rates if (rate, 0) not in finished]
            if rates:
                return rates[: self.at_once]
        (best,) = cells(finished.values()).values()
        return [(best.rate, seed) for seed in range(self.seeds) if (best.rate, seed) not in finished][: self.at_once]

    def advance(self) -> None:
        """Take a turn of every run, of the next ones if none is in progress.

        On a GPU the steps of all runs are queued before the first evaluation is read.
        """
        if not self.members:
            self._begin()
        start = time.perf_counter()
        phases: list[Callable[[Member], None]] = [Member.queue_steps, Member.queue_evaluation, Member.read_evaluation]
        for phase in phases:
            for member in self.members:
                phase(member)
        for member in self.members:
            member.seconds += (time.perf_counter() - start) / len(self.members)

    def ended(self) -> Iterator[Run]:
        """Yield the runs that have ended."""
        ended = [member for member in self.members if member.accuracy]
        self.members = [member for member in self.members if not member.accuracy]
        for member in ended:
            run = self._run(member)
            self.done.append(run)
            yield run
        if any(run.is_solved for run in self.done):  # the other rates
            self.members = [member for member in self.members if member.seed != 0]

    def _begin(self) -> None:
        """Build the models of the next runs. On a GPU also compile their kernels and capture their graphs."""
        start = time.perf_counter()
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)  # a dropped run may still compute in memory that is freed next
        gc.collect()  # runs that have ended are in reference cycles with their memory
        self.members = [self._member(rate, seed) for rate, seed in self.pending()]
        for member in self.members:
            member.set_up()
        self.setup_seconds += time.perf_counter() - start

    def _member(self, rate: float, seed: int) -> Member:
        task = task_of(self.task)
        member = Member(self.stack, task, rate, seed, self.device)
        if member.compiles:
            member.trainer.compiled = _compiled_layers(member.trainer.model)
        return member

    def _run(self, member: Member) -> Run:
        trainer, task, costs = member.trainer, member.trainer.task, self.stack.describe()
        return Run(
            task=self.task, mixer=self.mixer, rate=member.rate, seed=member.seed,
            settings=task.model_dump(mode="json"), steps=trainer.step, accuracy=member.accuracy, bits=member.bits,
            chance=task.chance, curve=member.curve, diverged=not math.isfinite(member.curve[-1].loss),
            parameters=costs.parameters, state_bytes=costs.state_bytes, cache_bytes=costs.cache_bytes,
            seconds=round(member.seconds, 2), captured=trainer.graph is not None, kernels=member.compiles,
            environment=environment(self.device),
        )  # fmt: skip


def _compiled_layers(model: LanguageModel) -> CompiledLayers:
    """Return the compiled layers that all models of the process with the same kinds of layers share."""
    key = (frozenset(model.spec.expand()), model.spec.width)
    if key not in _layers:
        _layers[key] = CompiledLayers(model, dynamic=True)
        _layers[key].forwards.clear()  # the cache must not keep the memory of a model
    return _layers[key].of(model)


def _in_plain_torch() -> AbstractContextManager[None]:
    """Return a context in which updates are built that compile nothing, unless the caller chose their backend."""
    return nullcontext() if requested_backend(None) is not None else use_backend(CompileBackend(compiled=False))
