"""PaTH attention: softmax attention with accumulated Householder matrices as the position encoding.

B batch, T time, D width, H heads, G key-value heads, E head width, N packed sequences
"""

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from deltazoo.backends.context_parallel.heads import HeadShare
from deltazoo.backends.ops.householder_attention import HouseholderInputs, householder_attention
from deltazoo.backends.ops.path_attention import (
    PathCache,
    PathInputs,
    PathPast,
    PathToken,
    path_attention,
    path_decode_,
    path_prefill,
    refusals,
    settled_keys,
)
from deltazoo.backends.ops.short_conv import ConvPart
from deltazoo.backends.torch_ext.modes import functorch_is_active
from deltazoo.backends.triton.limits import kernel_refusals
from deltazoo.backends.update.base import Backend, state_dtype, without_autocast
from deltazoo.backends.update.varlen import sequence_index
from deltazoo.backends.update.watch import runs_by_kernel
from deltazoo.mixers.core.decode_maps import apply_output, apply_to_input
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Place
from deltazoo.mixers.core.part import projection
from deltazoo.mixers.core.sequences import segment_cumsum, unpack
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.families.attention_heads import AttentionHeadsConfig
from deltazoo.mixers.families.filter import FilterConfig
from deltazoo.mixers.families.token_cache import TokenCacheMixer
from deltazoo.mixers.parts.attention.caches import KVCache
from deltazoo.mixers.parts.attention.softmax_attention import attend_cache
from deltazoo.mixers.parts.convolution import ShortConv
from deltazoo.mixers.parts.gates.forget_gates import (
    ForgetGate,
    accumulate,
    gate_channels,
    gate_sums,
    with_gates,
)
from deltazoo.mixers.parts.norms import RMSNorm

KERNEL = "PaTH attention"  # in the records of `watch`


PENDING = 8  # C; more save fewer bytes than they cost in products
HEADS = {"k": 2, "v": 2, "moves": 2, "log_forget": 1}  # the dimension of the heads in tensors of the state


class PathAttention(AttentionHeadsConfig, FilterConfig):
    """o_t = sum_(s <= t) softmax_s(scale k_s^T H_(s+1) ... H_t q_t) v_s with H_t = I - beta_t w_t w_t^T.

    w = conv(W x) / |conv(W x)| and beta = 2 sigmoid(W x + b) per key-value head. A forget gate per query head adds
    scale (log f_(s+1) + ... + log f_t) to the score (PaTH-FoX).
    """

    name: ClassVar[str] = "path_attention"
    purpose: ClassVar[str] = "attention whose positions depend on the data"
    source: ClassVar[str] = "Yang 2025, arXiv 2505.16381"
    oracle: ClassVar[str] = "its equation, token by token in float64"

    usual_head_width: ClassVar[int] = 64

    heads: int | None = Field(default=None, ge=1, description="query heads; None: width // 64, at least 1")
    rank: int | None = Field(default=32, ge=1, description="rank of the map to w; None: full rank")
    conv_width: int = Field(default=3, ge=1, description="taps of the short convolution of w")
    conv_bias: bool = Field(default=False, description="bias of the convolution of w")
    qk_norm: bool = Field(default=False, description="RMS norm of each head of q and of k, one weight for all heads")
    forget_gate: bool = Field(default=False, description="f = sigmoid(W x + b) per head, as in FoX; False: f = 1")
    norm_eps: float = Field(default=1e-5, gt=0, allow_inf_nan=False, description="epsilon of the norms of q and k")

    def equation(self) -> str:
        gate = " + scale (log f_(s+1) + ... + log f_t)" if self.forget_gate else ""
        return f"H_t = I - beta_t w_t w_t^T, o_t = sum_(s <= t) softmax_s(scale k_s^T H_(s+1) ... H_t q_t{gate}) v_s"

    def build(
        self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None
    ) -> "PathAttentionMixer":
        return PathAttentionMixer(self, width, backend)

    def flops_context(self, width: int) -> int:
        heads, key_value_heads, head_width = self.resolve_heads(width)
        # q^T k and p v per query head, and two products per key-value head that multiply a key by a chunk's matrices
        return 4 * head_width * (heads + key_value_heads)


