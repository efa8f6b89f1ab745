"""Fuzzy in-context recall: keys and values are several tokens long, and their lengths differ."""

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import ClassVar

import torch
from pydantic import Field
from torch import Generator, Tensor

from deltazoo.backends.ops.cross_entropy import IGNORE_INDEX
from deltazoo.blocks.probes.task import Batch, Task
from deltazoo.blocks.probes.tasks import draws


class FuzzyRecall(Task):
    """Keys and values of 1 to `longest` tokens; the answers are the tokens of a value whose key occurred before.

    A sequence has a set of `key_count` keys. Keys consist of the lower half of `tokens`, values of the upper half.
    """

    name: ClassVar[str] = "fuzzy_recall"
    about: ClassVar[str] = "recall of values by keys of several tokens"
    source: ClassVar[str] = "Poli 2024, arXiv 2403.17844: fuzzy in-context recall of MAD"
    published: ClassVar[str] = "mean over settings, in figures"
    scaled: ClassVar[str] = (
        "keys and values of 1 to 3 of 16 tokens, sequences of 128, two layers of width 128, each with an MLP, and "
        "batch 128 as in MAD; 16 keys in a sequence, so that long ones repeat, too; fresh sequences and 2,000 steps "
        "in place of 200 epochs of 12,800 sequences, and higher rates, to save time"
    )

    length: int = Field(default=128, ge=4)
    lengths: tuple[int, ...] = (128, 256)
    tokens: int = Field(default=16, ge=4)
    key_count: int = Field(default=16, ge=1)
    longest: int = Field(default=3, ge=1)
    width: int = 128
    mlp: float = 2.0
    batch: int = 128

    @property
    def vocab(self) -> int:
        return self.tokens

    @property
    def chance(self) -> float:
        return 1 / (self.tokens - self.tokens // 2)

    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        half, shape = self.tokens // 2, (batch, self.key_count)
        keys_BKL = draws.integers(0, half, (*shape, self.longest), generator)
        values_BKL = draws.integers(half, self.tokens, (*shape, self.longest), generator)
        key_sizes_BK, value_sizes_BK = (draws.integers(1, self.longest + 1, shape, generator) for _ in range(2))
        # Equal keys share the value of the first of them.
        is_used_BKL = draws.arange(self.longest, generator) < key_sizes_BK[:, :, None]
        is_equal_BKK = (_padded(keys_BKL, is_used_BKL)[:, :, None] == _padded(keys_BKL, is_used_BKL)[:, None]).all(3)
        first_BK = is_equal_BKK.long().argmax(2)
        key_BN = first_BK.gather(1, draws.integers(0, self.key_count, (batch, length // 2 + 1), generator))
        # Place t is in the pair whose end is the first one after t.
        sizes_BN, pair_sizes_BN = key_sizes_BK.gather(1, key_BN), (key_sizes_BK + value_sizes_BK).gather(1, key_BN)
        ends_BN = pair_sizes_BN.cumsum(1)
        places_BT = draws.arange(length, generator).expand(batch, -1).contiguous()
        pair_BT = torch.searchsorted(ends_BN, places_BT, right=True)
        offset_BT = places_BT - (ends_BN - pair_sizes_BN).gather(1, pair_BT)
        in_value_BT = offset_BT - sizes_BN.gather(1, pair_BT)
        key_BT = key_BN.gather(1, pair_BT)
        tokens_BT = torch.where(
            in_value_BT < 0, _at(keys_BKL, key_BT, offset_BT), _at(values_BKL, key_BT, in_value_BT.clamp(min=0))
        )
        is_key_BNK = key_BN[:, :, None] == draws.arange(self.key_count, generator)
        seen_BN = (is_key_BNK.cumsum(1) - is_key_BNK.long()).gather(2, key_BN[:, :, None])[:, :, 0]
        is_scored_BT = (in_value_BT >= 0) & (seen_BN.gather(1, pair_BT) > 0)
        answers_BA = torch.where(is_scored_BT, tokens_BT, IGNORE_INDEX)[:, 1:]
        return Batch(tokens_BT, places_BT[:, :-1], answers_BA)

    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        half, values, answers = self.tokens // 2, dict[tuple[int, ...], tuple[int, ...]](), dict[int, int]()
        runs = [tuple(run) for _, run in groupby(enumerate(tokens), lambda pair: pair[1] >= half)]
        for key_run, value_run in pairwise(runs):
            key, value = (tuple(token for _, token in run) for run in (key_run, value_run))
            if key[0] >= half:  # a value and the next key
                continue
            if key in values:
                answers |= {place - 1: values[key][n] for n, (place, _) in enumerate(value_run)}
            values.setdefault(key, value)
        return answers


def _padded(tokens_BKL: Tensor, is_used_BKL: Tensor) -> Tensor:
    return torch.where(is_used_BKL, tokens_BKL, -1)


def _at(tokens_BKL: Tensor, row_BT: Tensor, place_BT: Tensor) -> Tensor:
    """Return tokens_BKL[b, row, place]; a place beyond the row is clamped."""
    longest = tokens_BKL.shape[2]
    return tokens_BKL.flatten(1).gather(1, row_BT * longest + place_BT.clamp(max=longest - 1))
