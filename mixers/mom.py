"""Mixture of memories: a router sends every token to some of several memories, each a mixer of its own.

B batch, T time, D width, M memories, N packed sequences
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Self, cast

import torch
from pydantic import BeforeValidator, Field, PlainSerializer, ValidationInfo, model_validator
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from deltazoo.backends.base import Backend, state_dtype, without_autocast
from deltazoo.backends.errors import StateError
from deltazoo.backends.spec import UpdateSpec
from deltazoo.backends.varlen import sequence_index
from deltazoo.mixers.core.config import dump, parse
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Cost, Mixer, MixerConfig, Place, State
from deltazoo.mixers.core.sequences import check_state, left_align, undo_left_align
from deltazoo.mixers.core.state import rollback_


def _parse_memory(data: Any, info: ValidationInfo) -> MixerConfig:
    return parse(data, trust=bool((info.context or {}).get("trust")))


Inner = Annotated[MixerConfig, BeforeValidator(_parse_memory), PlainSerializer(dump)]


def _gated_deltanet() -> MixerConfig:
    return parse({"mixer": "gated_deltanet"})


class MoM(MixerConfig):
    """y_t = shared(x)_t + sum of p_tm memory_m(x_m)_t over the `active` memories m of token t; x_m is sent to m.

    p are the greatest `active` of softmax(W x_t), where several divided by their sum; of equals the first win. A memory
    sees its own tokens alone, one after the other, with states, convolutions and positions of its own. The paper's
    memories differ in k, v and gates, and share q and all that follows the mixture (norm, gate, output map); here each
    is a whole mixer, so that any may be one.
    """

    name: ClassVar[str] = "mom"
    source: ClassVar[str] = "Du 2025, arXiv 2502.13685"

    memory: Inner = Field(default_factory=_gated_deltanet, description="the mixer that each memory is")
    memories: int = Field(default=4, ge=1, description="memories beside the shared one")
    active: int = Field(default=2, ge=1, description="memories that a token is sent to")
    shared: bool = Field(default=True, description="one more memory that takes every token")
    balance: float = Field(default=0.01, ge=0, description="weight of the load-balance loss")
    z: float = Field(default=0.001, ge=0, description="weight of the z-loss, the mean square of logsumexp(W x)")

    @model_validator(mode="after")
    def _memories_suffice(self) -> Self:
        if self.active > self.memories:
            raise ValueError(f"active must be at most memories = {self.memories}, got {self.active}")
        return self

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> "MoMMixer":
        return MoMMixer(self, width, place, backend)

    def spec(self) -> UpdateSpec | None:
        return self.memory.spec()

    def equation(self) -> str:
        chosen = f"sum_(m in top {self.active} of {self.memories}) p_tm memory_m(x)_t"
        return f"y_t = {'shared(x)_t + ' if self.shared else ''}{chosen}; each: {self.memory.equation()}"

    def cost(self, width: int) -> Cost:
        """All memories run on every token's slot; a router's product beside."""
        one, times = self.memory.cost(width), self.memories + self.shared
        return Cost(times * one.flops + 2 * width * self.memories, *(times * figure for figure in one[1:]))


class Routes(NamedTuple):
    """chosen: [B, T, M] bool; weight: [B, T, M] float32, 0 where not chosen; loss: the router's, a scalar."""

    chosen: Tensor
    weight: Tensor
    loss: Tensor


class Router(nn.Module):
    """Send each token to `active` memories, in float32 whatever autocast says, so that prefill routes as decoding does.

    loss = balance M sum_m f_m P_m + z mean(logsumexp^2), f the share of what was sent to m, P its mean probability.
    Initialisation: N(0, 0.02^2). Source: MoM 2502.13685, section 3.2; Switch 2101.03961, section 2.2 (balance);
    ST-MoE 2202.08906 (z).
    """

    def __init__(self, config: MoM, width: int) -> None:
        super().__init__()
        self.active, self.balance, self.z = config.active, config.balance, config.z
        self.weight = nn.Parameter(torch.empty(config.memories, width).normal_(std=0.02))

    def forward(self, x: Tensor, mask: Tensor | None) -> Routes:
        """Route x [B, T, D]; padded tokens (mask False) go nowhere."""
        dtype = state_dtype(x.dtype)
        with without_autocast(x):
            # a sum of each row, the same whatever B and T, where a product of matrices adds up in another order
            logits = torch.stack([(x.to(dtype) * row.to(dtype)).sum(-1) for row in self.weight], -1)
        p = logits.softmax(-1)
        order = p.detach().argsort(dim=-1, descending=True, stable=True)
        chosen = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order[..., : self.active], True)
        real = p.new_ones(p.shape[:2]) if mask is None else mask.to(dtype)
        if mask is not None:
            chosen = chosen & mask[..., None]
        weight = torch.where(chosen, p, 0.0)
        if self.active > 1:  # one alone would always weigh 1, and teach the router nothing
            weight = weight / weight.sum(-1, keepdim=True).clamp(min=1e-20)
        count = real.sum().clamp(min=1)
        sent = chosen.to(dtype).sum((0, 1)) / (count * self.active)
        likely = (p * real[..., None]).sum((0, 1)) / count
        spread = (logits.logsumexp(-1).square() * real).sum() / count
        loss = self.balance * len(self.weight) * (sent * likely).sum() + self.z * spread
        return Routes(chosen, weight, loss)

    def extra_repr(self) -> str:
        return f"memories={self.weight.shape[0]}, active={self.active}, balance={self.balance:g}, z={self.z:g}"


