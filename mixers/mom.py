"""Mixture of memories: a router sends each token to some of several memories, each of which is a mixer.

B batch, T time, D width, M memories, k active memories, A = B T k assignments, N sequences: the B rows, or packed ones
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, cast

import torch
from pydantic import BeforeValidator, Field, PlainSerializer, ValidationInfo, model_validator
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from deltazoo.backends.context_parallel.memories import plan_of_memories
from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.update.base import Backend, state_dtype, without_autocast
from deltazoo.backends.update.check import check_integer
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.backends.update.varlen import sequence_index
from deltazoo.mixers.core.config import dump, parse
from deltazoo.mixers.core.delta_mixer import DeltaMixer, can_group
from deltazoo.mixers.core.initialization import build_in_any_order, fill_normal
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Cost, Mixer, MixerConfig, MixerOutput, Place, State
from deltazoo.mixers.core.named_tensors import NamedTensors
from deltazoo.mixers.core.part import HeadShape, Routed, active_parameters
from deltazoo.mixers.core.sequences import (
    check_dtypes,
    check_names,
    check_shapes,
    check_state,
    left_align,
    undo_left_align,
)
from deltazoo.mixers.core.side import Side, join_sides, side_outputs
from deltazoo.mixers.core.state import batch, rollback_
from deltazoo.mixers.families.update import UpdateConfig
from deltazoo.mixers.parts.memory.joint_memories import JointMemories, JointSizes, joint_refusal
from deltazoo.mixers.parts.memory.routing import load_balance_loss, real_tokens, z_loss
from deltazoo.mixers.parts.memory.token_pack import TokenPack, with_memory_of_all


def _parse_memory(data: Any, info: ValidationInfo) -> MixerConfig:
    return parse(data, trust=bool((info.context or {}).get("trust")))


SHARING = (
    "query: the memories have q, the convolution, norm, gate and output map in common; all: also the maps to k, v and "
    "gates (the source's single_kv_proj); none: nothing; None: query if the memory allows it, else none"
)
Inner = Annotated[MixerConfig, BeforeValidator(_parse_memory), PlainSerializer(dump)]


def _gated_deltanet() -> MixerConfig:
    return parse({"mixer": "gated_deltanet"})


class MoM(MixerConfig):
    """y_t = W_o gate(norm(shared(x)_t + sum over the active memories m of token t of p_tm memory_m(x_m)_t)).

    x_m are the tokens sent to memory m. p are the `active` largest entries of softmax(W x_t), divided by their sum if
    there are several; ties go to the memory with the lower index. A memory processes only its own tokens, as one
    sequence, with its own state and positions. The memories differ in k, v and gates. They have q, the convolution,
    and the norm, gate and output map after the mixture in common (`sharing`). With sharing="none" each memory is a
    complete mixer, so that any mixer can be one, and y_t = shared(x)_t + sum p_tm memory_m(x_m)_t.

    Auxiliary losses: "mom_balance" and "mom_z", see `deltazoo.mixers.parts.memory.routing`.
    """

    name: ClassVar[str] = "mom"
    family: ClassVar[str] = "memory slots"
    purpose: ClassVar[str] = "several memories, of which a token uses some"
    source: ClassVar[str] = "Du 2025, arXiv 2502.13685"
    oracle: ClassVar[str] = "a loop over tokens and memories, for several inner mixers"

    memory: Inner = Field(default_factory=_gated_deltanet, description="config of each memory: any mixer")
    memories: int = Field(default=4, ge=1, description="number of memories, without the shared one")
    active: int = Field(default=2, ge=1, description="memories per token")
    shared: bool = Field(default=True, description="add a memory that processes every token")
    sharing: Literal["none", "query", "all"] | None = Field(default=None, description=SHARING)
    balance: float = Field(default=0.01, ge=0, description="coefficient of the load-balance loss")
    z: float = Field(default=0.0, ge=0, description="coefficient of the z-loss, the mean square of logsumexp(W x)")

    @model_validator(mode="after")
    def _check_active(self) -> Self:
        if self.active > self.memories:
            raise ValueError(f"active must be at most memories = {self.memories}, got {self.active}")
        return self

    def build(
        self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None
    ) -> "MoMMixer | JointMoMMixer":
        check_integer("width", width)
        if self.is_joint:
            return build_in_any_order(lambda: JointMoMMixer(self, width, place, backend))
        return MoMMixer(self, width, place, backend)

    @property
    def is_joint(self) -> bool:
        """Whether the memories have parts in common. Raises: ConfigError: they cannot, and `sharing` demands it."""
        if self.sharing == "none":
            return False
        refusal: str | None = "needs a memory with a matrix state"
        if isinstance(self.memory, UpdateConfig):
            with torch.device("meta"):  # the kinds of the parts do not depend on the sizes
                shape = HeadShape(8, 1, 1, 8, 8, self.memory.spec().householders)
                refusal = joint_refusal(self.memory.parts(shape, FIRST_PLACE))
        if refusal is not None and self.sharing is not None:
            raise ConfigError(f"sharing={self.sharing!r} {refusal}, got {self.memory.name}")
        return refusal is None

    def spec(self) -> UpdateSpec | None:
        return self.memory.spec()

    def equation(self) -> str:
        chosen = f"sum_(m in top {self.active} of {self.memories}) p_tm memory_m(x)_t"
        mixture = f"{'shared(x)_t + ' if self.shared else ''}{chosen}"
        mixture = f"W_o gate(norm({mixture}))" if self.is_joint else mixture
        return f"y_t = {mixture}; each: {self.memory.equation()}"

    def cost(self, width: int) -> Cost:
        """Return the cost of all memories on T tokens and of the router; grouped memories run on k T tokens only."""
        one, count = self.memory.cost(width), self.memories + self.shared
        flops = count * one.flops + 2 * width * self.memories
        if self.is_joint:
            with torch.device("meta"):
                mixer = self.build(width, backend="reference")
            assert isinstance(mixer, JointMoMMixer)
            flops -= 2 * (count - 1) * mixer.joint.common_weights
        return Cost(flops, *(count * size for size in one[1:]))


class Routes(NamedTuple):
    """Result of the router: chosen [B, T, M] bool; weight [B, T, M] float32, 0 where not chosen; order [B, T, k] int64.

    order has the k memories of each token, by descending weight; at a padded token, k memories that are not chosen.
    side has the auxiliary losses.
    """

    chosen: Tensor
    weight: Tensor
    order: Tensor
    side: Side | None


class Router(nn.Module):
    """Choose `active` memories for each token.

    Computed in float32 also under autocast, so that prefill and decoding choose the same memories except at near-ties.
    Initialisation: N(0, 0.02^2). Source: MoM 2502.13685, section 3.2.
    """

    def __init__(self, config: MoM, width: int) -> None:
        super().__init__()
        self.active, self.balance, self.z = config.active, config.balance, config.z
        self.weight = nn.Parameter(torch.empty(config.memories, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        fill_normal(self.weight, std=0.02)

    def forward(self, x: Tensor, context: Context) -> Routes:
        """Route x [B, T, D] and compute the auxiliary losses. Tokens that belong to no sequence get no memory."""
        dtype = state_dtype(x.dtype)
        with without_autocast(x):
            # on a CPU a sum per row has the same rounding for every B and T, which a matrix product has not
            logits = torch.stack([(x.to(dtype) * row.to(dtype)).sum(-1) for row in self.weight], -1)
        p = logits.softmax(-1)
        order = p.detach().argsort(dim=-1, descending=True, stable=True)[..., : self.active]
        chosen = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, True)
        real_BT = real_tokens(x.shape[1], context)
        if real_BT is not None:
            chosen = chosen & real_BT[..., None]
        weight = torch.where(chosen, p, 0.0)
        if self.active > 1:  # a single weight divided by itself is 1 and gives the router no gradient
            weight = weight / weight.sum(-1, keepdim=True).clamp(min=1e-20)
        balance = load_balance_loss("mom_balance", self.balance, p, chosen, context)
        losses = *balance, *z_loss("mom_z", self.z, logits, context)
        return Routes(chosen, weight, order, side_outputs(losses=losses))

    def extra_repr(self) -> str:
        return f"memories={self.weight.shape[0]}, active={self.active}, balance={self.balance:g}, z={self.z:g}"


class JointMoMMixer(Mixer, Routed):
    """Module of `MoM` whose memories have parts in common: causal and isolated across sequences.

    Shapes are static and no token is dropped. The k T tokens of the memories are one pack, in which each memory has a
    sequence for each sequence of x; the shared memory processes x itself. State: see `JointMemories`.
    """

    splits_routed: ClassVar[bool] = True

    def __init__(self, config: MoM, width: int, place: Place, backend: str | Backend | None) -> None:
        super().__init__()
        assert isinstance(config.memory, UpdateConfig)
        memory, shape = config.memory, config.memory.shape(width).validated()
        sizes = JointSizes(config.memories, config.shared, config.sharing == "all")
        self.width = width
        self.router = Router(config, width)
        self.joint = JointMemories(shape, memory.spec(), memory.parts(shape, place), sizes, memory.name, backend)

    def split_refusal(self) -> None:
        return None

    @property
    def unused_parameters(self) -> int:
        return (self.joint.sizes.memories - self.router.active) * self.joint.own_parameters

    def init_state(self, batch: int, capacity: int | None = None) -> NamedTensors:
        """Return the states of all memories. Their sizes do not depend on `capacity`."""
        return self.joint.init_state(batch)

    def forward(self, x: Tensor, state: State | None = None, context: Context | None = None) -> MixerOutput:
        x_BTD, context, order = left_align(x, self.width, context, self.router.weight)
        if state is not None:
            expected = self.joint.init_state(0)
            check_names(state, expected)
            check_shapes(state, {name: tensor.shape[1:] for name, tensor in expected.items()})
            check_dtypes(state, {self.joint.update_key: state_dtype(x_BTD.dtype)}, x_BTD)
            check_state({name: tensor.shape[0] for name, tensor in state.items()}, x_BTD, context)
        routes = Routes(*self.router(x_BTD, context))
        weight_BTK = routes.weight.gather(-1, routes.order)
        is_step = x_BTD.shape[1] == 1 and context.cu_seqlens is None and not torch.is_grad_enabled()
        if state is not None and is_step and x_BTD.shape[0]:
            real_B = None if context.mask is None else context.mask[:, 0]
            y_BTD = self.joint.step_(x_BTD, routes.order[:, 0], weight_BTK[:, 0], real_B, state)
        else:
            pack = TokenPack.of(routes.order, weight_BTK, self.joint.sizes.memories, context)
            y_BTD, state = self.joint(x_BTD, pack, state, context._replace(values=None))
        return MixerOutput(undo_left_align(y_BTD, order), state, routes.side)


class MoMMixer(Mixer, Routed):
    """Module of `MoM` whose memories are complete mixers: causal and isolated across sequences.

    Shapes are static and no token is dropped. If the memories can be grouped (`can_group`: Gated DeltaNet and others
    whose parts all have `forward_grouped`) and their backend takes packed sequences, the k T tokens of all memories and
    the T tokens of the shared one are one pack, in which each memory has a sequence for each sequence of x. Otherwise,
    and for a single token, each memory runs on T tokens: its own tokens are moved to the front of the row, in order,
    and the rest of the row is padding. With given positions, which the shared memory needs, it is not in the pack.

    State: {"shared": ..., "memory 0": ..., ...}, each the state of its mixer.
    """

    splits_routed: ClassVar[bool] = True

    def __init__(self, config: MoM, width: int, place: Place, backend: str | Backend | None) -> None:
        super().__init__()
        self.width = width
        self.router = Router(config, width)
        self.memories = nn.ModuleList(config.memory.build(width, place, backend) for _ in range(config.memories))
        self.shared: Mixer | None = config.memory.build(width, place, backend) if config.shared else None
        self.names = tuple(f"memory {m}" for m in range(config.memories))

    def split_refusal(self) -> str | None:
        for memory in cast("Sequence[Mixer]", self.memories):
            refusal = memory.split_refusal()
            if refusal is None and not memory.splits_routed:
                refusal = "needs the number of its tokens on each rank, which depends on the router"
            if refusal is not None:
                return f"has memories of the type {type(memory).__name__}, which {refusal}"
        return None

    @property
    def unused_parameters(self) -> int:
        return (len(self.memories) - self.router.active) * active_parameters(self.memories[0])

    def init_state(self, batch: int, capacity: int | None = None) -> dict[str, State]:
        """Return the states of all memories; each has the full `capacity`."""
        named = dict(zip(self.names, cast("Sequence[Mixer]", self.memories), strict=True))
        if self.shared is not None:
            named["shared"] = self.shared
        return {name: mixer.init_state(batch, capacity) for name, mixer in named.items()}

    def forward(self, x: Tensor, state: dict[str, State] | None = None, context: Context | None = None) -> MixerOutput:
        x_BTD, context, order = left_align(x, self.width, context, self.router.weight)
        context = context._replace(values=None)  # values of other layers belong to all tokens, not to one memory's
        if state is not None:
            check_names(state, (*self.names, *(["shared"] if self.shared is not None else [])))
            check_state({name: batch(tree) for name, tree in state.items()}, x_BTD, context)
        routes = Routes(*self.router(x_BTD, context))
        own_context = context._replace(positions=None)  # a memory counts its own tokens
        pack, names = self._pack(x_BTD, context), self.names
        sides: list[Side | None] = []
        if pack is not None and len(pack) > len(names):
            names = (*names, "shared")
        states = [None if state is None else state[name] for name in names]
        if pack is None:
            y_BTD, states, sides = _run_one_by_one(list(self.memories), x_BTD, routes, states, own_context)
        else:
            y_BTD, states = _run_grouped(pack, x_BTD, routes, states, own_context)
        new = dict(zip(names, states, strict=True))
        if self.shared is not None and "shared" not in new:
            shared_state = None if state is None else state["shared"]
            o_BTD, new["shared"], side = MixerOutput(*self.shared(x_BTD, shared_state, context))
            y_BTD = y_BTD + o_BTD
            sides.append(side)
        y_BTD, side = undo_left_align(y_BTD, order), join_sides([routes.side, *sides])
        return MixerOutput(y_BTD, None if state is None else new, side)

    def _pack(self, x_BTD: Tensor, context: Context) -> Sequence[DeltaMixer] | None:
        """Return the mixers of one pack: the memories and, without given positions, the shared one. None: no pack."""
        memories = list(self.memories)
        has_few = context.parallel is None and (x_BTD.shape[0] == 0 or x_BTD.shape[1] <= 1)
        if has_few or not can_group(memories) or not memories[0].update.takes_packs(x_BTD):
            return None
        every_mixer = memories if self.shared is None else [*memories, self.shared]
        return every_mixer if context.positions is None and can_group(every_mixer) else memories


def _run_grouped(
    memories: Sequence[DeltaMixer], x_BTD: Tensor, routes: Routes, states: list[State], context: Context
) -> tuple[Tensor, list[State]]:
    """Return the weighted sum of the memories' outputs and their new states, from one pack of all chosen tokens.

    Every token goes to memories that the router has no weight for, with weight 1.
    """
    order_BTK, weight_BTK = routes.order, routes.weight.gather(-1, routes.order)
    for m in range(routes.weight.shape[-1], len(memories)):
        order_BTK, weight_BTK = with_memory_of_all(order_BTK, weight_BTK, m)
    pack = TokenPack.of(order_BTK, weight_BTK, len(memories), context)
    state = None
    if states[0] is not None:
        state = {name: pack.with_extra(torch.cat([s[name] for s in states])) for name in states[0]}
    y_1AD, new_state = memories[0].forward_grouped(memories, pack.rows, pack.tokens(x_BTD), state, pack.context)
    y_BTD = pack.mix(y_1AD)
    if new_state is None:
        return y_BTD, states
    M, N = pack.sizes
    new = [NamedTensors({name: x[m * N : (m + 1) * N] for name, x in new_state.items()}) for m in range(M)]
    if torch.is_grad_enabled():
        return y_BTD, new
    return y_BTD, [rollback_(NamedTensors(old), values) for old, values in zip(states, new, strict=True)]


def _run_one_by_one(
    memories: Sequence[nn.Module], x_BTD: Tensor, routes: Routes, states: list[State], context: Context
) -> tuple[Tensor, list[State], list[Side | None]]:
    """Return the weighted sum of the memories' outputs, their new states and their side outputs."""
    y_BTD = x_BTD.new_zeros(())
    new: list[State] = []
    sides: list[Side | None] = []
    for m, memory in enumerate(memories):
        o_BTD, state, side = _run_on_chosen(memory, x_BTD, routes.chosen[..., m], states[m], context)
        y_BTD = y_BTD + (routes.weight[..., m, None] * o_BTD).to(o_BTD.dtype)
        new.append(state)
        sides.append(side)
    return y_BTD, new, sides