class Operands(NamedTuple):
    """Operands of the attention.

    q: [B, T, H, E]; k, v, w: [B, T, G, E]; logit: [B, T, G], with beta = 2 sigmoid(logit); log_forget: [B, T, H],
    float32 (float64 in float64), None without a forget gate.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    logit: Tensor
    log_forget: Tensor | None


class WideOperands(NamedTuple):
    """Operands of the attention in float32 or float64, with the channels of the forget gates.

    q: [B, T, H, E + X]; k, w: [B, T, G, E + X]; v: [B, T, G, E]; beta: [B, T, G].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor


class PathAttentionMixer(TokenCacheMixer):
    """Module of `PathAttention`.

    Softmax, gates and the matrices are in float32 (float64 in float64). Decoding multiplies every cached key by the new
    H_t; on a GPU by the last C = 8 of them, after every C-th token.

    Initialisation: linear maps and the convolution as in torch, biases of beta and of the forget gate 0, norms 1.
    State: "conv", the last inputs of the convolution; "k" [B, S, G, E + X] float32, keys multiplied by the matrices of
    all later tokens but the pending ones, with the X channels of `gate_channels` if there is a forget gate; "v"
    [B, S, G, E]; "moves" [B, C, G, 2, E + X], w and beta w of the last "pending" [B] tokens; "seen" [B]; with a forget
    gate "log_forget" [B, H], the sum over the sequence so far.
    Source: the authors' code in fla, which multiplies log f by the scale.
    """

    rewrites_cache: ClassVar[bool] = True

    def __init__(self, config: PathAttention, width: int, backend: str | Backend | None) -> None:
        super().__init__(width)
        self.heads, self.key_value_heads, self.head_width = config.resolve_heads(width)
        H, G, E = self.heads, self.key_value_heads, self.head_width
        self.scale = E**-0.5
        parts = [ConvPart(G * E, silu=True, unit=E)]
        self.filters["conv"] = ShortConv(G * E, config.conv_width, config.conv_bias, parts, backend)
        self.sizes = [H * E, G * E, G * E]
        self.to_qkv = nn.Linear(width, sum(self.sizes), bias=False)
        self.to_w = projection(width, G * E, config.rank, False)
        self.to_beta = nn.Linear(width, G)
        self.forget = ForgetGate(width, H) if config.forget_gate else None
        self.q_norm, self.k_norm = (RMSNorm(E, config.norm_eps) if config.qk_norm else nn.Identity() for _ in range(2))
        self.out = nn.Linear(H * E, width, bias=False)
        self.channels = gate_channels(H, G, E) if config.forget_gate else 0
        self.reset_parameters()

    def split_refusal(self) -> None:
        return None

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.to_beta.bias)

    def empty_cache(self, batch: int, slots: int, like: Tensor) -> dict[str, Tensor]:
        shape, E = (batch, slots, self.key_value_heads), self.head_width
        return {
            "k": like.new_zeros(*shape, E + self.channels, dtype=state_dtype(like.dtype)),
            "v": like.new_zeros(*shape, E),
        }

    def initial_state(self, batch: int, capacity: int | None, like: Tensor) -> dict[str, Tensor]:
        state = super().initial_state(batch, capacity, like)
        sizes = (batch, PENDING, self.key_value_heads, 2, self.head_width + self.channels)
        state["moves"] = like.new_zeros(sizes, dtype=state_dtype(like.dtype))
        state["pending"] = like.new_zeros(batch, dtype=torch.int64)
        if self.forget is not None:
            state["log_forget"] = like.new_zeros(batch, self.heads, dtype=state_dtype(like.dtype))
        return state

    def mix(self, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context) -> Tensor:
        if state is not None:
            self.check_cache(state, x, context)
        operands = self._operands(x, state, new, context)
        share = HeadShare(self.key_value_heads, context.parallel)
        own = None if state is None else {n: share.own(y, HEADS[n]) if n in HEADS else y for n, y in state.items()}
        with without_autocast(x):
            o = self._attend_all(Operands(*share.scatter(operands)), own, new, context.of_line())
        if state is not None:
            new |= {n: write_back(state[n], share.all(new[n], dim)) for n, dim in HEADS.items() if n in state}
        return apply_output(share.gather(o.to(operands.v.dtype)).flatten(2), self.out)

    def _attend_all(
        self, operands: Operands, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context
    ) -> Tensor:
        if state is not None:
            if self._decodes_by_kernel(operands, context):
                return self._decode_by_kernel(operands, state, new, context)
            state = self._settled(state, new)
        if state is None and runs_by_kernel(KERNEL, refusals(operands.q, operands.v)):
            return self._attend_by_kernels(operands, context)
        if state is not None and self._prefills_by_kernels(operands, context):
            return self._prefill_by_kernels(operands, state, new, context)
        wide = self._widened(operands, state, new, context)
        if state is None:
            return self._attend(wide, context)
        if context.cu_seqlens is None:
            return self._attend_cached(wide, state, new, context)
        return self._attend_cached_packed(wide, state, new, context)

    def _operands(
        self, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context
    ) -> Operands:
        E = self.head_width
        mapped = apply_to_input(x, {"qkv": self.to_qkv, "w": self.to_w, "beta": self.to_beta}, state)
        q, k, v = (torch.unflatten(y, -1, (-1, E)) for y in mapped["qkv"].split(self.sizes, -1))
        w = torch.unflatten(self.apply_filter("conv", mapped["w"], state, new, context), -1, (-1, E))
        log_forget = None if self.forget is None else self.forget(x, context)
        return Operands(self.q_norm(q), self.k_norm(k), v, w, mapped["beta"], log_forget)

    def _beta(self, logit: Tensor, context: Context) -> Tensor:
        """Return beta [B, T, G], in float32 (float64 in float64)."""
        beta = 2 * logit.to(state_dtype(logit.dtype)).sigmoid()
        return beta if context.mask is None else beta * context.mask[..., None]  # H = I at padded tokens

    def _inputs(self, operands: Operands, context: Context) -> PathInputs:
        """Return the operands of the kernels."""
        q, k, v, w, logit, log_forget = operands
        beta = self._beta(logit, context)
        sums = None if log_forget is None else self.scale * segment_cumsum(log_forget, None, context)
        return PathInputs(q, k.to(q.dtype), v.to(q.dtype), w.to(q.dtype), beta, sums, context.cu_seqlens)

    def _attend_by_kernels(self, operands: Operands, context: Context) -> Tensor:
        return path_attention(self._inputs(operands, context), self.scale)

    def _prefills_by_kernels(self, operands: Operands, context: Context) -> bool:
        if operands.q.shape[1] == 1 and context.cu_seqlens is None:
            return False
        without_gradients = ["it has no gradients with a cache."] if torch.is_grad_enabled() else []
        return runs_by_kernel(KERNEL, without_gradients or refusals(operands.q, operands.v))

    def _decodes_by_kernel(self, operands: Operands, context: Context) -> bool:
        if operands.q.shape[1] > 1 or context.cu_seqlens is not None:
            return False
        without_gradients = ["it has no gradients with a cache."] if torch.is_grad_enabled() else []
        return runs_by_kernel("PaTH decode", without_gradients or kernel_refusals(operands.q))

    def _decode_by_kernel(
        self, operands: Operands, state: dict[str, Tensor], new: dict[str, Tensor], context: Context
    ) -> Tensor:
        q, k, v, w, logit, _ = self._with_channels(operands, state, new, context)
        cache = PathCache(*(state[name] for name in PathCache._fields))
        new.update(cache._asdict())
        real = None if context.mask is None else context.mask[:, 0]
        return path_decode_(PathToken(q, k, v, w, logit, real), cache, self.scale)

    def _settled(self, state: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state whose keys are multiplied by the matrices of all later tokens, and none is pending."""
        cache, new["moves"] = PathCache(*(state[name] for name in PathCache._fields)), state["moves"]
        if (
            cache.k.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and not functorch_is_active()
            and not cache.pending.any()
        ):
            new["pending"] = cache.pending
            return state
        keys = write_back(cache.k, settled_keys(cache))
        new["pending"] = write_back(cache.pending, torch.zeros_like(cache.pending))
        return state | {"k": keys}

    def _prefill_by_kernels(
        self, operands: Operands, state: dict[str, Tensor], new: dict[str, Tensor], context: Context
    ) -> Tensor:
        E, bias, after_NH = self.head_width, None, None
        inputs = self._inputs(operands, context)
        if operands.log_forget is not None:
            sums_BTH, after_NH = accumulate(operands.log_forget, state["log_forget"], context)
            bias = self.scale * (state["log_forget"][:, None] - gate_sums(state["k"], E, operands.q.shape[2]))
        o, keys, product = path_prefill(inputs, PathPast(state["k"], state["v"], state["seen"], bias), self.scale)
        state["k"][..., :E].sub_(torch.einsum("bsge,bgfe->bsgf", state["k"][..., :E], product))
        if after_NH is not None:
            keys = with_gates(operands.q.to(keys.dtype), keys, sums_BTH, 1.0)[1]
            new["log_forget"] = write_back(state["log_forget"], after_NH)
        self.append({"k": keys, "v": operands.v}, state, new, operands.q, context)
        return o

    def _with_channels(
        self, operands: Operands, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context
    ) -> Operands:
        """Append the channels of the forget gates to q, k and w, in the dtype of the gates."""
        if operands.log_forget is None:
            return operands
        q, k, w = (y.to(operands.log_forget.dtype) for y in (operands.q, operands.k, operands.w))
        before = None if state is None else state["log_forget"]
        sums, after = accumulate(operands.log_forget, before, context)
        if before is not None and after is not None:
            new["log_forget"] = write_back(before, after)
        q, k = with_gates(q, k, sums, 1.0)  # the scale multiplies log f too
        return operands._replace(q=q, k=k, w=F.pad(w, (0, self.channels)))

    def _widened(
        self, operands: Operands, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context
    ) -> WideOperands:
        beta = self._beta(operands.logit, context)
        operands = self._with_channels(operands, state, new, context)
        q, k, v, w = (y.to(beta.dtype) for y in operands[:4])
        return WideOperands(q, k, v, w, beta)

    def _attend(self, operands: WideOperands, context: Context) -> Tensor:
        k, v = operands.k, operands.v
        B, T = k.shape[:2]
        sequence = k.new_zeros(B, T, dtype=torch.int64)
        if context.cu_seqlens is not None:
            sequence = sequence_index(context.cu_seqlens, T)[None]
        inputs = HouseholderInputs(*operands, k[:, :0], v[:, :0], sequence[:, :0], sequence)
        return householder_attention(inputs, self.scale)[0]

    def _attend_cached(
        self, operands: WideOperands, state: dict[str, Tensor], new: dict[str, Tensor], context: Context
    ) -> Tensor:
        q, k, v, w, beta = operands
        (S, T), seen = (state["k"].shape[1], q.shape[1]), state["seen"]
        if T == 1:
            position_BT = seen[:, None].clone()
            past = state["k"] - (state["k"] * w).sum(-1, keepdim=True) * (beta[..., None] * w)
            self.append({"k": k, "v": v}, state | {"k": write_back(state["k"], past)}, new, q, context)
            return attend_cache(q, KVCache(new["k"], new["v"], new["seen"]), self.scale, position_BT)
        empty = torch.arange(S, device=q.device) >= seen[:, None]
        sequence = empty.new_zeros(q.shape[0], T, dtype=torch.int64)
        inputs = HouseholderInputs(*operands, state["k"], state["v"].to(v.dtype), -empty.long(), sequence)
        o, keys = householder_attention(inputs, self.scale)
        self.append({"k": keys[:, S:], "v": v}, state | {"k": write_back(state["k"], keys[:, :S])}, new, q, context)
        return o

    def _attend_cached_packed(
        self, operands: WideOperands, state: dict[str, Tensor], new: dict[str, Tensor], context: Context
    ) -> Tensor:
        """Attend with each packed sequence in a separate row, which takes N times the memory."""
        assert context.cu_seqlens is not None
        rows, mask, index_T = unpack(operands, context.cu_seqlens)
        o = self._attend_cached(WideOperands(*rows), state, new, Context(mask=mask))
        return o.flatten(0, 1)[index_T][None]
