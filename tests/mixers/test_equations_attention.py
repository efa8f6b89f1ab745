"""Relatives of softmax attention against their equations, outputs and all gradients in float64.

B batch, T time, H heads, E head width
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from equations import (
    Case,
    LargestTensor,
    Weights,
    assert_equals_equation,
    assert_same_with_gradients,
    conv,
    linear,
    rotate,
    split_heads,
    token_shift,
    unit,
)
from torch import Tensor

from deltazoo.backends.io.errors import ConfigError, StateError
from deltazoo.backends.ops.householder_attention import CHUNK, HouseholderInputs, householder_attention
from deltazoo.mixers import MLA, FoX, MixerConfig, PathAttention
from deltazoo.mixers.core.conformance import relative_error

H, K, V, C, R = 2, 6, 5, 7, 4
E = 6


def softmax_attention(scores: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Return the average of v [B, T, H, V] with the softmax over t - window < s <= t of scores [B, H, T, S]."""
    rows = []
    for t in range(v.shape[1]):
        seen = slice(0 if window is None else max(t + 1 - window, 0), t + 1)
        weight = scores[:, :, t, seen].exp()
        rows.append(torch.einsum("bhs,bshv->bhv", weight / weight.sum(-1, keepdim=True), v[:, seen]))
    return torch.stack(rows, 1)


def norm(w: Weights, name: str, x: Tensor, eps: float = 1e-6) -> Tensor:
    return w[f"{name}.weight"] * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def mla(w: Weights, x: Tensor, rotary: bool = True, window: int | None = None) -> Tensor:
    """DeepSeek-V2, appendix C, with the scores as the sum over both parts of the keys."""
    latent = linear(w, "to_latent", x)
    c, r = norm(w, "latent_norm", latent[..., :C]), latent[..., C:]
    kv = split_heads(linear(w, "to_kv", c), K + V)
    low_rank = "to_q.0.weight" in w
    q = (
        linear(w, "to_q.2", norm(w, "to_q.1", x @ w["to_q.0.weight"].mT + w.get("to_q.0.bias", 0)))
        if low_rank
        else linear(w, "to_q", x)
    )
    q = split_heads(q, K + R)
    scores = torch.einsum("bthe,bshe->bhts", q[..., :K], kv[..., :K])
    if rotary:
        q_rotated, r_rotated = rotate(q[..., K:], x.shape[1]), rotate(r[:, :, None], x.shape[1])[:, :, 0]
        scores = scores + torch.einsum("bthe,bse->bhts", q_rotated, r_rotated.conj()).real
    else:
        scores = scores + torch.einsum("bthe,bse->bhts", q[..., K:], r)
    o = softmax_attention(scores * (K + R) ** -0.5, kv[..., K:], window)
    if "to_gate.weight" in w:
        o = o * torch.sigmoid(linear(w, "to_gate", x)).unflatten(-1, (H, -1))
    return linear(w, "out", o.flatten(2))


def mla_without_positions(w: Weights, x: Tensor) -> Tensor:
    return mla(w, x, rotary=False)