class MoMMixer(Mixer):
    """A mixture of memories; causal and without leaks between sequences, in training as in decoding.

    Static in shape and exact, nothing is dropped: each memory's tokens are moved to the front of its row (of its pack),
    in their order, and the rest of the row is padding. So every memory runs on T slots. While gradients are on, the
    router's loss is added to whatever loss the output ends in: its gradient enters where the output's comes back.

    State: {"shared": .., "memory 0": .., ..}, each as its mixer has it.
    """

    def __init__(self, config: MoM, width: int, place: Place, backend: str | Backend | None) -> None:
        super().__init__()
        self.width = width
        self.router = Router(config, width)
        self.memories = nn.ModuleList(config.memory.build(width, place, backend) for _ in range(config.memories))
        self.shared: Mixer | None = config.memory.build(width, place, backend) if config.shared else None
        self.names = tuple(f"memory {m}" for m in range(config.memories))

    def init_state(self, batch: int, capacity: int | None = None) -> dict[str, State]:
        """The states of all memories; `capacity` is a memory's."""
        named = dict(zip(self.names, cast("Sequence[Mixer]", self.memories), strict=True))
        if self.shared is not None:
            named["shared"] = self.shared
        return {name: mixer.init_state(batch, capacity) for name, mixer in named.items()}

    def forward(
        self, x: Tensor, state: dict[str, State] | None = None, context: Context | None = None
    ) -> tuple[Tensor, dict[str, State] | None]:
        x_BTD, context, order = left_align(x, self.width, context)
        # a memory counts its own tokens; what layers hand on is of all tokens, not of one memory's
        context = context._replace(positions=None, values=None)
        if state is not None:
            wanted = {*self.names, *(["shared"] if self.shared is not None else [])}
            if not isinstance(state, dict) or set(state) != wanted:
                raise StateError(f"the state must have {sorted(wanted)}, got {sorted(state)}")
            rows = {name: _rows(tree) for name, tree in state.items()}
            check_state(rows, x_BTD, context)
        routes = self.router(x_BTD, context.mask)
        y_BTD = x_BTD.new_zeros(())
        after: dict[str, State] = {}
        for m, (name, memory) in enumerate(zip(self.names, self.memories, strict=True)):
            before = None if state is None else state[name]
            own, after[name] = _on_chosen(memory, x_BTD, routes.chosen[..., m], before, context)
            y_BTD = y_BTD + (routes.weight[..., m, None] * own).to(own.dtype)
        if self.shared is not None:
            own, after["shared"] = self.shared(x_BTD, None if state is None else state["shared"], context)
            y_BTD = y_BTD + own
        if torch.is_grad_enabled():
            y_BTD = _WithLoss.apply(y_BTD, routes.loss)
        return undo_left_align(y_BTD, order), None if state is None else after


def _on_chosen(
    memory: nn.Module, x_BTD: Tensor, chosen_BT: Tensor, state: State, context: Context
) -> tuple[Tensor, Any]:
    """Run a memory on its tokens alone; zeros where it has none, and its state after."""
    to_front_BT = chosen_BT.logical_not().to(torch.int8).argsort(dim=1, stable=True)
    back_BT = to_front_BT.argsort(dim=1)

    def taken(y: Tensor, index_BT: Tensor) -> Tensor:
        return y.gather(1, index_BT[..., None].expand_as(y))

    own_x = taken(x_BTD, to_front_BT)
    if context.cu_seqlens is None:
        y, state = memory(own_x, state, Context(mask=chosen_BT.gather(1, to_front_BT)))
    else:
        y, state = _on_pack(memory, own_x, chosen_BT[0], state, context.cu_seqlens)
    return torch.where(chosen_BT[..., None], taken(y, back_BT), 0.0), state


def _on_pack(
    memory: nn.Module, x_1TD: Tensor, chosen_T: Tensor, state: State, cu_seqlens: Tensor
) -> tuple[Tensor, Any]:
    """The chosen tokens of each sequence are sequences of a shorter pack; its others, a sequence too, are thrown away.

    Theirs are N more, none longer than the sequence it comes from, so that a cache has room for it.
    """
    T, N = x_1TD.shape[1], cu_seqlens.shape[0] - 1
    chosen_N = torch.zeros(N, dtype=torch.int64, device=x_1TD.device)
    chosen_N = chosen_N.index_add(0, sequence_index(cu_seqlens, T), chosen_T.long())
    count_2N = torch.cat([chosen_N, cu_seqlens.diff() - chosen_N])
    ends = torch.cat([count_2N.new_zeros(1), count_2N.cumsum(0)]).to(torch.int32)
    if state is None:
        return memory(x_1TD, None, Context(cu_seqlens=ends))
    longer = tree_map(lambda leaf: torch.cat([leaf, torch.zeros_like(leaf)]), state)
    y, longer = memory(x_1TD, longer, Context(cu_seqlens=ends))
    after = tree_map(lambda leaf: leaf[:N], longer)
    return y, after if torch.is_grad_enabled() else rollback_(state, after)


def _rows(tree: State) -> int:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return int(leaves[0].shape[0])


class _WithLoss(torch.autograd.Function):
    """y, with the gradient of a loss beside it: d loss = 1."""

    @staticmethod
    def forward(y: Tensor, loss: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.like = inputs[1].dtype, inputs[1].device

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.like
        return grad, torch.ones((), dtype=dtype, device=device)
