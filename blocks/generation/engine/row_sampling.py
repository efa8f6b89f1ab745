"""Draw one token per row, each row by its own sampling parameters, without synchronisation.

B rows, L vocabulary, K reported tokens
"""

import math
from collections.abc import Iterable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from deltazoo.blocks.generation.sampling import Sampling, draw_tokens, keep_largest, penalize

MOST_REPORTED = 20  # upper bound of `Sampling.logprobs`
NOT_FINITE = -1  # in place of a token: the logits of the row are NaN or infinite


class RowSampling(NamedTuple):
    """The parameters of `Sampling` for each row, [B, 1] each; without effect where the request does not set them."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    penalty: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Self:
        """Return parameters of rows without a request."""
        zeros = torch.zeros(rows, 1, device=device)
        return cls(zeros, torch.zeros_like(zeros, dtype=torch.int64), *(torch.zeros_like(zeros) for _ in range(3)))

    def set_row(self, row: int, sampling: Sampling) -> None:
        """Write the parameters of one row."""
        values = (
            sampling.temperature,
            2**62 if sampling.top_k is None else sampling.top_k,
            2.0 if sampling.top_p is None else sampling.top_p,
            -math.inf if sampling.min_p is None else math.log(sampling.min_p),
            sampling.repetition_penalty,
        )
        for tensor, value in zip(self, values, strict=True):
            tensor[row].fill_(value)


class DrawKind(NamedTuple):
    """What the rows of a draw need; each kind has its own CUDA graph.

    samples: a temperature is above 0. filters: with top-k, top-p or min-p. penalizes: with a repetition penalty.
    reports: log-probabilities, of the chosen token (1) or also of the most likely ones (2).
    """

    samples: bool = False
    filters: bool = False
    penalizes: bool = False
    reports: int = 0

    @classmethod
    def of(cls, samplings: Iterable[Sampling]) -> Self:
        """Return the kind that serves all of these."""
        rows = list(samplings)
        sampled = [row for row in rows if row.temperature > 0]
        return cls(
            bool(sampled),
            any((row.top_k, row.top_p, row.min_p) != (None, None, None) for row in sampled),
            any(row.repetition_penalty != 1 for row in rows),
            max((0 if row.logprobs is None else 1 + (row.logprobs > 0) for row in rows), default=0),
        )


class Drawn(NamedTuple):
    """The result of a draw.

    token: [B] int64, `NOT_FINITE` where the logits are not. logprob: [B], or None. top_token, top_logprob: [B, K], the
    most likely tokens in descending order, or None.
    """

    token: Tensor
    logprob: Tensor | None = None
    top_token: Tensor | None = None
    top_logprob: Tensor | None = None


class DrawBuffers(NamedTuple):
    """What a draw reads and writes: tokens [B, 1], logits [B, L], parameters, tokens seen [B, L] bool, uniform [B]."""

    tokens: Tensor
    logits: Tensor
    sampling: RowSampling
    seen: Tensor
    uniform: Tensor


def draw(buffers: DrawBuffers, kind: DrawKind) -> Drawn:
    """Draw the tokens, write them to `tokens` and `seen`, and return them."""
    raw_BL, sampling = buffers.logits, buffers.sampling
    is_finite_B = raw_BL.isfinite().all(-1)
    logits_BL = penalize(raw_BL, buffers.seen, sampling.penalty) if kind.penalizes else raw_BL
    token_B = logits_BL.argmax(-1)
    if kind.samples:
        sampled_B = draw_tokens(_filter_rows(logits_BL, sampling, kind.filters), buffers.uniform)
        token_B = torch.where(sampling.temperature[:, 0] > 0, sampled_B, token_B)
    buffers.tokens.copy_(token_B[:, None])
    if kind.penalizes:
        buffers.seen.scatter_(1, buffers.tokens, True)
    drawn = Drawn(torch.where(is_finite_B, token_B, NOT_FINITE))
    if not kind.reports:
        return drawn
    logprob_BL = raw_BL.log_softmax(-1)
    drawn = drawn._replace(logprob=logprob_BL.gather(1, token_B[:, None])[:, 0])
    if kind.reports == 1:
        return drawn
    top = logprob_BL.topk(min(MOST_REPORTED, logprob_BL.shape[1]), -1)
    return drawn._replace(top_token=top.indices, top_logprob=top.values)


def _filter_rows(logits_BL: Tensor, sampling: RowSampling, filters: bool) -> Tensor:
    """Compute `filter_logits` with the parameters of each row; a temperature of 0 counts as 1."""
    temperature_B1 = torch.where(sampling.temperature > 0, sampling.temperature, 1.0)
    scaled_BL = (logits_BL - logits_BL.amax(-1, keepdim=True)) / temperature_B1
    if not filters:
        return scaled_BL
    sorted_BL = scaled_BL.sort(-1, descending=True).values
    rank_L = torch.arange(sorted_BL.shape[1], device=sorted_BL.device)
    probability_BL = sorted_BL.masked_fill(rank_L >= sampling.top_k, float("-inf")).softmax(-1)
    preceding_BL = probability_BL.cumsum(-1) - probability_BL
    count_B1 = ((preceding_BL < sampling.top_p) & (rank_L < sampling.top_k)).sum(-1, keepdim=True)
    scaled_BL = keep_largest(scaled_BL, sorted_BL.gather(-1, (count_B1 - 1).clamp(min=0)), count_B1)
    return scaled_BL.masked_fill(scaled_BL < sampling.log_min_p, float("-inf"))
