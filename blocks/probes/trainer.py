"""Trainer: one run of a model on a task. On a GPU a whole training step is one CUDA graph on its own stream.

The graph draws the sequences, computes the loss and the gradients, and updates the weights and the learning rate, so
that several runs share a GPU without waiting for the host. A step adds in a fixed order: runs repeat bit for bit.
"""

import gc
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.io.errors import ValueRangeError
from deltazoo.backends.ops.cross_entropy import IGNORE_INDEX
from deltazoo.blocks.model.compilation import CompiledLayers
from deltazoo.blocks.model.losses import at_places
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.probes.task import Task
from deltazoo.blocks.training.config import OptimizerConfig, ScheduleConfig, TrainConfig
from deltazoo.blocks.training.optimizer import Optimizer, learning_rate

EAGER_STEPS = 2  # before the capture: they allocate the optimizer's state and load the kernels
_WARMUP = 0.05  # of the steps
_EVALUATION_SEED = 2**31  # all runs of a task are evaluated on the same sequences
_CALL_TOKENS = 2**14
_COMPILE_SIZES = (64, 128)  # B, T
_DRAWN = 8  # steps whose sequences are drawn at once, because a draw takes up to a third of the launches of a step
# Up to this vocabulary the head reads all tokens: the gradient of an index in a fixed order sorts, in 30 launches.
_DENSE_VOCAB = 1024


class _Drawn(NamedTuple):
    """Sequences of `_DRAWN` steps [N, B, T], and their answers; places: None if there is an answer for every token."""

    tokens_NBT: Tensor
    answers_NBA: Tensor
    places_NBA: Tensor | None


class _Evaluation(NamedTuple):
    """`run` draws sequences and adds to sums [3]: right answers, scored answers, and their cross entropy in nats."""

    generator: torch.Generator
    sums: Tensor
    run: Callable[[], None]


