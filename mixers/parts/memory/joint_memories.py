"""Memories of one layer that differ in k, v and gates, and have the query and everything after the mixture in common.

B batch, T time, D width, M memories, A assignments of tokens to memories, N sequences: the B rows, or packed ones,
C channels, HV value heads, K key width, V value width
"""

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from deltazoo.backends.ops.grouped import grouped_linear_of_copies
from deltazoo.backends.ops.short_conv import ConvPart, apply_silu_and_norm
from deltazoo.backends.torch_ext.gather import gather_rows
from deltazoo.backends.torch_ext.plain_module import is_plain_linear
from deltazoo.backends.update.base import Backend, UpdateInputs
from deltazoo.backends.update.check import check_integer
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.backends.update.varlen import sequence_index
from deltazoo.mixers.core.activations import activation_like
from deltazoo.mixers.core.calls import call_part
from deltazoo.mixers.core.decode_maps import apply_output
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.named_tensors import NamedTensors
from deltazoo.mixers.core.part import (
    HasBackend,
    HeadShape,
    LinearPart,
    OutputArguments,
    OutputPart,
    Parts,
    Stateful,
    StatelessOutputPart,
    project_jointly,
)
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.parts.convolution import ConvBias, ShortConv
from deltazoo.mixers.parts.memory.token_pack import TokenPack
from deltazoo.mixers.parts.projections import QKVProjection, split_heads


class JointSizes(NamedTuple):
    """memories: M, without the shared one; shared: whether there is one, which processes every token.

    one_map: whether the memories also have the maps to k, v and gates in common.
    """

    memories: int
    shared: bool
    one_map: bool

    @property
    def total(self) -> int:
        """Number of memories with the shared one."""
        return self.memories + self.shared


def joint_refusal(parts: Parts) -> str | None:
    """Return why memories with these parts cannot have a query and output in common, or None."""
    if not isinstance(parts.projection, QKVProjection) or not parts.projection.keys:
        return "needs a memory with one map to q, k and v"
    if parts.projection.conv is not None and parts.projection.unconvolved:
        return "needs a memory that convolves all of q, k and v, or nothing"
    if parts.skip is not None or not all(isinstance(part, StatelessOutputPart) for part in parts.outputs.values()):
        return "needs a memory whose output depends on its state and the token alone"
    if not all(isinstance(part, LinearPart) and not isinstance(part, Stateful) for part in parts.operands.values()):
        return "needs a memory whose gates are linear maps"
    return None


