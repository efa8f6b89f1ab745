"""ContextPlan: which tokens of which documents a rank holds, and where the states of its first tokens come from.

All documents form one line of tokens. The line is cut into G pieces, and each rank holds P of them, one after the
other. The part of a document that lies in a piece is a segment; a piece has S segments, of which some may be empty. So
the first segment of a piece may continue a document of the piece before, and the last one may be continued.

D documents, G pieces of all ranks, P pieces of this rank, S segments per piece, N = P S, T tokens of this rank
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ContextPlan(NamedTuple):
    """The plan of one batch on one rank. Tensors have fixed shapes and lie on the device of the tokens.

    Args:
        group: name of the process group. ranks: its size.
        order: for each piece of the line its index among the gathered pieces, which are ordered by rank.
        local: indices of this rank's pieces in the line.
        sizes: tokens of each piece of the line; empty if only the device has them (`plan_of_memories`).
        documents: D.
        cu_seqlens: [N + 1] int32, bounds of the local segments.
        document: [N] int64, the document of each segment.
        begins, ends: [N] bool, whether a segment holds the first and the last token of its document.
        tails: [P] int64, the last segment of each local piece; its first one is p S.
        receives: [P] bool, whether the first segment of a local piece continues a document.
        before, after: [N, 1 + G] int32, for each segment a count n, and n pieces as indices of the gathered ones: those
            before the segment in its document, from first to last, and those after it, from last to first.
        joins: [G] bool, whether the last segment of a piece continues a document; it is then the only one.
        lengths: [G] int64, tokens in the last segment of each piece.
        distance: [P, G] int64, tokens between the end of a piece g and the start of local piece p, if the last segment
            of g belongs to the document that p continues; else -1.
        positions: [1, T] int64, index of each token in its document.
        document_lengths: [D] int64.
        is_head, is_outer: [N] int32, 1 for the first segments of pieces, and for the first and last ones.
        gathers: whether mixers that cannot split their tokens run on those of all ranks, on every rank.
        symmetric: whether the triton backend exchanges summaries by a kernel of its own (triton/gather/op.py).
        key_bounds: [P, S + 1] int64, index in the line of the first token of each segment's document, then the end of
            the piece; empty without `sizes`.
    """

    group: str
    ranks: int
    order: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]
    documents: int
    cu_seqlens: Tensor
    document: Tensor
    begins: Tensor
    ends: Tensor
    tails: Tensor
    receives: Tensor
    before: Tensor
    after: Tensor
    joins: Tensor
    lengths: Tensor
    distance: Tensor
    positions: Tensor
    document_lengths: Tensor
    key_bounds: Tensor
    is_head: Tensor
    is_outer: Tensor
    gathers: bool = False
    symmetric: bool = False

    @property
    def segments(self) -> int:
        """S, segments per piece."""
        return (self.cu_seqlens.shape[0] - 1) // len(self.local)

    @property
    def operator_bounds(self) -> Tensor | None:
        """The bounds of the local segments for an operator; None, which is faster: all tokens are one segment."""
        return None if self.cu_seqlens.shape[0] == 2 and self.positions.shape[1] > 0 else self.cu_seqlens

    @property
    def links(self) -> "Links":
        """What combines the summaries of pieces."""
        return Links(
            self.group, self.ranks, self.symmetric, self.segments,
            self.tails, self.before, self.after, self.is_head, self.is_outer,
        )  # fmt: skip

    @property
    def head_spans(self) -> tuple[Tensor, Tensor]:
        """The bounds of the first segment of each local piece, [P] each."""
        return self.cu_seqlens[: -1 : self.segments], self.cu_seqlens[1 :: self.segments]

    @property
    def tail_spans(self) -> tuple[Tensor, Tensor]:
        """The bounds of the last segment of each local piece, [P] each."""
        return self.cu_seqlens[self.tails], self.cu_seqlens[self.tails + 1]

    @property
    def local_sizes(self) -> list[int]:
        """Tokens of each local piece."""
        return [self.sizes[g] for g in self.local]


class Links(NamedTuple):
    """The part of a plan that combines the summaries of pieces; the fields are those of `ContextPlan`."""

    group: str
    ranks: int
    symmetric: bool
    segments: int
    tails: Tensor
    before: Tensor
    after: Tensor
    is_head: Tensor
    is_outer: Tensor


class Cut(NamedTuple):
    """How the line is cut: token bounds of the G pieces, and for each piece the rank that holds it."""

    bounds: tuple[int, ...]
    owners: tuple[int, ...]


class _Segment(NamedTuple):
    document: int
    start: int
    end: int
    begins: bool
    ends: bool


def make_plan(
    documents: Sequence[int], cut: Cut, rank: int, ranks: int, group: str, segments: int, device: torch.device | str
) -> ContextPlan:
    """Make the plan of one rank on the host, and copy its tensors to the device.

    Args: documents: [D + 1], bounds of the documents in the line; segments: S, at least `most_segments`.
    """
    pieces = [_segments_of(documents, *span) for span in itertools.pairwise(cut.bounds)]
    local = tuple(g for g, owner in enumerate(cut.owners) if owner == rank)
    by_rank = [g for r in range(ranks) for g, owner in enumerate(cut.owners) if owner == r]
    joins = [not piece[-1].begins for piece in pieces]
    lengths = [piece[-1].end - piece[-1].start for piece in pieces]
    document, begins, ends, key_bounds, bounds, positions = [], [], [], [], [0], []
    for g in local:
        piece, padding = pieces[g], segments - len(pieces[g])
        empty = _Segment(0, cut.bounds[g + 1], cut.bounds[g + 1], False, False)
        offset = bounds[-1] - cut.bounds[g]
        padded = [*piece, *[empty] * padding]
        document += [s.document for s in padded]
        begins += [s.begins for s in padded]
        ends += [s.ends for s in padded]
        bounds += [s.end + offset for s in padded]
        starts = [documents[s.document] if s.end > s.start else s.start for s in piece]
        key_bounds.append([*starts, *[cut.bounds[g + 1]] * (padding + 1)])
        positions += [torch.arange(s.start, s.end) - documents[s.document] for s in piece]
    distance = []
    for p in local:
        passed, row, reached = 0, [-1] * len(pieces), not pieces[p][0].begins
        for g in reversed(range(p)):
            row[g] = passed if reached else -1
            passed, reached = passed + lengths[g], reached and joins[g]
        distance.append(row)

    order = [by_rank.index(g) for g in range(len(pieces))]

    def chain(g: int, step: int) -> list[int]:
        """Return the count of the document's pieces before (step -1) or after (1) piece g, and them, farthest first."""
        found: list[int] = []
        while 0 <= g + step < len(pieces) and not pieces[max(g, g + step)][0].begins:
            g += step
            found.insert(0, order[g])
            if not joins[g]:
                break
        return [len(found), *found, *[0] * (len(pieces) - len(found))]

    def copied(host: Tensor) -> Tensor:
        is_cuda = torch.device(device).type == "cuda"
        return host.pin_memory().to(device, non_blocking=True) if is_cuda else host.to(device)

    def tensor(values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        return copied(torch.tensor(values, dtype=dtype))

    return ContextPlan(
        group, ranks, tuple(order), local,
        tuple(b - a for a, b in itertools.pairwise(cut.bounds)), len(documents) - 1,
        cu_seqlens=tensor(bounds, torch.int32), document=tensor(document), begins=tensor(begins, torch.bool),
        ends=tensor(ends, torch.bool), tails=tensor([i * segments + len(pieces[g]) - 1 for i, g in enumerate(local)]),
        receives=tensor([not pieces[g][0].begins for g in local], torch.bool),
        before=tensor([row for g in local for row in _rows(chain(g, -1), 0, segments)], torch.int32),
        after=tensor([row for g in local for row in _rows(chain(g, 1), len(pieces[g]) - 1, segments)], torch.int32),
        joins=tensor(joins, torch.bool),
        lengths=tensor(lengths), distance=tensor(distance), positions=copied(torch.cat(positions)[None]),
        document_lengths=tensor([b - a for a, b in itertools.pairwise(documents)]),
        key_bounds=tensor(key_bounds),
        is_head=tensor([i % segments == 0 for i in range(len(document))], torch.int32),
        is_outer=tensor(
            [i % segments in (0, len(pieces[g]) - 1) for g in local for i in range(segments)], torch.int32
        ),
    )  # fmt: skip


def _rows(row: list[int], at: int, segments: int) -> list[list[int]]:
    """Return a row for each segment of a piece: `row` for segment `at`, zeros for the others."""
    return [row if i == at else [0] * len(row) for i in range(segments)]


def most_segments(documents: Sequence[int], cut: Cut) -> int:
    """Return the largest number of segments in a piece."""
    return max(len(_segments_of(documents, *span)) for span in itertools.pairwise(cut.bounds))


def _segments_of(documents: Sequence[int], start: int, end: int) -> list[_Segment]:
    """Return the segments of a piece, at least one: an empty piece continues the document around it.

    An empty document belongs to the piece with the token after it; at the end of the line, to the piece before.
    """
    found = []
    for d, (first, last) in enumerate(itertools.pairwise(documents)):
        is_at_end = first == documents[-1] == end
        overlaps = start <= first < end or is_at_end if first == last else first < end and start < last
        if overlaps and start < end:
            found.append(_Segment(d, max(first, start), min(last, end), first >= start, last <= end))
    if found:
        return found
    around = next((d for d, (a, b) in enumerate(itertools.pairwise(documents)) if a <= start < b), 0)
    return [_Segment(around, start, end, False, False)]
