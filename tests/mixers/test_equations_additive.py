"""Mixers without an erase term against their equations, from the raw parameters in float64.

B batch, T time, HV value heads, K key width, V value width, M slots
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from equations import (
    HEADS,
    HV,
    LATER_LAYER,
    Case,
    Equation,
    K,
    T,
    V,
    Weights,
    assert_equals_equation,
    conv,
    gate,
    layer_norm,
    linear,
    low_rank,
    out,
    outer,
    per_value_head,
    qkv,
    read,
    recurrence,
    rms_norm,
    rotate,
    scan,
    split_heads,
    token_shift,
    unit,
    zero_state,
)
from torch import Tensor

from deltazoo.backends.update.base import Backend
from deltazoo.mixers import (
    GLA,
    GSA,
    HGRN2,
    MLSTM,
    RWKV6,
    ABCAttention,
    Based,
    GatedRetNet,
    GatedRFA,
    LightNet,
    LinearAttention,
    Mamba3,
    Raven,
    ReBased,
    RetNet,
    Rodimus,
    SimpleGLA,
)
from deltazoo.mixers.parts.feature_maps import Feature

Projection = Callable[[Weights, Tensor], tuple[Tensor, Tensor, Tensor]]
SHARED = {"heads": HV, "key_value_heads": 2, "key_width": K, "value_width": V}
FEATURES, SLOTS = 16, 7  # random features of gated_rfa, memory slots of gsa and abc


def normalised_linear_attention(phi: Callable[[Tensor], Tensor]) -> Equation:
    def equation(w: Weights, x: Tensor) -> Tensor:
        q, k, v = qkv(w, x)
        weight = torch.einsum("bthk,bshk->bhts", phi(q), phi(k)).tril() * phi(q).shape[-1] ** -0.5
        o = torch.einsum("bhts,bshv->bthv", weight, v)
        return out(w, o / (weight.sum(-1).mT[..., None] + 1e-5))

    return equation


def dpfp(x: Tensor) -> Tensor:
    both = torch.cat([F.relu(x), F.relu(-x)], -1)
    size = both.shape[-1]
    return torch.cat([torch.stack([both[..., i] * both[..., i - j] for i in range(size)], -1) for j in (1, 2, 3)], -1)


def shared_qkv(w: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, and k and v of two key-value heads, each repeated for two query heads."""
    projected = conv(w, "project.conv", linear(w, "project.to_qkv", x))
    q, k, v = projected.split([HV * K, 2 * K, 2 * V], -1)
    return split_heads(q, K), per_value_head(split_heads(k, K)), per_value_head(split_heads(v, V))


def learned_map(w: Weights, x: Tensor, name: str) -> Tensor:
    return linear(w, f"operands.feature.maps.{name}", x)


def t2r_linear_attention(w: Weights, x: Tensor) -> Tensor:
    q, k, v = shared_qkv(w, x)
    q, k = (F.relu(learned_map(w, y, name)) for name, y in (("q", q), ("k", k)))
    weight = torch.einsum("bthk,bshk->bhts", q, k).tril() * K**-0.5
    return out(w, torch.einsum("bhts,bshv->bthv", weight, v) / (weight.sum(-1).mT[..., None] + 1e-5))


def hadamard_linear_attention(w: Weights, x: Tensor) -> Tensor:
    q, k, v = qkv(w, x)
    q, k = (learned_map(w, y, name) for name, y in (("q", q), ("k", k)))
    return out(w, rms_norm(w, recurrence(*(y[..., :K] * y[..., K:] for y in (q, k)), v)))


def silu_linear_attention(w: Weights, x: Tensor) -> Tensor:
    q, k, v = qkv(w, x)
    return out(w, rms_norm(w, recurrence(F.silu(q), F.silu(k), v)))


