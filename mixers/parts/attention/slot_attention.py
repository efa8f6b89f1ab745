"""Attention to M memory slots: two linear attentions whose state has a row per slot, with a softmax between them.

B batch, T time, D width, H heads, M slots, K key width, V value width, N sequences
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from deltazoo.backends.ops.gemv import products as products_of_few_rows
from deltazoo.backends.ops.short_conv import ConvPart
from deltazoo.backends.ops.time_softmax import initial_logsumexp
from deltazoo.backends.torch_ext.devices import device_type
from deltazoo.backends.torch_ext.plain_module import is_plain
from deltazoo.backends.triton.decode.softmax_slots_op import SoftmaxSlotsCall, softmax_slots_step_, takes_softmax_slots
from deltazoo.backends.triton.element.routed_slots_op import RoutedSlotsCall, routed_slots_step_, takes_routed_slots
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.calls import call_part
from deltazoo.mixers.core.decode_maps import apply_maps, reads_weight
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import (
    HeadShape,
    MapsInput,
    OperandPart,
    OperandResult,
    OutputArguments,
    OutputPart,
    ResizesHeads,
    Stateful,
)
from deltazoo.mixers.core.token_step import TokenCall, TokenOutput, TokenStep
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.parts.attention.running_logsumexp import softmax_over_time
from deltazoo.mixers.parts.feature_maps import FeatureMap
from deltazoo.mixers.parts.gates.decays import SoftplusDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate, OutputSilu
from deltazoo.mixers.parts.norms import HeadNorm, KeyNorm, norm_before_product
from deltazoo.mixers.parts.projections import QKVProjection, ShareKeyValues
from deltazoo.mixers.parts.rotary import Rotary

RouterScore = Literal["sigmoid", "softmax"]
ROUTER_EPS = 1e-9
VALUE_SPEC = UpdateSpec(decay="channel", transition="additive", scale=1.0)


class SlotKeyPass(OperandPart, ResizesHeads, MapsInput, ABC):
    """The operands of the first pass, K_t = Diag(a_t) K_(t-1) + w_t k_t^T, with a and w computed from W x.

    Each slot is a value head with V = 1 whose value is its write strength w, so that the state of the update is K
    transposed. Returns the intermediate "values": the projected values, for the second pass.

    Args:
        shape: the sizes of keys and values; slots: M.
        query_heads: query heads, for which a and w are repeated; k and v already are. None: the heads of `shape`.
    """

    def __init__(self, shape: HeadShape, slots: int, query_heads: int | None = None) -> None:
        super().__init__()
        self.heads, self.slots = shape.heads, slots
        self.groups = (query_heads or shape.heads) // shape.heads
        self.proj = nn.Linear(shape.width, shape.heads * slots, bias=False)

    def input_map(self) -> nn.Module:
        return self.proj

    @abstractmethod
    def strengths(
        self, raw: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log a and w, [B, T, H M], and the new state. Args: raw: W x."""

    def forward(self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context) -> OperandResult:
        raw = context.apply(self.proj, x)
        log_decay, write, new_state = self.strengths(raw, inputs, state, context)
        if self.groups > 1:
            log_decay, write = (
                repeat(y, "b t (h m) -> b t (h g m)", m=self.slots, g=self.groups) for y in (log_decay, write)
            )
        v = write[..., None].to(inputs.v.dtype)
        return inputs._replace(v=v, log_decay=log_decay), new_state, {"values": inputs.v}

    def resize_heads(self, shape: HeadShape) -> HeadShape:
        return shape._replace(value_heads=shape.heads * self.slots, value_width=1)


