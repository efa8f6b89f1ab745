"""From logits to the next token, on the device, without waiting for it.

B batch, L vocabulary
"""

import torch
from torch import Tensor

from deltazoo.backends.check import check_integer
from deltazoo.backends.errors import ValueRangeError


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise ValueRangeError unless the three can be sampled with."""
    if not isinstance(temperature, int | float) or not 0 <= temperature < float("inf"):
        raise ValueRangeError(f"temperature must be at least 0 (0 takes the likeliest token), got {temperature!r}")
    if top_k is not None:
        check_integer("top_k", top_k)
    if top_p is not None and not (isinstance(top_p, int | float) and 0 < top_p <= 1):
        raise ValueRangeError(f"top_p must be in (0, 1], or None for every token, got {top_p!r}")


def filtered(logits_BL: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Divide by the temperature, and set to -inf the tokens that may not be drawn: softmax gives the probabilities.

    top_k keeps the k likeliest tokens; top_p, of those, the fewest whose mass reaches p. Of equal tokens the
    earlier ones are kept.

    Args: temperature: above 0.
    Returns: [B, L], the dtype of `logits_BL`.
    """
    scaled_BL = (logits_BL - logits_BL.amax(-1, keepdim=True)) / temperature
    if top_k is None and top_p is None:
        return scaled_BL
    ordered_BL, index_BL = scaled_BL.sort(stable=True, dim=-1, descending=True)
    if top_k is not None:
        ordered_BL[:, top_k:] = float("-inf")
    if top_p is not None:
        mass_BL = ordered_BL.softmax(-1)
        before_BL = mass_BL.cumsum(-1) - mass_BL
        ordered_BL = ordered_BL.masked_fill(before_BL >= top_p, float("-inf"))
    return torch.empty_like(ordered_BL).scatter_(-1, index_BL, ordered_BL)


def sample(
    logits_BL: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a token a row: [B] int64. At temperature 0 the likeliest one, and nothing is drawn.

    By the exponential race: argmax_l (logit_l - log E_l) with E_l from Exp(1) has the probabilities of softmax.
    """
    if temperature == 0:
        return logits_BL.argmax(-1)
    noise_BL = torch.empty_like(logits_BL).exponential_(generator=generator)
    return (filtered(logits_BL, temperature, top_k, top_p) - noise_BL.log()).argmax(-1)