class Trainer:
    """The state of a run after `step` steps.

    Args: compiled: the layers for the training steps; None: eager.
    """

    def __init__(self, model: LanguageModel, task: Task, rate: float, seed: int) -> None:
        self.model, self.task, self.step = model, task, 0
        self.compiled: CompiledLayers | None = None
        self.device = model.device
        self.config = TrainConfig(
            steps=task.steps,
            optimizer=OptimizerConfig(learning_rate=rate, weight_decay=task.weight_decay),
            schedule=ScheduleConfig(warmup=int(_WARMUP * task.steps), final=0.0),
        )
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.optimizer = Optimizer(model, self.config.optimizer, sharded=False, captured=True)
        self.loss = torch.zeros((), device=self.device)
        self.drawn: _Drawn | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.draw_graph: torch.cuda.CUDAGraph | None = None
        self.pool: Any = None  # memory that all graphs of the run share, because they run one after the other
        self.evaluations: dict[tuple[int, int], _Evaluation] = {}  # by length and rows
        self.is_cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if self.is_cuda else None
        rates = [learning_rate(self.config, step) for step in range(task.steps)]
        self.rates = torch.tensor(rates, device=self.device)
        self.count = torch.zeros(1, dtype=torch.int64, device=self.device)  # of steps, which a graph increments
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))  # which fills the weights

    def compile(self) -> None:
        """Compile the layers for all sizes, by a call whose sizes do not depend on the task.

        torch.compile may order sums by the sizes of the first call, and a run must not depend on which task was first.
        """
        if self.compiled is not None:
            with self._on_stream(), _in_fixed_order(), self.compiled.active(), self._autocast():
                tokens_BT = torch.zeros(_COMPILE_SIZES, dtype=torch.int64, device=self.device)
                self.model.features(tokens_BT)[0].sum().backward()
            self.model.zero_grad()

    def train(self, until: int) -> None:
        """Take steps up to `until`. On a GPU the calls return before the steps are done."""
        with self._on_stream():
            while self.step < until:
                if self.step % _DRAWN == 0:
                    self._draw() if self.draw_graph is None else self.draw_graph.replay()
                if self.graph is not None:
                    self.graph.replay()
                else:
                    self._take_step()
                    if self.is_cuda and self.step + 1 == EAGER_STEPS:
                        self._capture()
                self.step += 1

    def last_loss(self) -> float:
        """Wait for the steps; return the loss of the last one in nats per answer."""
        with self._on_stream():
            return float(self.loss)

    def queue_scores(self, tokens: int) -> Tensor:
        """Return the share of the scored answers that have the largest logit, and their cross entropy in bits.

        On a GPU the call returns before the tensor is computed; `read` waits for it.

        Args: tokens: about as many are read at each length.
        Returns: [2, n] float64 for the n lengths of the task.
        """
        with self._on_stream(), torch.no_grad():
            return torch.stack([self._scores(length, tokens) for length in self.task.lengths], dim=1)

    def read(self, values: Tensor) -> tuple[list[float], list[float]]:
        """Wait for scores that this trainer computes; return accuracies and bits."""
        with self._on_stream():
            accuracies, bits = values.tolist()
            return accuracies, bits

    def _scores(self, length: int, tokens: int) -> Tensor:
        rows = max(1, min(_CALL_TOKENS, tokens) // length)
        if (length, rows) not in self.evaluations:
            self.evaluations[length, rows] = self._evaluation(length, rows)
        evaluation = self.evaluations[length, rows]
        evaluation.generator.manual_seed(_EVALUATION_SEED + length)
        evaluation.sums.zero_()
        for _ in range(max(1, tokens // (rows * length))):
            evaluation.run()
        right, total, nats = evaluation.sums.unbind()
        return torch.stack((right, nats / math.log(2))) / total.clamp(min=1)

    def _evaluation(self, length: int, rows: int) -> "_Evaluation":
        """Build an evaluation on `rows` sequences, on a GPU as a graph."""
        generator = torch.Generator(self.device)
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)

        def add() -> None:
            batch = self.task.draw_evaluation(rows, length, generator)
            is_scored = batch.answers_BA != IGNORE_INDEX
            with self._autocast():
                try:
                    x_BTD, _ = self.model.features(batch.tokens_BT)
                    logits_BAL = self.model.logits(at_places(x_BTD, batch.places_BA)).float()
                except ValueRangeError:  # a NaN, which a CPU refuses
                    logits_BAL = torch.full((*batch.answers_BA.shape, self.task.vocab), math.nan)
            found_BA = torch.where(logits_BAL.isnan().any(2), IGNORE_INDEX - 1, logits_BAL.argmax(2))
            # By gather, because the sum of F.cross_entropy is not deterministic.
            nats_BA = logits_BAL.logsumexp(2) - logits_BAL.gather(2, batch.answers_BA.clamp(min=0)[..., None])[..., 0]
            right, nats = (found_BA == batch.answers_BA) & is_scored, torch.where(is_scored, nats_BA, 0.0).double()
            sums.add_(torch.stack((right.sum().double(), is_scored.sum().double(), nats.sum())))

        if not self.is_cuda:
            return _Evaluation(generator, sums, add)
        add()  # loads the kernels
        return _Evaluation(generator, sums, self._captured(add, generator).replay)

    def _take_step(self) -> None:
        with _in_fixed_order() if self.is_cuda else nullcontext():
            self._compute_step()

    def _draw(self) -> None:
        """Draw the sequences of the next steps, into the tensors of the first call."""
        task = self.task
        batch = task.draw(_DRAWN * task.batch, task.length, self.generator)
        answers, places = batch.answers_BA, None
        if (limit := task.scored_length(self.count)) is not None:
            answers = torch.where(batch.places_BA < limit, answers, IGNORE_INDEX)
        if task.vocab <= _DENSE_VOCAB and not task.decoded:
            answers = torch.full_like(batch.tokens_BT, IGNORE_INDEX).scatter(1, batch.places_BA, answers)
        else:
            places = torch.unflatten(batch.places_BA, 0, (_DRAWN, -1))
        tokens_NBT, answers_NBA = (torch.unflatten(x, 0, (_DRAWN, -1)) for x in (batch.tokens_BT, answers))
        drawn = _Drawn(tokens_NBT, answers_NBA, places)
        if self.drawn is None:
            self.drawn = drawn
            return
        for old, new in zip(self.drawn, drawn, strict=True):
            if old is not None and new is not None:
                old.copy_(new)

    def _compute_step(self) -> None:
        assert self.drawn is not None
        index = self.count % _DRAWN
        tokens_BT, answers_BA = (x.index_select(0, index)[0] for x in (self.drawn.tokens_NBT, self.drawn.answers_NBA))
        places_BA = None if self.drawn.places_NBA is None else self.drawn.places_NBA.index_select(0, index)[0]
        active: AbstractContextManager[Any] = nullcontext() if self.compiled is None else self.compiled.active()
        with active, self._autocast():
            losses = self.model.losses(tokens_BT, answers_BA, places_BA=places_BA)
        self.model.zero_grad()
        losses.total.backward()
        norm = torch.nn.utils.get_total_norm([x.grad for x in self.model.parameters() if x.grad is not None])
        scale = (self.config.optimizer.clip / norm).clamp(max=1)
        self.optimizer.step(self.rates.gather(0, self.count)[0], scale, skip=~norm.isfinite())
        self.count += 1
        self.loss.copy_(losses.cross_entropy.detach())

    def _capture(self) -> None:
        """Capture a step. The capture runs nothing, so neither the weights nor the generator move."""
        for group in self.optimizer.groups:
            group["capturable"] = True
        self.draw_graph = self._captured(self._draw, self.generator)
        self.model.zero_grad()  # the graph then stores gradients in its own memory
        self.graph = self._captured(self._take_step, self.generator)

    def _captured(self, call: Callable[[], None], generator: torch.Generator) -> torch.cuda.CUDAGraph:
        """Capture a call on the stream of the run. Unlike `torch.cuda.graph` this waits for no other stream."""
        assert self.stream is not None
        self.stream.synchronize()
        torch.cuda.empty_cache()  # eager calls leave memory that no other stream can use
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(generator)
        collects = gc.isenabled()
        gc.disable()  # a collection could destroy the graph of another run, which a capture forbids
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            call()
        finally:
            graph.capture_end()
            if collects:
                gc.enable()
        return graph

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _autocast(self) -> AbstractContextManager[Any]:
        enabled = self.is_cuda and self.task.dtype == "bfloat16"
        # Casts that autocast keeps would be those of the weights before the capture.
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled, cache_enabled=False)


@contextmanager
def _in_fixed_order() -> Iterator[None]:
    """Use torch's deterministic operators: the gradient of an embedding else adds in the order in which blocks end.

    cuBLAS products, about which torch warns, are deterministic on one stream with its own workspace.
    """
    before = torch.get_deterministic_debug_mode()
    memory: Any = torch.utils.deterministic  # a module with a property
    fills = memory.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*deterministic")
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)
            memory.fill_uninitialized_memory = fills
