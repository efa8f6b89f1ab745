"""MesaNet, TTT-Linear, Titans, Hyena, LFM2's convolution and RWKV's channel mix against their equations in float64.

B batch, T time, D width, H heads, E head width
"""

import pytest
import torch
import torch.nn.functional as F
from equations import Case, T, Weights, assert_equals_equation, conv, linear, outer, read, split_heads, unit
from torch import Tensor

from deltazoo.mixers import Hyena, LFM2Conv, Mesa, RWKVChannelMix, Titans, TTTLinear

D, H = 12, 3
E = D // H


def hyena(w: Weights, x: Tensor) -> Tensor:
    x1, x2, v = conv(w, "filters.short", linear(w, "to_streams", x)).chunk(3, -1)
    t = torch.arange(T, dtype=torch.float64)[:, None] / 31
    angle = 2e-4 * torch.pi * t * 31 / 32
    z = torch.cat([t, torch.cos(angle), -torch.sin(angle)], 1)
    for i in range(3):
        z = torch.sin(w["filters.long.frequency"] * linear(w, f"filters.long.layers.{i}", z))
    rate = torch.linspace(1, 5, D, dtype=torch.float64) * torch.log(torch.tensor(100.0, dtype=torch.float64)) / 1.5
    h = linear(w, "filters.long.last", z) * torch.exp(-t * rate)
    u = x2 * v
    y = torch.stack([(h[: t + 1].flip(0) * u[:, : t + 1]).sum(1) for t in range(T)], 1)
    return linear(w, "out", x1 * (y + w["filters.long.bias"] * u))


def lfm2_conv(w: Weights, x: Tensor) -> Tensor:
    B, C, value = linear(w, "to_bcx", x).chunk(3, -1)
    return linear(w, "out", C * conv(w, "filters.conv", B * value))


def rwkv_channel_mix(w: Weights, x: Tensor) -> Tensor:
    """RWKV-7's; the previous token of the first one is zero."""
    outputs = []
    for t in range(T):
        before = x[:, t - 1] if t else torch.zeros_like(x[:, 0])
        x_k = x[:, t] + (before - x[:, t]) * w["mix_weight"][0]
        outputs.append(linear(w, "out", torch.relu(linear(w, "to_k", x_k)) ** 2))
    return torch.stack(outputs, 1)


def rwkv4_channel_mix(w: Weights, x: Tensor) -> Tensor:
    """With a gate; mu multiplies the current token."""
    outputs = []
    for t in range(T):
        before = x[:, t - 1] if t else torch.zeros_like(x[:, 0])
        x_k, x_r = (mu * x[:, t] + (1 - mu) * before for mu in w["mix_weight"])
        y = linear(w, "out", torch.relu(linear(w, "to_k", x_k)) ** 2)
        outputs.append(torch.sigmoid(linear(w, "to_r", x_r)) * y)
    return torch.stack(outputs, 1)


def mesa(w: Weights, x: Tensor) -> Tensor:
    """Solve exactly for every token; q and k are convolved, v is not."""
    *qk, v = linear(w, "project.to_qkv", x).chunk(3, -1)
    q, k = F.silu(conv(w, "project.conv", torch.cat(qk, -1))).chunk(2, -1)
    q, k, v = unit(split_heads(q, E)), unit(split_heads(k, E)), split_heads(v, E)
    a = torch.sigmoid(linear(w, "operands.decay.proj", x))[..., None, None]
    beta = torch.sigmoid(linear(w, "operands.beta.proj", x))[..., None]
    shift = torch.diag_embed(0.25 + F.softplus(w["operands.solve.log_lambda"]))
    G = K = x.new_zeros(x.shape[0], H, E, E)
    outputs = []
    for t in range(T):
        key = beta[:, t] * k[:, t]
        G, K = a[:, t] * G + outer(key, v[:, t]), a[:, t] * K + outer(key, k[:, t])
        outputs.append(read(G, torch.linalg.solve(K + shift, q[:, t])))
    o = torch.stack(outputs, 1)
    o = w["outputs.norm.weight"] * o / torch.sqrt((o**2).mean(-1, keepdim=True) + 1e-5)
    return linear(w, "out", o.flatten(2))


