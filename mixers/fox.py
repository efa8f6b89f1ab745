"""Forgetting attention: softmax attention with a data-dependent forget gate for each head.

B batch, T time, D width, H heads, G key-value heads, E head width
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from deltazoo.backends.ops.forgetting_attention import (
    attention_with_cache,
    decode_attention,
    forgetting_attention,
    refusals,
)
from deltazoo.backends.ops.paged_attention import page_refusals
from deltazoo.backends.ops.rms_norm import apply_gate
from deltazoo.backends.torch_ext.plain_module import is_plain
from deltazoo.backends.update.base import Backend, UpdateInputs, state_dtype, without_autocast
from deltazoo.backends.update.watch import runs_by_kernel
from deltazoo.mixers.core.activations import activation_like
from deltazoo.mixers.core.decode_maps import apply_output, apply_to_input
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, PageTable, Place
from deltazoo.mixers.core.named_tensors import NamedTensors
from deltazoo.mixers.core.part import HeadShape, OutputArguments
from deltazoo.mixers.core.sequences import positions, token_counts
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.families.attention_heads import AttentionHeadsConfig
from deltazoo.mixers.families.filter import FilterConfig
from deltazoo.mixers.families.token_cache import QKV, TokenCacheMixer
from deltazoo.mixers.parts.attention.softmax_attention import attend
from deltazoo.mixers.parts.attention.split_attention import attend_split
from deltazoo.mixers.parts.convolution import TokenShift
from deltazoo.mixers.parts.gates.forget_gates import (
    ForgetGate,
    accumulate,
    gate_channels,
    gate_sums,
    in_gate_dtype,
    keys_with_gates,
    queries_with_gates,
)
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.rotary import apply_rotary, rotation_at

KERNEL = "forgetting attention"  # in the records of `watch`
QK_NORM_EPS = 1e-5  # the published code fixes it for q and k


class FoX(AttentionHeadsConfig, FilterConfig):
    """o_t = sum_(s <= t) softmax_s(scale q_t^T k_s + sum_(s < r <= t) log f_r) v_s with f = sigmoid(W x + b) per head.

    The "Pro" variant sets kv_shift, qk_norm, output_norm and gate.
    """

    name: ClassVar[str] = "fox"
    purpose: ClassVar[str] = "attention with a learned forget gate per head"
    source: ClassVar[str] = "Lin 2025, arXiv 2503.02130"
    oracle: ClassVar[str] = "its equation, token by token in float64"

    usual_head_width: ClassVar[int] = 64

    heads: int | None = Field(default=None, ge=1, description="query heads; None: width // 64, at least 1")
    rotary_theta: float | None = Field(
        default=None, gt=1, allow_inf_nan=False, description="base of rotary angles; None: no position embeddings"
    )
    kv_shift: bool = Field(
        default=False, description="k_t <- a_t k_(t-1) + (1 - a_t) k_t with a = sigmoid(W x) per head; likewise v"
    )
    qk_norm: bool = Field(default=False, description="RMS norm of each head of q and of k")
    output_norm: bool = Field(default=False, description="RMS norm of each head of o, before the gate")
    gate: bool = Field(default=False, description="output gate: o <- o * phi(W x)")
    gate_activation: Literal["sigmoid", "silu"] = Field(default="sigmoid", description="phi of the output gate")
    norm_eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False, description="epsilon of the output norm")

    def equation(self) -> str:
        return "o_t = sum_(s <= t) softmax_s(scale q_t^T k_s + log f_(s+1) + ... + log f_t) v_s"

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> "FoXMixer":
        return FoXMixer(self, width)

    def flops_context(self, width: int) -> int:
        heads, _, head_width = self.resolve_heads(width)
        return 4 * heads * head_width  # q^T k and p v


class FoXMixer(TokenCacheMixer):
    """Module of `FoX`.

    On a GPU flash kernels compute calls without a state or without gradients (`backends.ops.forgetting_attention`).
    SDPA computes all others.
    Initialisation: linear maps as in torch, bias of the forget gate 0, norms 1.
    State: "k" [B, S, G, E + X], with the channels of `gate_channels`; "v" [B, S, G, E]; "log_forget" [B, H], the sum
    over the sequence so far; "seen" [B]; with kv_shift the last k and v before the shift, "shift" [B, 1, 2 G E].
    Source: the published code, zhixuan-lin/forgetting-transformer.
    """

    def __init__(self, config: FoX, width: int) -> None:
        super().__init__(width)
        self.heads, self.key_value_heads, self.head_width = config.resolve_heads(width)
        H, G, E = self.heads, self.key_value_heads, self.head_width
        self.scale, self.theta = E**-0.5, config.rotary_theta
        self.to_q = nn.Linear(width, H * E, bias=False)
        self.to_kv = nn.Linear(width, 2 * G * E, bias=False)
        self.shift = TokenShift() if config.kv_shift else None
        self.to_mix = nn.Linear(width, 2 * G, bias=False) if config.kv_shift else None
        self.forget = ForgetGate(width, H)
        shapes = [HeadShape(width, heads, heads, E, E) for heads in (H, G, H)]
        enabled = (config.qk_norm, config.qk_norm, config.output_norm)
        epsilons = (QK_NORM_EPS, QK_NORM_EPS, config.norm_eps)
        self.q_norm, self.k_norm, self.o_norm = (
            HeadNorm(shape, eps, over="each") if on else None
            for shape, eps, on in zip(shapes, epsilons, enabled, strict=True)
        )
        self.to_gate = nn.Linear(width, H * E, bias=False) if config.gate else None
        self.gate_activation = config.gate_activation
        self.out = nn.Linear(H * E, width, bias=False)

    def empty_cache(self, batch: int, slots: int, like: Tensor) -> dict[str, Tensor]:
        H, G, E = self.heads, self.key_value_heads, self.head_width
        return {
            "k": like.new_zeros(batch, slots, G, E + gate_channels(H, G, E)),
            "v": like.new_zeros(batch, slots, G, E),
        }

    def initial_state(self, batch: int, capacity: int | None, like: Tensor) -> dict[str, Tensor]:
        state = super().initial_state(batch, capacity, like)
        state["log_forget"] = like.new_zeros(batch, self.heads, dtype=state_dtype(like.dtype))
        if self.shift is not None:
            state["shift"] = self.shift.init_state(batch, 2 * self.key_value_heads * self.head_width, like)
        return state

    def init_paged_state(self, capacity: int, pages: PageTable) -> NamedTensors:
        """Return an empty state with paged keys and values; without pages if they are not supported."""
        like = activation_like(self.out, self)
        k = self.empty_cache(1, 1, like)["k"]
        if page_refusals(k, pages.slots):
            return self.init_state(len(pages.table), capacity)
        return self.paged_state(pages, like)

    def split_refusal(self) -> None:
        return None

    def mix(self, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context) -> Tensor:
        if state is not None:
            self.check_cache(state, x, context)
        optional = {"mix": self.to_mix, "gate": self.to_gate}
        maps = {"q": self.to_q, "kv": self.to_kv} | {name: m for name, m in optional.items() if m is not None}
        if is_plain(self.forget):
            maps["forget"] = self.forget.proj
        products = apply_to_input(x, maps, state)
        q, k, v = self._operands(products, x, state, new, context)
        log_f = self.forget(x, context, products.get("forget"))
        with without_autocast(q):
            is_alone = state is None and context.parallel is None
            if is_alone and runs_by_kernel(KERNEL, refusals(q)):
                o = forgetting_attention(q, k, v, log_f, self.scale, context.cu_seqlens)
            else:
                sums = self._sum_gates(log_f, state, new, context)
                o = self._attend_with_channels(QKV(q, k, v), sums, state, new, context)
        o = o.to(x.dtype)
        o = _normalize(self.o_norm, o, x, context)
        if self.to_gate is not None:
            gate = products["gate"].view(o.shape)
            o = apply_gate(o, gate, self.gate_activation)
        return apply_output(o.flatten(2), self.out)

    def _attend_with_channels(
        self, tokens: QKV, sums: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context
    ) -> Tensor:
        """Attend with the gates as channels of the keys, which the cache stores as well."""
        q, k, v = in_gate_dtype(*tokens)
        k = keys_with_gates(k, sums, self.scale)
        if state is not None and "pages" in state:
            tokens = QKV(queries_with_gates(q, self.key_value_heads), k, v)
            return self.attend_paged(tokens, self.scale, state, new, context)
        if state is not None and runs_by_kernel(KERNEL, _cache_refusals(q, state["k"])):
            self.append({"k": k, "v": v}, state, new, q, context)
            return self._attend_cache(q, new, context)
        q = queries_with_gates(q, self.key_value_heads)
        if state is not None:
            return self.attend_cached(QKV(q, k, v), self.scale, state, new, context)
        if context.parallel is not None:
            return attend_split(q, k, v, self.scale, None, context.parallel)
        return attend(q, k, v, self.scale, None, context.cu_seqlens)

    def _attend_cache(self, q: Tensor, new: dict[str, Tensor], context: Context) -> Tensor:
        """Attend by kernels to the cache of the state after the new tokens, without gradients."""
        k, v, ends = new["k"], new["v"], new["seen"]
        if q.shape[1] == 1 and context.cu_seqlens is None:
            return decode_attention(queries_with_gates(q, self.key_value_heads), k, v, ends, self.scale)
        sums_BSH = gate_sums(k, self.head_width, self.heads, self.scale)
        before = ends - token_counts(q, context)
        return attention_with_cache(q, k, v, sums_BSH, before, ends, self.scale, context.cu_seqlens)

    def _operands(
        self,
        products: Mapping[str, Tensor],
        x: Tensor,
        state: dict[str, Tensor] | None,
        new: dict[str, Tensor],
        context: Context,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v. Write the state of the shift. Args: products: of the maps of x."""
        q = torch.unflatten(products["q"], -1, (self.heads, self.head_width))
        k, v = self._keys_and_values(products, state, new, context)
        q, k = _normalize(self.q_norm, q, x, context), _normalize(self.k_norm, k, x, context)
        if self.theta is not None:
            position_BT = positions(x, None if state is None else state["seen"], context)
            rotation = rotation_at(position_BT, self.head_width // 2, self.theta, state_dtype(x.dtype))
            q, k = apply_rotary(q, rotation), apply_rotary(k, rotation)
        return q, k, v

    def _sum_gates(
        self, log_f: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context
    ) -> Tensor:
        """Return the sums of the log gates [B, T, H]. Write their state."""
        sums, after = accumulate(log_f, None if state is None else state["log_forget"], context)
        if state is not None and after is not None:
            new["log_forget"] = write_back(state["log_forget"], after)
        return sums

    def _keys_and_values(
        self, products: Mapping[str, Tensor], state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context
    ) -> tuple[Tensor, Tensor]:
        kv = products["kv"]
        heads = torch.unflatten(kv, -1, (2 * self.key_value_heads, self.head_width))
        if self.shift is not None:
            previous, after = self.shift(kv, None if state is None else state["shift"], context)
            if after is not None:
                new["shift"] = after
            mix = products["mix"].to(state_dtype(kv.dtype)).sigmoid()[..., None]
            heads = (mix * previous.view(heads.shape) + (1 - mix) * heads).to(heads.dtype)
        k, v = heads.chunk(2, 2)
        return k, v


def _cache_refusals(q: Tensor, cached_k: Tensor) -> list[str]:
    """Return why no kernel attends to a cache."""
    if torch.is_grad_enabled():
        return ["it has no gradients with a cache."]
    if cached_k.dtype != q.dtype:
        return [f"it needs a cache in {q.dtype}, the dtype of q, got {cached_k.dtype}."]
    return refusals(q)


def _normalize(norm: HeadNorm | None, heads: Tensor, x: Tensor, context: Context) -> Tensor:
    """Return norm(heads), or the heads [B, T, H, E] without a norm. Args: x: input of the mixer."""
    if norm is None:
        return heads
    unused = UpdateInputs(heads, heads, heads)
    return norm(heads, OutputArguments(x, unused, unused), None, context)[0]
