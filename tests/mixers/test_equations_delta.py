"""The zoo against its equations, written out token by token in float64 from the raw parameters.

B batch, T time, H heads, K key width, V value width. Every head has a key of its own here.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.base import Backend
from deltazoo.mixers import (
    GSA,
    HGRN,
    HGRN2,
    LRU,
    MLSTM,
    RWKV6,
    RWKV7,
    S5,
    Comba,
    DeltaProduct,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedEFLA,
    GatedLonghorn,
    GatedRetNet,
    GatedRFA,
    LonghornDiagonal,
    MixerConfig,
)
from deltazoo.mixers.core.mixer import Place

D, T, H, K, V, C = 20, 11, 3, 4, 5, 6
HEADS = {"heads": H, "value_heads": H, "key_width": K, "value_width": V}
LAYER = Place(1, 4)

Weights = dict[str, Tensor]


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].mT + w.get(f"{name}.bias", 0)


def heads(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (-1, size))


def conv(w: Weights, x: Tensor) -> Tensor:
    if "project.conv.weight" not in w:
        return x
    weight = w["project.conv.weight"]
    taps, bias = weight.shape[1], w.get("project.conv.bias")
    return F.conv1d(x.mT, weight[:, None], bias, padding=taps - 1, groups=x.shape[2]).mT[:, : x.shape[1]]


def streams(w: Weights, x: Tensor, n: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    qkv = conv(w, linear(w, "project.to_qkv", x))
    q, k, v = qkv.split([H * K, n * H * K, n * H * V], -1)
    if n == 1:
        return heads(q, K), heads(k, K), heads(v, V)
    return heads(q, K), k.unflatten(-1, (n, H, K)), v.unflatten(-1, (n, H, V))


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x**2).sum(-1, keepdim=True) + 1e-6)


def scan(step: Callable[[Tensor, int], Tensor], read: Callable[[Tensor, int], Tensor], state: Tensor) -> Tensor:
    """S <- step(S, t), o_t = read(S, t)."""
    outputs = []
    for t in range(T):
        state = step(state, t)
        outputs.append(read(state, t))
    return torch.stack(outputs, 1)


def matrix(x: Tensor, k: int = K, v: int = V) -> Tensor:
    return x.new_zeros(x.shape[0], H, k, v)


def outer(k: Tensor, v: Tensor) -> Tensor:
    return k[..., :, None] * v[..., None, :]


def read(S: Tensor, q: Tensor) -> Tensor:
    return (S * q[..., None]).sum(-2)


def rms(w: Weights, o: Tensor, eps: float = 1e-5, dims: int = 1) -> Tensor:
    flat = o.flatten(-dims) if dims > 1 else o
    return (w["outputs.norm.weight"] * (flat / (flat.pow(2).mean(-1, keepdim=True) + eps).sqrt())).view(o.shape)


def layer(w: Weights, o: Tensor, eps: float = 1e-5) -> Tensor:
    """Layer norm of each head, a weight and perhaps a bias for each channel of each head."""
    o = o - o.mean(-1, keepdim=True)
    weight, bias = w["outputs.norm.weight"].view(-1, o.shape[-1]), w.get("outputs.norm.bias")
    normed = weight * (o / (o.pow(2).mean(-1, keepdim=True) + eps).sqrt())
    return normed if bias is None else normed + bias.view(-1, o.shape[-1])


def gate(w: Weights, x: Tensor, o: Tensor, activation: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    return o * activation(linear(w, "outputs.gate.proj", x)).view(o.shape)


def out(w: Weights, o: Tensor) -> Tensor:
    return linear(w, "out", o.flatten(2))


def mamba_decay(w: Weights, x: Tensor) -> Tensor:
    raw = linear(w, "operands.decay.proj", x) + w["operands.decay.dt_bias"]
    return torch.exp(-torch.exp(w["operands.decay.A_log"]) * torch.log1p(torch.exp(raw)))


def gated_retnet(w: Weights, x: Tensor) -> Tensor:
    q, k, v = streams(w, x)
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(K // 2, dtype=torch.float64) / (K // 2))
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]
    q, k = (torch.complex(y[..., : K // 2], y[..., K // 2 :]) * turn for y in (q, k))
    log_a = F.logsigmoid(linear(w, "operands.decay.proj", x)) / 16
    total = log_a.cumsum(1)
    weight = torch.einsum("bthk,bshk->bhts", q, k.conj()).real * K**-0.5
    age = (total.mT[..., :, None] - total.mT[..., None, :]).tril()
    o = torch.einsum("bhts,bshv->bthv", (weight * age.exp()).tril(), v)
    o = o - o.mean(-1, keepdim=True)
    return out(w, gate(w, x, rms(w, o)))


def gated_rfa(w: Weights, x: Tensor) -> Tensor:
    q, k, v = streams(w, x)

    def phi(y: Tensor) -> Tensor:
        angle = torch.einsum("bthk,hkr->bthr", unit(y) * w["operands.feature.sigma"], w["operands.feature.G"])
        return torch.cat([angle.sin(), angle.cos()], -1) / 4  # sqrt of 16 features

    q, k = phi(q), phi(k)
    g = torch.sigmoid(linear(w, "operands.decay.proj", x))[..., None]
    S = scan(lambda S, t: g[:, t, :, None] * S + outer((1 - g[:, t]) * k[:, t], v[:, t]), lambda S, t: S, matrix(x, 32))
    z = scan(lambda z, t: g[:, t] * z + (1 - g[:, t]) * k[:, t], lambda z, t: z, x.new_zeros(2, H, 32))
    return out(w, read(S, q) / (z * q).sum(-1, keepdim=True).abs().clamp(min=0.05))


def bounded(w: Weights, x: Tensor) -> Tensor:
    g = torch.sigmoid(w["operands.decay.floor"])
    return g + (1 - g) * torch.sigmoid(linear(w, "operands.decay.proj", x))


def hgrn2(w: Weights, x: Tensor) -> Tensor:
    q, v = linear(w, "project.to_qkv", x).split([H * K, H * V], -1)
    q, v, f = heads(F.silu(q), K), heads(v, V), heads(bounded(w, x), K)
    o = scan(
        lambda S, t: f[:, t, :, :, None] * S + outer(1 - f[:, t], v[:, t]), lambda S, t: read(S, q[:, t]), matrix(x)
    )
    return out(w, rms(w, o, dims=2))


def hgrn(w: Weights, x: Tensor) -> Tensor:
    c = torch.view_as_complex(heads(F.silu(linear(w, "project.to_v", x)), 2).contiguous())
    f, turn = bounded(w, x), w["operands.turn_in.turn"]
    a = torch.polar(torch.ones_like(turn), turn)
    h = scan(lambda h, t: f[:, t] * a * h + (1 - f[:, t]) * c[:, t], lambda h, t: h, torch.zeros_like(c[:, 0]))
    o = gate(w, x, torch.view_as_real(h), torch.sigmoid).flatten(2)
    return out(w, rms(w, o - o.mean(-1, keepdim=True)))


def hgrn_real(w: Weights, x: Tensor) -> Tensor:
    c, f = F.silu(linear(w, "project.to_v", x)), bounded(w, x)
    h = scan(lambda h, t: f[:, t] * h + (1 - f[:, t]) * c[:, t], lambda h, t: h, torch.zeros_like(c[:, 0]))
    o = gate(w, x, h, torch.sigmoid)
    return out(w, rms(w, o - o.mean(-1, keepdim=True)))


def diagonal(w: Weights, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """s <- a s + b B x, y = Re(C s) + D x, all complex."""
    u = torch.view_as_complex(heads(linear(w, "project.to_v", x), 2).contiguous())
    s = scan(lambda s, t: a * s + b * u[:, t], lambda s, t: s, torch.zeros_like(u[:, 0]))
    C_re, C_im = heads(w["out.weight"], 2).unbind(-1)
    return (s @ torch.complex(C_re, C_im).mT).real + w["direct.D"] * x


def lru(w: Weights, x: Tensor) -> Tensor:
    a = torch.exp(torch.complex(-torch.exp(w["operands.decay.nu"]), torch.exp(w["operands.decay.theta"])))
    return diagonal(w, x, a, torch.exp(w["operands.decay.gamma"]))


def s5(bilinear: bool) -> Callable[[Weights, Tensor], Tensor]:
    def run(w: Weights, x: Tensor) -> Tensor:
        lam = torch.complex(-torch.exp(w["operands.decay.log_real"]), w["operands.decay.imaginary"])
        dt = torch.exp(w["operands.decay.log_dt"])
        if bilinear:
            return diagonal(w, x, (1 + lam * dt / 2) / (1 - lam * dt / 2), dt / (1 - lam * dt / 2))
        return diagonal(w, x, torch.exp(lam * dt), (torch.exp(lam * dt) - 1) / lam)

    return run


def longhorn_diagonal(w: Weights, x: Tensor) -> Tensor:
    u = F.silu(conv(w, linear(w, "project.to_v", x)))
    r, k, q = linear(w, "operands.selective.proj", u).split([-(-x.shape[2] // 16), 3, 3], -1)
    b = torch.sigmoid(linear(w, "operands.selective.to_step", r))
    d = b / (1 + b * (k**2).sum(-1, keepdim=True))

    def step(S: Tensor, t: int) -> Tensor:
        erase = d[:, t, :, None] * k[:, t, None] ** 2
        return (1 - erase) * S + (d * u)[:, t, :, None] * k[:, t, None]

    o = scan(step, lambda S, t: (S * q[:, t, None]).sum(-1), x.new_zeros(2, C, 3))
    return out(w, (o + w["outputs.skip.D"] * u) * F.silu(linear(w, "outputs.gate.proj", x)))


def mlstm(w: Weights, x: Tensor) -> Tensor:
    """Without the stabiliser: float64 holds these exponentials."""
    q, k, v = streams(w, x)
    raw = 15 * torch.tanh(linear(w, "operands.gates.proj", x) / 15)
    i, f = raw[..., :H].exp()[..., None], raw[..., H:].sigmoid()[..., None]
    S = scan(lambda S, t: f[:, t, :, None] * S + outer(i[:, t] * k[:, t], v[:, t]), lambda S, t: S, matrix(x))
    n = scan(lambda n, t: f[:, t] * n + i[:, t] * k[:, t], lambda n, t: n, x.new_zeros(2, H, K))
    q = q * K**-0.5
    # the epsilon stands beside the divided state's one
    m = -torch.ones(2, H, dtype=x.dtype) * 80
    scale = []
    for t in range(T):
        m = torch.maximum(m + f[:, t, :, 0].log(), i[:, t, :, 0].log())
        scale.append(m.exp())
    eps = 1e-6 * torch.stack(scale, 1)[..., None].detach()
    o = read(S, q) / ((n * q).sum(-1, keepdim=True).abs().clamp(min=1) + eps)
    return out(w, gate(w, x, layer(w, o, 1e-6), torch.sigmoid))


def before(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


def low_rank(w: Weights, name: str, x: Tensor, inner: Callable[[Tensor], Tensor] = lambda y: y) -> Tensor:
    return linear(w, f"{name}.up", inner(linear(w, f"{name}.down", x))) + w.get(f"{name}.bias", 0)


def rwkv6(w: Weights, x: Tensor) -> Tensor:
    d = before(x) - x
    inner = torch.tanh(linear(w, "project.mix_down", x + d * w["project.mix_x"])).unflatten(-1, (5, 2))
    mixed = [x + d * (w["project.mix"][i] + inner[..., i, :] @ w["project.mix_up"][i]) for i in range(5)]
    x_w, x_k, x_v, x_r, x_g = mixed
    a = heads(torch.exp(-torch.exp(low_rank(w, "project.decay", x_w, torch.tanh))), K)
    r, k = heads(linear(w, "project.to_r", x_r), K), heads(linear(w, "project.to_k", x_k), K)
    v, u = heads(linear(w, "project.to_v", x_v), V), w["outputs.bonus.u"]
    S, outputs = matrix(x), []
    for t in range(T):
        new = outer(k[:, t], v[:, t])
        outputs.append(read(S + u[..., None] * new, r[:, t]))
        S = a[:, t, :, :, None] * S + new
    o = layer(w, torch.stack(outputs, 1), 64e-5)
    return out(w, o * F.silu(linear(w, "project.to_g", x_g)).view(o.shape))


def rwkv7(w: Weights, x: Tensor) -> Tensor:
    d = before(x) - x
    x_r, x_w, x_k, x_v, x_a, x_g = (x + d * w["project.mix"][i] for i in range(6))
    r, k = heads(linear(w, "project.to_r", x_r), K), linear(w, "project.to_k", x_k)
    v = linear(w, "project.to_v", x_v)
    decay = heads(torch.exp(-(torch.e**-0.5) * torch.sigmoid(low_rank(w, "project.decay", x_w, torch.tanh))), K)
    eta = torch.sigmoid(low_rank(w, "project.rate", x_a))
    kappa = heads(k * w["project.xi"], K)
    kappa = kappa / kappa.norm(dim=-1, keepdim=True)
    k = heads(k * (1 + (eta - 1) * w["project.alpha"]), K)
    v, eta = heads(v, V), heads(eta, K)
    g = low_rank(w, "project.gate", x_g, torch.sigmoid)
    eye = torch.eye(K, dtype=x.dtype)

    def step(S: Tensor, t: int) -> Tensor:
        transition = eye * decay[:, t, :, None] - outer(kappa[:, t] * eta[:, t], kappa[:, t])
        return transition @ S + outer(k[:, t], v[:, t])

    o = layer(w, scan(step, lambda S, t: read(S, r[:, t]), matrix(x)), 64e-5)
    o = o + (r * k * w["outputs.bonus.u"]).sum(-1, keepdim=True) * v
    return out(w, o * g.view(o.shape))


def gsa(w: Weights, x: Tensor) -> Tensor:
    q, k, v = (F.silu(y) for y in streams(w, x))
    a = heads(torch.sigmoid(linear(w, "operands.slots.proj", x)) ** (1 / 8), 7)
    keys = scan(lambda S, t: a[:, t, :, :, None] * S + outer(1 - a[:, t], k[:, t]), lambda S, t: S, matrix(x, 7, K))
    values = scan(lambda S, t: a[:, t, :, :, None] * S + outer(1 - a[:, t], v[:, t]), lambda S, t: S, matrix(x, 7))
    p = torch.einsum("bthmk,bthk->bthm", keys, q).softmax(-1)
    return out(w, rms(w, F.silu(read(values, p)), dims=2))


def delta(w: Weights, x: Tensor, a: Tensor, erase: Tensor, write: Tensor) -> Tensor:
    """S = (I - k (erase k)^T) a S + k (write v)^T on unit q and k."""
    q, k, v = (F.silu(y) for y in streams(w, x))
    q, k = unit(q), unit(k)

    def step(S: Tensor, t: int) -> Tensor:
        S = a[:, t, :, :, None] * S
        return S + outer(k[:, t], write[:, t] * v[:, t] - read(S, erase[:, t] * k[:, t]))

    return scan(step, lambda S, t: K**-0.5 * read(S, q[:, t]), matrix(x))


def gated_deltanet2(w: Weights, x: Tensor) -> Tensor:
    raw = heads(
        linear(w, "operands.decay.proj.1", linear(w, "operands.decay.proj.0", x)) + w["operands.decay.dt_bias"], K
    )
    a = torch.exp(-torch.exp(w["operands.decay.A_log"])[:, None] * torch.log1p(torch.exp(raw)))
    erase = heads(torch.sigmoid(linear(w, "operands.beta.to_erase", x)), K)
    write = heads(torch.sigmoid(linear(w, "operands.beta.to_write", x)), V)
    o = rms(w, delta(w, x, a, erase, write))
    g = linear(w, "outputs.gate.proj.1", linear(w, "outputs.gate.proj.0", x))
    return out(w, o * torch.sigmoid(g).view(o.shape))


def comba(w: Weights, x: Tensor) -> Tensor:
    q, k, v = (F.silu(y) for y in streams(w, x))
    q, k = unit(q), unit(k)
    a, beta = mamba_decay(w, x), torch.sigmoid(linear(w, "operands.beta.proj", x))
    b, d = torch.sigmoid(w["operands.feedback.b"])[:, None], w["operands.feedback.d"][:, None]

    def step(S: Tensor, t: int) -> Tensor:
        erase = beta[:, t, :, None, None] * outer(k[:, t], b * k[:, t])
        return a[:, t, :, None, None] * S - erase @ S + outer(beta[:, t, :, None] * k[:, t], v[:, t])

    o = scan(step, lambda S, t: K**-0.5 * read(S, q[:, t] - d * k[:, t]), matrix(x))
    return out(w, gate(w, x, rms(w, o), torch.sigmoid))


def deltaproduct(gated: bool) -> Callable[[Weights, Tensor], Tensor]:
    def run(w: Weights, x: Tensor) -> Tensor:
        q, k, v = (F.silu(y) for y in streams(w, x, 3))
        q, k = unit(q), unit(k)
        beta = 2 * torch.sigmoid(linear(w, "operands.beta.proj", x)).clamp(max=1 - 2**-7).unflatten(-1, (3, H))
        a = mamba_decay(w, x) if gated else torch.ones(2, T, H, dtype=x.dtype)
        eye = torch.eye(K, dtype=x.dtype)

        def step(S: Tensor, t: int) -> Tensor:
            S = a[:, t, :, None, None] * S
            for n in range(3):
                strength = beta[:, t, n, :, None, None]
                S = (eye - strength * outer(k[:, t, n], k[:, t, n])) @ S + strength * outer(k[:, t, n], v[:, t, n])
            return S

        o = rms(w, scan(step, lambda S, t: K**-0.5 * read(S, q[:, t]), matrix(x)))
        return out(w, gate(w, x, o) if gated else o)

    return run


def stepped(exact: bool) -> Callable[[Weights, Tensor], Tensor]:
    def run(w: Weights, x: Tensor) -> Tensor:
        """Each step of dS/dt = -k k^T S + k v^T: by the matrix exponential, or by solving the implicit equation."""
        q, k, v = (F.silu(y) for y in streams(w, x))
        q, a, beta = unit(q), mamba_decay(w, x), torch.sigmoid(linear(w, "operands.beta.proj", x))
        eye = torch.eye(K, dtype=x.dtype)

        def step(S: Tensor, t: int) -> Tensor:
            S = a[:, t, :, None, None] * S
            erase, write = (beta[:, t, :, None, None] * outer(k[:, t], y) for y in (k[:, t], v[:, t]))
            if not exact:  # S' = S + beta k (v - S'^T k)^T
                return torch.linalg.solve(eye + erase, S + write)
            full = torch.cat([torch.cat([-erase, write], -1), torch.zeros(2, H, V, K + V, dtype=x.dtype)], -2)
            flow = torch.linalg.matrix_exp(full)
            return flow[..., :K, :K] @ S + flow[..., :K, K:]

        o = scan(step, lambda S, t: K**-0.5 * read(S, q[:, t]), matrix(x))
        return out(w, gate(w, x, rms(w, o)))

    return run


CASES: dict[str, tuple[MixerConfig, Callable[[Weights, Tensor], Tensor]]] = {
    "gated_retnet": (GatedRetNet(**HEADS), gated_retnet),
    "gated_rfa": (GatedRFA(**HEADS, features=16), gated_rfa),
    "hgrn2": (HGRN2(**HEADS), hgrn2),
    "hgrn": (HGRN(channels=C), hgrn),
    "hgrn, real": (HGRN(channels=C, turning=False), hgrn_real),
    "lru": (LRU(channels=C), lru),
    "s5, zoh": (S5(channels=C), s5(bilinear=False)),
    "s5, bilinear": (S5(channels=C, discretisation="bilinear"), s5(bilinear=True)),
    "longhorn_diagonal": (LonghornDiagonal(channels=C, state_size=3), longhorn_diagonal),
    "mlstm": (MLSTM(**HEADS), mlstm),
    "rwkv6": (RWKV6(**HEADS, mix_rank=2, decay_rank=3), rwkv6),
    "rwkv7": (RWKV7(**HEADS, ranks=(3, 0, 3, 2, 4)), rwkv7),
    "gsa": (GSA(**HEADS, slots=7), gsa),
    "gated_deltanet2": (GatedDeltaNet2(**HEADS), gated_deltanet2),
    "comba": (Comba(**HEADS), comba),
    "deltaproduct": (DeltaProduct(**HEADS, householders=3), deltaproduct(gated=False)),
    "gated_deltaproduct": (GatedDeltaProduct(**HEADS, householders=3), deltaproduct(gated=True)),
    "gated_efla": (GatedEFLA(**HEADS), stepped(exact=True)),
    "gated_longhorn": (GatedLonghorn(**HEADS), stepped(exact=False)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mixer_equals_its_equation(name: str, backend: str | Backend) -> None:
    config, equation = CASES[name]
    torch.manual_seed(0)
    place = Place() if name == "rwkv7" else LAYER  # in later layers it mixes in the first layer's values
    mixer = config.build(D, place, backend=backend).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    x = torch.randn(2, T, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, T, D, dtype=torch.float64)
    y = mixer(x)[0]
    want = equation(dict(mixer.named_parameters()) | dict(mixer.named_buffers()), x)
    torch.testing.assert_close(y, want, rtol=1e-8, atol=1e-10)
    leaves = [x, *mixer.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad((y * weight).sum(), leaves),
        torch.autograd.grad((want * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_rwkv7_mixes_in_the_values_of_the_first_layer() -> None:
    from deltazoo.mixers import Context

    torch.manual_seed(0)
    config = RWKV7(**HEADS, ranks=(3, 0, 3, 2, 4))
    first, later = (config.build(D, Place(layer, 2), "reference").double() for layer in (0, 1))
    with torch.no_grad():
        later.project.value.down.weight.normal_()
    x = torch.randn(2, T, D, dtype=torch.float64)
    context = Context(values={})
    first(x, None, context)
    seen: list[Tensor] = []
    later.update.register_forward_pre_hook(lambda _, args: seen.append(args[0].v))
    later(x, None, context)
    w, w_first = dict(later.named_parameters()), dict(first.named_parameters())

    def value(weights: Weights) -> tuple[Tensor, Tensor]:
        x_v = x + (before(x) - x) * weights["project.mix"][3]
        return x_v, linear(weights, "project.to_v", x_v)

    (x_v, v), (_, v_first) = value(w), value(w_first)
    mix = torch.sigmoid(low_rank(w, "project.value", x_v))
    torch.testing.assert_close(seen[0].flatten(2), (1 - mix) * v + mix * v_first, rtol=1e-10, atol=1e-12)
