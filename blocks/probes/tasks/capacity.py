"""State capacity: MQAR whose number of pairs is a quarter of the length, up to more pairs than in training."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from deltazoo.blocks.probes.tasks.mqar import MQAR


class Capacity(MQAR):
    """MQAR with length / 4 pairs: the accuracy over the length is the recall over the number of stored keys."""

    name: ClassVar[str] = "capacity"
    about: ClassVar[str] = "recall with length / 4 pairs of keys and values"
    source: ClassVar[str] = "Arora 2024, arXiv 2402.18668, section 3: recall against the size of the state"
    published: ClassVar[str] = "in figures only"
    scaled: ClassVar[str] = (
        "two layers of width 64 with 2 heads of 32; 256 words and 3,000 steps of 64 with 16 pairs, to save time: with "
        "512 words, 32 pairs and 4 heads Gated DeltaNet had learned nothing after 3,000 steps"
    )

    length: int = Field(default=64, ge=8)
    lengths: tuple[int, ...] = (32, 64, 128, 256)
    pairs: int = Field(default=8, ge=1)  # at the shortest length
    tokens: int = Field(default=256, ge=8)
    batch: int = 64

    @model_validator(mode="after")
    def _keys_suffice(self) -> Self:
        if max(self.length, *self.lengths) // 4 >= self.tokens // 2:
            raise ValueError(f"tokens must be above {max(self.length, *self.lengths) // 2}, got {self.tokens}")
        return self

    @property
    def chance(self) -> float:
        return 4 / max(self.lengths)

    def pairs_of(self, length: int) -> int:
        return length // 4
