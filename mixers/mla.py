"""Multi-head latent attention: keys and values of all heads are computed from one cached vector per token.

B batch, T time, S slots, D width, H heads, K key width, V value width, C latent width, R rotary width
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import torch
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor, nn

from deltazoo.backends.context_parallel.exchange import gather_line
from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.ops.latent_attention import latent_attention, refusals
from deltazoo.backends.torch_ext.plain_module import is_plain_linear
from deltazoo.backends.triton.attention.latent_op import MAX_LATENT, MAX_ROTARY
from deltazoo.backends.triton.attention.latent_token_op import MAX_HEAD, LatentTokenCall, attend_latent_token_
from deltazoo.backends.update.base import Backend, state_dtype
from deltazoo.backends.update.watch import runs_by_kernel
from deltazoo.mixers.core.decode_maps import apply_output, apply_to_input, is_step, reads_weight
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Place
from deltazoo.mixers.core.sequences import positions
from deltazoo.mixers.families.filter import FilterConfig
from deltazoo.mixers.families.token_cache import TokenCacheMixer
from deltazoo.mixers.parts.attention.caches import KVCache
from deltazoo.mixers.parts.attention.softmax_attention import attend, attend_cache, attend_packed
from deltazoo.mixers.parts.attention.split_attention import attend_cached_split, attend_line
from deltazoo.mixers.parts.norms import RMSNorm, norm_before_product
from deltazoo.mixers.parts.rope_scaling import RopeScaling, check_rope_scaling
from deltazoo.mixers.parts.rotary import apply_rotary, rotation_at


class MLA(FilterConfig):
    """c_t = norm(W x_t), k_t = [W_k c_t, r_t], v_t = W_v c_t, o_t = sum_(s <= t) softmax_s(scale q_t^T k_s) v_s.

    The key r_t = W_r x_t is shared by all heads. It and the last channels of q_t get rotary embeddings, unless
    rotary_theta is None (Kimi Linear). The cache stores c_t and r_t of every token, also with a window. With a gate,
    o_t <- o_t * sigmoid(W_g x_t).
    """

    name: ClassVar[str] = "mla"
    family: ClassVar[str] = "softmax attention"
    purpose: ClassVar[str] = "attention with a small cache of latent vectors"
    source: ClassVar[str] = "DeepSeek-V2 2024, arXiv 2405.04434; without positions: Kimi Linear 2510.26692"
    oracle: ClassVar[str] = "transformers `deepseek_v3`, `kimi_linear`; its equation in float64"

    heads: int | None = Field(default=None, ge=1, description="heads; None: width // 128, at least 1")
    key_width: int | None = Field(
        default=None, ge=1, description="K, width per head of the keys computed from c; None: width // heads"
    )
    value_width: int | None = Field(default=None, ge=1, description="V, width of v per head; None: key_width")
    latent_width: int | None = Field(default=None, ge=1, description="C, width of c; None: 4 * key_width")
    rotary_width: int | None = Field(
        default=None,
        ge=0,
        description="R, width of r, even with rotary embeddings; None: key_width / 2, rounded down to even",
    )
    query_rank: int | None = Field(
        default=None, ge=1, description="q = W norm(W' x) with W' of this rank; None: q = W x"
    )
    rotary_theta: float | None = Field(
        default=10000.0,
        gt=1,
        allow_inf_nan=False,
        description="base of the rotary angles; None: no position embeddings",
    )
    rope_scaling: RopeScaling | None = Field(
        default=None, description="scaling of the rotary frequencies, as transformers' rope_scaling; None: none"
    )
    scale: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="factor on the scores; None: (K + R) ** -0.5, times that of rope_scaling.mscale_all_dim",
    )
    window: int | None = Field(
        default=None, ge=1, description="tokens to attend to, the current one included; None: all"
    )
    gate: Literal["head", "channel"] | None = Field(
        default=None, description="output gate: head: one number per head (Ling 3.0); channel: per channel (Kimi K3)"
    )
    bias: bool = Field(
        default=False, description="biases of the output map, of the map to c and r, and of W' (transformers)"
    )
    norm_eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False, description="epsilon of the norms")

    @model_validator(mode="after")
    def _scaling_has_rotary_embeddings(self) -> Self:
        check_rope_scaling(self.rotary_theta, self.rope_scaling)
        return self

    def equation(self) -> str:
        return "c_t = norm(W x_t), k_t = [W_k c_t, r_t], o_t = sum_(s <= t) softmax_s(scale q_t^T k_s) W_v c_s"

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> "MLAMixer":
        return MLAMixer(self, width)

    def flops_context(self, width: int) -> int:
        with torch.device("meta"):
            mixer = self.build(width)
        return 2 * mixer.heads * (mixer.K + mixer.R + mixer.V)  # q^T k and p v


class MLAMixer(TokenCacheMixer):
    """Module of `MLA`.

    Decoding of one token multiplies W_k into q and W_v into the output, and attends to the cached c and r as one key
    head with values c; of few rows on a GPU by `attend_latent_token_`, without a window. Other calls, and a `to_kv`
    that is not plain, compute k and v of all heads.

    Initialisation: linear maps as in torch, norms 1. State: "latent" [B, S, 1, C + R], c and r; "seen" [B].
    Source: sections 2.1.2 and 2.1.3, appendix C.
    """

    def __init__(self, config: MLA, width: int) -> None:
        super().__init__(width)
        self.heads = config.heads or max(1, width // 128)
        self.K = config.key_width or width // self.heads
        if self.K < 1:
            raise ConfigError(f"heads must be at most width = {width} without a key_width, got {self.heads}")
        self.V = config.value_width or self.K
        self.C = config.latent_width or 4 * self.K
        self.R = self.K // 4 * 2 if config.rotary_width is None else config.rotary_width
        self.theta, self.rope_scaling, self.window = config.rotary_theta, config.rope_scaling, config.window
        if self.theta is not None and self.R % 2:
            raise ConfigError(f"rotary_width must be even with rotary embeddings, got {self.R}")
        score_factor = 1.0 if config.rope_scaling is None else config.rope_scaling.score_factor()
        self.scale = score_factor * (self.K + self.R) ** -0.5 if config.scale is None else config.scale
        query_width = self.heads * (self.K + self.R)
        if config.query_rank is None:
            self.to_q: nn.Module = nn.Linear(width, query_width, bias=False)
        else:
            self.to_q = nn.Sequential(
                nn.Linear(width, config.query_rank, bias=config.bias),
                RMSNorm(config.query_rank, config.norm_eps),
                nn.Linear(config.query_rank, query_width, bias=False),
            )
        self.to_latent = nn.Linear(width, self.C + self.R, bias=config.bias)
        self.latent_norm = RMSNorm(self.C, config.norm_eps)
        self.to_kv = nn.Linear(self.C, self.heads * (self.K + self.V), bias=False)
        self.to_gate = None
        if config.gate is not None:
            self.to_gate = nn.Linear(width, self.heads * (1 if config.gate == "head" else self.V), bias=False)
        self.out = nn.Linear(self.heads * self.V, width, bias=config.bias)

    def empty_cache(self, batch: int, slots: int, like: Tensor) -> dict[str, Tensor]:
        return {"latent": like.new_zeros(batch, slots, 1, self.C + self.R)}

    def mix(self, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context) -> Tensor:
        maps = {"q": self.to_q, "latent": self.to_latent} | ({} if self.to_gate is None else {"gate": self.to_gate})
        products = apply_to_input(x, maps, state)
        if state is not None and is_step(x, state):
            o_B1C = self._attend_token_(products, state, new, context)
            if o_B1C is not None:
                return apply_output(o_B1C, self.out)
        q, c, r = self._operands(products, positions(x, None if state is None else state["seen"], context))
        if context.parallel is not None:
            o = self._attend_split(q, c, r, state, new, context)
        elif state is None:
            o = attend(q, *self._keys_and_values(c, r), self.scale, self.window, context.cu_seqlens)
        else:
            self.check_cache(state, x, context)
            o = self._attend_cached(q, c, r, state, new, context)
        if self.to_gate is not None:
            raw = torch.unflatten(products["gate"], -1, (self.heads, -1))
            o = (o * raw.to(state_dtype(raw.dtype)).sigmoid()).to(o.dtype)
        return self.out(o.flatten(2))

    def split_refusal(self) -> None:
        return None

    def _attend_split(
        self, q: Tensor, c: Tensor, r: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context
    ) -> Tensor:
        """Gather c and r of all ranks, which are smaller than k and v."""
        plan = context.parallel
        assert plan is not None
        latent = gather_line(torch.cat([c, r], -1), plan)
        k, v = self._keys_and_values(*self._split(latent))
        if state is None:
            return attend_line(q, k, v, self.scale, self.window, plan)
        self.check_cache(state, q, context)
        cache = KVCache(*self._keys_and_values(*self._split(state["latent"].to(latent.dtype))), state["seen"])
        o = attend_cached_split(q, k, v, self.scale, self.window, cache, plan)
        self.append({"latent": latent}, state, new, q, context)
        return o

    def _attend_cached(
        self, q: Tensor, c: Tensor, r: Tensor, state: dict[str, Tensor], new: dict[str, Tensor], context: Context
    ) -> Tensor:
        latent = torch.cat([c, r], -1)
        if context.cu_seqlens is not None:
            k, v = self._keys_and_values(c, r)
            cache = KVCache(*self._keys_and_values(*self._split(state["latent"].to(latent.dtype))), state["seen"])
            o = attend_packed(q, k, v, self.scale, self.window, cache, context.cu_seqlens)
            self.append({"latent": latent}, state, new, q, context)
            return o
        position_BT = state["seen"][:, None] + torch.arange(q.shape[1], device=q.device)
        self.append({"latent": latent}, state, new, q, context)
        latent = new["latent"].to(latent.dtype)
        if q.shape[1] == 1 and is_plain_linear(self.to_kv) and self.to_kv.bias is None:
            return self._decode(q, latent, new["seen"], position_BT)
        cache = KVCache(*self._keys_and_values(*self._split(latent)), new["seen"])
        return attend_cache(q, cache, self.scale, position_BT, self.window)

    def _attend_token_(
        self, products: Mapping[str, Tensor], state: dict[str, Tensor], new: dict[str, Tensor], context: Context
    ) -> Tensor | None:
        """Decode one token per row by kernels from the products of the input up to the output map, [B, 1, H V].

        Returns: None, with the state as it was, if the kernels cannot.
        """
        norm, latent, position = norm_before_product(self.latent_norm), state["latent"], context.positions
        is_alone = context.mask is None and context.cu_seqlens is None and context.parallel is None
        is_small = max(self.K, self.V) <= MAX_HEAD and self.C <= MAX_LATENT and self.R <= MAX_ROTARY
        if norm is None or self.window is not None or not is_alone or not is_small:
            return None
        if not reads_weight(self.to_kv, latent) or any(y.dtype != latent.dtype for y in products.values()):
            return None
        self.check_cache(state, products["q"], context)
        gate, pairs = products.get("gate"), 0 if self.theta is None else self.R // 2
        scaling = self.rope_scaling.frequencies(self.theta, pairs) if self.theta and self.rope_scaling and pairs else ()
        o = attend_latent_token_(
            LatentTokenCall(
                products["q"][:, 0], products["latent"][:, 0], None if gate is None else gate[:, 0], norm.weight,
                self.to_kv.weight, None if position is None else position[:, 0], latent, state["seen"],
                self.heads, pairs, self.theta or 2.0, [*scaling], norm.eps, self.scale,
            )
        )  # fmt: skip
        new.update(latent=latent, seen=state["seen"])
        return o[:, None]

    def _operands(self, products: Mapping[str, Tensor], position_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, T, H, K + R], c [B, T, 1, C] and r [B, T, 1, R]. Args: products: of the maps of the input."""
        q = torch.unflatten(products["q"], -1, (self.heads, self.K + self.R))
        c, r = self._split(products["latent"][:, :, None])
        if self.theta is not None:
            rotation = rotation_at(position_BT, self.R // 2, self.theta, state_dtype(q.dtype), self.rope_scaling)
            q = torch.cat([q[..., : self.K], apply_rotary(q[..., self.K :], rotation)], -1)
            r = apply_rotary(r, rotation)
        return q, self.latent_norm(c), r

    def _split(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        return latent[..., : self.C], latent[..., self.C :]

    def _keys_and_values(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """Return k [B, T, H, K + R] and v [B, T, H, V]."""
        kv = rearrange(self.to_kv(c), "b t 1 (h e) -> b t h e", h=self.heads)
        return torch.cat([kv[..., : self.K], r.expand(-1, -1, self.heads, -1).to(kv.dtype)], -1), kv[..., self.K :]

    def _decode(self, q: Tensor, latent: Tensor, seen: Tensor, position_BT: Tensor) -> Tensor:
        """Attend to the cached vectors, [B, S, 1, C + R]. Returns: [B, 1, H, V]."""
        weight_HEC = torch.unflatten(self.to_kv.weight, 0, (self.heads, self.K + self.V))
        q_HC = torch.einsum("bthk,hkc->bthc", q[..., : self.K], weight_HEC[:, : self.K])
        query = torch.cat([q_HC, q[..., self.K :].to(q_HC.dtype)], -1)
        refused = refusals(query[:, 0], latent[:, :, 0], self.C) if self.window is None else ["it has no window."]
        if runs_by_kernel("latent attention of one token", refused):
            o_HC = latent_attention(query[:, 0], latent[:, :, 0], seen, self.C, self.scale)[:, None]
        else:
            # The heads are queries of one head: with heads of their own SDPA would copy the cached vectors for each.
            cache = KVCache(latent, latent[..., : self.C], seen)
            o_HC = attend_cache(query.transpose(1, 2), cache, self.scale, position_BT, self.window).transpose(1, 2)
        return torch.einsum("bthc,hvc->bthv", o_HC, weight_HEC[:, self.K :])
