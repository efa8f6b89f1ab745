"""Sampling of the next token from logits, on the device and without synchronisation.

B batch, L vocabulary
"""

import torch
from torch import Tensor

from deltazoo.backends.io.errors import ValueRangeError
from deltazoo.backends.update.check import check_integer


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise ValueRangeError unless the sampling parameters are valid."""
    if not isinstance(temperature, int | float) or not 0 <= temperature < float("inf"):
        raise ValueRangeError(f"temperature must be at least 0 (0 is greedy decoding), got {temperature!r}")
    if top_k is not None:
        check_integer("top_k", top_k)
    if top_p is not None and not (isinstance(top_p, int | float) and 0 < top_p <= 1):
        raise ValueRangeError(f"top_p must be in (0, 1], or None for every token, got {top_p!r}")


def filter_logits(logits_BL: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Divide by the temperature and set excluded tokens to -inf; the softmax of the result is sampled from.

    top_k keeps the k most likely tokens. top_p keeps, of those, the smallest set with total probability p. Among
    equally likely tokens the first ones are kept.

    Args: temperature: above 0.
    Returns: [B, L], the dtype of `logits_BL`.
    """
    scaled_BL = (logits_BL - logits_BL.amax(-1, keepdim=True)) / temperature
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


def sample(
    logits_BL: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Sample one token per row: [B] int64. Temperature 0 selects the most likely token and draws no random number.

    With E_l from Exp(1), argmax_l (logit_l - log E_l) is distributed as softmax(logits) (the exponential race).
    """
    if temperature == 0:
        return logits_BL.argmax(-1)
    noise_BL = torch.empty_like(logits_BL).exponential_(generator=generator)
    return (filter_logits(logits_BL, temperature, top_k, top_p) - noise_BL.log()).argmax(-1)
