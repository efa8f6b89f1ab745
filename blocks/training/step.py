"""One step of a run: accumulated gradients, their norm and clipping, the update, and the figures of the step."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from deltazoo.blocks.model.losses import Losses
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.parallel.context import ContextParallel
from deltazoo.blocks.parallel.ranks import Ranks
from deltazoo.blocks.parallel.wrapping import gradients_synchronized
from deltazoo.blocks.training.config import TrainConfig
from deltazoo.blocks.training.optimizer import Optimizer
from deltazoo.blocks.training.source import Rows
from deltazoo.mixers.core.mixer import Context


class Figures(NamedTuple):
    """The figures of one step, over all processes.

    bits: cross entropy in bits per token before the update; auxiliary: the auxiliary losses by name.
    gradient_norm: before clipping; group_norms: of the embedding, each layer and the rest.
    skipped: whether a gradient was NaN or infinite, so that the weights did not change.
    not_finite: the processes whose loss was NaN or infinite.
    stop: whether a process received a signal.
    """

    bits: float
    auxiliary: dict[str, float]
    learning_rate: float
    gradient_norm: float
    group_norms: dict[str, float]
    skipped: bool = False
    not_finite: tuple[int, ...] = ()
    stop: bool = False


class Pending(NamedTuple):
    """The figures of a step on their way from the device; `read` waits for them."""

    values: Tensor
    copied: Any
    auxiliary: tuple[str, ...]
    learning_rate: float
    groups: tuple[str, ...]
    ranks: int

    def read(self) -> Figures:
        """Wait for the device, and return the figures."""
        if self.copied is not None:
            wait_for_figures(self.copied)
        values = self.values.tolist()
        entropy, count, norm, skipped, stop = values[:5]
        end = 5 + len(self.auxiliary)
        auxiliary = dict(zip(self.auxiliary, values[5:end], strict=True))
        flags = values[end : end + self.ranks]
        return Figures(
            bits=math.nan if any(flags) else entropy / max(count, 1.0) / math.log(2),
            auxiliary=auxiliary,
            learning_rate=self.learning_rate,
            gradient_norm=norm,
            group_norms=dict(zip(self.groups, values[end + self.ranks :], strict=True)),
            skipped=bool(skipped),
            not_finite=tuple(rank for rank, flag in enumerate(flags) if flag),
            stop=stop > 0,
        )


def wait_for_figures(event: Any) -> None:
    """Wait until the device has computed a step; the watchdog recognises the name."""
    event.synchronize()


class Stepper:
    """Take the steps of a run.

    The loss of a step is the mean over the targets of all passes and processes, so that it does not depend on how they
    are split. Auxiliary losses are means over the passes.

    Args: module: `LossTerms`, perhaps wrapped; context: None without context parallelism.
    """

    def __init__(
        self, module: nn.Module, model: LanguageModel, optimizer: Optimizer, config: TrainConfig, ranks: Ranks,
        context: ContextParallel | None,
    ) -> None:  # fmt: skip
        self.module, self.optimizer, self.config, self.ranks, self.context = module, optimizer, config, ranks, context
        self.device = next(model.parameters()).device
        self.wide = torch.float32 if self.device.type == "mps" else torch.float64
        self.norm_dtype = torch.float64 if config.precision == "float64" else torch.float32
        self.group_of = [_group(weight.name) for weight in optimizer.weights]
        self.groups = tuple(dict.fromkeys(self.group_of)) if config.logging.groups else ("all",)
        self.sharded = isinstance(optimizer.weights[0].parameter, DTensor)
        self.index = torch.tensor(
            [self.groups.index(group) if config.logging.groups else 0 for group in self.group_of], device=self.device
        )

    def losses(self, rows: Rows, by_token: bool = False) -> Any:
        """Compute the losses of rows in the precision of the run."""
        bounds, (R, T) = rows.cu_seqlens, rows.tokens.shape
        context: Context | None = None
        if self.context is not None:
            documents = None if bounds is None else bounds.tolist()
            batch = self.context.plan(R, T, documents, segments=None if documents is None else len(documents))
            rows = rows.to(self.device)
            tokens, targets, context = batch.shard(rows.tokens), batch.shard(rows.targets), batch.context
        elif bounds is not None:
            rows = rows.to(self.device)
            tokens, targets = rows.tokens.view(1, -1), rows.targets.view(1, -1)
            context = Context(cu_seqlens=rows.cu_seqlens)
        else:
            tokens, targets = rows.to(self.device)[:2]
        enabled = self.config.precision == "autocast"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled):
            return self.module(tokens, targets, context, by_token)

    def take(self, batches: list[Rows], dense: bool, rate: float, stop: bool, beat: Callable[[str], None]) -> Pending:
        """Take a step on the rows of this process, and queue the copy of its figures.

        Args: dense: whether all targets have a loss; stop: whether this process received a signal; beat: called before
            each pass.
        """
        ranks = self.ranks
        counted = float(sum(rows.counted for rows in batches))
        total: Any = max(counted, 1.0) * ranks.data_ranks  # a step may have rows of prompts only
        if not dense and ranks.size > 1:
            counts = torch.full((), counted, device=self.device)
            total = ranks.sum_(counts).clamp(min=1) * (ranks.data_ranks / ranks.size)
        entropy = torch.zeros((), dtype=self.wide, device=self.device)
        auxiliary: dict[str, Tensor] = {}
        for index, rows in enumerate(batches):
            beat("in the forward and backward pass")
            with gradients_synchronized(self.module, index == len(batches) - 1):
                losses: Losses = self.losses(rows)
                share = rows.counted * ranks.data_ranks / total
                extra = losses.total - losses.cross_entropy if losses.auxiliary else 0.0
                (losses.cross_entropy * share + extra / len(batches)).backward()
            entropy += losses.cross_entropy.detach().to(self.wide) * rows.counted
            for name, value in losses.auxiliary.items():
                auxiliary[name] = auxiliary.get(name, 0) + value.detach().to(self.wide) / len(batches)
        beat("in the exchange of gradients")
        return self._update(entropy, counted, auxiliary, rate, stop)

    @torch.no_grad()
    def _update(
        self, entropy: Tensor, counted: float, auxiliary: dict[str, Tensor], rate: float, stop: bool
    ) -> Pending:
        ranks = self.ranks
        squares = self._squares()
        flags = torch.zeros(ranks.size, dtype=self.wide, device=self.device)
        flags[ranks.rank] = 1 - torch.isfinite(entropy).to(self.wide)
        aux = [value / ranks.size for value in auxiliary.values()]
        share = ranks.data_ranks / ranks.size
        head = entropy.new_full((2,), float(stop))  # a kernel fills it: a copy from the host would wait for the device
        head[:1].fill_(counted * share)
        mine = torch.cat([torch.stack([torch.nan_to_num(entropy) * share, *aux]), head, flags])
        if self.sharded:
            mine = torch.cat([mine, squares])
        if ranks.size > 1:
            ranks.sum_(mine)
        if self.sharded:
            mine, squares = mine[: -len(squares)], mine[-len(squares) :]
        norms = squares.sqrt()
        norm = squares.sum().sqrt()
        skip = 1 - torch.isfinite(norm).to(self.wide)
        scale = (self.config.optimizer.clip / (norm + 1e-6)).clamp(max=1.0)
        self.optimizer.step(rate, torch.nan_to_num(scale, nan=1.0), skip)
        for weight in self.optimizer.weights:
            weight.parameter.grad = None
        n = 1 + len(aux)
        values = torch.cat(
            [torch.stack([mine[0], mine[n], norm, skip, mine[n + 1]]), mine[1:n], mine[n + 2 :],
             norms if self.config.logging.groups else norms[:0]]
        )  # fmt: skip
        copied = None
        if self.device.type == "cuda":
            values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        groups = self.groups if self.config.logging.groups else ()
        return Pending(values, copied, tuple(auxiliary), rate, groups, ranks.size)

    def _squares(self) -> Tensor:
        """Return the sum of squares of the gradients of each group, of this process's parts under FSDP2."""
        found = [(g, n) for g, n in ((w.gradient(), n) for n, w in enumerate(self.optimizer.weights)) if g is not None]
        norms = torch.stack(torch._foreach_norm([gradient for gradient, _ in found], dtype=self.norm_dtype))
        squares = torch.zeros(len(self.groups), dtype=self.wide, device=self.device)
        index = self.index if len(found) == len(self.index) else self.index[[n for _, n in found]]
        if self.sharded and self.replicas > 1:
            norms = norms / self.replicas**0.5  # each replica adds its parts to the sum
        return squares.index_add_(0, index, norms.to(self.wide).square())

    @property
    def replicas(self) -> int:
        """Number of processes that hold the same part of each weight under FSDP2."""
        parameter = self.optimizer.weights[0].parameter
        if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim == 1:
            return 1
        return parameter.device_mesh.size(0)


def _group(name: str) -> str:
    """Return the group of a parameter: a layer, the embedding, the head or the last norm."""
    parts = name.split(".")
    return f"layer {parts[2]}" if parts[:2] == ["stack", "layers"] else parts[0] if parts[0] != "stack" else parts[1]