def based(w: Weights, x: Tensor) -> Tensor:
    q, k, v = qkv(w, x)
    a = torch.einsum("bthk,bshk->bhts", q, k) / K**0.5
    weight = (1 + a + a**2 / 2).tril()
    return out(w, torch.einsum("bhts,bshv->bthv", weight / weight.sum(-1, keepdim=True), v))


def rebased(w: Weights, x: Tensor) -> Tensor:
    q, k, v = qkv(w, x)
    gain, bias = w["operands.qk_norm.weight"], w["operands.qk_norm.bias"]
    q, k = (
        gain * (y - y.mean(-1, keepdim=True)) / (y.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() + bias
        for y in (q, k)
    )
    weight = (torch.einsum("bthk,bshk->bhts", q, k) / K**0.5).square().tril()
    return out(w, torch.einsum("bhts,bshv->bthv", weight / (weight.sum(-1, keepdim=True) + 1e-5), v))


def lightnet(w: Weights, x: Tensor) -> Tensor:
    """The softmax over time of each channel of k, computed for every t without a recurrence."""
    q, k, v = qkv(w, x)
    q = F.silu(q)
    rows = []
    for t in range(T):
        S = torch.einsum("bshk,bshv->bhkv", k[:, : t + 1].softmax(1), v[:, : t + 1])
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) * K**-0.5)
    o = torch.stack(rows, 1).flatten(2)
    o = w["outputs.norm.weight"] * o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return out(w, gate(w, x, o.view(2, T, HV, V)))


def rodimus(w: Weights, x: Tensor) -> Tensor:
    u = linear(w, "project.to_u", x)
    c = F.silu(conv(w, "project.conv", u))
    g = torch.log1p(torch.exp(linear(w, "project.to_g", c)))
    tau = torch.sigmoid(linear(w, "project.to_tau", c))
    k = linear(w, "project.to_k", c)
    k = k / k.norm(dim=-1, keepdim=True) * g**tau
    v = torch.sigmoid(linear(w, "project.value_gate", u)) * u
    q, decay = linear(w, "project.to_q", c) * K**-0.5, torch.exp(-g * tau)
    S, rows = torch.zeros(2, K, v.shape[-1], dtype=x.dtype), []
    for t in range(T):
        S = decay[:, t, :, None] * S + k[:, t, :, None] * v[:, t, None, :]
        rows.append((q[:, t, None] @ S)[:, 0])
    o = (torch.stack(rows, 1) + w["outputs.skip.D"] * c) * F.silu(linear(w, "outputs.gate.proj", x))
    return out(w, w["outputs.norm.weight"] * o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt())


def retention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """Attention with weights exp(sum of log_decay over s+1..t) and complex rotary positions. log_decay: [B, T, HV]."""
    q, k = rotate(q, T), rotate(k, T)
    weight = torch.einsum("bthk,bshk->bhts", q, k.conj()).real * K**-0.5
    total = log_decay.cumsum(1).mT
    decay = (total[..., :, None] - total[..., None, :]).tril().exp()
    return torch.einsum("bhts,bshv->bthv", (weight * decay).tril(), v)


def retnet(w: Weights, x: Tensor) -> Tensor:
    decay = 1 - 2.0 ** (-5 - torch.arange(HV, dtype=torch.float64))
    return out(w, gate(w, x, layer_norm(w, retention(*qkv(w, x), decay.log().expand(2, T, HV)))))


def gated_retnet(w: Weights, x: Tensor) -> Tensor:
    log_decay = F.logsigmoid(linear(w, "operands.decay.proj", x)) / 16
    return out(w, gate(w, x, layer_norm(w, retention(*qkv(w, x), log_decay))))


def gla(w: Weights, x: Tensor) -> Tensor:
    decay = torch.sigmoid(linear(w, "operands.decay.proj", x)) ** (1 / 16)
    return out(w, gate(w, x, rms_norm(w, recurrence(*qkv(w, x), split_heads(decay, K)))))