class GatedSlots(SlotKeyPass):
    """a = sigmoid(W x)^(1 / temperature) and w = 1 - a (GSA 2409.07146)."""

    def __init__(self, shape: HeadShape, slots: int, temperature: float, query_heads: int | None = None) -> None:
        super().__init__(shape, slots, query_heads)
        self.temperature = temperature

    def strengths(
        self, raw: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        log_decay = F.logsigmoid(raw.to(state_dtype(raw.dtype))) / self.temperature
        return log_decay, -torch.expm1(log_decay), None

    def extra_repr(self) -> str:
        return f"slots={self.slots}, temperature={self.temperature:g}"


class RoutedSlots(SlotKeyPass, TokenStep):
    """log a = r g and w = 1 - a, for the log decay g [B, T, H] of an earlier part.

    r is s / sum(s), with s = sigmoid(W x), for the `active` slots of a head with the largest W x, and 0 for the others.
    Of slots with equal W x the first ones are active. With score="softmax" r is the softmax of W x instead, without a
    further normalisation.

    Args:
        active: number of slots that are not 0.
    Source: goombalab/raven.
    """

    def __init__(self, shape: HeadShape, slots: int, active: int, score: RouterScore, query_heads: int) -> None:
        super().__init__(shape, slots, query_heads)
        self.active, self.score = active, score

    def strengths(
        self, raw: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        assert inputs.log_decay is not None  # the config has a decay part before this one
        raw = torch.unflatten(raw.to(state_dtype(raw.dtype)), -1, (self.heads, self.slots))
        score = raw.sigmoid() if self.score == "sigmoid" else raw.softmax(-1)
        is_active = _first_largest(raw.detach(), self.active)
        route = score.where(is_active, 0.0)
        if self.score == "sigmoid":
            route = route / (route.sum(-1, keepdim=True) + ROUTER_EPS)
        log_decay = (route * inputs.log_decay[..., None]).flatten(2)
        return log_decay, -torch.expm1(log_decay), None

    def decode_token_(self, call: TokenCall) -> TokenOutput | None:
        before, after = (FeatureMap, KeyNorm), (SoftplusDecay, RoutedSlots, Update, SlotValuePass, OutputSilu, HeadNorm)
        if not any(call.has_parts(QKVProjection, *before, *share, *after) for share in ((), (ShareKeyValues,))):
            return None
        project, decay, second = call.part(QKVProjection), call.part(SoftplusDecay), call.part(SlotValuePass)
        norms, spec, shape = call.part(KeyNorm), call.part(Update).spec, project.shape
        q_norm, k_norm = norm_before_product(norms.q_norm), norm_before_product(norms.k_norm)
        if q_norm is None or k_norm is None or q_norm.eps != k_norm.eps or call.part(FeatureMap).feature != "silu":
            return None
        if project.conv is not None or not project.keys or not _activates_values(project.unconvolved):
            return None
        if (decay.per, decay.bound, decay.limits, decay.writes) != ("head", None, (0.0, None), False):
            return None
        if not takes_routed_slots(self.slots, shape.key_width, shape.value_width) or not second.has_decode_kernels(
            call.x
        ):
            return None
        products = apply_maps(call.x, {"qkv": project.to_qkv, "decay": decay.proj, "slots": self.proj}, call.norm)
        qkv, raw_decay, raw_slots = (products[name][:, 0] for name in ("qkv", "decay", "slots"))
        q, k, v = qkv.split([part.channels for part in project.unconvolved], -1)
        slot_call = RoutedSlotsCall(
            q, k, v, raw_decay, raw_slots, q_norm.weight, k_norm.weight, decay.A_log, decay.dt_bias,
            keys=call.states["update"], values=call.state_of(second), active=self.active,
            softmax=self.score == "softmax", scale=spec.scale_of(shape.key_width), eps=q_norm.eps,
        )  # fmt: skip
        o = torch.unflatten(routed_slots_step_(slot_call)[:, None], 2, (-1, shape.value_width))
        o = call.part(HeadNorm).transform(call.part(OutputSilu).transform(o, call.x), call.x)
        return TokenOutput(o.flatten(2))

    def extra_repr(self) -> str:
        return f"slots={self.slots}, active={self.active}, score={self.score!r}"


class SoftmaxSlots(SlotKeyPass, Stateful, TokenStep):
    """w_t = exp(s_t - z_t) and a_t = exp(z_(t-1) - z_t) = 1 - w_t with z_t = log sum_(i <= t) exp(s_i) and s = W x.

    Each slot is thus a mean of all keys, weighted by a softmax of s over time. s is clamped to +-32, as in fla.

    State: z, [B, H M].
    Source: ABC 2110.02488; the stable form, fla's `naive_recurrent_abc`.
    """

    splits: ClassVar[bool] = True

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return initial_logsumexp(batch, self.heads * self.slots, like)

    def strengths(
        self, raw: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return softmax_over_time(raw, state, context)

    def decode_token_(self, call: TokenCall) -> TokenOutput | None:
        before, after = (QKVProjection, Rotary, SoftmaxSlots), (SlotValuePass, HeadNorm, OutputGate)
        if not call.has_parts(*before, Update, *after) or self.groups > 1:
            return None
        project, rotary, _, update, second, norm, gate = call.parts.values()
        assert isinstance(project, QKVProjection) and isinstance(rotary, Rotary) and isinstance(update, Update)
        assert isinstance(second, SlotValuePass) and isinstance(norm, HeadNorm) and isinstance(gate, OutputGate)
        values, K = call.state_of(second), update.shape.key_width
        if not update.is_decayed_sum("head") or not project.is_one_map() or not is_plain(second.update):
            return None
        if norm.weight is None or norm.bias is not None or norm.groups != self.heads:
            return None
        maps = [linear for linear in (project.to_qkv, self.proj, gate.proj) if reads_weight(linear, call.x)]
        if len(maps) < 3 or not takes_softmax_slots(self.slots, K, values.shape[3]):
            return None
        seen, positions = call.state_of(rotary), call.context.positions
        position = seen.clone() if positions is None else positions[:, 0]
        seen += 1
        qkv, raw, output_gate = products_of_few_rows(call.x[:, 0], [linear.weight for linear in maps], call.norm)
        o = softmax_slots_step_(
            SoftmaxSlotsCall(
                self.heads, qkv, raw, output_gate, position, call.state_of(self), call.states["update"], values,
                norm.weight, norm.kind, norm.eps, gate.activation, rotary.theta, update.spec.scale_of(K),
            )
        )  # fmt: skip
        return TokenOutput(o[:, None])

    def extra_repr(self) -> str:
        return f"slots={self.slots}"


class SlotValuePass(OutputPart, Stateful):
    """The second pass, o_t = U_t^T softmax(K_t q_t) with U_t = Diag(a_t) U_(t-1) + w_t v_t^T.

    Its query is the softmax over the slots of the first pass's output.
    State: U, [B, H, M, V].
    """

    splits: ClassVar[bool] = True

    def __init__(self, shape: HeadShape, slots: int) -> None:
        super().__init__()
        self.heads = shape.heads
        self.update = Update(VALUE_SPEC, shape._replace(key_width=slots, value_heads=shape.heads))

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return self.update.init_state(batch, like)

    def forward(
        self, o: Tensor, arguments: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        def by_head(x: Tensor) -> Tensor:
            return rearrange(x, "b t (h m) -> b t h m", h=self.heads)

        assert arguments.inputs.log_decay is not None  # set by `SlotKeyPass`
        q = by_head(o.squeeze(-1).to(state_dtype(o.dtype))).softmax(-1).to(o.dtype)
        k = by_head(arguments.inputs.v.squeeze(-1))
        inputs = UpdateInputs(q, k, context.intermediate("values"), log_decay=by_head(arguments.inputs.log_decay))
        result: tuple[Tensor, Tensor | None] = call_part(self.update, inputs, state, context)
        return result

    def has_decode_kernels(self, x: Tensor) -> bool:
        """Whether the backend has kernels for a token of the update, which is plain. Args: x: input of the mixer."""
        meta = self.update.meta(device_type(x), x.dtype)
        return is_plain(self.update) and self.update.bound.has_decode_kernels(meta)


def _first_largest(x: Tensor, count: int) -> Tensor:
    """Return where the `count` largest numbers of the last dimension are; of equal ones the first, and NaN is largest.

    topk does not define which of equal numbers it returns, and products in 16 bits are often equal.
    """
    least = x.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    is_larger, is_equal = ~(x <= least), x == least
    left = count - is_larger.sum(-1, keepdim=True)
    return is_larger | (is_equal & (is_equal.cumsum(-1, dtype=torch.int32) <= left))


def _activates_values(parts: Sequence[ConvPart]) -> bool:
    """Whether a projection applies a SiLU to v alone, and no norm."""
    return [part.silu for part in parts] == [False, False, True] and not any(part.unit for part in parts)
