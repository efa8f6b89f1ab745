"""Sampling: the parameters of generation, and the next token from logits, on the device, without synchronisation.

B batch, L vocabulary
"""

import torch
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from deltazoo.backends.io.frozen_config import FrozenConfig


class Sampling(FrozenConfig):
    """How tokens are sampled, and when generation ends. A token of a model of bytes is a byte.

    Args:
        max_tokens: maximum number of new tokens per prompt.
        temperature: divides the logits; 0 selects the most likely token.
        top_k: sample from the k most likely tokens; None: from all.
        top_p: sample from the smallest set of tokens with total probability p, after `top_k`; None: from all.
        stop: what ends a continuation, which includes it, or several: tokens and sequences of tokens for prompts of
            tokens, texts for prompts of text.
        seed: of the random numbers; None: those of torch's default generator.
    """

    max_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=0.8, ge=0, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stop: tuple[str | int | tuple[int, ...], ...] = ()
    seed: int | None = Field(default=0, ge=0, lt=2**63)

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
    equally likely tokens the first ones are kept.

    Args: sampling: with a temperature above 0.
    Returns: [B, L], the dtype of `logits_BL`.
    """
    top_k, top_p = sampling.top_k, sampling.top_p
    scaled_BL = (logits_BL - logits_BL.amax(-1, keepdim=True)) / sampling.temperature
    if top_k is None and top_p is None:
        return scaled_BL
    sorted_BL, index_BL = scaled_BL.sort(stable=True, dim=-1, descending=True)
    if top_k is not None:
        sorted_BL[:, top_k:] = float("-inf")
    if top_p is not None:
        probability_BL = sorted_BL.softmax(-1)
        preceding_BL = probability_BL.cumsum(-1) - probability_BL
        sorted_BL = sorted_BL.masked_fill(preceding_BL >= top_p, float("-inf"))
    return torch.empty_like(sorted_BL).scatter_(-1, index_BL, sorted_BL)


def sample(logits_BL: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """Sample one token per row: [B] int64. Temperature 0 selects the most likely token and draws no random number.

    With E_l from Exp(1), argmax_l (logit_l - log E_l) is distributed as softmax(logits) (the exponential race).
    """
    if sampling.temperature == 0:
        return logits_BL.argmax(-1)
    noise_BL = torch.empty_like(logits_BL).exponential_(generator=generator)
    return (filter_logits(logits_BL, sampling) - noise_BL.log()).argmax(-1)
