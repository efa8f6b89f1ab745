"""Sampling: the parameters of generation, and the next token from logits, on the device, without synchronisation.

B batch, L vocabulary, K candidates
"""

import math
from typing import Annotated

import torch
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from deltazoo.backends.io.frozen_config import FrozenConfig

_LEAST_TEMPERATURE = 1e-30  # logits are divided by it in float32

Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Sampling(FrozenConfig):
    """How tokens are sampled, and when generation ends. A token of a model of bytes is a byte.

    Args:
        max_tokens: maximum number of new tokens per prompt.
        temperature: divides the logits, at least 1e-30; 0 selects the most likely token.
        top_k: sample from the k most likely tokens; None: from all.
        top_p: sample from the smallest set of tokens with total probability p, after `top_k`; None: from all.
        min_p: sample from the tokens that are at least p times as likely as the most likely one; None: from all.
        repetition_penalty: divides positive logits of the tokens of the prompt and the continuation, and multiplies
            negative ones, before the temperature; 1: no penalty. Source: CTRL, Keskar 2019, section 4.1.
        stop: what ends a continuation, which includes it, or several: tokens and sequences of tokens for prompts of
            tokens, texts for prompts of text.
        seed: of the random numbers; None: drawn from torch's default generator. With one seed the rows of a batch draw
            different numbers. With a seed for each row, a row draws those of a batch of this row and seed alone.
        logprobs: number of most likely tokens whose log-probabilities a request of `deltazoo.Engine` reports beside
            that of the chosen token; None: it reports none. They are those of the logits before penalty, temperature
            and filters. `generate_tokens` and `generate` refuse the field.
    """

    max_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=0.8, ge=0, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, gt=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    stop: tuple[str | int | tuple[int, ...], ...] = ()
    seed: Seed | tuple[Seed, ...] | None = 0
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @field_validator("temperature")
    @classmethod
    def _divides_in_float32(cls, value: float) -> float:
        if 0 < value < _LEAST_TEMPERATURE:
            raise PydanticCustomError("temperature", f"Input should be 0 or at least {_LEAST_TEMPERATURE:g}")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _as_entries(cls, value: object) -> object:
        entries = value if isinstance(value, list | tuple) else (value,)
        entries = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in entries)
        for entry in entries:
            tokens = entry if isinstance(entry, tuple) else (entry,)
            if entry in ("", ()) or not (isinstance(entry, str) or all(isinstance(token, int) for token in tokens)):
                rule = "texts, tokens or sequences of tokens, none of them empty"
                raise PydanticCustomError("stop", f"Input should be {rule}")
        return entries


def filter_logits(logits_BL: Tensor, sampling: Sampling) -> Tensor:
    """Divide by the temperature and set excluded tokens to -inf; the softmax of the result is sampled from.

    top_k keeps the k most likely tokens. top_p keeps, of those, the smallest set with total probability p. Among
    equally likely tokens the first ones are kept. min_p then excludes tokens by their ratio to the most likely one.

    Args: sampling: with a temperature above 0.
    Returns: [B, L], the dtype of `logits_BL`.
    """
    top_k, top_p = sampling.top_k, sampling.top_p
    scaled_BL = (logits_BL - logits_BL.amax(-1, keepdim=True)) / sampling.temperature
    if top_k is not None or top_p is not None:
        largest_BK = _largest(scaled_BL, top_k)
        count_B1 = torch.full_like(largest_BK[:, :1], largest_BK.shape[1], dtype=torch.int64)
        if top_p is not None:
            probability_BK = largest_BK.softmax(-1)
            preceding_BK = probability_BK.cumsum(-1) - probability_BK
            count_B1 = (preceding_BK < top_p).sum(-1, keepdim=True)
        scaled_BL = keep_largest(scaled_BL, largest_BK.gather(-1, count_B1 - 1), count_B1)
    if sampling.min_p is not None:
        scaled_BL = scaled_BL.masked_fill(scaled_BL < math.log(sampling.min_p), float("-inf"))
    return scaled_BL


def _largest(logits_BL: Tensor, count: int | None) -> Tensor:
    """Return the `count` largest logits of each row in descending order, all if it is None."""
    if count is None or count >= logits_BL.shape[-1]:
        return logits_BL.sort(-1, descending=True).values
    return logits_BL.topk(count, -1).values


def keep_largest(logits_BL: Tensor, least_B1: Tensor, count_B1: Tensor) -> Tensor:
    """Set all but the `count` largest logits of a row, the least of which is given, to -inf; keep the first of ties."""
    above_BL, equal_BL = logits_BL > least_B1, logits_BL == least_B1
    missing_B1 = count_B1 - above_BL.sum(-1, keepdim=True)
    return logits_BL.masked_fill(~(above_BL | (equal_BL & (equal_BL.cumsum(-1) <= missing_B1))), float("-inf"))


def penalize(logits_BL: Tensor, seen_BL: Tensor, penalty: float | Tensor) -> Tensor:
    """Apply the repetition penalty, a number or [B, 1].

    Args: seen_BL: bool, the tokens of the prompt and of the continuation.
    """
    return torch.where(seen_BL, torch.where(logits_BL > 0, logits_BL / penalty, logits_BL * penalty), logits_BL)


def sample(logits_BL: Tensor, sampling: Sampling, uniform_B: Tensor) -> Tensor:
    """Sample one token per row: [B] int64, by the inverse of the cumulative distribution.

    Temperature 0 selects the most likely token. Each row depends on its own logits and number alone.

    Args: uniform_B: [B] float64 in [0, 1), multiples of 2^-32; a token's probability is exact to 2^-32.
    """
    if sampling.temperature == 0:
        return logits_BL.argmax(-1)
    return draw_tokens(filter_logits(logits_BL, sampling), uniform_B)


def draw_tokens(filtered_BL: Tensor, uniform_B: Tensor) -> Tensor:
    """Draw one token per row, [B] int64, from the softmax of `filtered_BL`."""
    # In float64 the order of the additions, which depends on the batch, does not matter.
    cumulative_BL = filtered_BL.softmax(-1).cumsum(-1, dtype=uniform_B.dtype)
    threshold_B1 = uniform_B[:, None] * cumulative_BL[:, -1:]
    token_B = torch.searchsorted(cumulative_BL, threshold_B1, right=True)[:, 0]
    return token_B.clamp(max=filtered_BL.shape[-1] - 1)  # NaN must not become an index beyond the embedding