def fox(w: Weights, x: Tensor, theta: bool = False, phi: Callable[[Tensor], Tensor] = torch.sigmoid) -> Tensor:
    """Lin 2025 per head, with the layer of the Pro variant where it has weights for it."""
    heads = w["forget.proj.bias"].shape[0]
    q, kv = split_heads(linear(w, "to_q", x), E), split_heads(linear(w, "to_kv", x), E)
    if "to_mix.weight" in w:
        a = torch.sigmoid(linear(w, "to_mix", x))[..., None]
        kv = a * token_shift(kv.flatten(2)).view(kv.shape) + (1 - a) * kv
    k, v = (y.repeat_interleave(heads // y.shape[2], 2) for y in kv.chunk(2, 2))
    if "q_norm.weight" in w:
        shared = heads // (w["k_norm.weight"].numel() // E)
        k_weight = w["k_norm.weight"].view(-1, E).repeat_interleave(shared, 0)
        q = w["q_norm.weight"].view(-1, E) * q / (q.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        k = k_weight * k / (k.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    if theta:
        scores = torch.einsum("bthe,bshe->bhts", rotate(q, x.shape[1]), rotate(k, x.shape[1]).conj()).real
    else:
        scores = torch.einsum("bthe,bshe->bhts", q, k)
    f = torch.sigmoid(linear(w, "forget.proj", x))
    decay = [[f[:, s + 1 : t + 1].prod(1) for s in range(x.shape[1])] for t in range(x.shape[1])]
    decay_BHTS = torch.stack([torch.stack(row, -1) for row in decay], 2)
    o = softmax_attention(scores * E**-0.5 + decay_BHTS.log(), v)
    if "o_norm.weight" in w:
        o = w["o_norm.weight"].view(-1, E) * o / (o.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    if "to_gate.weight" in w:
        o = o * phi(linear(w, "to_gate", x)).view(o.shape)
    return linear(w, "out", o.flatten(2))


def fox_with_rotary(w: Weights, x: Tensor) -> Tensor:
    return fox(w, x, theta=True)


def householder_scores(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """Return k_s^T H_(s+1) ... H_t q_t for s <= t, [B, H, T, S], by multiplying all earlier keys by each matrix."""
    keys, rows = k[:, :0], []
    for t in range(q.shape[1]):
        erased = torch.einsum("bshe,bhe->bsh", keys, w[:, t]) * beta[:, t, None]
        keys = torch.cat([keys - erased[..., None] * w[:, t, None], k[:, t : t + 1]], 1)
        row = torch.einsum("bhe,bshe->bhs", q[:, t], keys)
        rows.append(torch.nn.functional.pad(row, (0, q.shape[1] - t - 1)))
    return torch.stack(rows, 2)


def path(w: Weights, x: Tensor) -> Tensor:
    """Yang 2025 per head; the forget gate as in the authors' code, times the scale."""
    G = w["to_beta.bias"].shape[0]
    H = w["out.weight"].shape[1] // E
    q, k, v = (split_heads(y, E) for y in linear(w, "to_qkv", x).split([H * E, G * E, G * E], -1))
    if "q_norm.weight" in w:
        q, k = norm(w, "q_norm", q, 1e-5), norm(w, "k_norm", k, 1e-5)
    vector = unit(split_heads(torch.nn.functional.silu(conv(w, "filters.conv", linear(w, "to_w", x))), E))
    beta = 2 * torch.sigmoid(linear(w, "to_beta", x))
    k, v, vector, beta = (y.repeat_interleave(H // G, 2) for y in (k, v, vector, beta))
    scores = householder_scores(q, k, vector, beta)
    if "forget.proj.weight" in w:
        log_f = torch.sigmoid(linear(w, "forget.proj", x)).log().mT
        time = torch.arange(x.shape[1])
        between = (time <= time[:, None, None]) & (time > time[:, None])  # s < r <= t, [T, S, R]
        scores = scores + torch.einsum("tsr,bhr->bhts", between.to(log_f.dtype), log_f)
    return linear(w, "out", softmax_attention(scores * E**-0.5, v).flatten(2))


FOX_SIZES = {"heads": 4, "key_value_heads": 2, "head_width": E}
PRO = {"kv_shift": True, "qk_norm": True, "output_norm": True, "gate": True}
MLA_SIZES = {"heads": H, "key_width": K, "value_width": V, "latent_width": C, "rotary_width": R}
CASES: dict[str, Case] = {
    "mla": (MLA(**MLA_SIZES), mla),
    "mla, low-rank query": (MLA(**MLA_SIZES, query_rank=3), mla),
    "mla, no positions": (MLA(**MLA_SIZES, rotary_theta=None), mla_without_positions),
    "mla, gate per head, window": (MLA(**MLA_SIZES, gate="head", window=3), partial(mla, window=3)),
    "mla, gate per channel, biases": (MLA(**MLA_SIZES, gate="channel", bias=True, query_rank=3), mla),
    "path_attention": (PathAttention(heads=3, head_width=E, rank=2), path),
    "path_attention, full rank, norm, longer convolution": (
        PathAttention(heads=3, head_width=E, rank=None, qk_norm=True, conv_width=4),
        path,
    ),
    "path_attention, forget gate, grouped heads": (PathAttention(**FOX_SIZES, forget_gate=True), path),
    "fox": (FoX(heads=3, head_width=E), fox),
    "fox, grouped heads, rotary": (FoX(**FOX_SIZES, rotary_theta=10000.0), fox_with_rotary),
    "fox, pro": (FoX(heads=3, head_width=E, **PRO), fox),
    "fox, pro, SiLU gate": (
        FoX(heads=3, head_width=E, **PRO, gate_activation="silu"),
        partial(fox, phi=torch.nn.functional.silu),
    ),
    "path_attention, convolution bias": (PathAttention(heads=3, head_width=E, conv_bias=True), path),
    "fox, pro, grouped heads": (FoX(**FOX_SIZES, **PRO), fox),
}


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_equal_the_equation(name: str) -> None:
    assert_equals_equation(CASES[name], 1e-10)


def test_default_sizes_of_mla_are_those_of_deepseek_v2() -> None:
    """DeepSeek-V2 has d_h = 128, d_c = 4 d_h = 512 and d_h^R = d_h / 2 = 64."""
    with torch.device("meta"):
        mixer = MLA().build(1024)
    assert (mixer.heads, mixer.K, mixer.V, mixer.C, mixer.R) == (8, 128, 128, 512, 64)


def test_mla_caches_only_the_latent_and_the_shared_key() -> None:
    assert MLA(**MLA_SIZES).cost(24).cache_bytes == 4 * (C + R)


def test_sizes_that_mla_cannot_use_are_refused() -> None:
    with pytest.raises(ConfigError, match="rotary_width must be even with rotary embeddings, got 3"):
        MLA(rotary_width=3).build(24)
    MLA(rotary_width=3, rotary_theta=None).build(24)
    with pytest.raises(ConfigError, match="heads must be at most width = 8"):
        MLA(heads=16).build(8)


def test_a_cache_of_other_sizes_is_refused() -> None:
    mixer, x = MLA(**MLA_SIZES).build(24), torch.randn(1, 4, 24)
    with pytest.raises(StateError, match=r"state 'latent' must have shape \[B, S, 1, 11\], got \[1, 8, 1, 10\]"):
        mixer(x, MLA(**MLA_SIZES | {"latent_width": 6}).build(24).init_state(1, 8))
    with pytest.raises(StateError, match="its capacity is 3 tokens, but a sequence has 4"):
        mixer(x, mixer.init_state(1, 3))
    with pytest.raises(StateError, match="needs the maximum length of a sequence"):
        mixer.init_state(1)


def test_forget_gates_of_fox_start_with_bias_zero() -> None:
    assert not FoX().build(64).forget.proj.bias.any()


def test_bfloat16_gradients_of_forget_gates_stay_accurate_in_long_sequences() -> None:
    """The tolerance of gates in bfloat16 is 2 %. With the channels of the gates in bfloat16 the error is 32 %."""
    torch.manual_seed(0)
    mixer, x = FoX(heads=1).build(32), torch.randn(1, 1024, 32)
    exact = FoX(heads=1).build(32).double()
    exact.load_state_dict(mixer.state_dict())
    weight = torch.randn_like(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = mixer(x)[0]
    parameters = [m.forget.proj.weight for m in (mixer, exact)]
    losses = [(y * weight).sum(), (exact(x.double())[0] * weight).sum()]
    rounded, expected = (torch.autograd.grad(loss, p)[0] for loss, p in zip(losses, parameters, strict=True))
    assert relative_error(rounded, expected) < 2e-2


@pytest.mark.parametrize("config", [FoX(heads=2, key_value_heads=1), MLA(heads=2)], ids=lambda config: config.name)
def test_memory_is_linear_in_time(config: MixerConfig) -> None:
    """The largest tensor of a forward and a backward pass doubles with T, so none is T x T."""
    mixer = config.build(16)

    def largest(T: int) -> int:
        with LargestTensor() as tensors:
            mixer(torch.randn(1, T, 16))[0].sum().backward()
        return tensors.elements

    assert largest(2048) <= 2.1 * largest(1024)


def test_householder_attention_over_many_chunks_equals_the_equation() -> None:
    """330 tokens are six chunks, of which the backward pass stores every second. Four past tokens precede them."""
    torch.manual_seed(0)
    B, T, S, heads, K, V = 2, 330, 4, 2, 3, 2
    shapes = [(B, S + T, heads, K)] * 2 + [(B, S + T, heads, V), (B, S + T, heads, K), (B, S + T, heads)]
    q, k, v, w, beta = leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    expected = softmax_attention(0.7 * householder_scores(q, k, unit(w), 2 * beta.sigmoid()), v)[:, S:]
    sequence = torch.zeros(B, S + T, dtype=torch.int64)
    none = [x[:, :0] for x in (k, v, sequence)]

    def inputs(tokens: slice, past: list[Tensor]) -> HouseholderInputs:
        operands = (x[:, tokens] for x in (q, k, v, unit(w), 2 * beta.sigmoid()))
        return HouseholderInputs(*operands, *past, sequence[:, tokens])

    _, past_k = householder_attention(inputs(slice(S), none), 0.7)
    o, _ = householder_attention(inputs(slice(S, None), [past_k, v[:, :S], sequence[:, :S]]), 0.7)
    assert_same_with_gradients(o, expected, leaves, 1e-10)


def test_path_attention_starts_with_beta_one_and_open_forget_gates_at_one_half() -> None:
    """fla initialises the biases of both maps to zero."""
    mixer = PathAttention(forget_gate=True).build(64)
    assert not mixer.to_beta.bias.any()
    assert not mixer.forget.proj.bias.any()


def test_path_attention_keeps_no_tensor_of_all_scores() -> None:
    """The largest tensor holds the scores of one chunk with all tokens."""
    mixer, T = PathAttention(heads=1, head_width=8, rank=2).build(8), 1024
    with LargestTensor() as tensors:
        mixer(torch.randn(1, T, 8))[0].sum().backward()
    assert tensors.elements <= CHUNK * T
