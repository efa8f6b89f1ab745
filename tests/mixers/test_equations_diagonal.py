"""Diagonal recurrences against their equations in complex float64, and S4D's discretisation against scipy.signal.

B batch, T time, D width, C channels
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equations import (
    LATER_LAYER,
    Case,
    Equation,
    T,
    Weights,
    assert_equals_equation,
    conv,
    gate,
    linear,
    out,
    rms_norm,
    scan,
    split_heads,
)
from scipy.signal import cont2discrete, dlsim
from torch import Tensor

from deltazoo.backends.update.base import Backend
from deltazoo.mixers import H3, HGRN, LRU, S4D, S5, Context, LonghornDiagonal
from deltazoo.mixers.parts.ssm.discretisation import Discretisation, discretise

C = 6


def discretised(lam: Tensor, dt: Tensor, bilinear: bool) -> tuple[Tensor, Tensor]:
    if bilinear:
        return (1 + lam * dt / 2) / (1 - lam * dt / 2), dt / (1 - lam * dt / 2)
    return torch.exp(lam * dt), (torch.exp(lam * dt) - 1) / lam


def complex_values(x: Tensor) -> Tensor:
    return torch.view_as_complex(split_heads(x, 2).contiguous())


def hgrn_gates(w: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input c and the forget gate f, which has a lower bound."""
    bound = torch.sigmoid(w["operands.decay.floor"])
    f = bound + (1 - bound) * torch.sigmoid(linear(w, "operands.decay.proj", x))
    return F.silu(linear(w, "project.to_v", x)), f


def hgrn(w: Weights, x: Tensor) -> Tensor:
    c, f = hgrn_gates(w, x)
    c, frequency = complex_values(c), w["operands.turn_in.turn"]
    rotation = torch.polar(torch.ones_like(frequency), frequency)
    h = scan(lambda h, t: f[:, t] * rotation * h + (1 - f[:, t]) * c[:, t], lambda h, t: h, torch.zeros_like(c[:, 0]))
    o = gate(w, x, torch.view_as_real(h), torch.sigmoid).flatten(2)
    return out(w, rms_norm(w, o - o.mean(-1, keepdim=True)))


def hgrn_real(w: Weights, x: Tensor) -> Tensor:
    c, f = hgrn_gates(w, x)
    h = scan(lambda h, t: f[:, t] * h + (1 - f[:, t]) * c[:, t], lambda h, t: h, torch.zeros_like(c[:, 0]))
    o = gate(w, x, h, torch.sigmoid)
    return out(w, rms_norm(w, o - o.mean(-1, keepdim=True)))


