"""The rows of requests: states, next tokens and sampling parameters, with the requests in the first rows.

A request that leaves is replaced by that of the last row. A step of n requests therefore runs in place on views of the
first n rows, or of a few more if its sizes are rounded up.

R rows, L vocabulary
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from deltazoo.backends.ops.prompt_lookup import Text
from deltazoo.blocks.generation.decoder import Buffers, new_buffers
from deltazoo.blocks.generation.drafted_pass import PassBuffers, empty_texts, start_text
from deltazoo.blocks.generation.engine.job import Job, next_numbers
from deltazoo.blocks.generation.engine.pages import PageAllocator, RowStates, tensors_of
from deltazoo.blocks.generation.engine.prefix_tree import PrefixTree, Snapshot
from deltazoo.blocks.generation.engine.row_sampling import DrawBuffers, RowSampling
from deltazoo.blocks.model.interface import TokenModel

PAYS_FROM = 1.4  # tokens of a pass per request; a pass takes as long as 1.2 to 1.6 steps of 1 to 16 requests on an H200
RETRY_AFTER = 32  # steps without drafts, after which a pass is tried
MOST_TOKENS = 64  # of a pass; a larger one is not bound by loading weights, so a step of more rows has no drafts


class _Rows(NamedTuple):
    """What belongs to the request of a row and moves with it, R rows each."""

    state: list[Tensor]
    tokens: Tensor
    sampling: RowSampling
    seen: Tensor
    text: Text | tuple[()]


class Pool:
    """Rows of a fixed number, the first of which hold requests.

    Args:
        rows: R.
        states: initial states of rows; the pools of an engine share their pages.
        sizes: numbers of rows that steps run on, in ascending order up to R; None: as many as there are requests.
        drafted: number of tokens that a pass drafts; 0: there are no passes.
    """

    def __init__(
        self, model: TokenModel, rows: int, states: RowStates, sizes: Sequence[int] | None, drafted: int = 0
    ) -> None:
        self.rows, self.capacity, self.sizes, self._states = rows, states.longest, sizes, states
        self.jobs: list[Job] = []
        self._without_drafts = 0  # steps since the last pass
        self._draw_buffers: dict[tuple[int, int], DrawBuffers] = {}
        device = model.device
        state, self._table = states.spread(rows)
        self._buffers = new_buffers(model, rows, state)
        sampling = RowSampling.empty(rows, device)
        self._seen = torch.zeros(rows, model.spec.vocab, dtype=torch.bool, device=device)
        self._texts = empty_texts(rows, self.capacity, device) if drafted else None
        self._read = torch.zeros(rows, drafted + 1, dtype=torch.int64, device=device)
        self._logits = torch.zeros(rows if drafted else 0, drafted + 1, model.spec.vocab, device=device)  # of a pass
        self._accepted = torch.zeros(rows, dtype=torch.int32, device=device)
        # A pass may begin up to `drafted` tokens after the last one that the host has counted.
        self.numbers = 2 * drafted + 1
        # MPS has no float64
        wide = torch.float32 if device.type == "mps" else torch.float64
        self._uniform = torch.zeros(rows, 1 + self.numbers, dtype=wide, device=device)
        self._leaves, self._initial = tensors_of(state, self._table), tensors_of(states.initial, states.table)
        own = self._leaves if self._table is None else [*self._leaves, self._table]
        self._own = _Rows(own, self._buffers.tokens, sampling, self._seen, self._texts or ())

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def is_full(self) -> bool:
        return len(self.jobs) == self.rows

    @property
    def row_bytes(self) -> int:
        """The size of the state of a row, with one page."""
        return sum(x.numel() * x.element_size() for x in self._initial) + self._states.page_bytes

    @property
    def width(self) -> int:
        """The number of rows that a step runs on."""
        count = len(self.jobs)
        return count if self.sizes is None else next(size for size in self.sizes if size >= count)

    def drafted(self, rows: int) -> int:
        """Return the number of tokens per row that a step with this number of rows drafts."""
        drafted = self._read.shape[1] - 1
        return drafted if rows * (drafted + 1) <= MOST_TOKENS else 0

    def next_drafted(self) -> int:
        """Return the number of tokens per row that the next step drafts.

        It has no drafts while recent passes of its requests yielded too few tokens, but for a rare pass, which shows
        whether that has changed.
        """
        drafted = self.drafted(self.width)
        pays = sum(job.tokens_per_pass for job in self.jobs) >= PAYS_FROM * len(self.jobs)
        if drafted and not pays and self._without_drafts < RETRY_AFTER:
            self._without_drafts += 1
            return 0
        self._without_drafts = 0
        return drafted

    def buffers(self, rows: int) -> Buffers:
        """Return views of the first rows for a step of the model."""
        state = tree_map(lambda x: x[:rows] if isinstance(x, Tensor) else x, self._buffers.state)
        return Buffers(self._buffers.tokens[:rows], self._buffers.logits[:rows], state)

    def pass_buffers(self, rows: int) -> PassBuffers:
        """Return views of the first rows for a pass with drafts."""
        assert self._texts is not None
        tokens, _, state = self.buffers(rows)
        history, read, logits, accepted = self._texts.history, self._read, self._logits, self._accepted
        return PassBuffers(tokens, history[:rows], read[:rows], logits[:rows], accepted[:rows], state)

    def draw_buffers(self, rows: int, drafted: int) -> DrawBuffers:
        """Return views of the first rows for a draw after a step, or after a pass with drafts. They are kept."""
        if (rows, drafted) not in self._draw_buffers:
            self._draw_buffers[rows, drafted] = self._new_draw_buffers(rows, drafted)
        return self._draw_buffers[rows, drafted]

    def _new_draw_buffers(self, rows: int, drafted: int) -> DrawBuffers:
        own, tokens = self._own, self._buffers.tokens[:rows]
        read, logits = (self._read, self._logits) if drafted else (tokens, self._buffers.logits[:, None])
        return DrawBuffers(
            tokens=tokens,
            read=read[:rows],
            logits=logits[:rows],
            sampling=RowSampling(*(x[:rows] for x in own.sampling)),
            seen=own.seen[:rows],
            uniform=self._uniform[:rows],
            accepted=self._accepted[:rows],
            text=None if self._texts is None else Text(*(x[:rows] for x in self._texts)),
        )

    def set_uniforms(self, jobs: Sequence[Job | None]) -> None:
        """Write the next random numbers of the first rows, without waiting for the device."""
        host = torch.tensor(next_numbers(jobs, self.numbers), dtype=self._uniform.dtype, device="cpu")
        if self._uniform.is_cuda:
            host = host.pin_memory()
        self._uniform[: len(host)].copy_(host, non_blocking=True)

    def join(self, job: Job, snapshot: Snapshot | None) -> None:
        """Give a job the next row, with the state of a snapshot or the initial state.

        The job already has its pages, including the full ones of the snapshot.
        """
        row, state = len(self.jobs), _rows(self._leaves, len(self.jobs))
        self.jobs.append(job)
        if self._table is not None:
            host = torch.tensor(job.pages, dtype=torch.int32, device="cpu")
            host = host.pin_memory() if self._table.is_cuda else host
            self._table[row, : len(host)].copy_(host, non_blocking=True)
        if snapshot is None:
            torch._foreach_copy_(state, self._initial)
        else:
            self._restore(state, snapshot)
            job.read = snapshot.length
            self._own_last_page(job, snapshot)

    def _own_last_page(self, job: Job, snapshot: Snapshot) -> None:
        """Copy the last page of a snapshot, unless it is full, to the page in which the job continues."""
        pages = self._states.pages
        if pages is not None and (full := pages.full(snapshot.length)) < len(snapshot.pages):
            self._states.copy_page(snapshot.pages[full], job.pages[full])

    def begin_draws(self, row: int) -> None:
        """Set the sampling state of a row when its prompt is complete; earlier draws for other rows would change it."""
        job, sampling = self.jobs[row], self.jobs[row].request.sampling
        self._own.sampling.set_row(row, sampling)
        if self._texts is not None:
            start_text(self._texts, row, job.prompt, sampling.max_tokens)
        if sampling.repetition_penalty != 1:
            self._seen[row].zero_()
            self._seen[row].index_fill_(0, job.prompt.to(self._seen.device, non_blocking=True), True)

    def move(self, row: int, target: "Pool") -> None:
        """Move the job of a row to another pool."""
        target.jobs.append(self.jobs[row])
        _copy_row(self._own, row, target._own, len(target.jobs) - 1)
        self.leave(row)

    def leave(self, row: int) -> Job:
        """Take the job of a row out; that of the last row replaces it."""
        job, last = self.jobs[row], len(self.jobs) - 1
        if row != last:
            _copy_row(self._own, last, self._own, row)
            self.jobs[row] = self.jobs[last]
        self.jobs.pop()
        if self._table is not None:
            self._table[last].zero_()  # steps of more rows than requests must not write to pages of others
        return job

    def snapshot(self, row: int) -> Snapshot:
        """Return a copy of the state of a row."""
        length = self.jobs[row].read
        parts = [
            (x[:, :length] if is_cache else x)
            for x, is_cache in zip(_rows(self._leaves, row), self._states.is_cache, strict=True)
        ]
        copies = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in parts]
        torch._foreach_copy_(copies, parts)
        pages = self._states.pages
        return Snapshot(length, copies, () if pages is None else tuple(self.jobs[row].pages[: pages.pages_of(length)]))

    def _restore(self, state: list[Tensor], snapshot: Snapshot) -> None:
        of_caches = self._states.is_cache
        for row, initial, saved, is_cache in zip(state, self._initial, snapshot.tensors, of_caches, strict=True):
            if is_cache:
                row.copy_(initial)
                row[:, : snapshot.length].copy_(saved)
        whole = [not is_cache for is_cache in of_caches]
        torch._foreach_copy_(_where(state, whole), _where(snapshot.tensors, whole))


def grant_pages(job: Job, snapshot: Snapshot | None, pages: PageAllocator, prefixes: PrefixTree | None) -> bool:
    """Give a job all pages that it may need, of which it shares the full ones of a snapshot.

    Returns: False if too few are free, also without the snapshots that no request uses.
    """
    shared = () if snapshot is None else snapshot.pages[: pages.full(snapshot.length)]
    needed = pages.pages_of(job.longest) - len(shared)
    pages.share(shared)
    if needed > pages.free and (prefixes is None or not prefixes.make_room(needed)):
        pages.release(shared)
        return False
    job.pages = [*shared, *pages.take(needed)]
    return True


def _rows(tensors: list[Tensor], row: int) -> list[Tensor]:
    return [x[row : row + 1] for x in tensors]


def _where(tensors: list[Tensor], chosen: list[bool]) -> list[Tensor]:
    return [x for x, is_chosen in zip(tensors, chosen, strict=True) if is_chosen]


def _copy_row(source: _Rows, row: int, target: _Rows, to: int) -> None:
    sources, targets = (_rows(tree_leaves(rows), i) for rows, i in ((source, row), (target, to)))
    torch._foreach_copy_(targets, sources)
