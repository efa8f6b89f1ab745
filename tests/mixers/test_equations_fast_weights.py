"""Mixers outside the update spec against their equations in float64; S4D's steps against scipy.signal.

B batch, T time, D width, H heads, E head width
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.signal import cont2discrete, dlsim
from torch import Tensor

from deltazoo.mixers import H3, S4D, Hyena, Mesa, MixerConfig, Titans, TTTLinear
from deltazoo.mixers.parts.discretisation import discretise

D, T, H = 12, 13, 3
E = D // H

Weights = dict[str, Tensor]


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].mT + w.get(f"{name}.bias", 0)


def conv(w: Weights, name: str, x: Tensor) -> Tensor:
    weight = w[f"{name}.weight"]
    taps = weight.shape[1]
    return F.conv1d(x.mT, weight[:, None], w.get(f"{name}.bias"), padding=taps - 1, groups=x.shape[2]).mT[:, :T]


def diagonal(w: Weights, name: str, x: Tensor, bilinear: bool = False) -> Tensor:
    """h <- a h + b x, y = Re(C h) + skip x, complex, token by token."""
    real = -torch.exp(w[f"{name}.log_real"])
    C, dt = w[f"{name}.C"], torch.exp(w[f"{name}.log_dt"])
    if f"{name}.imaginary" in w:
        lam, C = torch.complex(real, w[f"{name}.imaginary"]), torch.complex(C[..., 0], C[..., 1])
    else:
        lam = real
    if bilinear:
        a, b = (1 + lam * dt / 2) / (1 - lam * dt / 2), dt / (1 - lam * dt / 2)
    else:
        a, b = torch.exp(lam * dt), (torch.exp(lam * dt) - 1) / lam
    h, outputs = torch.zeros_like(a).expand(x.shape[0], *a.shape), []
    for t in range(T):
        h = a * h + b * x[:, t, :, None]
        y = (C * h).sum(-1)
        outputs.append((y.real if y.is_complex() else y) + w[f"{name}.skip"] * x[:, t])
    return torch.stack(outputs, 1)


def s4d(bilinear: bool) -> Callable[[Weights, Tensor], Tensor]:
    def run(w: Weights, x: Tensor) -> Tensor:
        y = F.gelu(diagonal(w, "filters.ssm", x, bilinear))
        return linear(w, "out", y) * torch.sigmoid(linear(w, "gate", y))

    return run


def h3(bilinear: bool) -> Callable[[Weights, Tensor], Tensor]:
    def run(w: Weights, x: Tensor) -> Tensor:
        q, k, v = linear(w, "to_qkv", x).chunk(3, -1)
        return linear(w, "out", q * diagonal(w, "filters.diagonal", conv(w, "filters.shift", k) * v, bilinear))

    return run


def hyena(w: Weights, x: Tensor) -> Tensor:
    x1, x2, v = conv(w, "filters.short", linear(w, "to_streams", x)).chunk(3, -1)
    t = torch.arange(T, dtype=torch.float64)[:, None] / 31
    angle = 2e-4 * torch.pi * t * 31 / 32
    z = torch.cat([t, torch.cos(angle), -torch.sin(angle)], 1)
    for i in range(3):
        z = torch.sin(w["filters.long.frequency"] * linear(w, f"filters.long.layers.{i}", z))
    pace = torch.linspace(1, 5, D, dtype=torch.float64) * torch.log(torch.tensor(100.0, dtype=torch.float64)) / 1.5
    h = linear(w, "filters.long.last", z) * torch.exp(-t * pace)
    u = x2 * v
    y = torch.stack([(h[: t + 1].flip(0) * u[:, : t + 1]).sum(1) for t in range(T)], 1)
    return linear(w, "out", x1 * (y + w["filters.long.bias"] * u))


def mesa(w: Weights, x: Tensor) -> Tensor:
    """By an exact solve for every token; q and k are convolved, v is not."""
    *qk, v = linear(w, "project.to_qkv", x).chunk(3, -1)
    qk = conv(w, "project.conv", torch.cat(qk, -1)).chunk(2, -1)
    q, k, v = (y.unflatten(-1, (H, E)) for y in (*qk, v))
    q, k = (F.silu(y) / torch.sqrt((F.silu(y) ** 2).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    a = torch.sigmoid(linear(w, "operands.decay.proj", x))[..., None, None]
    beta = torch.sigmoid(linear(w, "operands.beta.proj", x))[..., None, None]
    shift = torch.diag_embed(0.25 + F.softplus(w["operands.solve.log_lambda"]))
    G = K = x.new_zeros(x.shape[0], H, E, E)
    outputs = []
    for t in range(T):
        key = k[:, t, :, :, None]
        G, K = a[:, t] * G + beta[:, t] * key * v[:, t, :, None], a[:, t] * K + beta[:, t] * key * key.mT
        outputs.append((G.mT @ torch.linalg.solve(K + shift, q[:, t, :, :, None]))[..., 0])
    o = torch.stack(outputs, 1)
    o = w["outputs.norm.weight"] * o / torch.sqrt((o**2).mean(-1, keepdim=True) + 1e-5)
    return linear(w, "out", o.flatten(2))


def rms(w: Weights, o: Tensor) -> Tensor:
    return w["norm.weight"] * o / torch.sqrt((o**2).mean(-1, keepdim=True) + 1e-6)


def ttt_linear(w: Weights, x: Tensor) -> Tensor:
    """The inner gradient by autograd, at the state of the mini-batch's start; mini-batches of 4.

    The dual form of the published code: token i reads W' - rate_i sum_(j <= i) eta_j grad_j.
    """
    qk, v = linear(w, "to_qk_v", x).chunk(2, -1)
    q, k = conv(w, "filters.conv", torch.cat([qk, qk], -1)).chunk(2, -1)
    q, k, v = (y.unflatten(-1, (H, E)) for y in (q, k, v))
    eta = torch.sigmoid(linear(w, "to_rate", x)) / E
    W, b = (w[name].expand(x.shape[0], *w[name].shape) for name in "Wb")

    def model(W: Tensor, b: Tensor, y: Tensor) -> Tensor:
        z = torch.einsum("bhke,bhk->bhe", W, y) + b
        return w["gain"] * F.layer_norm(z, (E,), eps=1e-6) + w["bias"]

    outputs = []
    for begin in range(0, T, 4):
        d_Ws, d_bs = [], []
        for place in range(min(4, T - begin)):
            t = begin + place
            angle = place * 10000.0 ** (-torch.arange(E // 2, dtype=torch.float64) / (E // 2))
            turn = torch.block_diag(*[torch.stack([c.cos(), -c.sin(), c.sin(), c.cos()]).view(2, 2) for c in angle])
            order = [i + j * (E // 2) for i in range(E // 2) for j in range(2)]
            q_t, k_t = (
                torch.zeros_like(y[:, t]).index_copy(-1, torch.tensor(order), y[:, t][..., order] @ turn.mT)
                for y in (q, k)
            )
            loss = 0.5 * (eta[:, t, :, None] * (model(W, b, k_t) - (v[:, t] - k_t)).square()).sum()
            d_W, d_b = torch.autograd.grad(loss, [W, b], create_graph=True)
            d_Ws.append(d_W)
            d_bs.append(d_b)
            rate = (1 / (place + 1) + w["place_rate"][place]).clamp(min=0)
            now = W - rate * sum(d_Ws), b - rate * sum(d_bs)
            outputs.append(q_t + model(*now, q_t))
        W, b = now
    y = F.layer_norm(torch.stack(outputs, 1).flatten(2), (D,), w["norm.weight"], w["norm.bias"], 1e-6)
    return linear(w, "out", y * F.gelu(linear(w, "to_gate", x), approximate="tanh"))


def titans(w: Weights, x: Tensor) -> Tensor:
    """The inner gradient by autograd, at the memory of the chunk's start; chunks of 4."""
    q, k, v = F.silu(conv(w, "filters.conv", linear(w, "to_qkv", x))).chunk(3, -1)
    q, k, v = (y.unflatten(-1, (H, E)) for y in (q, k, v))
    q, k = (y / torch.sqrt((y**2).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    eta, theta, alpha = (g[..., None, None] for g in torch.sigmoid(linear(w, "to_gates", x)).chunk(3, -1))
    M = [w[name].expand(x.shape[0], *w[name].shape) for name in sorted(w) if name.startswith("memory")]
    S = [torch.zeros_like(m) for m in M]

    def read(M: list[Tensor], y: Tensor) -> Tensor:
        y = torch.einsum("bhk,bhke->bhe", y, M[0])
        return y if len(M) == 1 else torch.einsum("bhk,bhke->bhe", F.silu(y), M[1])

    outputs = []
    for t in range(T):
        if t % 4 == 0:
            start = M
        loss = (read(start, k[:, t]) - v[:, t]).square().sum()
        gradients = torch.autograd.grad(loss, start, create_graph=True)
        S = [eta[:, t] * s - theta[:, t] * g for s, g in zip(S, gradients, strict=True)]
        M = [(1 - alpha[:, t]) * m + s for m, s in zip(M, S, strict=True)]
        outputs.append(read(M, q[:, t]))
    y = rms(w, torch.stack(outputs, 1).flatten(2))
    return linear(w, "out", y * F.silu(linear(w, "to_gate", x)))


CASES: dict[str, tuple[MixerConfig, Callable[[Weights, Tensor], Tensor]]] = {
    "s4d, recurrence": (S4D(states=3, convolution=False), s4d(bilinear=False)),
    "s4d, convolution": (S4D(states=3), s4d(bilinear=False)),
    "s4d, bilinear": (S4D(states=3, discretisation="bilinear"), s4d(bilinear=True)),
    "s4d, real": (S4D(states=3, start="real"), s4d(bilinear=False)),
    "s4d, real, recurrence": (S4D(states=3, start="real", convolution=False), s4d(bilinear=False)),
    "h3": (H3(states=3, shift=5), h3(True)),
    "h3, recurrence": (H3(states=3, shift=5, convolution=False, discretisation="zoh"), h3(False)),
    "hyena": (Hyena(max_length=32, filter_width=6), hyena),
    "mesa": (Mesa(heads=H, steps=8), mesa),
    "ttt_linear": (TTTLinear(heads=H, batch=4), ttt_linear),
    "titans": (Titans(heads=H, chunk=4), titans),
    "titans, a matrix": (Titans(heads=H, chunk=4, depth=1), titans),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mixer_equals_its_equation(name: str) -> None:
    config, equation = CASES[name]
    torch.manual_seed(0)
    mixer = config.build(D, backend="reference").double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    x = torch.randn(2, T, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, T, D, dtype=torch.float64)
    y = mixer(x)[0]
    want = equation(dict(mixer.named_parameters()), x)
    torch.testing.assert_close(y, want, rtol=1e-7, atol=1e-9)
    leaves = [x, *mixer.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad((y * weight).sum(), leaves),
        torch.autograd.grad((want * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("ours", "theirs"), [("zoh", "zoh"), ("bilinear", "bilinear")])
def test_a_discretised_step_is_scipys(ours: str, theirs: str) -> None:
    torch.manual_seed(0)
    one = np.ones((1, 1))
    real, imaginary = -torch.rand(5, dtype=torch.float64) - 0.1, 5 * torch.randn(5, dtype=torch.float64)
    log_a, turn, b_re, b_im = discretise(ours, real, imaginary, torch.tensor(0.3, dtype=torch.float64))
    for i in range(5):
        lam = torch.complex(real[i], imaginary[i]).item()
        a, b, *_ = cont2discrete((np.array([[lam]]), one, one, 0 * one), 0.3, method=theirs)
        got = torch.polar(log_a[i].exp(), turn[i]).item(), complex(b_re[i], b_im[i])
        assert abs(got[0] - a[0, 0]) < 1e-14
        assert abs(got[1] - b[0, 0]) < 1e-14


@pytest.mark.parametrize("how", ["zoh", "bilinear"])
def test_s4d_real_filters_as_scipy_does(how: str) -> None:
    """One channel, with its skip. Of scipy's bilinear system only the step is taken: its C and D differ."""
    torch.manual_seed(0)
    ssm = S4D(states=2, start="real", discretisation=how).build(1, backend="reference").double().filters["ssm"]
    x = torch.randn(1, T, 1, dtype=torch.float64)
    from deltazoo.mixers import Context

    y = ssm(x, None, Context())[0][0, :, 0].detach()
    A = torch.diag(-ssm.log_real[0].exp()).detach().numpy()
    C, dt = ssm.C.detach().numpy(), float(ssm.log_dt.exp())
    system = cont2discrete((A, np.ones((2, 1)), C, np.zeros((1, 1))), dt, method=how)
    # o_t reads the state after its token: the output equation of the next one
    states = dlsim((system[0], system[1], C, np.zeros((1, 1)), dt), torch.cat([x[0], x[0, :1]]).numpy())[1][1:, 0]
    want = torch.tensor(states) + float(ssm.skip) * x[0, :, 0]
    torch.testing.assert_close(y, want, rtol=1e-10, atol=1e-12)


def test_a_long_sequence_turns_exactly() -> None:
    """Angles modulo 2 pi in float64: after 100,000 tokens float32 is as right as float64."""
    torch.manual_seed(0)
    mixer = S4D(states=3, convolution=False).build(4, backend="reference")
    with torch.no_grad():
        mixer.filters["ssm"].log_real.fill_(-12)
    x = torch.randn(1, 4, 4)
    exact = S4D(states=3, convolution=False).build(4, backend="reference").double()
    exact.load_state_dict({name: value.double() for name, value in mixer.state_dict().items()})
    outputs = []
    for module, y in ((mixer, x), (exact, x.double())):
        state = module.init_state(1)
        state["ssm.seen"] += 100_000
        outputs.append(module(y, state)[0].double())
    assert float((outputs[0] - outputs[1]).norm() / outputs[1].norm()) < 1e-4


def test_mesas_solution_converges_to_the_exact_one() -> None:
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