def state_space(w: Weights, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """s <- a s + b B x, y = Re(C s) + D x, with complex s, B and C."""
    u = complex_values(linear(w, "project.to_v", x))
    s = scan(lambda s, t: a * s + b * u[:, t], lambda s, t: s, torch.zeros_like(u[:, 0]))
    C_re, C_im = split_heads(w["out.weight"], 2).unbind(-1)
    return (s @ torch.complex(C_re, C_im).mT).real + w["direct.D"] * x


def lru(w: Weights, x: Tensor) -> Tensor:
    a = torch.exp(torch.complex(-torch.exp(w["operands.decay.nu"]), torch.exp(w["operands.decay.theta"])))
    return state_space(w, x, a, torch.exp(w["operands.decay.gamma"]))


def s5(bilinear: bool) -> Equation:
    def equation(w: Weights, x: Tensor) -> Tensor:
        lam = torch.complex(-torch.exp(w["operands.decay.log_real"]), w["operands.decay.imaginary"])
        return state_space(w, x, *discretised(lam, torch.exp(w["operands.decay.log_dt"]), bilinear))

    return equation


def longhorn_diagonal(w: Weights, x: Tensor) -> Tensor:
    u = F.silu(conv(w, "project.conv", linear(w, "project.to_v", x)))
    r, k, q = linear(w, "operands.selective.proj", u).split([-(-x.shape[2] // 16), 3, 3], -1)
    b = torch.sigmoid(linear(w, "operands.selective.to_step", r))
    d = b / (1 + b * (k**2).sum(-1, keepdim=True))

    def step(S: Tensor, t: int) -> Tensor:
        erase = d[:, t, :, None] * k[:, t, None] ** 2
        return (1 - erase) * S + (d * u)[:, t, :, None] * k[:, t, None]

    o = scan(step, lambda S, t: (S * q[:, t, None]).sum(-1), x.new_zeros(2, C, 3))
    return out(w, (o + w["outputs.skip.D"] * u) * F.silu(linear(w, "outputs.gate.proj", x)))


def channel_state_spaces(w: Weights, name: str, x: Tensor, bilinear: bool) -> Tensor:
    """h <- a h + b x, y = Re(C h) + skip x for each channel; real if there is no imaginary part."""
    lam, C_n = -torch.exp(w[f"{name}.log_real"]), w[f"{name}.C"]
    if f"{name}.imaginary" in w:
        lam, C_n = torch.complex(lam, w[f"{name}.imaginary"]), torch.complex(C_n[..., 0], C_n[..., 1])
    a, b = discretised(lam, torch.exp(w[f"{name}.log_dt"]), bilinear)
    start = torch.zeros_like(a).expand(x.shape[0], *a.shape)
    y = scan(lambda h, t: a * h + b * x[:, t, :, None], lambda h, t: (C_n * h).sum(-1), start)
    return (y.real if y.is_complex() else y) + w[f"{name}.skip"] * x


def s4d(bilinear: bool = False) -> Equation:
    def equation(w: Weights, x: Tensor) -> Tensor:
        y = F.gelu(channel_state_spaces(w, "filters.ssm", x, bilinear))
        return linear(w, "out", y) * torch.sigmoid(linear(w, "gate", y))

    return equation


def h3(bilinear: bool) -> Equation:
    def equation(w: Weights, x: Tensor) -> Tensor:
        q, k, v = linear(w, "to_qkv", x).chunk(3, -1)
        y = channel_state_spaces(w, "filters.diagonal", conv(w, "filters.shift", k) * v, bilinear)
        return linear(w, "out", q * y)

    return equation


UPDATES: dict[str, Case] = {
    "hgrn": (HGRN(channels=C), hgrn),
    "hgrn, real": (HGRN(channels=C, turning=False), hgrn_real),
    "lru": (LRU(channels=C), lru),
    "s5, zoh": (S5(channels=C), s5(bilinear=False)),
    "s5, bilinear": (S5(channels=C, discretisation="bilinear"), s5(bilinear=True)),
    "longhorn_diagonal": (LonghornDiagonal(channels=C, state_size=3), longhorn_diagonal),
}
FILTERS: dict[str, Case] = {
    "s4d, recurrence": (S4D(states=3, convolution=False), s4d()),
    "s4d, convolution": (S4D(states=3), s4d()),
    "s4d, bilinear": (S4D(states=3, discretisation="bilinear"), s4d(bilinear=True)),
    "s4d, real": (S4D(states=3, start="real"), s4d()),
    "s4d, real, recurrence": (S4D(states=3, start="real", convolution=False), s4d()),
    "h3": (H3(states=3, shift=5), h3(bilinear=True)),
    "h3, recurrence": (H3(states=3, shift=5, convolution=False, discretisation="zoh"), h3(bilinear=False)),
}


@pytest.mark.parametrize("name", UPDATES)
def test_mixer_equals_its_equation(name: str, backend: str | Backend) -> None:
    assert_equals_equation(UPDATES[name], 1e-8, backend, LATER_LAYER)


@pytest.mark.parametrize("name", FILTERS)
def test_filter_equals_its_equation(name: str) -> None:
    assert_equals_equation(FILTERS[name], 1e-7, width=12, noise=0.2)


@pytest.mark.parametrize("method", ["zoh", "bilinear"])
def test_discretise_equals_scipy(method: Discretisation) -> None:
    torch.manual_seed(0)
    one = np.ones((1, 1))
    real, imaginary = -torch.rand(5, dtype=torch.float64) - 0.1, 5 * torch.randn(5, dtype=torch.float64)
    log_magnitude, angle, b_re, b_im = discretise(method, real, imaginary, torch.tensor(0.3, dtype=torch.float64))
    for i in range(5):
        lam = torch.complex(real[i], imaginary[i]).item()
        a, b, *_ = cont2discrete((np.array([[lam]]), one, one, 0 * one), 0.3, method=method)
        assert abs(torch.polar(log_magnitude[i].exp(), angle[i]).item() - a[0, 0]) < 1e-14
        assert abs(complex(b_re[i], b_im[i]) - b[0, 0]) < 1e-14


@pytest.mark.parametrize("method", ["zoh", "bilinear"])
def test_real_s4d_equals_the_simulation_of_scipy(method: Discretisation) -> None:
    """One channel, with its skip. Only A and B of scipy's bilinear system are used: its C and D differ from S4D's."""
    torch.manual_seed(0)
    ssm = S4D(states=2, start="real", discretisation=method).build(1, backend="reference").double().filters["ssm"]
    x = torch.randn(1, T, 1, dtype=torch.float64)
    y = ssm(x, None, Context())[0][0, :, 0].detach()
    A = torch.diag(-ssm.log_real[0].exp()).detach().numpy()
    C_n, dt = ssm.C.detach().numpy(), ssm.log_dt.exp().item()
    system = cont2discrete((A, np.ones((2, 1)), C_n, np.zeros((1, 1))), dt, method=method)
    # Our output reads the state after its token, scipy's the state before it: drop scipy's first output.
    inputs = torch.cat([x[0], x[0, :1]]).numpy()
    states = dlsim((system[0], system[1], C_n, np.zeros((1, 1)), dt), inputs)[1][1:, 0]
    torch.testing.assert_close(y, torch.tensor(states) + ssm.skip.item() * x[0, :, 0], rtol=1e-10, atol=1e-12)


def test_rotation_is_accurate_after_100000_tokens() -> None:
    """Angles are computed in float64 modulo 2 pi, so the error of float32 does not grow with the position."""
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
        state["ssm.seen"].add_(100_000)
        outputs.append(module(y, state)[0].double())
    assert float((outputs[0] - outputs[1]).norm() / outputs[1].norm()) < 1e-4