def ttt_linear(w: Weights, x: Tensor) -> Tensor:
    """The inner gradient by autograd at the state of the mini-batch's start; mini-batches of 4.

    The dual form of the published code: token i reads W' - rate_i sum_(j <= i) eta_j grad_j.
    """
    qk, v = linear(w, "to_qk_v", x).chunk(2, -1)
    q, k = conv(w, "filters.conv", torch.cat([qk, qk], -1)).chunk(2, -1)
    q, k, v = (split_heads(y, E) for y in (q, k, v))
    eta = torch.sigmoid(linear(w, "to_rate", x)) / E
    W, b = (w[name].expand(x.shape[0], *w[name].shape) for name in "Wb")

    def model(W: Tensor, b: Tensor, y: Tensor) -> Tensor:
        return w["gain"] * F.layer_norm(read(W, y) + b, (E,), eps=1e-6) + w["bias"]

    def rotate(y: Tensor, position: int) -> Tensor:
        angle = position * 10000.0 ** (-torch.arange(E // 2, dtype=torch.float64) / (E // 2))
        z = torch.complex(*y.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], -1)

    outputs = []
    for start in range(0, T, 4):
        d_Ws, d_bs = [], []
        for i in range(min(4, T - start)):
            t = start + i
            q_t, k_t = rotate(q[:, t], i), rotate(k[:, t], i)
            loss = 0.5 * (eta[:, t, :, None] * (model(W, b, k_t) - (v[:, t] - k_t)).square()).sum()
            d_W, d_b = torch.autograd.grad(loss, [W, b], create_graph=True)
            d_Ws.append(d_W)
            d_bs.append(d_b)
            rate = (1 / (i + 1) + w["place_rate"][i]).clamp(min=0)
            current = W - rate * sum(d_Ws), b - rate * sum(d_bs)
            outputs.append(q_t + model(*current, q_t))
        W, b = current
    y = F.layer_norm(torch.stack(outputs, 1).flatten(2), (D,), w["norm.weight"], w["norm.bias"], 1e-6)
    return linear(w, "out", y * F.gelu(linear(w, "to_gate", x), approximate="tanh"))


def titans(w: Weights, x: Tensor) -> Tensor:
    """The inner gradient by autograd at the memory of the chunk's start; chunks of 4."""
    q, k, v = F.silu(conv(w, "filters.conv", linear(w, "to_qkv", x))).chunk(3, -1)
    q, k, v = unit(split_heads(q, E)), unit(split_heads(k, E)), split_heads(v, E)
    eta, theta, alpha = (g[..., None, None] for g in torch.sigmoid(linear(w, "to_gates", x)).chunk(3, -1))
    M = [w[name].expand(x.shape[0], *w[name].shape) for name in sorted(w) if name.startswith("memory")]
    S = [torch.zeros_like(m) for m in M]

    def memory(M: list[Tensor], y: Tensor) -> Tensor:
        y = read(M[0], y)
        return y if len(M) == 1 else read(M[1], F.silu(y))

    outputs = []
    for t in range(T):
        if t % 4 == 0:
            start = M
        loss = (memory(start, k[:, t]) - v[:, t]).square().sum()
        gradients = torch.autograd.grad(loss, start, create_graph=True)
        S = [eta[:, t] * s - theta[:, t] * g for s, g in zip(S, gradients, strict=True)]
        M = [(1 - alpha[:, t]) * m + s for m, s in zip(M, S, strict=True)]
        outputs.append(memory(M, q[:, t]))
    y = torch.stack(outputs, 1).flatten(2)
    y = w["norm.weight"] * y / torch.sqrt((y**2).mean(-1, keepdim=True) + 1e-6)
    return linear(w, "out", y * F.silu(linear(w, "to_gate", x)))


CASES: dict[str, Case] = {
    "hyena": (Hyena(max_length=32, filter_width=6), hyena),
    "lfm2_conv": (LFM2Conv(), lfm2_conv),
    "lfm2_conv, biases": (LFM2Conv(conv_width=4, bias=True), lfm2_conv),
    "mesa": (Mesa(heads=H, steps=8), mesa),
    "rwkv_channel_mix": (RWKVChannelMix(hidden=7), rwkv_channel_mix),
    "rwkv_channel_mix, RWKV-4": (RWKVChannelMix(gate=True, mix="current"), rwkv4_channel_mix),
    "ttt_linear": (TTTLinear(heads=H, batch=4), ttt_linear),
    "titans": (Titans(heads=H, chunk=4), titans),
    "titans, linear memory": (Titans(heads=H, chunk=4, depth=1), titans),
}


@pytest.mark.parametrize("name", CASES)
def test_mixer_equals_its_equation(name: str) -> None:
    assert_equals_equation(CASES[name], 1e-7, width=D, noise=0.2)


def test_error_of_mesa_decreases_with_conjugate_gradient_steps() -> None:
    errors = []
    for steps in (1, 2, 4, 12):
        torch.manual_seed(0)
        mixer = Mesa(heads=1, steps=steps).build(D, backend="reference").double()
        x = torch.randn(1, T, D, dtype=torch.float64)
        exact = Mesa(heads=1, steps=40).build(D, backend="reference").double()
        exact.load_state_dict(mixer.state_dict())
        errors.append(float((mixer(x)[0] - exact(x)[0]).norm().detach()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-7 < errors[0]
