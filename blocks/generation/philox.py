"""Random numbers as a function of a seed, a row and a step: Philox4x32-10 in plain torch operators.

A counter-based generator has no state. A row therefore draws the same numbers in every batch, and the numbers of
many steps are computed at once. Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".

B batch, N steps
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> list[Tensor]:
    """Return the block of four words that belongs to a counter and a key.

    Args: counter, key: four and two int64 tensors with values in [0, 2^32).
    Returns: four int64 tensors with values in [0, 2^32).
    """
    a, b, c, d = counter
    first, second = key
    for _ in range(_ROUNDS):
        # The product of two words wraps modulo 2^64, which keeps all of its bits.
        low, high = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b, c, d = (high >> 32 & _WORD) ^ b ^ first, high & _WORD, (low >> 32 & _WORD) ^ d ^ second, low & _WORD
        first, second = first + _KEY_STEPS[0] & _WORD, second + _KEY_STEPS[1] & _WORD
    return [a, b, c, d]


def uniforms(seed_B: Tensor, row_B: Tensor, start: int | Tensor, count: int) -> Tensor:
    """Return the random numbers of steps `start` to `start + count - 1` of each row, uniform in [0, 1).

    Args:
        seed_B: [B] int64, at least 0.
        row_B: [B] int64 in [0, 2^32): rows with equal seeds and different numbers here draw different numbers.
        start: of all rows, or of each row, [B] int64.
    Returns: [N, B] float64, multiples of 2^-32, on the device of `seed_B`.
    """
    step_NB = torch.arange(count, device=seed_B.device)[:, None] + start
    zero = torch.zeros_like(seed_B)
    counter = (step_NB & _WORD, step_NB >> 32, row_B, zero)
    word_NB, *_ = philox(counter, (seed_B & _WORD, seed_B >> 32))
    return word_NB.double() * 2.0**-32
