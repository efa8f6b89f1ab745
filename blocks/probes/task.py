"""Task: the sizes and schedule of a small model, a generator of sequences on any device, and an exact solver.

B sequences, T tokens, A scored places
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field
from torch import Generator, Tensor

from deltazoo.backends.io.frozen_config import FrozenConfig

Dtype = Literal["float32", "bfloat16"]


class Batch(NamedTuple):
    """Sequences and what must be predicted in them.

    Args:
        tokens_BT: int64.
        places_BA: int64, indices of the tokens at which an answer is predicted.
        answers_BA: int64, the token that must be predicted there; -100 is not scored.
    """

    tokens_BT: Tensor
    places_BA: Tensor
    answers_BA: Tensor


class Task(FrozenConfig, ABC):
    """A synthetic task with the model and the schedule that it is measured with.

    Args:
        length: tokens of the training sequences.
        lengths: tokens of the sequences of the evaluation; the last one is the score of the tables.
        depth, width, heads: sizes of the model; a mixer with fields of its own for heads keeps those that are set.
        mlp: hidden channels of the MLPs as a multiple of the width; 0: none.
        steps, batch: the schedule; rates: the learning rates of the search.
        weight_decay: applied to matrices only; the default is zoology's.
        evaluation_tokens: of the evaluation of a finished run at each length.
        dtype: compute dtype on a GPU; the CPU computes in float32.
        equal_parameters: whether the width of the MLPs is chosen so that every mixer has the parameters of attention.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    source: ClassVar[str]
    published: ClassVar[str]  # the results that the source reports
    scaled: ClassVar[str]  # how the defaults differ from the settings of the source, and why

    length: int = Field(ge=2)
    lengths: tuple[int, ...] = Field(min_length=1)
    depth: int = Field(default=2, ge=1)
    width: int = Field(default=64, ge=1)
    heads: int = Field(default=2, ge=1)
    mlp: float = Field(default=0, ge=0)
    steps: int = Field(default=2000, ge=1)
    batch: int = Field(default=64, ge=1)
    rates: tuple[float, ...] = Field(default=(1e-3, 3e-3, 1e-2), min_length=1)
    weight_decay: float = Field(default=0.1, ge=0)
    evaluation_tokens: int = Field(default=2**16, ge=1)
    dtype: Dtype = "bfloat16"
    equal_parameters: bool = False

    @property
    @abstractmethod
    def vocab(self) -> int:
        """Number of tokens in the vocabulary."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """Accuracy of a guess among the possible answers; in recall of pairs, among the values of the sequence."""

    @property
    def decoded(self) -> int:
        """Number of answers that an MLP reads from one vector; 0: the head reads the vector of each answer's place."""
        return 0

    @property
    def changes(self) -> str:
        """The fields that differ from the defaults, which `scaled` describes, and their values."""
        defaults = dict(self.model_validate({}))
        return ", ".join(f"{name} {_listed(value)}" for name, value in self if value != defaults[name])

    @property
    def difference(self) -> str:
        """How the settings differ from those of the source."""
        return f"{self.scaled}; but here {self.changes}" if self.changes else self.scaled

    @abstractmethod
    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        """Draw sequences on the device of the generator.

        The shapes depend on the arguments only and nothing synchronises with the host, so that a CUDA graph can
        capture the call.
        """

    @abstractmethod
    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        """Return the answer at every place of a sequence that has one, by an exact algorithm on its tokens."""

    def draw_evaluation(self, batch: int, length: int, generator: Generator) -> Batch:
        """Draw sequences of the evaluation with their scored answers."""
        return self.last_half(self.draw(batch, length, generator))

    def scored_length(self, step: Tensor) -> Tensor | None:
        """Return the length beyond which answers are not trained at a step, [1]; None: all are."""
        return None

    def last_half(self, batch: Batch) -> Batch:
        """Keep the scored answers. Tasks with an answer at every token score the last half of the sequence."""
        return batch


def _listed(value: object) -> str:
    return " and ".join(map(str, value)) if isinstance(value, tuple) else str(value)
