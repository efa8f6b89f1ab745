"""Mixers against their equations, written out token by token in float64 from the raw parameters.

B batch, T time, H key heads, HV value heads, K key width, V value width
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.base import Backend
from deltazoo.mixers import EFLA, GLA, KDA, DeltaNet, GatedDeltaNet, LinearAttention, Longhorn, MixerConfig, RetNet
from deltazoo.mixers.parts.feature_maps import Feature

WIDTH, H, HV, K, V = 20, 2, 4, 6, 5
HEADS = {"heads": H, "value_heads": HV, "key_width": K, "value_width": V}

Weights = dict[str, Tensor]


def of_value_heads(key: Tensor) -> Tensor:
    """Value head j uses key head j // (HV / H): [B, T, H, K] -> [B, T, HV, K]."""
    return torch.stack([key[:, :, j // (HV // H)] for j in range(HV)], 2)


def causal_conv(w: Weights, x: Tensor) -> Tensor:
    weight = w["project.conv.weight"]
    taps = weight.shape[1]
    return F.conv1d(x.mT, weight[:, None], padding=taps - 1, groups=x.shape[2]).mT[:, : x.shape[1]]


def streams(w: Weights, x: Tensor, n: int = 1, conv: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, T, HV, K]; k [B, T, n, HV, K] and v [B, T, n, HV, V], n = 1 taken out."""
    qkv = x @ w["project.to_qkv.weight"].mT
    if conv:
        qkv = causal_conv(w, qkv)
    q, k, v = qkv.split([H * K, n * H * K, n * HV * V], dim=-1)
    q = of_value_heads(q.unflatten(-1, (H, K)))
    k = torch.stack([of_value_heads(part.unflatten(-1, (H, K))) for part in k.chunk(n, -1)], 2)
    v = torch.stack([part.unflatten(-1, (HV, V)) for part in v.chunk(n, -1)], 2)
    return (q, k[:, :, 0], v[:, :, 0]) if n == 1 else (q, k, v)


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, strength: Tensor | None = None, scale: float = K**-0.5
) -> Tensor:
    """S <- D S, S <- S + f k (v - S^T k)^T, o = scale S^T q; no erase without a strength f."""
    state = q.new_zeros(q.shape[0], HV, q.shape[-1], v.shape[-1])
    outputs = []
    for t in range(q.shape[1]):
        if decay is not None:
            state = decay[:, t, :, :, None] * state
        written = v[:, t]
        if strength is not None:
            read = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            written = strength[:, t, :, None] * (written - read)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], written)
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1)


def normed(w: Weights, o: Tensor, eps: float = 1e-5) -> Tensor:
    return w["outputs.norm.weight"] * o / torch.sqrt((o**2).mean(-1, keepdim=True) + eps)


def gated(w: Weights, x: Tensor, o: Tensor) -> Tensor:
    gate = x @ w["outputs.gate.proj.weight"].mT + w.get("outputs.gate.proj.bias", 0)
    return o * F.silu(gate.view(o.shape))


def out(w: Weights, o: Tensor) -> Tensor:
    return o.flatten(2) @ w["out.weight"].mT


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x**2).sum(-1, keepdim=True) + 1e-6)


def beta(w: Weights, x: Tensor) -> Tensor:
    return torch.sigmoid(x @ w["operands.beta.proj.weight"].mT)


def mamba_log_decay(w: Weights, raw: Tensor) -> Tensor:
    return -torch.exp(w["operands.decay.A_log"]) * torch.log1p(torch.exp(raw))


def linear_attention(phi: Callable[[Tensor], Tensor]) -> Callable[[Weights, Tensor], Tensor]:
    def run(w: Weights, x: Tensor) -> Tensor:
        q, k, v = streams(w, x, conv=False)
        weight = torch.einsum("bthk,bshk->bhts", phi(q), phi(k)).tril() * phi(q).shape[-1] ** -0.5
        o = torch.einsum("bhts,bshv->bthv", weight, v)
        return out(w, o / (weight.sum(-1).mT[..., None] + 1e-5))

    return run


def dpfp(x: Tensor) -> Tensor:
    both = torch.cat([F.relu(x), F.relu(-x)], -1)
    size = both.shape[-1]
    return torch.cat([torch.stack([both[..., i] * both[..., i - j] for i in range(size)], -1) for j in (1, 2, 3)], -1)


def linear_attention_normed(w: Weights, x: Tensor) -> Tensor:
    q, k, v = streams(w, x, conv=False)
    return out(w, normed(w, recurrence(F.silu(q), F.silu(k), v)))


def retnet(w: Weights, x: Tensor) -> Tensor:
    """As attention with weights g^(t-s), positions as complex numbers."""
    q, k, v = streams(w, x, conv=False)
    T = x.shape[1]
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(K // 2, dtype=torch.float64) / (K // 2))
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]
    turned = [torch.complex(y[..., : K // 2], y[..., K // 2 :]) * turn for y in (q, k)]
    weight = torch.einsum("bthk,bshk->bhts", turned[0], turned[1].conj()).real * K**-0.5
    pace = 1 - 2.0 ** (-5 - torch.arange(HV, dtype=torch.float64))
    age = torch.arange(T)[:, None] - torch.arange(T)
    o = torch.einsum("bhts,bshv->bthv", weight * (pace[:, None, None] ** age).tril(), v)
    o = o - o.mean(-1, keepdim=True)
    return out(w, gated(w, x, normed(w, o)))


def gla(w: Weights, x: Tensor) -> Tensor:
    q, k, v = streams(w, x, conv=False)
    raw = x @ w["operands.decay.proj.0.weight"].mT @ w["operands.decay.proj.1.weight"].mT
    decay = torch.sigmoid(raw + w["operands.decay.proj.1.bias"]) ** (1 / 16)
    return out(w, gated(w, x, normed(w, recurrence(q, k, v, decay.unflatten(-1, (HV, K))))))


def deltanet(w: Weights, x: Tensor) -> Tensor:
    q, k, v = streams(w, x)
    return out(w, normed(w, recurrence(unit(F.silu(q)), unit(F.silu(k)), F.silu(v), strength=beta(w, x))))


def deltanet_two_householders(w: Weights, x: Tensor) -> Tensor:
    """Two delta steps a token with eigenvalues in [-1, 1], features elu + 1, norm L1: as a sequence twice as long."""
    q, k, v = streams(w, x, n=2)

    def l1(y: Tensor) -> Tensor:
        return (F.elu(y) + 1) / ((F.elu(y) + 1).sum(-1, keepdim=True) + 1e-6)

    strength = 2 * beta(w, x).clamp(max=1 - 2**-7).unflatten(-1, (2, HV)).flatten(1, 2)
    q2 = l1(q).repeat_interleave(2, 1)
    o = recurrence(q2, l1(k).flatten(1, 2), F.silu(v).flatten(1, 2), strength=strength)
    return out(w, normed(w, o[:, 1::2]))


def gated_deltanet_negative_erase(w: Weights, x: Tensor) -> Tensor:
    """Only the erase is doubled."""
    q, k, v = unit(F.silu(streams(w, x)[0])), unit(F.silu(streams(w, x)[1])), F.silu(streams(w, x)[2])
    decay = torch.exp(mamba_log_decay(w, x @ w["operands.decay.proj.weight"].mT + w["operands.decay.dt_bias"]))
    b = beta(w, x).clamp(max=1 - 2**-7)
    o = recurrence(q, k, v / 2, decay[..., None], 2 * b)
    return out(w, gated(w, x, normed(w, o)))


def exact(time: Tensor, key: Tensor) -> Tensor:
    n = (key**2).sum(-1)
    return (1 - torch.exp(-time * n)) / n


def implicit(time: Tensor, key: Tensor) -> Tensor:
    return time / (1 + time * (key**2).sum(-1))


def efla(w: Weights, x: Tensor) -> Tensor:
    q, k, v = streams(w, x)
    o = recurrence(unit(F.silu(q)), F.silu(k), F.silu(v), strength=exact(beta(w, x), F.silu(k)))
    return out(w, normed(w, o))


def longhorn(w: Weights, x: Tensor) -> Tensor:
    q, k, v = streams(w, x)
    o = recurrence(q, k, F.silu(v), strength=implicit(beta(w, x), k))
    return out(w, gated(w, x, normed(w, o)))


def gated_longhorn(w: Weights, x: Tensor) -> Tensor:
    q, k, v = streams(w, x)
    decay = torch.exp(mamba_log_decay(w, x @ w["operands.decay.proj.weight"].mT + w["operands.decay.dt_bias"]))
    o = recurrence(unit(F.silu(q)), F.silu(k), F.silu(v), decay[..., None], implicit(beta(w, x), F.silu(k)))
    return out(w, gated(w, x, normed(w, o)))


def kda_efla(w: Weights, x: Tensor) -> Tensor:
    q, k, v = streams(w, x)
    raw = x @ w["operands.decay.proj.0.weight"].mT @ w["operands.decay.proj.1.weight"].mT
    raw = (raw + w["operands.decay.dt_bias"]).unflatten(-1, (HV, K))
    decay = torch.exp(-torch.exp(w["operands.decay.A_log"])[:, None] * torch.log1p(torch.exp(raw)))
    o = recurrence(unit(F.silu(q)), F.silu(k), F.silu(v), decay, exact(beta(w, x), F.silu(k)))
    gate = x @ w["outputs.gate.proj.0.weight"].mT @ w["outputs.gate.proj.1.weight"].mT
    return out(w, normed(w, o) * torch.sigmoid(gate.view(o.shape)))


def linear_case(feature: Feature, phi: Callable[[Tensor], Tensor]) -> tuple[MixerConfig, Callable[..., Tensor]]:
    return LinearAttention(**HEADS, feature=feature), linear_attention(phi)


CASES: dict[str, tuple[MixerConfig, Callable[[Weights, Tensor], Tensor]]] = {
    "linear_attention": linear_case("elu+1", lambda x: F.elu(x) + 1),
    "linear_attention, relu": linear_case("relu", F.relu),
    "linear_attention, softmax": linear_case("softmax", lambda x: x.softmax(-1)),
    "linear_attention, dpfp": linear_case("dpfp", dpfp),
    "linear_attention, silu": (LinearAttention(**HEADS, feature="silu", normaliser=False), linear_attention_normed),
    "retnet": (RetNet(**HEADS), retnet),
    "gla": (GLA(**HEADS, gate_rank=3), gla),
    "deltanet": (DeltaNet(**HEADS), deltanet),
    "deltanet, two householders": (
        DeltaNet(**HEADS, negative_eigenvalues="both", householders=2, feature="elu+1", qk_norm="l1"),
        deltanet_two_householders,
    ),
    "gated_deltanet, doubled erase": (
        GatedDeltaNet(**HEADS, negative_eigenvalues="erase"),
        gated_deltanet_negative_erase,
    ),
    "efla": (EFLA(**HEADS), efla),
    "longhorn": (Longhorn(**HEADS), longhorn),
    "gated longhorn": (GatedDeltaNet(**HEADS, reparam="longhorn"), gated_longhorn),
    "efla with channel decay": (KDA(**HEADS, reparam="efla"), kda_efla),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mixer_equals_its_equation(name: str, backend: str | Backend) -> None:
    config, equation = CASES[name]
    torch.manual_seed(0)
    mixer = config.build(WIDTH, backend=backend).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    x = torch.randn(2, 11, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 11, WIDTH, dtype=torch.float64)
    y = mixer(x)[0]
    want = equation(dict(mixer.named_parameters()), x)
    torch.testing.assert_close(y, want, rtol=1e-9, atol=1e-11)
    leaves = [x, *mixer.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad((y * weight).sum(), leaves),
        torch.autograd.grad((want * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
