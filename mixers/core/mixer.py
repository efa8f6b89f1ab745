"""Interfaces of a mixer and of its config.

B batch, T time, D width, N packed sequences
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.utils._pytree import _register_namedtuple, tree_leaves, tree_map

from deltazoo.backends.context_parallel.exchange import document_bounds, gather_line, take_local
from deltazoo.backends.context_parallel.plan import ContextPlan
from deltazoo.backends.io.errors import OperandError, PluginError, UnsupportedError
from deltazoo.backends.io.frozen_config import FrozenConfig
from deltazoo.backends.ops.gemv import Norm
from deltazoo.backends.torch_ext.einops_nodes import record_einops_calls
from deltazoo.backends.update.base import Backend
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.initialization import drawn_in_float32, init_weights
from deltazoo.mixers.core.named_tensors import NamedTensors
from deltazoo.mixers.core.patterns import Term
from deltazoo.mixers.core.side import LostGradientError, Side

# A state is a tree (NamedTuples, tuples, dicts) of tensors with the batch in dimension 0.
State = Any


class Place(NamedTuple):
    """Position of a mixer in the model: index `layer`, from 0, of `depth` layers.

    Some initial values depend on it: slopes, lower bounds of decays, RWKV's mixing weights and norms.
    """

    layer: int = 0
    depth: int = 1


FIRST_PLACE = Place()


class PageTable(NamedTuple):
    """The page table of paged caches.

    table: [B, M] int32, the pages of each row; 0: none. All layers share it.
    pages: number of pages of a cache, from 1 on. slots: tokens of a page, a power of two.
    """

    table: Tensor
    pages: int
    slots: int


class Context(NamedTuple):
    """Inputs that all modules share in one forward pass. Modules do not change it; they return what others read.

    cu_seqlens: [N + 1] int32, bounds of packed sequences; then B = 1 and states have N rows.
    positions: [B, T] int64, absolute positions for rotary embeddings. None: positions continue from the state, or
        start at 0 in each sequence.
    mask: [B, T] bool, True at real tokens. Padding may be left or right of the real tokens of a row, not between
        them. Outputs at real tokens and the final state equal those of the unpadded rows.
    values: tensors that earlier modules returned in `side`, by name (RWKV-7's first values). None: modules neither
        read nor return any.
    losses: whether modules with auxiliary losses return them in `side`.
    intermediates: tensors that earlier parts of the same mixer returned, by name.
    parallel: the plan of context parallelism: x holds this rank's tokens, cu_seqlens the bounds of its segments, and
        states have a row for each document, equal on all ranks.
    product: the part's linear map of the mixer's input (`MapsInput`), if the mixer has computed it.
    verify: whether the tokens are drafted ones. A mixer then leaves its state as it was before them, and returns in
        place of the new state what `Mixer.commit_` needs.
    """

    cu_seqlens: Tensor | None = None
    positions: Tensor | None = None
    mask: Tensor | None = None
    values: Mapping[str, Tensor] | None = None
    losses: bool = False
    intermediates: NamedTensors | None = None
    parallel: ContextPlan | None = None
    verify: bool = False
    product: Tensor | None = None

    def of_line(self) -> "Context":
        """Return the context of the tokens of all ranks, as packed documents; without a plan this one."""
        if self.parallel is None:
            return self
        return Context(cu_seqlens=document_bounds(self.parallel), losses=self.losses)

    def apply(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return module(x), for the part's linear map of the mixer's input."""
        y: Tensor = module(x) if self.product is None else self.product
        return y

    def intermediate(self, name: str) -> Tensor:
        """Return a tensor that an earlier part returned."""
        assert self.intermediates is not None and name in self.intermediates  # the config includes both parts
        return self.intermediates[name]

    def value(self, name: str) -> Tensor:
        """Return a tensor that an earlier module returned in `side`.

        Raises: LostGradientError: it needs gradients, and the module that reads it runs without.
        """
        assert self.values is not None  # the module has looked for the name
        if self.values[name].requires_grad and not torch.is_grad_enabled():
            raise LostGradientError(f"the side output {name}")
        return self.values[name]

    def with_intermediates(self, tensors: Mapping[str, Tensor]) -> "Context":
        """Return the context of the parts after one that returned `tensors`."""
        return self._replace(intermediates=NamedTensors({**(self.intermediates or {}), **tensors}))

    def after(self, side: Side | None) -> "Context":
        """Return the context of the modules after one that returned `side`."""
        if self.values is None or side is None or not side.values:
            return self
        return self._replace(values={**self.values, **side.values})


# How a mixer commits accepted tokens: it reads them again, makes the writes that `verify` has computed, or appends them
# to its cache.
CommitForm = Literal["reread", "writes", "cache"]


class Reread(NamedTuple):
    """Drafted tokens that `Mixer.commit_` reads again: the mixer's input x [B, T, D] and its context."""

    x: Tensor
    context: Context


class MixerOutput(NamedTuple):
    """Result of a mixer.

    y: [B, T, D].
    state: the new state; None without a state.
    side: tensors for later modules, and auxiliary losses; None: there are none.
    """

    y: Tensor
    state: State | None = None
    side: Side | None = None


_register_namedtuple(MixerOutput, serialized_type_name="deltazoo.MixerOutput")  # for torch.export.save


class Mixer(nn.Module, ABC):
    """Token mixer: `(x [B, T, D], state, context) -> MixerOutput(y [B, T, D], new state, side)`.

    `forward` of a mixer without side outputs may return `(y, state)`; a call returns a `MixerOutput` all the same.

    Without gradients the mixer may update the tensors of the state in place. Continue with the returned state, and take
    a `snapshot` first if the old one is still needed.

    Submodules name parameters of two or more dimensions that weight decay must skip (decay rates, per-head biases) in
    a class attribute, `no_weight_decay = ("A_log",)`. Submodules with parameters or buffers initialise them in
    `reset_parameters()`, which their constructor calls last; see `init_weights`.

    A mixer that computes tokens split over ranks (`Context.parallel`) returns None from `split_refusal`.

    Class attributes: `commit_form`, how the mixer commits drafted tokens. `forward` and `commit_` of a mixer with
    another form than "reread" compute them (`Context.verify`); `splits_routed`, whether a mixer that splits also
    computes tokens whose number on each rank the host does not know (`plan_of_memories`), such as those of a memory.
    """

    commit_form: ClassVar[CommitForm] = "reread"
    splits_routed: ClassVar[bool] = False

    def split_refusal(self) -> str | None:
        """Return why the mixer cannot split sequences over ranks, as a clause after its name; None: it can."""
        return "does not exchange its state between ranks"

    @abstractmethod
    def forward(
        self, x: Tensor, state: State | None = None, context: Context | None = None
    ) -> MixerOutput | tuple[Tensor, State | None]:
        """Mix the tokens. One call, several calls with pieces, and one call per token give equal outputs."""

    def residual_step(self, x: Tensor, norm: Norm, state: State, context: Context) -> MixerOutput | None:
        """Compute x + y, with y of `forward(norm(x), state, context)`, by the kernels of a decode step.

        The caller guarantees that a call of the module runs only `forward` (`is_plain`).

        Args: x: [B, 1, D], without `backends.ops.gemv.refusals`.
        Returns: None, with the state as it was, if there are no such kernels for the call.
        """
        return None

    @abstractmethod
    def init_state(self, batch: int, capacity: int | None = None) -> State:
        """Return the state before the first token, on the module's device.

        Args: capacity: maximum number of tokens per sequence; needed only by mixers that keep every token.
        """

    def init_paged_state(self, capacity: int, pages: PageTable) -> State:
        """Return the state before the first token, with paged caches if the mixer supports them.

        Calls with it record no gradients. Its rows share `CachePages`, whose tensors are not leaves of the state tree.

        Args: capacity: as for `init_state`; pages: with the table of the rows.
        """
        return self.init_state(len(pages.table), capacity)

    def _on_all_tokens(
        self, x: Tensor, state: State | None, context: Context, plan: ContextPlan, reason: str
    ) -> MixerOutput:
        """Run on the tokens of all ranks, and return the outputs of this rank's. The new state is equal on all ranks.

        Raises: UnsupportedError, unless the plan says `gathers`.
        """
        if not plan.gathers:
            raise UnsupportedError(
                f"context parallelism: {type(self).__name__} {reason}; ContextParallel(mesh, gather=True) runs it on "
                "the tokens of all ranks, on every rank"
            )
        y, new_state, side = self(gather_line(x, plan), state, context.of_line())
        return MixerOutput(take_local(y, plan), new_state, side)

    def commit_(self, draft: Any, state: State, accepted: Tensor) -> None:
        """Advance the state in place by the first `accepted` drafted tokens of each row, without gradients.

        The result is the state after a call with these tokens alone.

        Args:
            draft: what a call with `Context.verify` returned as the state.
            state: the state that the call received.
            accepted: [B] int32, from 0 to T.
        """
        mask = torch.arange(draft.x.shape[1], device=draft.x.device) < accepted[:, None]
        with torch.no_grad():
            new_state = self(draft.x, state, draft.context._replace(mask=mask)).state
            for old, new in zip(tree_leaves(state), tree_leaves(new_state), strict=True):
                if new is not old:
                    old.copy_(new)

    def draft_state(self, state: State) -> State:
        """Return a state that reads drafted tokens without a change of `state`, for the form "reread"."""
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)

    def _verify(self, x: Tensor, state: State | None, context: Context) -> MixerOutput:
        """Read drafted tokens with a copy of the state."""
        plain = context._replace(verify=False)
        y, _, side = self(x, self.draft_state(state), plain)
        return MixerOutput(y, Reread(x, plain), side)

    def init_weights(self) -> None:
        """Initialise all parameters and buffers, for example after `torch.device("meta")` and `to_empty`.

        With the same seed the weights equal those of an ordinary build.
        """
        init_weights(self)

    def __call__(self, x: Tensor, state: State | None = None, context: Context | None = None) -> MixerOutput:
        if torch.compiler.is_compiling():
            record_einops_calls()
        if isinstance(context, Context) and context.parallel is not None and (reason := self.split_refusal()):
            return self._on_all_tokens(x, state, context, context.parallel, reason)
        if isinstance(context, Context) and context.verify:
            _check_draft(state, context)
            if self.commit_form == "reread":
                return self._verify(x, state, context)
        result = super().__call__(x, state, context)
        if not isinstance(result, tuple):  # a tensor would be taken apart into its rows
            raise PluginError(
                f"{type(self).__name__}.forward must return (y, state) or a MixerOutput, got {type(result).__name__}"
            )
        return MixerOutput(*result)


