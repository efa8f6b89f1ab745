"""ContextParallel: cut a batch of documents into pieces, one or two for each rank of a device mesh.

B batch, T time, D documents, G pieces
"""

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from deltazoo.backends.context_parallel.exchange import gather_line, sum_over_ranks, take_local
from deltazoo.backends.context_parallel.plan import ContextPlan, Cut, make_plan, most_segments
from deltazoo.backends.io.errors import OperandError, ShapeError, ValueRangeError
from deltazoo.backends.triton.gather.op import symmetric_refusal
from deltazoo.mixers.core.mixer import Context

Layout = Literal["contiguous", "zigzag"]


class ContextBatch(NamedTuple):
    """One batch that is split over the ranks. Every rank calls the same methods in the same order.

    Args: plan: of this rank. shape: [B, T] of the batch.
    """

    plan: ContextPlan
    shape: tuple[int, int]

    @property
    def context(self) -> Context:
        """The context of the model's call: the model takes this rank's tokens and returns those of this rank."""
        return Context(cu_seqlens=self.plan.cu_seqlens, parallel=self.plan)

    def shard(self, x: Tensor) -> Tensor:
        """Return this rank's tokens [1, T', ...] of a tensor of the whole batch [B, T, ...].

        Shift targets before this call: the target of a rank's last token is a token of the next rank.

        Raises: ShapeError.
        """
        if tuple(x.shape[:2]) != self.shape:
            raise ShapeError(f"x must have shape {[*self.shape, '...']} like the batch, got {list(x.shape)}")
        return take_local(x.flatten(0, 1)[None], self.plan)

    def gather(self, x: Tensor) -> Tensor:
        """Return the whole batch [B, T, ...] on every rank, from the tokens of the ranks [1, T', ...]. Differentiable.

        Raises: ShapeError.
        """
        if tuple(x.shape[:2]) != tuple(self.plan.positions.shape):
            expected = [*self.plan.positions.shape, "..."]
            raise ShapeError(f"x must have this rank's tokens, shape {expected}, got {list(x.shape)}")
        return torch.unflatten(gather_line(x, self.plan)[0], 0, self.shape)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks, on every rank. Differentiable."""
        return sum_over_ranks(x, self.plan)


class ContextParallel:
    """Context parallelism over a device mesh: each rank holds a part of every batch's tokens.

        parallel = ContextParallel(mesh["context"])
        batch = parallel.plan(2, 131072)
        loss = model.loss(batch.shard(tokens), batch.shard(targets), batch.context)

    All ranks of the mesh get the same batch, and results are exact: outputs, final states and gradients equal those of
    one process up to rounding. `loss` returns the loss of the whole batch on every rank, and the mean of the ranks'
    gradients is its gradient, as DDP and FSDP2 compute it. A gradient on a rank is a share: their sum, divided by the
    number of ranks for a loss that is equal on all ranks, is the gradient.

    Args:
        mesh: one-dimensional.
        layout: "contiguous": rank r holds piece r of n. "zigzag": rank r holds pieces r and 2 n - 1 - r of 2 n, which
            gives all ranks equal work in causal softmax attention.
        gather: run mixers that cannot split their tokens (`Mixer.split_refusal`) on those of all ranks, on every rank:
            exact, with n times the work. False: they raise UnsupportedError.
        symmetric: exchange the summaries of updates, in the triton backend, by a kernel that reads the memory of the
            other GPUs over NVLink, instead of a collective. None: where NVLink connects all GPUs of the mesh. `str` of
            the object names the exchange, and why it is a collective.
    Raises: OperandError.
    """

    def __init__(
        self, mesh: DeviceMesh, layout: Layout = "contiguous", gather: bool = False, symmetric: bool | None = None
    ) -> None:
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            got = f"{mesh.ndim} dimensions" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
            raise OperandError(f"mesh must be a DeviceMesh of one dimension, such as mesh['context'], got {got}")
        if layout not in get_args(Layout):
            raise OperandError(f"layout must be one of {', '.join(map(repr, get_args(Layout)))}, got {layout!r}")
        refusal: str | None = "symmetric is False"
        if symmetric is not False:
            refusal = symmetric_refusal(mesh.get_group()) if mesh.device_type == "cuda" else "the mesh has no GPUs"
        if symmetric and refusal is not None:
            raise OperandError(f"symmetric needs GPUs of one host that NVLink connects: {refusal}")
        self.mesh, self.layout, self.gather, self.symmetric = mesh, layout, gather, refusal is None
        self._refusal = refusal

    def __str__(self) -> str:
        backend = torch.distributed.get_backend(self.mesh.get_group())
        exchange = backend if self._refusal else "gather_kernel over NVLink"
        reason = f" ({self._refusal})" if self._refusal else ""
        ranks = self.mesh.size()
        return f"context parallelism: {ranks} rank{'s' * (ranks > 1)}, {self.layout}, summaries by {exchange}{reason}"

    def plan(
        self,
        B: int,
        T: int,
        cu_seqlens: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        segments: int | None = None,
    ) -> ContextBatch:
        """Plan one batch, on the host; its tensors are copied to the mesh's device without a synchronisation.

        The rows of the batch form one line of B T tokens. Batches with equal B, T, sizes and segments have plans of
        equal shapes: compiled graphs serve all of them, and captured ones after the tensors are copied.

        Args:
            B, T: of the batch.
            cu_seqlens: bounds of packed documents in the line, D + 1 integers from 0 to B T; None: the rows.
            sizes: tokens of each piece, in the order of the line; None: equal, up to one token.
            segments: S, the most parts of documents in a piece; None: as many as this batch has.
        Raises: ValueRangeError.
        """
        ranks, rank = self.mesh.size(), self.mesh.get_local_rank()
        total, pieces = B * T, ranks if self.layout == "contiguous" else 2 * ranks
        if total < 1:
            raise ValueRangeError(f"the batch must have at least one token, got B = {B}, T = {T}")
        documents = list(range(0, total + 1, T)) if cu_seqlens is None else [int(bound) for bound in cu_seqlens]
        if documents[0] != 0 or documents[-1] != total or documents != sorted(documents):
            raise ValueRangeError(
                f"cu_seqlens must rise from 0 to B T = {total}, got {documents[:4]} ... {documents[-1]}"
            )
        if sizes is None:
            bounds = [g * total // pieces for g in range(pieces + 1)]
        else:
            bounds = [0, *itertools.accumulate(sizes)]
            if len(sizes) != pieces or bounds[-1] != total or min(sizes) < 0:
                raise ValueRangeError(f"sizes must be {pieces} numbers with the sum B T = {total}, got {list(sizes)}")
        owners = [g if g < ranks else pieces - 1 - g for g in range(pieces)]
        cut = Cut(tuple(bounds), tuple(owners))
        needed = most_segments(documents, cut)
        if segments is not None and segments < needed:
            raise ValueRangeError(f"segments must be at least {needed} for this batch, got {segments}")
        group = self.mesh.get_group().group_name
        plan = make_plan(documents, cut, rank, ranks, group, segments or needed, self._device())
        return ContextBatch(plan._replace(gathers=self.gather, symmetric=self.symmetric), (B, T))

    def _device(self) -> torch.device:
        kind = self.mesh.device_type
        return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device(kind)
