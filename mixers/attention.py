"""Softmax attention with torch's SDPA: over all previous tokens, or over a sliding window.

B batch, T time, D width, H heads, G key-value heads, E head width, W window, N packed sequences
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, Self

import torch
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor, nn

from deltazoo.backends.io.errors import StateError
from deltazoo.backends.ops import token_attention
from deltazoo.backends.ops.gemv import Norm, add_product
from deltazoo.backends.ops.paged_attention import page_refusals
from deltazoo.backends.ops.token_attention import TokenOperands, Turn, attend_token_
from deltazoo.backends.torch_ext.plain_module import is_plain
from deltazoo.backends.update.base import Backend, state_dtype
from deltazoo.backends.update.check import check_integer
from deltazoo.backends.update.watch import runs_by_kernel
from deltazoo.mixers.core.activations import activation_like
from deltazoo.mixers.core.decode_maps import apply_maps, reads_weight
from deltazoo.mixers.core.mixer import FIRST_PLACE, CommitForm, Context, Cost, Mixer, MixerOutput, PageTable, Place
from deltazoo.mixers.core.sequences import check_state, left_align, positions, token_counts, undo_left_align
from deltazoo.mixers.core.state import nbytes
from deltazoo.mixers.families.attention_heads import AttentionHeadsConfig
from deltazoo.mixers.parts.attention.caches import (
    KVCache,
    append_to_cache,
    check_capacity,
    empty_cache,
    required_capacity,
)
from deltazoo.mixers.parts.attention.pages import PagedCache, attend_paged, empty_pages
from deltazoo.mixers.parts.attention.softmax_attention import (
    attend,
    attend_cache,
    attend_last,
    attend_packed,
    attend_ring_buffer,
    decode_refusals,
)
from deltazoo.mixers.parts.attention.split_attention import (
    attend_cached_split,
    attend_split,
    document_starts,
    gather_keys_and_values,
)
from deltazoo.mixers.parts.norms import RMSNorm, norm_before_product
from deltazoo.mixers.parts.rope_scaling import RopeScaling, check_rope_scaling
from deltazoo.mixers.parts.rotary import apply_rotary, rotation_at


class AttentionConfig(AttentionHeadsConfig, ABC):
    """o_t = sum_s softmax_s(scale q_t^T k_s) v_s over the tokens s <= t, or the last `window` of them."""

    rotary_theta: float | None = Field(
        default=10000.0,
        gt=1,
        allow_inf_nan=False,
        description="base of the rotary angles; None: no position embeddings",
    )
    rotary_fraction: float = Field(
        default=1.0, gt=0, le=1, description="fraction of each head's channels with rotary embeddings"
    )
    rope_scaling: RopeScaling | None = Field(
        default=None, description="scaling of the rotary frequencies, as transformers' rope_scaling; None: none"
    )
    qk_norm: Literal["head", "all"] | None = Field(
        default=None,
        description="RMS norm of q and k before the rotary embeddings; head: of each head, with one weight for all "
        "heads (Qwen3); all: of all heads as one vector (OLMo)",
    )
    gate: bool = Field(default=False, description="output gate: o <- o * sigmoid(W x)")
    out_bias: bool = Field(default=False, description="bias of the output map, as in Griffin; it starts at 0")
    scale: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="factor on the scores; None: head_width ** -0.5"
    )
    key_scale: float = Field(default=1.0, allow_inf_nan=False, description="factor on the keys, as in Falcon-H1")
    norm_eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False, description="epsilon of the norm of q and k")
    norm_offset: float = Field(
        default=0.0, allow_inf_nan=False, description="added to the weights of the norm of q and k; 1 in Qwen3-Next"
    )

    @model_validator(mode="after")
    def _scaling_has_rotary_embeddings(self) -> Self:
        check_rope_scaling(self.rotary_theta, self.rope_scaling)
        return self

    @abstractmethod
    def window_or_none(self) -> int | None:
        """Return the number of tokens to attend to, including the current one; None: all."""

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> "AttentionMixer":
        check_integer("width", width)
        return AttentionMixer(self, width)

    def cost(self, width: int) -> Cost:
        with torch.device("meta"):
            mixer = self.build(width)
            if mixer.window is None:
                bytes_1, bytes_2 = (nbytes(mixer.init_state(1, capacity)) for capacity in (1, 2))
            else:
                bytes_1 = bytes_2 = nbytes(mixer.init_state(1))
        maps = sum(2 * m.weight.numel() for m in mixer.modules() if isinstance(m, nn.Linear))
        flops_per_key = 4 * mixer.heads * mixer.head_width  # q^T k and p v
        if mixer.window is not None:
            return Cost(maps + mixer.window * flops_per_key, 0, bytes_1, 0)
        cache_bytes = bytes_2 - bytes_1
        return Cost(maps, flops_per_key, bytes_1 - cache_bytes, cache_bytes)


class Attention(AttentionConfig):
    """Attention to all previous tokens. The cache holds every token: `init_state` needs a capacity."""

    name: ClassVar[str] = "attention"
    purpose: ClassVar[str] = "exact recall; the cache grows with the text"
    source: ClassVar[str] = "Vaswani 2017, arXiv 1706.03762; GQA 2305.13245; RoPE 2104.09864"
    oracle: ClassVar[str] = "transformers `llama`, `qwen3_next`, `olmo_hybrid`"

    def window_or_none(self) -> None:
        return None

    def equation(self) -> str:
        return "o_t = sum_(s <= t) softmax_s(scale q_t^T k_s) v_s"


class SlidingWindow(AttentionConfig):
    """Attention to the last `window` tokens, with compute linear in the sequence length.

    The cache is a ring buffer of `window` slots, or of `capacity` slots if that is smaller.
    """

    name: ClassVar[str] = "sliding_window"
    purpose: ClassVar[str] = "exact recall of the last tokens; fixed cache"
    source: ClassVar[str] = "Beltagy 2020, arXiv 2004.05150; in hybrids: Samba 2406.07522, Gated DeltaNet 2412.06464"
    oracle: ClassVar[str] = "masked softmax in float64"

    window: int = Field(default=2048, ge=1, description="tokens to attend to, the current one included")

    def window_or_none(self) -> int:
        return self.window

    def equation(self) -> str:
        return f"o_t = sum_(t - {self.window} < s <= t) softmax_s(scale q_t^T k_s) v_s"


class AttentionMixer(Mixer):
    """Module of `Attention` and `SlidingWindow`.

    Rotary angles are computed in float64 modulo 2 pi. State: `KVCache`, or of full attention `PagedCache`.
    """

    commit_form: ClassVar[CommitForm] = "cache"

    def __init__(self, config: AttentionConfig, width: int) -> None:
        super().__init__()
        self.width, self.window = width, config.window_or_none()
        self.heads, self.key_value_heads, self.head_width = config.resolve_heads(width)
        scale = self.head_width**-0.5 if config.scale is None else config.scale
        self.scale = scale * config.key_scale  # the rotation of the keys is linear
        self.theta, self.rope_scaling = config.rotary_theta, config.rope_scaling
        self.rotary_pairs = int(config.rotary_fraction * self.head_width) // 2
        sizes = [self.heads * self.head_width, *[self.key_value_heads * self.head_width] * 2]
        self.to_qkv = nn.Linear(width, sum(sizes), bias=False)
        self.sizes = sizes
        self.qk_norm = config.qk_norm
        norm_widths = sizes[:2] if config.qk_norm == "all" else [self.head_width] * 2
        self.q_norm, self.k_norm = (
            RMSNorm(norm_width, config.norm_eps, offset=config.norm_offset) if config.qk_norm else nn.Identity()
            for norm_width in norm_widths
        )
        self.to_gate = nn.Linear(width, sizes[0], bias=False) if config.gate else None
        self.out = nn.Linear(sizes[0], width, bias=config.out_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bias of the output map to 0."""
        if self.out.bias is not None:
            nn.init.zeros_(self.out.bias)

    def split_refusal(self) -> None:
        return None

    def init_state(self, batch: int, capacity: int | None = None) -> KVCache:
        """Return an empty cache of `capacity` slots; with a window, of at most `window` slots.

        Raises: StateError, for full attention without a capacity.
        """
        check_integer("batch", batch, 0)
        slots = required_capacity(
            capacity if self.window is None else min(self.window, self.window if capacity is None else capacity)
        )
        return empty_cache(batch, slots, self.key_value_heads, self.head_width, activation_like(self.out, self))

    def init_paged_state(self, capacity: int, pages: PageTable) -> KVCache | PagedCache:
        """Return an empty paged cache; with a window, or if pages are not supported, the cache of `init_state`."""
        like = activation_like(self.out, self)
        q = like.new_empty(1, 1, 1, self.head_width)
        if self.window is not None or page_refusals(q, pages.slots):
            return self.init_state(len(pages.table), capacity)
        return empty_pages(pages, self.key_value_heads, self.head_width, like)

    def forward(
        self, x: Tensor, state: KVCache | PagedCache | None = None, context: Context | None = None
    ) -> MixerOutput:
        x_BTD, context, order = left_align(x, self.width, context, getattr(self.out, "weight", None))
        if state is not None:
            self._check_cache(state, x_BTD, context)
        qkv_BTC = self.to_qkv(x_BTD)
        q, k, v = self._operands(qkv_BTC, None if state is None else state.position, context)
        if context.parallel is not None and state is None:
            o_BTHE = attend_split(q, k, v, self.scale, self.window, context.parallel)
        elif state is None:
            o_BTHE = attend(q, k, v, self.scale, self.window, context.cu_seqlens)
        else:
            o_BTHE, state = self._attend_cached(q, k, v, state, context)
        o_BTC = rearrange(o_BTHE, "b t h e -> b t (h e)")
        if self.to_gate is not None:
            o_BTC = _apply_gate(o_BTC, self.to_gate(x_BTD))
        return MixerOutput(undo_left_align(self.out(o_BTC), order), state)

    def residual_step(self, x: Tensor, norm: Norm, state: KVCache | PagedCache, context: Context) -> MixerOutput | None:
        has_norms = type(self.q_norm) in (nn.Identity, RMSNorm) and is_plain(self.q_norm) and is_plain(self.k_norm)
        if context.mask is not None or context.cu_seqlens is not None or context.parallel is not None or not has_norms:
            return None
        if context.verify or not reads_weight(self.out, x):
            return None
        x_B1D, context, _ = left_align(x, self.width, context, self.out.weight)
        self._check_cache(state, x_B1D, context)
        maps: dict[str, nn.Module] = {"qkv": self.to_qkv}
        if self.to_gate is not None:
            maps["gate"] = self.to_gate
        mapped = apply_maps(x_B1D, maps, norm)
        o_B1C = self._attend_token(mapped["qkv"], mapped.get("gate"), state, context)
        if o_B1C is None:
            q, k, v = self._operands(mapped["qkv"], state.position, context)
            o_B1HE, state = self._attend_cached(q, k, v, state, context)
            o_B1C = rearrange(o_B1HE, "b t h e -> b t (h e)")
            if self.to_gate is not None:
                o_B1C = _apply_gate(o_B1C, mapped["gate"])
        return MixerOutput(add_product(x_B1D, o_B1C, self.out.weight), state)

    def commit_(self, draft: KVCache, state: KVCache | PagedCache, accepted: Tensor) -> None:
        with torch.no_grad():
            if isinstance(state, PagedCache):  # the pages hold the drafted tokens already
                state.position.add_(accepted)
                return
            append_to_cache(state, draft.k, draft.v, accepted)

    def _attend_token(
        self, qkv_B1C: Tensor, gate_B1C: Tensor | None, cache: KVCache | PagedCache, context: Context
    ) -> Tensor | None:
        """Attend by one operator, which changes the cache in place; None if the kernels do not compute it."""
        norms: list[Norm | None] = [None, None]
        if self.qk_norm == "head" and isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            norms = [norm_before_product(norm) for norm in (self.q_norm, self.k_norm)]
        if self.qk_norm is not None and None in norms:
            return None
        buffers, table = (cache.pages, cache.table) if isinstance(cache, PagedCache) else (cache, None)
        if context.positions is not None or token_attention.refusals(self.head_width, buffers.k.dtype, qkv_B1C):
            return None
        turn = None
        if self.theta is not None and self.rotary_pairs:
            scaling = () if self.rope_scaling is None else self.rope_scaling.frequencies(self.theta, self.rotary_pairs)
            turn = Turn(self.rotary_pairs, self.theta, tuple(scaling))
        operands = TokenOperands(qkv_B1C[:, 0], norms[0], norms[1], None if gate_B1C is None else gate_B1C[:, 0])
        return attend_token_(operands, buffers.k, buffers.v, cache.position, turn, self.scale, table)[:, None]

    def _operands(self, qkv_BTC: Tensor, offset_N: Tensor | None, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv_BTC.split(self.sizes, dim=-1)
        if self.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (rearrange(stream, "b t (h e) -> b t h e", e=self.head_width) for stream in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.theta is not None:
            position_BT = positions(qkv_BTC, offset_N, context)
            rotation = rotation_at(position_BT, self.rotary_pairs, self.theta, state_dtype(q.dtype), self.rope_scaling)
            q, k = apply_rotary(q, rotation), apply_rotary(k, rotation)
        return q, k, v

    def _attend_cached(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache | PagedCache, context: Context
    ) -> tuple[Tensor, KVCache | PagedCache]:
        count_N = token_counts(q, context)
        if isinstance(cache, PagedCache):
            o = attend_paged(q, k, v, self.scale, cache, context)
            if context.verify:
                return o, KVCache(k, v, count_N)
            return o, cache._replace(position=cache.position.add_(count_N))
        if context.parallel is not None:
            plan = context.parallel
            k, v = gather_keys_and_values(k, v, plan)
            o = attend_cached_split(q, k, v, self.scale, self.window, cache, plan)
            return o, append_to_cache(cache, k, v, count_N, document_starts(plan))
        if context.cu_seqlens is not None:
            o = attend_packed(q, k, v, self.scale, self.window, cache, context.cu_seqlens)
            return o, append_to_cache(cache, k, v, count_N, context.cu_seqlens[:-1].long())
        if self.window is not None and (q.shape[1] != 1 or context.verify):
            o = attend_ring_buffer(q, k, v, self.scale, cache)
            return o, KVCache(k, v, count_N) if context.verify else append_to_cache(cache, k, v, count_N)
        position_BT = cache.position[:, None] + torch.arange(q.shape[1], device=q.device)
        if context.verify:  # slots after the position hold no tokens
            cache = append_to_cache(cache._replace(position=cache.position.clone()), k, v, count_N)
            return attend_cache(q, cache, self.scale, position_BT), KVCache(k, v, count_N)
        cache = append_to_cache(cache, k, v, count_N)
        if q.shape[1] == 1 and runs_by_kernel("attention of one token", decode_refusals(q, cache)):
            return attend_last(q, cache, self.scale), cache
        return attend_cache(q, cache, self.scale, position_BT), cache

    def _check_cache(self, cache: KVCache | PagedCache, x_BTD: Tensor, context: Context) -> None:
        if not isinstance(cache, KVCache | PagedCache):
            raise StateError(f"the state of attention must be a KVCache or a PagedCache, got {type(cache).__name__}")
        tensors = {name: tensor for name, tensor in cache._asdict().items() if isinstance(tensor, Tensor)}
        check_state({name: tensor.shape[0] for name, tensor in tensors.items()}, x_BTD, context)
        expected = (self.key_value_heads, self.head_width)
        buffers = cache.pages if isinstance(cache, PagedCache) else cache
        if buffers.k.shape[2:] != expected or buffers.v.shape != buffers.k.shape:
            raise StateError(
                f"the cache must have key-value heads and head width {expected}, got k {list(buffers.k.shape)} and "
                f"v {list(buffers.v.shape)}"
            )
        if isinstance(cache, PagedCache) and context.verify:
            return  # drafted tokens beyond the pages are not stored
        slots = cache.capacity if isinstance(cache, PagedCache) else cache.k.shape[1]
        if self.window is not None and slots > self.window:
            raise StateError(f"the cache must have at most window = {self.window} slots, got {slots}")
        if slots != self.window and x_BTD.device.type == "cpu":  # elsewhere values are not inspected
            check_capacity(cache.position, token_counts(x_BTD, context), slots)


def _apply_gate(o: Tensor, gate: Tensor) -> Tensor:
    return (o * gate.to(state_dtype(gate.dtype)).sigmoid()).to(o.dtype)