class JointMemories(nn.Module):
    """y_t = W_o outputs(sum over the memories m of token t of p_tm S_m,t^T q_m,t).

    q = W_q x for all memories; each has its own W_kv and maps of the gates. A memory processes its own tokens, as one
    sequence. The convolution, and the rates and biases of the gates, are those of all memories.

    Args: parts: of one memory; `joint_refusal` returns None for them. sizes: number and common maps of the memories.
    State: "q" and "kv", the inputs of the convolution [N, M, taps - 1, C]; "NAME.update", [N, M, HV, K, V]. M counts
    the shared memory, which processes all tokens and comes last.
    """

    def __init__(
        self,
        shape: HeadShape,
        spec: UpdateSpec,
        parts: Parts,
        sizes: JointSizes,
        name: str,
        backend: str | Backend | None,
    ) -> None:
        super().__init__()
        project = parts.projection
        assert isinstance(project, QKVProjection)
        self.update_key, self.shape, self.sizes = f"{name}.update", shape, sizes
        conv_parts = list(project.unconvolved if project.conv is None else project.conv.parts)
        streams = {"q": conv_parts[:1], "kv": conv_parts[1:]}
        channels = {stream: sum(part.channels for part in pieces) for stream, pieces in streams.items()}
        self.to_q = nn.Linear(shape.width, channels["q"], bias=False)
        count = 1 if sizes.one_map else sizes.total
        self.to_kv = nn.ModuleList(nn.Linear(shape.width, channels["kv"], bias=False) for _ in range(count))
        self.gates = nn.ModuleDict()
        self.convs = nn.ModuleDict({stream: _Convolution(project.conv, pieces) for stream, pieces in streams.items()})
        self.operands = nn.ModuleDict(parts.operands)
        for name, part in parts.operands.items():
            assert isinstance(part, LinearPart)
            self.gates[name] = nn.ModuleList(copy.deepcopy(part.proj) for _ in range(count))
            part.proj = nn.Identity()
        self.update = Update(spec, parts.update_shape(shape), backend)
        self.outputs = nn.ModuleDict(parts.outputs)
        self.out = nn.Linear(shape.value_heads * shape.value_width, shape.width, bias=parts.output_bias)
        self.reset_parameters()
        for module in self.modules():
            if isinstance(module, HasBackend):
                module.rebind(backend, torch.empty(0))

    def reset_parameters(self) -> None:
        """Draw the maps of the gates, which are copies of one."""
        for module in self.gates.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()

    @property
    def common_weights(self) -> int:
        """Number of weights of the linear maps that all memories have in common."""
        own = [self.to_kv, self.gates] if self.sizes.one_map else []
        maps = (m for part in [self.to_q, self.out, self.outputs, *own] for m in part.modules())
        return sum(m.weight.numel() for m in maps if isinstance(m, nn.Linear))

    @property
    def own_parameters(self) -> int:
        """Number of parameters of a memory that the others do not have."""
        own = sum(p.numel() for part in (self.to_kv, self.gates) for p in part.parameters())
        return 0 if self.sizes.one_map else own // self.sizes.total

    def init_state(self, batch: int) -> NamedTensors:
        """Return the states of all memories before the first token."""
        check_integer("batch", batch, 0)
        like = activation_like(self.out, self)
        state = {self.update_key: self.update.init_state(batch, like).unsqueeze(1)}
        for name, stream in self.convs.items():
            assert isinstance(stream, _Convolution)
            if stream.conv is not None:
                state[name] = stream.conv.init_state(batch, like).unsqueeze(1)
        return NamedTensors({name: y.repeat_interleave(self.sizes.total, 1) for name, y in state.items()})

    def forward(
        self, x: Tensor, pack: TokenPack, state: Mapping[str, Tensor] | None, context: Context
    ) -> tuple[Tensor, NamedTensors | None]:
        """Return y [B, T, D], and the new state, for the tokens x [B, T, D] and their memories."""
        is_packed = context.parallel is not None or self._takes_packs(x)
        layout: _Layout = _PackedLayout(pack) if is_packed else _PaddedLayout(pack, x.shape[1])
        (M, N), routed_state = pack.sizes, {name: y[:, : pack.sizes[0]] for name, y in (state or {}).items()}
        old = {name: layout.states(y.transpose(0, 1).flatten(0, 1)) for name, y in routed_state.items()}
        routed, of_all = self._channels(x, pack)
        inputs, new = self._inputs({name: layout.of_pack(y) for name, y in routed.items()}, old, layout.context)
        o, new[self.update_key] = call_part(self.update, inputs, old.get(self.update_key), layout.context)
        mixture = pack.mix(layout.to_pack(o.flatten(2)))
        rows = {name: torch.unflatten(new[name][: M * N], 0, (M, N)).transpose(0, 1) for name in old}
        if self.sizes.shared:
            old = {name: y[:, M] for name, y in (state or {}).items()}
            inputs, new = self._inputs(of_all, old, context)
            o, new[self.update_key] = call_part(self.update, inputs, old.get(self.update_key), context)
            mixture = mixture + o.flatten(2)
            rows = {name: torch.cat([y, new[name][:, None]], 1) for name, y in rows.items()}
        # contiguous, because the step of a token reads the states of all memories as one pool
        new_state = NamedTensors({name: write_back((state or {})[name], y).contiguous() for name, y in rows.items()})
        return self._outputs(mixture, x, inputs), None if state is None else new_state

    def step_(
        self, x: Tensor, memory: Tensor, weight: Tensor, real: Tensor | None, state: Mapping[str, Tensor]
    ) -> Tensor:
        """Decode one token per row, x [B, 1, D], and update the states of its memories in place. Returns y.

        All memories of all tokens, with the shared one, are the rows of one convolution and one update.

        Args: memory, weight: [B, k], the memories of each token. real: [B] bool, None: all tokens belong to a sequence.
        """
        if self.sizes.shared:
            memory = F.pad(memory, (0, 1), value=self.sizes.memories)
            weight = F.pad(weight, (0, 1), value=1.0)
        B, K = memory.shape
        token_B1 = torch.arange(B, device=x.device)[:, None]
        channels = {"q": self.to_q(x).expand(-1, K, -1)}
        for name, of_each in self._maps(x, joint=B > 1).items():  # many maps gain also for a token of several rows
            outputs = [y() for y in of_each]
            if self.sizes.one_map:
                channels[name] = outputs[0].expand(-1, K, -1)
            else:
                channels[name] = torch.cat(outputs, 1)[token_B1, memory]
        rows = {name: y.flatten(0, 1)[:, None] for name, y in channels.items()}
        pools = {name: y.view(-1, *y.shape[2:]) for name, y in state.items()}
        slots = (token_B1 * self.sizes.total + memory).flatten()
        o, inputs = self._step_rows(rows, pools, slots, None if real is None else real.repeat_interleave(K))
        o_BKC = torch.unflatten(o.flatten(1), 0, (B, K))
        if real is not None:
            o_BKC = torch.where(real[:, None, None], o_BKC, 0.0)
        mixture = (weight[..., None] * o_BKC).sum(1, keepdim=True).to(o.dtype)
        return self._outputs(mixture, x, inputs)

    def _step_rows(
        self, channels: Mapping[str, Tensor], pools: Mapping[str, Tensor], slots: Tensor, real: Tensor | None
    ) -> tuple[Tensor, UpdateInputs]:
        """Decode a token per row with the states in `slots` of the pools. Rows that are not real change none."""
        old = {name: pool.index_select(0, slots) for name, pool in pools.items() if name != self.update_key}
        inputs, new = self._inputs(channels, {name: y.clone() for name, y in old.items()}, Context())
        for name, history in new.items():
            kept = history if real is None else torch.where(real[:, None, None], history, old[name])
            pools[name].index_copy_(0, slots, kept.to(old[name].dtype))
        slots = slots if real is None else torch.where(real, slots, -1)
        return self.update.bound.step_(inputs, pools[self.update_key], slots), inputs

    def _takes_packs(self, x: Tensor) -> bool:
        return x.shape[0] > 0 and x.shape[1] > 0 and self.update.takes_packs(x)

    def _channels(self, x: Tensor, pack: TokenPack) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return q, kv and the outputs of the maps of the gates, in the rows of a pack and for the shared memory."""
        q, M = self.to_q(x), self.sizes.memories
        routed, of_all = {"q": pack.tokens(q)}, {"q": q}
        plain = [layer.weight for layer in list(self.to_kv)[:M] if is_plain_linear(layer)]
        for name, of_each in self._maps(x, joint=True).items():
            if self.sizes.one_map:
                of_all[name] = of_each[0]()
                routed[name] = pack.tokens(of_all[name])
                continue
            if name == "kv" and len(plain) == M:
                weight = torch.stack(plain)
                routed[name] = grouped_linear_of_copies(x.flatten(0, 1), pack.copies, weight, pack.rows.ends)[None]
            else:
                routed[name] = pack.chosen(torch.stack([y() for y in of_each[:M]], 2))
            if self.sizes.shared:
                of_all[name] = of_each[M]()
        return routed, of_all

    def _maps(self, x: Tensor, joint: bool) -> dict[str, list[Callable[[], Tensor]]]:
        """Return calls that apply kv and the gates' maps of each memory to x.

        Args: joint: compute the narrow maps now, in one product.
        """
        layers = {"kv": list(self.to_kv)} | {name: list(maps.children()) for name, maps in self.gates.items()}
        narrow = {f"{name} {m}": y for name in self.gates for m, y in enumerate(layers[name])}
        known = project_jointly(x, narrow) if joint else {}
        return {
            name: [functools.partial(_output, known.get(f"{name} {m}"), y, x) for m, y in enumerate(maps)]
            for name, maps in layers.items()
        }

    def _inputs(
        self, channels: Mapping[str, Tensor], old: Mapping[str, Tensor], context: Context
    ) -> tuple[UpdateInputs, dict[str, Tensor]]:
        """Return the operands of the update, and the new states of the convolutions."""
        streams: list[Tensor] = []
        new = {}
        for name, conv in self.convs.items():
            pieces, history = conv(channels[name], old.get(name), context)
            streams += pieces
            if history is not None:
                new[name] = history
        q, k, v = streams
        inputs = split_heads(q, k, v, self.shape)
        for name, part in self.operands.items():
            inputs, _ = call_part(part, channels[name], inputs, None, context)
        return inputs, new

    def _outputs(self, o_BTC: Tensor, x: Tensor, inputs: UpdateInputs) -> Tensor:
        """Apply the output parts and the output map to the mixture. Args: inputs: of an update; no part reads them."""
        o = rearrange(o_BTC, "b t (h v) -> b t h v", h=self.shape.value_heads)
        parts = list(self.outputs.values())
        while parts:
            part = parts.pop(0)
            assert isinstance(part, StatelessOutputPart)
            following = parts[0] if parts else None
            both = part.transform_with(following, o, x) if isinstance(following, OutputPart) else None
            if both is not None:
                o = both
                parts.pop(0)
            else:
                o, _ = call_part(part, o, OutputArguments(x, inputs, inputs), None, Context())
        return apply_output(o.flatten(2), self.out)


def _output(known: Tensor | None, layer: nn.Module, x: Tensor) -> Tensor:
    """Return a map's output, unless it is known."""
    return cast(Tensor, layer(x)) if known is None else known