def gla_with_shared_keys(w: Weights, x: Tensor) -> Tensor:
    """SiLU after the convolution, and SiLU as a feature map."""
    q, k, v = (F.silu(y) for y in shared_qkv(w, x))
    decay = per_value_head(split_heads(torch.sigmoid(linear(w, "operands.decay.proj", x)) ** (1 / 16), K))
    return out(w, gate(w, x, rms_norm(w, recurrence(F.silu(q), F.silu(k), v, decay))))


def hedgehog_simple_gla(w: Weights, x: Tensor) -> Tensor:
    q, k, v = shared_qkv(w, x)
    q, k = (2 * learned_map(w, y, name) for name, y in (("q", q), ("k", k)))
    q, k = (torch.cat([y, -y], -1).softmax(-1) for y in (q, k))
    decay = torch.sigmoid(linear(w, "operands.decay.proj", x)) ** (1 / 16)
    return out(w, gate(w, x, rms_norm(w, recurrence(q, k, v, decay[..., None], scale=(2 * K) ** -0.5))))


def simple_gla(w: Weights, x: Tensor) -> Tensor:
    """With SiLU after the convolution, if the mixer has one."""
    q, k, v = (F.silu(y) if "project.conv.weight" in w else y for y in qkv(w, x))
    decay = torch.sigmoid(linear(w, "operands.decay.proj", x)) ** (1 / 16)
    return out(w, gate(w, x, rms_norm(w, recurrence(q, k, v, decay[..., None]))))


def gated_rfa(w: Weights, x: Tensor) -> Tensor:
    q, k, v = qkv(w, x)
    sigma, G = (w[f"operands.feature.{name}"].repeat_interleave(2, 0) for name in ("sigma", "G"))

    def phi(y: Tensor) -> Tensor:
        angle = torch.einsum("bthk,hkr->bthr", unit(y) * sigma, G)
        return torch.cat([angle.sin(), angle.cos()], -1) / FEATURES**0.5

    q, k = phi(q), phi(k)
    g = torch.sigmoid(linear(w, "operands.decay.proj", x))[..., None]
    o = recurrence(q, (1 - g) * k, v, g, scale=1)
    z = scan(lambda z, t: g[:, t] * z + (1 - g[:, t]) * k[:, t], lambda z, t: z, x.new_zeros(2, HV, 2 * FEATURES))
    return out(w, o / (z * q).sum(-1, keepdim=True).abs().clamp(min=0.05))


def hgrn2(w: Weights, x: Tensor) -> Tensor:
    q, v = conv(w, "project.conv", linear(w, "project.to_qkv", x)).split([HV * K, HV * V], -1)
    g = torch.sigmoid(w["operands.decay.floor"])
    raw = conv(w, "operands.decay.conv", linear(w, "operands.decay.proj", x))
    f = split_heads(g + (1 - g) * torch.sigmoid(raw), K)
    o = recurrence(split_heads(F.silu(q), K), 1 - f, split_heads(v, V), f, scale=1)
    return out(w, rms_norm(w, o, dims=2))


def mlstm(w: Weights, x: Tensor) -> Tensor:
    """Gates and state are not stabilised, because float64 can represent these exponentials; m only scales epsilon."""
    q, k, v = qkv(w, x)
    raw = 15 * torch.tanh(linear(w, "operands.gates.proj", x) / 15)
    i, f = raw[..., :HV].exp()[..., None], raw[..., HV:].sigmoid()[..., None]
    n = scan(lambda n, t: f[:, t] * n + i[:, t] * k[:, t], lambda n, t: n, x.new_zeros(2, HV, K))
    q = q * K**-0.5
    # The mixer divides the normaliser by exp(m) before it adds 1e-6, which is 1e-6 exp(m) here.
    m, exp_m = torch.full((2, HV), -torch.inf, dtype=x.dtype), []
    for t in range(T):
        m = torch.maximum(m + f[:, t, :, 0].log(), i[:, t, :, 0].log())
        exp_m.append(m.exp())
    eps = 1e-6 * torch.stack(exp_m, 1)[..., None].detach()
    o = recurrence(q, i * k, v, f, scale=1) / ((n * q).sum(-1, keepdim=True).abs().clamp(min=1) + eps)
    return out(w, gate(w, x, layer_norm(w, o, 1e-6), torch.sigmoid))


