"""Draw tokens of rows, each row by its own sampling parameters, without synchronisation.

B rows, T tokens of a row: 1, and the number of drafts that are verified; L vocabulary, K reported tokens
"""

import math
from collections.abc import Collection
from typing import NamedTuple, Self

import torch
from torch import Tensor

from deltazoo.backends.ops.prompt_lookup import REJECTED, Text, append_
from deltazoo.blocks.generation.sampling import Sampling, draw_tokens, keep_largest, penalize
from deltazoo.blocks.generation.speculation import seen_before_each

MOST_REPORTED = 20  # upper bound of `Sampling.logprobs`
NOT_FINITE = -1  # in place of a token: its logits are NaN or infinite


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
    def of(cls, sampling: Sampling) -> Self:
        """Return the kind of one request."""
        samples = sampling.temperature > 0
        filters = samples and (sampling.top_k, sampling.top_p, sampling.min_p) != (None, None, None)
        reports = 0 if sampling.logprobs is None else 1 + (sampling.logprobs > 0)
        return cls(samples, filters, sampling.repetition_penalty != 1, reports)

    @classmethod
    def union(cls, kinds: Collection[Self]) -> Self:
        """Return the kind that serves all of these."""
        return cls(
            any(kind.samples for kind in kinds),
            any(kind.filters for kind in kinds),
            any(kind.penalizes for kind in kinds),
            max((kind.reports for kind in kinds), default=0),
        )


class Drawn(NamedTuple):
    """The result of a draw.

    token: [B, T] int64; `NOT_FINITE` where the logits are not, and `REJECTED` after the last accepted token.
    logprob: [B, T], or None. top_token, top_logprob: [B, T, K], the most likely tokens in descending order, or None.
    """

    token: Tensor
    logprob: Tensor | None = None
    top_token: Tensor | None = None
    top_logprob: Tensor | None = None


class DrawBuffers(NamedTuple):
    """Tensors that a draw reads and writes.

    tokens: [B, 1], the next ones. read: [B, T], those that the logits [B, T, L] follow. seen: [B, L] bool, the tokens
    of prompt and continuation. uniform: [B, 1 + W] random numbers, preceded by the number of the first one. accepted:
    [B] int32, how many tokens are accepted. text: None: the engine drafts no tokens, and T is 1.
    """

    tokens: Tensor
    read: Tensor
    logits: Tensor
    sampling: RowSampling
    seen: Tensor
    uniform: Tensor
    accepted: Tensor
    text: Text | None


def draw(buffers: DrawBuffers, kind: DrawKind) -> Drawn:
    """Draw the tokens, write the next ones, update the seen tokens and the texts, and return the tokens."""
    raw_BTL, sampling, (B, T) = buffers.logits, buffers.sampling, buffers.read.shape
    logits_BTL = raw_BTL
    if kind.penalizes:
        logits_BTL = penalize(raw_BTL, seen_before_each(buffers.seen, buffers.read), sampling.penalty[:, None])
    token_BT = logits_BTL.argmax(-1)
    if kind.samples:
        of_tokens = RowSampling(*(x.repeat_interleave(T, 0) for x in sampling)) if T > 1 else sampling
        filtered_NL = _filter_rows(logits_BTL.flatten(0, 1), of_tokens, kind.filters)
        sampled_BT = draw_tokens(filtered_NL, _numbers(buffers).flatten()).view(B, T)
        token_BT = torch.where(sampling.temperature > 0, sampled_BT, token_BT)
    is_finite_BT = (raw_BTL * 0).sum(-1) == 0  # 0 times inf or NaN is NaN
    drawn = Drawn(_keep_accepted(buffers, token_BT, torch.where(is_finite_BT, token_BT, NOT_FINITE)))
    if kind.penalizes:
        # a rejected token is replaced by the next one, which is accepted or has been seen
        buffers.seen.scatter_(1, torch.where(drawn.token == REJECTED, buffers.tokens, token_BT), True)
    if not kind.reports:
        return drawn
    logprob_BTL = raw_BTL.log_softmax(-1)
    drawn = drawn._replace(logprob=logprob_BTL.gather(2, token_BT[..., None])[..., 0])
    if kind.reports == 1:
        return drawn
    top = logprob_BTL.topk(min(MOST_REPORTED, logprob_BTL.shape[-1]), -1)
    return drawn._replace(top_token=top.indices, top_logprob=top.values)


def _numbers(buffers: DrawBuffers) -> Tensor:
    """Return the random number of each token, [B, T]."""
    if buffers.text is None:
        return buffers.uniform[:, 1:]
    first_B = buffers.text.drawn - buffers.uniform[:, 0].long()
    place_BT = 1 + first_B[:, None] + torch.arange(buffers.read.shape[1], device=first_B.device)
    return buffers.uniform.gather(1, place_BT.clamp(1, buffers.uniform.shape[1] - 1))  # of rows without a request


def _keep_accepted(buffers: DrawBuffers, token_BT: Tensor, checked_BT: Tensor) -> Tensor:
    """Write the next tokens and the counts, and return the tokens with `REJECTED` after the accepted ones.

    Args: checked_BT: the tokens, with `NOT_FINITE`, which no draft equals.
    """
    if buffers.text is None:
        buffers.tokens.copy_(token_BT)
        return checked_BT
    return append_(token_BT, checked_BT, buffers.read, buffers.tokens, buffers.accepted, buffers.text)


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
