"""Parity: whether the number of ones so far is odd."""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field
from torch import Generator

from deltazoo.blocks.probes.prefix_task import PrefixTask
from deltazoo.blocks.probes.task import Batch, Dtype
from deltazoo.blocks.probes.tasks import draws


class Parity(PrefixTask):
    """Random bits; the answer at every bit is the sum so far, modulo 2."""

    name: ClassVar[str] = "parity"
    about: ClassVar[str] = "tracking a state of two values beyond the training length"
    source: ClassVar[str] = "Grazzi 2024, arXiv 2411.12537, section 5.1; Mamba-3, arXiv 2603.15569, table 5b"
    published: ClassVar[str] = (
        "scaled accuracy, trained to 160, tested at 256: Mamba-3 100, Mamba-2 0.90, GDN with eigenvalues in [-1, 1] 100"
    )
    scaled: ClassVar[str] = (
        "lengths, one layer, width and state 64 as for Mamba-3, without its curriculum, because every prefix has an "
        "answer; no weight decay, as in Grazzi; 2,000 steps of 128 in place of 10,000 of 256 and three of eight "
        "rates, to save time"
    )

    length: int = Field(default=160, ge=2)
    lengths: tuple[int, ...] = (160, 256)
    depth: int = 1
    heads: int = 1
    steps: int = 2000
    batch: int = 128
    weight_decay: float = 0.0
    evaluation_tokens: int = Field(default=2**17, ge=1)
    dtype: Dtype = "float32"

    @property
    def vocab(self) -> int:
        return 2

    @property
    def chance(self) -> float:
        return 0.5

    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        bits_BT = draws.integers(0, 2, (batch, length), generator)
        return Batch(bits_BT, draws.arange(length, generator).expand(batch, -1), bits_BT.cumsum(1) % 2)

    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        return {place: sum(tokens[: place + 1]) % 2 for place in range(len(tokens))}