class _Layout(ABC):
    """How the rows of a pack [1, A, C] are given to the convolution and the update."""

    context: Context

    @abstractmethod
    def states(self, x: Tensor) -> Tensor:
        """Return the states of the sequences from those [M N, ...] of the memories."""

    @abstractmethod
    def of_pack(self, x_1AC: Tensor) -> Tensor:
        """Return the rows in this layout."""

    @abstractmethod
    def to_pack(self, x: Tensor) -> Tensor:
        """Return the rows [1, A, C]."""


class _PackedLayout(_Layout):
    """The pack itself."""

    def __init__(self, pack: TokenPack) -> None:
        self.pack, self.context = pack, pack.context

    def states(self, x: Tensor) -> Tensor:
        return self.pack.with_extra(x)

    def of_pack(self, x_1AC: Tensor) -> Tensor:
        return x_1AC

    def to_pack(self, x: Tensor) -> Tensor:
        return x


class _PaddedLayout(_Layout):
    """A row of a batch for each sequence of the pack, padded to the T tokens of x: for backends without packs."""

    def __init__(self, pack: TokenPack, T: int) -> None:
        (M, N), A = pack.sizes, pack.order.shape[0]
        self.count, self.T, places = M * N, T, M * N * T
        bounds, sequence_A = pack.bounds.long(), sequence_index(pack.bounds, A)
        row_A = torch.arange(A, device=bounds.device)
        slot_A = sequence_A * T + row_A - bounds[sequence_A]
        self.slot_A = torch.where(sequence_A < self.count, slot_A, places)  # padded tokens have none
        self.row_S = row_A.new_full((places + 1,), A).scatter(0, self.slot_A, row_A)[:places]
        mask = torch.arange(T, device=bounds.device) < bounds.diff()[: self.count, None]
        self.context = Context(mask=mask)

    def states(self, x: Tensor) -> Tensor:
        return x.clone()  # x may be a view of the state that is written at the end, which `copy_` refuses

    def of_pack(self, x_1AC: Tensor) -> Tensor:
        return gather_rows(x_1AC[0], self.row_S, self.slot_A, True).view(self.count, self.T, x_1AC.shape[2])

    def to_pack(self, x: Tensor) -> Tensor:
        return gather_rows(x.flatten(0, 1), self.slot_A, self.row_S, True)[None]


class _Convolution(nn.Module):
    """The convolution, SiLU and norms of some channels; without a convolution the others alone.

    Args: like: gives the taps and the bias; parts: of the channels.
    """

    def __init__(self, like: ShortConv | None, parts: list[ConvPart]) -> None:
        super().__init__()
        self.parts, self.conv = parts, None
        if like is not None:
            bias: ConvBias = "uniform" if like.uniform_bias else like.bias is not None
            channels = sum(part.channels for part in parts)
            self.conv = ShortConv(channels, like.weight.shape[1], bias, parts, std=like.std)

    def forward(self, x: Tensor, state: Tensor | None, context: Context) -> tuple[tuple[Tensor, ...], Tensor | None]:
        if self.conv is None:
            return tuple(apply_silu_and_norm(x, self.parts)), None
        return call_part(self.conv, x, state, context)
