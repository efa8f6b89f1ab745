"""Selective copying: data tokens at random places among noise must be repeated in their order."""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field
from torch import Generator

from deltazoo.blocks.probes.task import Batch, Task
from deltazoo.blocks.probes.tasks import draws

_NOISE, _MARKER = 0, 1


class SelectiveCopying(Task):
    """Noise with `data` tokens at random places, then as many markers; marker i is answered by the i-th data token."""

    name: ClassVar[str] = "selective_copying"
    about: ClassVar[str] = "copying of tokens among noise"
    source: ClassVar[str] = "Gu & Dao 2023, arXiv 2312.00752, section 4.1.1; Jing 2019"
    published: ClassVar[str] = (
        "T = 4096, 2 layers of width 64: S4 18.3 %, 56.4 and 57.0 % in blocks with gates; Hyena 30.1 %; Mamba (S6) "
        "97.0 to 99.8 %"
    )

    scaled: ClassVar[str] = (
        "16 data tokens and two layers of width 64 as for Mamba; 16 values, a token of noise and a marker, in place of "
        "a vocabulary of 16; tested on twice the training length, where the source tests on the training length; "
        "weight decay of 0.1 and rates from 1e-3 on, in place of a constant 1e-4; 256 tokens in place of 4,096 and "
        "5,000 steps in place of 400,000, to save time"
    )

    length: int = Field(default=256, ge=4)
    lengths: tuple[int, ...] = (256, 512)
    data: int = Field(default=16, ge=1)
    tokens: int = Field(default=18, ge=3)
    steps: int = 5000

    @property
    def vocab(self) -> int:
        return self.tokens

    @property
    def chance(self) -> float:
        return 1 / (self.tokens - 2)

    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        places_BN = draws.distinct(self.data, length - self.data, batch, generator).sort(1).values
        data_BN = draws.integers(2, self.tokens, (batch, self.data), generator)
        tokens_BT = draws.integers(_NOISE, _NOISE + 1, (batch, length), generator).scatter(1, places_BN, data_BN)
        tokens_BT[:, -self.data :] = _MARKER
        markers_BN = (length - self.data + draws.arange(self.data, generator)).expand(batch, -1)
        return Batch(tokens_BT, markers_BN, data_BN)

    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        data = [token for token in tokens if token not in (_NOISE, _MARKER)]
        markers = [place for place, token in enumerate(tokens) if token == _MARKER]
        return dict(zip(markers, data, strict=True))