def _check_draft(state: State | None, context: Context) -> None:
    """Check the arguments of a call with drafted tokens. Raises: OperandError."""
    given = [name for name in ("cu_seqlens", "mask", "parallel") if getattr(context, name) is not None]
    if state is None or given or torch.is_grad_enabled():
        got = f"context.{given[0]}" if given else "no state" if state is None else "gradients"
        raise OperandError(f"context.verify needs a state, rows without padding and packs, and no gradients, got {got}")


class Cost(NamedTuple):
    """Cost of a mixer.

    flops: floating-point operations per token in the forward pass, projections included; a multiply-add counts as two.
    flops_context: additional operations per token for each earlier token it attends to.
    state_bytes: bytes per sequence, independent of its length.
    cache_bytes: additional bytes per cached token.
    """

    flops: int
    flops_context: int
    state_bytes: int
    cache_bytes: int


def _returns_a_mixer(build: Callable[..., Mixer]) -> Callable[..., Mixer]:
    """Decorate `MixerConfig.build` so that it raises PluginError for another result."""

    @functools.wraps(build)
    def checked(self: "MixerConfig", *args: Any, **kwargs: Any) -> Mixer:
        mixer: object = build(self, *args, **kwargs)
        if not isinstance(mixer, Mixer):
            raise PluginError(f"{type(self).__name__}.build must return a Mixer, got {type(mixer).__name__}")
        return mixer

    return checked