def _run_on_chosen(memory: nn.Module, x_BTD: Tensor, chosen_BT: Tensor, state: State, context: Context) -> MixerOutput:
    """Run a memory on its own tokens. The outputs are zero at other tokens."""
    to_front_BT = chosen_BT.logical_not().to(torch.int8).argsort(dim=1, stable=True)
    to_place_BT = to_front_BT.argsort(dim=1)

    def permute(y: Tensor, index_BT: Tensor) -> Tensor:
        return y.gather(1, index_BT[..., None].expand_as(y))

    memory_x = permute(x_BTD, to_front_BT)
    if context.cu_seqlens is None:
        memory_context = context._replace(mask=chosen_BT.gather(1, to_front_BT))
        y, state, side = MixerOutput(*memory(memory_x, state, memory_context))
    else:
        y, state, side = _run_on_packed(memory, memory_x, chosen_BT[0], state, context)
    return MixerOutput(torch.where(chosen_BT[..., None], permute(y, to_place_BT), 0.0), state, side)


def _run_on_packed(memory: nn.Module, x_1TD: Tensor, chosen_T: Tensor, state: State, context: Context) -> MixerOutput:
    """Run a memory on the chosen tokens of N packed sequences.

    The chosen tokens of the N sequences come first in x, as N shorter sequences. The other tokens of each sequence form
    N more sequences, whose outputs and states are discarded. None is longer than its original, so caches suffice.
    """
    cu_seqlens = context.cu_seqlens
    assert cu_seqlens is not None
    T, N = x_1TD.shape[1], cu_seqlens.shape[0] - 1
    chosen_N = torch.zeros(N + 1, dtype=torch.int64, device=x_1TD.device)  # N: tokens of no sequence
    chosen_N = chosen_N.index_add(0, sequence_index(cu_seqlens, T), chosen_T.long())[:N]
    count_2N = torch.cat([chosen_N, cu_seqlens.diff() - chosen_N])
    ends = torch.cat([count_2N.new_zeros(1), count_2N.cumsum(0)]).to(torch.int32)
    plan = context.parallel
    plan = None if plan is None else plan_of_memories(plan, ends, 2, T)
    context = context._replace(cu_seqlens=ends, parallel=plan)
    if state is None:
        return MixerOutput(*memory(x_1TD, None, context))
    doubled = tree_map(lambda leaf: torch.cat([leaf, torch.zeros_like(leaf)]), state)
    y, doubled, side = MixerOutput(*memory(x_1TD, doubled, context))
    new = tree_map(lambda old, leaf: leaf[: old.shape[0]], state, doubled)
    return MixerOutput(y, new if torch.is_grad_enabled() else rollback_(state, new), side)