def gsa(w: Weights, x: Tensor, phi: Callable[[Tensor], Tensor] = F.silu, project: Projection = qkv) -> Tensor:
    """With SiLU after the convolution, if there is one, and a learned map before phi likewise."""
    q, k, v = (F.silu(y) if "project.conv.weight" in w else y for y in project(w, x))
    q, k = (learned_map(w, y, "q") if "operands.feature.maps.q.weight" in w else y for y in (q, k))
    q, k, v = phi(q), phi(k), F.silu(v)
    a = split_heads(torch.sigmoid(linear(w, "operands.slots.proj", x)) ** (1 / 8), SLOTS)
    a = per_value_head(a)
    keys = scan(
        lambda S, t: a[:, t, ..., None] * S + outer(1 - a[:, t], k[:, t]), lambda S, t: S, zero_state(x, SLOTS, K)
    )
    p = torch.einsum("bthmk,bthk->bthm", keys, q).softmax(-1)
    return out(w, rms_norm(w, F.silu(recurrence(p, 1 - a, v, a, scale=1)), dims=2))


def raven(w: Weights, x: Tensor, softmax: bool = False, phi: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    """Three active slots. The log decay is Mamba-2's per head."""
    q, k, v = qkv(w, x) if w["project.to_qkv.weight"].shape[0] == HV * (2 * K + V) else shared_qkv(w, x)
    q, k = (
        w[f"operands.qk_norm.{name}_norm.weight"] * phi(y) / (phi(y).pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        for name, y in (("q", q), ("k", k))
    )
    raw = split_heads(linear(w, "operands.slots.proj", x), SLOTS)
    score = raw.softmax(-1) if softmax else raw.sigmoid()
    score = torch.where(score >= score.sort(-1).values[..., -3:-2], score, 0.0)
    route = score if softmax else score / (score.sum(-1, keepdim=True) + 1e-9)
    dt = torch.log1p(torch.exp(linear(w, "operands.decay.proj", x) + w["operands.decay.dt_bias"]))
    log_decay = -(torch.exp(w["operands.decay.A_log"]) * dt)[..., None]
    a = per_value_head(torch.exp(route * log_decay))
    keys = scan(
        lambda S, t: a[:, t, ..., None] * S + outer(1 - a[:, t], k[:, t]), lambda S, t: S, zero_state(x, SLOTS, K)
    )
    p = torch.einsum("bthmk,bthk->bthm", keys, q).softmax(-1)
    o = F.silu(recurrence(p, 1 - a, F.silu(v), a, scale=1))
    return out(w, gate(w, x, rms_norm(w, o)) if "outputs.gate.proj.weight" in w else rms_norm(w, o, dims=2))


def abc(w: Weights, x: Tensor) -> Tensor:
    """Slots as means of all tokens so far, weighted by a softmax over time. With SiLU after the convolution, if any."""
    q, k, v = (F.silu(y) if "project.conv.weight" in w else y for y in qkv(w, x))
    q, k = (torch.cat([z.real, z.imag], -1) for z in (rotate(q, T), rotate(k, T)))
    score = split_heads(linear(w, "operands.slots.proj", x), SLOTS).clamp(-32, 32)
    outputs = []
    for t in range(1, T + 1):
        weight = score[:, :t].softmax(1)
        keys, values = (torch.einsum("bthm,bthk->bhmk", weight, y[:, :t]) for y in (k, v))
        p = torch.einsum("bhmk,bhk->bhm", keys, K**-0.5 * q[:, t - 1]).softmax(-1)
        outputs.append(torch.einsum("bhm,bhmv->bhv", p, values))
    return out(w, gate(w, x, rms_norm(w, torch.stack(outputs, 1))))


def rwkv6(w: Weights, x: Tensor) -> Tensor:
    d = token_shift(x) - x
    inner = torch.tanh(linear(w, "project.mix_down", x + d * w["project.mix_x"])).unflatten(-1, (5, 2))
    x_w, x_k, x_v, x_r, x_g = (
        x + d * (w["project.mix"][i] + inner[..., i, :] @ w["project.mix_up"][i]) for i in range(5)
    )
    a = split_heads(torch.exp(-torch.exp(low_rank(w, "project.decay", x_w, torch.tanh))), K)
    r, k = (split_heads(linear(w, f"project.to_{name}", y), K) for name, y in (("r", x_r), ("k", x_k)))
    v, u = split_heads(linear(w, "project.to_v", x_v), V), w["outputs.bonus.u"]
    S, outputs = zero_state(x), []
    for t in range(T):
        new = outer(k[:, t], v[:, t])
        outputs.append(read(S + u[..., None] * new, r[:, t]))
        S = a[:, t, ..., None] * S + new
    o = layer_norm(w, torch.stack(outputs, 1), 64e-5)
    return out(w, o * F.silu(linear(w, "project.to_g", x_g)).view(o.shape))


def mamba3(w: Weights, x: Tensor, softplus: bool = False) -> Tensor:
    """h <- a h + (1 - lambda) dt a k' v'^T + lambda dt k v^T, where k' and v' are the previous token's.

    q and k are rotated by angles that accumulate. Equation: mamba3_siso_step_ref in state-spaces/mamba; A, dt and the
    norms: its modules/mamba3.py.
    """
    q, k, v = qkv(w, x)
    q, k = (
        w[f"operands.norm.{name}_norm.weight"] * y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        + w[f"operands.norm.{name}_bias"]
        for name, y in (("q", q), ("k", k))
    )
    raw_dt, raw_A, raw_share = linear(w, "operands.gates.proj", x).chunk(3, -1)
    dt = torch.log1p(torch.exp(raw_dt + w["operands.gates.dt_bias"]))
    A = torch.log1p(torch.exp(raw_A)) if softplus else torch.where(raw_A < 0, 1 / (1 - raw_A), 1 + raw_A)
    a = torch.exp(-dt * A)
    share = torch.sigmoid(raw_share)
    angle = (torch.pi * torch.tanh(linear(w, "operands.rotary.proj", x))[:, :, None] * dt[..., None]).cumsum(1)

    def turned(y: Tensor) -> Tensor:
        """Rotate two of the three pairs of channels: (0, 2) and (1, 3) of 0 to 5."""
        pairs = torch.complex(y[..., :2], y[..., 2:4]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pairs.real, pairs.imag, y[..., 4:]], -1)

    q, k = turned(q), turned(k)
    previous_k, previous_v = (F.pad(y, (0, 0, 0, 0, 1, 0))[:, :-1] for y in (k, v))

    def step(S: Tensor, t: int) -> Tensor:
        a_t, dt_t, share_t = (y[:, t, :, None, None] for y in (a, dt, share))
        previous, present = outer(previous_k[:, t], previous_v[:, t]), outer(k[:, t], v[:, t])
        return a_t * S + (1 - share_t) * dt_t * a_t * previous + share_t * dt_t * present

    o = scan(step, lambda S, t: read(S, q[:, t]), zero_state(x))
    o = o + w["outputs.skip.D"][:, None] * v
    if "outputs.output_norm.weight" in w:
        o = o / (o.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w["outputs.output_norm.weight"].view(HV, V)
    return out(w, gate(w, x, o))


def linear_attention_case(feature: Feature, phi: Callable[[Tensor], Tensor]) -> Case:
    return LinearAttention(**HEADS, feature=feature), normalised_linear_attention(phi)


CASES: dict[str, Case] = {
    "linear_attention": linear_attention_case("elu+1", lambda x: F.elu(x) + 1),
    "linear_attention, relu": linear_attention_case("relu", F.relu),
    "linear_attention, softmax": linear_attention_case("softmax", lambda x: x.softmax(-1)),
    "linear_attention, dpfp": linear_attention_case("dpfp", dpfp),
    "linear_attention, silu": (LinearAttention(**HEADS, feature="silu", normaliser=False), silu_linear_attention),
    "linear_attention, shared keys, t2r": (LinearAttention(**SHARED, feature="t2r"), t2r_linear_attention),
    "linear_attention, hadamard": (
        LinearAttention(**HEADS, feature="hadamard", normaliser=False),
        hadamard_linear_attention,
    ),
    "based": (Based(**HEADS), based),
    "rebased": (ReBased(**HEADS), rebased),
    "rodimus": (Rodimus(key_width=K, gate_rank=3), rodimus),
    "lightnet": (LightNet(**HEADS, gate_rank=3), lightnet),
    "retnet": (RetNet(**HEADS), retnet),
    "gated_retnet": (GatedRetNet(**HEADS), gated_retnet),
    "gla": (GLA(**HEADS, gate_rank=3), gla),
    "gla, shared keys, convolution, silu": (
        GLA(**SHARED, gate_rank=3, conv_width=4, feature="silu"),
        gla_with_shared_keys,
    ),
    "simple_gla, shared keys, hedgehog": (SimpleGLA(**SHARED, feature="hedgehog"), hedgehog_simple_gla),
    "simple_gla": (SimpleGLA(**HEADS), simple_gla),
    "simple_gla, convolution": (SimpleGLA(**HEADS, conv_width=4), simple_gla),
    "gated_rfa": (GatedRFA(**HEADS, features=FEATURES), gated_rfa),
    "hgrn2": (HGRN2(**HEADS), hgrn2),
    "hgrn2, convolution": (HGRN2(**HEADS, conv_width=4), hgrn2),
    "mlstm": (MLSTM(**HEADS), mlstm),
    "mamba3": (Mamba3(**HEADS, rotary_fraction=0.7), mamba3),
    "mamba3, softplus, norm": (
        Mamba3(**HEADS, rotary_fraction=0.7, rate="softplus", output_norm=True),
        partial(mamba3, softplus=True),
    ),
    "gsa": (GSA(**HEADS, slots=SLOTS), gsa),
    "gsa, relu": (GSA(**HEADS, slots=SLOTS, feature="relu"), partial(gsa, phi=F.relu)),
    "gsa, shared keys, convolution, t2r": (
        GSA(**SHARED, slots=SLOTS, conv_width=4, feature="t2r"),
        partial(gsa, phi=F.relu, project=shared_qkv),
    ),
    "abc, convolution": (ABCAttention(**HEADS, slots=SLOTS, conv_width=4), abc),
    "raven": (Raven(**HEADS, slots=SLOTS, active=3), raven),
    "raven, shared keys, softmax router": (
        Raven(**SHARED, slots=SLOTS, active=3, router="softmax", feature="relu"),
        partial(raven, softmax=True, phi=F.relu),
    ),
    "raven, gate": (Raven(**HEADS, slots=SLOTS, active=3, gate=True), raven),
    "abc": (ABCAttention(**HEADS, slots=SLOTS), abc),
    "rwkv6": (RWKV6(**HEADS, mix_rank=2, decay_rank=3), rwkv6),
}


@pytest.mark.parametrize("name", CASES)
def test_mixer_equals_its_equation(name: str, backend: str | Backend) -> None:
    assert_equals_equation(CASES[name], 1e-9, backend, LATER_LAYER)