class MixerConfig(FrozenConfig, Term, ABC):
    """Config that builds a mixer. Subclass it, give every field a default, and register it in `deltazoo.mixers`.

    The operators `+`, `*` and `|` compose configs into a pattern of layers; see `deltazoo.mixers.core.patterns`.

    Class attributes: `name`, the registered name and serialised tag (`mixer: name`); `source`, the paper. For
    `deltazoo list` and the zoo's page, which a plug-in may leave empty: `family`; `purpose`, what distinguishes it in a
    few words; `oracle`, the independent implementation that its tests compare it with.
    """

    name: ClassVar[str]
    family: ClassVar[str] = ""
    purpose: ClassVar[str] = ""
    source: ClassVar[str]
    oracle: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "build" in vars(cls):
            cls.build = drawn_in_float32(_returns_a_mixer(cls.build))  # type: ignore[method-assign]

    @model_validator(mode="after")
    def _has_class_attributes(self) -> Self:
        for name in ("name", "family", "purpose", "source", "oracle"):
            value = None if name in type(self).model_fields else getattr(type(self), name, None)
            if not isinstance(value, str):
                got = "a field" if name in type(self).model_fields else "none" if value is None else repr(value)
                raise ValueError(f'a mixer needs the class attribute `{name}: ClassVar[str] = "..."`, got {got}')
        return self

    @abstractmethod
    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> Mixer:
        """Build the module. Weights of 16 bits (torch's default dtype) are drawn in float32 and rounded.

        Args: width: D; place: its position in the model; backend: as for `deltazoo.bind`.
        Raises: ConfigError, if the fields do not fit the width.
        """

    @abstractmethod
    def cost(self, width: int) -> Cost:
        """Return the operations and state bytes of the mixer; see `Cost`."""

    def spec(self) -> UpdateSpec | None:
        """Return the spec of the update, or None for a mixer without one (attention)."""
        return None

    def equation(self) -> str:
        """Return the recurrence as one line of text. A mixer without an update overrides this."""
        spec = self.spec()
        return "" if spec is None else str(spec)
