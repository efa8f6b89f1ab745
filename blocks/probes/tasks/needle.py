"""Needle in a haystack: the value of a key somewhere in a long text must be repeated at its end."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field
from torch import Generator

from deltazoo.blocks.probes.task import Batch, Task
from deltazoo.blocks.probes.tasks import draws

_KEY, _QUERY, _SPECIAL = 0, 1, 2


class Needle(Task):
    """Haystack with KEY v1 ... vn somewhere, and QUERY v1 ... v(n-1) at the end; the answers are v1 ... vn.

    S-NIAH in tokens: task 1 has a haystack that repeats one sentence and a short value, task 2 random words as
    haystack, task 3 also a long value.
    """

    name: ClassVar[str] = "needle"
    about: ClassVar[str] = "one fact in a long context"
    source: ClassVar[str] = "RULER, Hsieh 2024, arXiv 2404.06654; Gated DeltaNet, arXiv 2412.06464, table 2"
    published: ClassVar[str] = (
        "1.3B models, DeltaNet, Mamba-2, Gated DeltaNet: S-NIAH-1 at 8K 98.8, 30.4, 91.8; S-NIAH-2 at 4K 18.6, 56.2, "
        "92.2"
    )

    scaled: ClassVar[str] = (
        "the published models are language models of 1.3B parameters; these are trained on the task alone, at 256 "
        "tokens. The haystack has no word of the values, so that a model need not write it to its state"
    )

    haystack: Literal["repeated", "words"] = "words"
    value_tokens: int = Field(default=2, ge=1)
    length: int = Field(default=256, ge=16)
    lengths: tuple[int, ...] = (256, 1024, 2048)
    words: int = Field(default=64, ge=2)
    sentence: int = Field(default=8, ge=1)
    batch: int = 64

    @property
    def vocab(self) -> int:
        return _SPECIAL + 2 * self.words

    @property
    def chance(self) -> float:
        return 1 / self.words

    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        n = self.value_tokens
        if self.haystack == "words":
            words_BT = draws.integers(0, self.words, (batch, length), generator)
        else:
            words_BT = (draws.arange(length, generator) % self.sentence).expand(batch, -1)
        value_BN = _SPECIAL + self.words + draws.integers(0, self.words, (batch, n), generator)
        key_B1 = draws.integers(0, length - 2 * n - 1, (batch, 1), generator)
        tokens_BT = (_SPECIAL + words_BT).scatter(1, key_B1, _KEY)
        tokens_BT = tokens_BT.scatter(1, key_B1 + 1 + draws.arange(n, generator), value_BN)
        tokens_BT[:, -n] = _QUERY
        if n > 1:
            tokens_BT[:, 1 - n :] = value_BN[:, :-1]
        return Batch(tokens_BT, (length - n + draws.arange(n, generator)).expand(batch, -1), value_BN)

    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        key, query = list(tokens).index(_KEY), list(tokens).index(_QUERY)
        return {query + i: tokens[key + 1 + i] for i in range(self.value_tokens)}
