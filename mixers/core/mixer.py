"""What a mixer is, and what a config of one is.

B batch, T time, D width, N packed sequences
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from deltazoo.backends.base import Backend
from deltazoo.backends.spec import UpdateSpec
from deltazoo.mixers.core.patterns import Term

# A state is a tree (NamedTuples, tuples, dicts) of tensors that all have the batch in dimension 0.
State = Any


class Place(NamedTuple):
    """Where a mixer stands: layer `layer` of `depth`, from 0. Slopes and lower bounds depend on it."""

    layer: int = 0
    depth: int = 1


FIRST_PLACE = Place()


class Context(NamedTuple):
    """What a whole forward pass shares.

    cu_seqlens: [N + 1] int32, packed sequences with B = 1; states then have N rows.
    positions: [B, T] int64, absolute positions for rotary embeddings; None counts from the state, or from 0 in
        each sequence.
    mask: [B, T] bool, True at real tokens; padding stands left or right of them, never between. Outputs at real
        tokens and the final state are those of the unpadded rows.
    values: what layers hand to later layers in one forward pass, by name (RWKV-7's first values); a fresh dict
        for each pass.
    notes: what the parts of one mixer hand to its later parts, by name; the mixer lays a fresh dict out.
    """

    cu_seqlens: Tensor | None = None
    positions: Tensor | None = None
    mask: Tensor | None = None
    values: dict[str, Any] | None = None
    intermediates: dict[str, Tensor] | None = None

    def intermediate(self, name: str) -> Tensor:
        """Read what an earlier part left."""
        assert self.intermediates is not None and name in self.intermediates  # a config puts both parts in
        return self.intermediates[name]

    def store(self, **tensors: Tensor) -> None:
        """Leave something for later parts."""
        assert self.intermediates is not None  # a mixer lays the dict out
        self.intermediates.update(tensors)


class Mixer(nn.Module, ABC):
    """Mix along time: `(x [B, T, D], state, context) -> (y [B, T, D], state)`; no state in, none out.

    A state that is passed in is used up: without gradients its tensors may be updated in place. Go on with the
    one returned, and take a `snapshot` first if the old one is needed again.

    A module inside that has parameters of two dimensions and more which weight decay must leave alone (decay rates,
    biases by head) names them in a class attribute, `no_weight_decay = ("A_log",)`.
    """

    @abstractmethod
    def forward(
        self, x: Tensor, state: State | None = None, context: Context | None = None
    ) -> tuple[Tensor, State | None]:
        """Mix. Prefill in pieces, at once, and token by token give the same numbers."""

    @abstractmethod
    def init_state(self, batch: int, capacity: int | None = None) -> State:
        """The state before the first token, on the module's device; its tensors have the batch in dimension 0.

        Args: capacity: the most tokens a sequence may reach; only mixers that remember every token need it.
        """

    def __call__(
        self, x: Tensor, state: State | None = None, context: Context | None = None
    ) -> tuple[Tensor, State | None]:
        return super().__call__(x, state, context)  # typed


class Cost(NamedTuple):
    """What a mixer costs. flops: a token, forward, a multiply-add counted as two, projections included;
    flops_context: more flops a token for each token of context that it looks back on;
    state_bytes: a sequence, constant in its length; cache_bytes: more for every token kept."""

    flops: int
    flops_context: int
    state_bytes: int
    cache_bytes: int


class MixerConfig(BaseModel, Term, ABC):
    """A mixer as a value that builds itself. Subclass, give every field a default, register in `deltazoo.mixers`.

    Configs compose with `+`, `*` and `|` to a pattern of layers; see `deltazoo.mixers.core.patterns`.

    Class attributes: `name`, the registered name and serialised tag (`mixer: name`); `source`, the paper.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    source: ClassVar[str]

    @abstractmethod
    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> Mixer:
        """Make the module.

        Args: width: D; place: the layer it will be; backend: as for `deltazoo.bind`.
        Raises: ConfigError where the fields do not fit the width.
        """

    @abstractmethod
    def cost(self, width: int) -> Cost:
        """State bytes and floating-point operations; see `Cost`."""

    def spec(self) -> UpdateSpec | None:
        """The update inside, or None where the mixer has none (attention)."""
        return None

    def equation(self) -> str:
        """The recurrence in a line of plain text; "" where the mixer has no update and says nothing else."""
        spec = self.spec()
        return "" if spec is None else str(spec)
