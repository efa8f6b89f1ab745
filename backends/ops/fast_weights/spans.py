"""Where each sequence and its chunks are among the tokens, for operators whose chunks start at positions of a sequence.

A span describes one sequence: the row of its first token among all B T tokens, its number of tokens, the place of its
first token in a chunk, and whether the sequence starts with it (1 or 0).

N sequences, R rows of tokens (B T), M tokens per chunk, H heads
"""

from typing import NamedTuple

import torch
from torch import Tensor

FIELDS = 4


class Span(NamedTuple):
    """The columns of spans [N, 4] int32."""

    start: Tensor
    tokens: Tensor
    place: Tensor
    fresh: Tensor


def columns(spans: Tensor) -> Span:
    """Return the columns of spans, [N] int64 each."""
    return Span(*spans.long().unbind(1))


def has_one_token(x: Tensor, spans: Tensor) -> bool:
    """Whether x [B, T, ...] holds at most one token of each of its N sequences, sequence n in row n."""
    return x.shape[1] == 1 and x.shape[0] == spans.shape[0]


class Chunks:
    """The chunks of all sequences, chunk i of each sequence at once; places without a token hold zeros.

    Args: spans: [N, 4] int32; size: M; rows: R.
    """

    def __init__(self, spans: Tensor, size: int, rows: int) -> None:
        self.span, self.size, self.rows = columns(spans), size, rows
        self.end_N = self.span.place + self.span.tokens
        if not len(spans) or not rows:
            last = 0
        elif spans.device.type == "cpu":
            last = int(torch.where(self.span.tokens > 0, self.end_N, 0).amax())
        else:
            last = rows + size - 1  # a bound that needs no synchronisation
        self.count = -(-last // size)

    def starts(self, i: int) -> Tensor:
        """Whether a sequence has a token at the first place of its chunk i, [N] bool."""
        first = self.span.place if i == 0 else torch.zeros_like(self.span.place)
        return (first == 0) & self.has_tokens(i)

    def has_tokens(self, i: int) -> Tensor:
        """Whether a sequence has a token in its chunk i, [N] bool."""
        return (self.end_N > i * self.size) & (self.span.tokens > 0)

    def present(self, i: int) -> Tensor:
        """Whether the places of chunk i have tokens, [N, M] bool."""
        at_NM = i * self.size + torch.arange(self.size, device=self.end_N.device)
        row_NM = self.row(i)
        is_inside = (at_NM >= self.span.place[:, None]) & (at_NM < self.end_N[:, None])
        return is_inside & (row_NM >= 0) & (row_NM < self.rows)

    def row(self, i: int) -> Tensor:
        """Return the rows of the tokens of chunk i, [N, M] int64; any number where there is no token."""
        at_M = i * self.size + torch.arange(self.size, device=self.end_N.device)
        return (self.span.start - self.span.place)[:, None] + at_M

    def load(self, i: int, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Load chunk i of an operand [B, T, H, ...] as [N, H, M, ...], zero where there is no token."""
        flat, present_NM = x.flatten(0, 1), self.present(i)
        loaded = flat[torch.where(present_NM, self.row(i), 0)].to(dtype)
        mask = present_NM.view(*present_NM.shape, *[1] * (loaded.dim() - 2))
        return torch.where(mask, loaded, 0.0).transpose(1, 2)

    def store(self, i: int, target: Tensor, values: Tensor) -> None:
        """Store values [N, H, M, ...] to rows [R + 1, H, ...]; the last row takes those of places without a token."""
        rows_NM = torch.where(self.present(i), self.row(i), self.rows)
        target[rows_NM] = values.transpose(1, 2).to(target.dtype)


def rows_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return zeros [R + 1, ...] for a result like x [B, T, ...], for `Chunks.store`."""
    return x.new_zeros(x.shape[0] * x.shape[1] + 1, *x.shape[2:], dtype=dtype)


def unpad(rows: Tensor, x: Tensor) -> Tensor:
    """Return rows [R + 1, ...] without the last one, in the shape of x [B, T, ...]."""
    return rows[:-1].reshape(*x.shape[:2], *rows.shape[1:])
