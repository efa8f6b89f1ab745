"""Mixers with a delta rule against their equations, from the raw parameters in float64.

B batch, T time, H key heads, HV value heads, K key width, V value width, n Householder steps
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from equations import (
    HEADS,
    HV,
    LATER_LAYER,
    Case,
    D,
    Equation,
    K,
    T,
    V,
    Weights,
    assert_equals_equation,
    beta,
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
    scan,
    softplus_decay,
    split_heads,
    token_shift,
    unit,
    zero_state,
)
from torch import Tensor

from deltazoo.backends.update.base import Backend
from deltazoo.mixers import (
    EFLA,
    KDA,
    RWKV7,
    Comba,
    Context,
    DeltaNet,
    DeltaProduct,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedEFLA,
    GatedLonghorn,
    Longhorn,
    MomentumDeltaNet,
    PreconditionedDeltaNet,
    PreconditionedKDA,
)
from deltazoo.mixers.core.mixer import FIRST_PLACE, Place


def silu_qkv(w: Weights, x: Tensor, n: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (F.silu(y) for y in qkv(w, x, n))
    return q, k, v


def deltanet(w: Weights, x: Tensor) -> Tensor:
    q, k, v = silu_qkv(w, x)
    return out(w, rms_norm(w, recurrence(unit(q), unit(k), v, None, beta(w, x), beta(w, x))))


def gated_deltanet_doubled_erase(w: Weights, x: Tensor) -> Tensor:
    q, k, v = silu_qkv(w, x)
    b = beta(w, x)
    return out(w, gate(w, x, rms_norm(w, recurrence(unit(q), unit(k), v, softplus_decay(w, x), 2 * b, b))))


def gated_deltanet(activation: Callable[[Tensor], Tensor]) -> Equation:
    def equation(w: Weights, x: Tensor) -> Tensor:
        q, k, v = silu_qkv(w, x)
        o = recurrence(unit(q), unit(k), v, softplus_decay(w, x), beta(w, x), beta(w, x))
        return out(w, gate(w, x, rms_norm(w, o), activation))

    return equation


def gated_deltanet2(w: Weights, x: Tensor) -> Tensor:
    q, k, v = silu_qkv(w, x)
    erase = per_value_head(split_heads(torch.sigmoid(linear(w, "operands.beta.to_erase", x)), K))
    write = split_heads(torch.sigmoid(linear(w, "operands.beta.to_write", x)), V)
    raw = split_heads(linear(w, "operands.decay.proj", x) + w["operands.decay.dt_bias"], K)
    decay = torch.exp(-torch.exp(w["operands.decay.A_log"])[:, None] * torch.log1p(torch.exp(raw)))
    o = recurrence(unit(q), unit(k), v, per_value_head(decay), erase, write)
    return out(w, gate(w, x, rms_norm(w, o), torch.sigmoid))


def comba(norm_after: bool) -> Equation:
    """With norm_after as in the layer of flash-linear-attention, which normalises q, k and p in its kernel."""

    def equation(w: Weights, x: Tensor) -> Tensor:
        q, k, v = silu_qkv(w, x)
        b, d = (per_value_head(w[f"operands.feedback.{name}"], 0)[:, None] for name in "bd")
        if norm_after:
            p = torch.sigmoid(b) * k
            q, k, p = unit(q - d * p), unit(k), unit(p)
        else:
            q, k = unit(q) - d * unit(k), unit(k)
            p = torch.sigmoid(b) * k
        a, strength = softplus_decay(w, x), beta(w, x)

        def step(S: Tensor, t: int) -> Tensor:
            return a[:, t, ..., None] * S + outer(strength[:, t] * k[:, t], v[:, t] - read(S, p[:, t]))

        o = scan(step, lambda S, t: K**-0.5 * read(S, q[:, t]), zero_state(x))
        return out(w, gate(w, x, rms_norm(w, o), torch.sigmoid))

    return equation


def householder_products(q: Tensor, k: Tensor, v: Tensor, a: Tensor, strength: Tensor) -> Tensor:
    """Apply S <- (I - beta k k^T) S + beta k v^T n times per token. strength: [B, T, n, HV]; a: [B, T, HV, 1]."""
    eye = torch.eye(K, dtype=q.dtype)

    def step(S: Tensor, t: int) -> Tensor:
        S = a[:, t, ..., None] * S
        for n in range(k.shape[2]):
            b = strength[:, t, n, :, None, None]
            S = (eye - b * outer(k[:, t, n], k[:, t, n])) @ S + b * outer(k[:, t, n], v[:, t, n])
        return S

    return scan(step, lambda S, t: K**-0.5 * read(S, q[:, t]), zero_state(q))


def deltaproduct(decay: bool, gated: bool = True) -> Equation:
    def equation(w: Weights, x: Tensor) -> Tensor:
        q, k, v = silu_qkv(w, x, 3)
        strength = 2 * beta(w, x)[..., 0].unflatten(-1, (3, HV))
        a = softplus_decay(w, x) if decay else torch.ones(2, T, HV, 1, dtype=x.dtype)
        o = rms_norm(w, householder_products(unit(q), unit(k), v, a, strength))
        return out(w, gate(w, x, o) if gated else o)

    return equation


def deltanet_two_householders(w: Weights, x: Tensor) -> Tensor:
    """Features elu + 1, L1 norm."""
    q, k, v = qkv(w, x, 2)
    q, k = ((F.elu(y) + 1) / ((F.elu(y) + 1).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    strength = 2 * beta(w, x)[..., 0].unflatten(-1, (2, HV))
    o = householder_products(q, k, F.silu(v), torch.ones(2, T, HV, 1, dtype=x.dtype), strength)
    return out(w, rms_norm(w, o))


def exact_step(time: Tensor, key: Tensor) -> Tensor:
    n = (key**2).sum(-1, keepdim=True)
    return (1 - torch.exp(-time * n)) / n


def efla(w: Weights, x: Tensor) -> Tensor:
    q, k, v = silu_qkv(w, x)
    strength = exact_step(beta(w, x), k)
    return out(w, rms_norm(w, recurrence(unit(q), k, v, None, strength, strength)))


def kda_efla(w: Weights, x: Tensor) -> Tensor:
    q, k, v = silu_qkv(w, x)
    strength = exact_step(beta(w, x), k)
    o = recurrence(unit(q), k, v, softplus_decay(w, x), strength, strength)
    return out(w, gate(w, x, rms_norm(w, o), torch.sigmoid))


def longhorn(w: Weights, x: Tensor) -> Tensor:
    q, k, v = qkv(w, x)
    strength = beta(w, x) / (1 + beta(w, x) * (k**2).sum(-1, keepdim=True))
    return out(w, gate(w, x, rms_norm(w, recurrence(q, k, F.silu(v), None, strength, strength))))


def integrated(exact: bool, query_norm: bool = True) -> Equation:
    """Integrate dS/dt = -k k^T S + k v^T over beta by the matrix exponential, or by one implicit Euler step."""

    def equation(w: Weights, x: Tensor) -> Tensor:
        q, k, v = silu_qkv(w, x)
        q = unit(q) if query_norm else q
        a, time = softplus_decay(w, x), beta(w, x)[..., None]
        eye = torch.eye(K, dtype=x.dtype)

        def step(S: Tensor, t: int) -> Tensor:
            S = a[:, t, ..., None] * S
            erase, write = (time[:, t] * outer(k[:, t], y) for y in (k[:, t], v[:, t]))
            if not exact:  # S' = S + beta k (v - S'^T k)^T
                return torch.linalg.solve(eye + erase, S + write)
            generator = torch.cat([torch.cat([-erase, write], -1), torch.zeros(2, HV, V, K + V, dtype=x.dtype)], -2)
            flow = torch.linalg.matrix_exp(generator)
            return flow[..., :K, :K] @ S + flow[..., :K, K:]

        o = scan(step, lambda S, t: K**-0.5 * read(S, q[:, t]), zero_state(x))
        return out(w, gate(w, x, rms_norm(w, o)))

    return equation


def preconditioned_keys(w: Weights, x: Tensor, k: Tensor) -> Tensor:
    """p_t = k_t M(A_t) with A_t = a_t A_(t-1) + beta_t k_t^2 and M(A) = 1.5^(-r / (1 + |r|)), r = log(A + 1e-6) - c.

    Equation and constants: fla's naive_recurrent_precond_gated_delta_rule.
    """
    name = "operands.preconditioner"
    dt = torch.log1p(torch.exp(linear(w, f"{name}.decay.proj", x) + w[f"{name}.decay.dt_bias"]))
    a = per_value_head(torch.exp(-torch.exp(w[f"{name}.decay.A_log"]) * dt))[..., None]
    strength = per_value_head(torch.sigmoid(linear(w, f"{name}.beta.proj", x)))[..., None]
    center = per_value_head(w[f"{name}.center"], 0)[:, None]
    A, keys = torch.zeros_like(k[:, 0]), []
    for t in range(T):
        A = a[:, t] * A + strength[:, t] * k[:, t] ** 2
        r = torch.log(A + 1e-6) - center
        keys.append(k[:, t] * 1.5 ** (-r / (1 + r.abs())))
    return torch.stack(keys, 1)


def bounded_decay(w: Weights, x: Tensor) -> Tensor:
    """KDA's decay with a bound of -5, [B, T, HV, K]."""
    raw = (linear(w, "operands.decay.proj", x) + w["operands.decay.dt_bias"]).unflatten(-1, (HV, -1))
    return torch.exp(-5 * torch.sigmoid(torch.exp(w["operands.decay.A_log"])[:, None] * raw))


def preconditioned(
    activation: Callable[[Tensor], Tensor] | None,
    doubled: bool = False,
    decay: Callable[[Weights, Tensor], Tensor] = softplus_decay,
) -> Equation:
    """S <- D S, S <- S + beta p (v - S^T k)^T for the preconditioned key p."""

    def equation(w: Weights, x: Tensor) -> Tensor:
        q, k, v = silu_qkv(w, x)
        q, k = unit(q), unit(k)
        p, a, strength = preconditioned_keys(w, x, k), decay(w, x), per_value_head(beta(w, x))
        strength = 2 * strength if doubled else strength

        def step(S: Tensor, t: int) -> Tensor:
            S = a[:, t, ..., None] * S
            return S + outer(strength[:, t] * p[:, t], v[:, t] - read(S, k[:, t]))

        o = rms_norm(w, scan(step, lambda S, t: K**-0.5 * read(S, q[:, t]), zero_state(x)))
        return out(w, o if activation is None else gate(w, x, o, activation))

    return equation


def momentum_deltanet(doubled: bool = False) -> Equation:
    """S <- alpha S - beta M with M <- mu M - eta k (v - alpha S^T k)^T, as in fla's recurrent form and layer."""

    def equation(w: Weights, x: Tensor) -> Tensor:
        q, k, v = silu_qkv(w, x)
        if "gates.d_log" in w:
            q = q - per_value_head(w["gates.d_log"].exp(), 0)[:, None] * k
        q, k = unit(q), unit(k)
        raw_a, raw_b, raw_m, raw_e = linear(w, "gates.proj", x).chunk(4, -1)
        rate, mu_rate, f = (per_value_head(w[f"gates.{name}"].exp(), 0) for name in ("A_log", "A_mu_log", "f_log"))
        theta = torch.atan(f * (1 + torch.tanh(raw_e / D**0.5)))
        eta = (1 + torch.tanh(raw_e / D**0.5))[..., None, None]
        alpha = torch.cos(theta) ** 2 * torch.exp(-rate * torch.log1p(torch.exp(raw_a + w["gates.alpha_bias"])))
        beta = (1 + doubled) * torch.sin(theta) ** 2 * torch.sigmoid(raw_b)
        mu = torch.exp((-mu_rate * torch.log1p(torch.exp(raw_m + w["gates.mu_bias"]))).clamp(min=-2))
        alpha, beta, mu = (y[..., None, None] for y in (alpha, beta, mu))
        S, M, outputs = zero_state(x), zero_state(x), []
        for t in range(T):
            M = mu[:, t] * M - eta[:, t] * outer(k[:, t], v[:, t] - read(alpha[:, t] * S, k[:, t]))
            S = alpha[:, t] * S - beta[:, t] * M
            outputs.append(K**-0.5 * read(S, q[:, t]))
        o = rms_norm(w, torch.stack(outputs, 1))
        return out(w, gate(w, x, o) if "outputs.gate.proj.weight" in w else o)

    return equation


def rwkv7(w: Weights, x: Tensor) -> Tensor:
    d = token_shift(x) - x
    x_r, x_w, x_k, x_v, x_a, x_g = (x + d * w["project.mix"][i] for i in range(6))
    r, k = split_heads(linear(w, "project.to_r", x_r), K), linear(w, "project.to_k", x_k)
    v = split_heads(linear(w, "project.to_v", x_v), V)
    decay = split_heads(torch.exp(-(torch.e**-0.5) * torch.sigmoid(low_rank(w, "project.decay", x_w, torch.tanh))), K)
    eta = torch.sigmoid(low_rank(w, "project.rate", x_a))
    kappa = split_heads(k * w["project.xi"], K)
    kappa = kappa / kappa.norm(dim=-1, keepdim=True)
    k = split_heads(k * (1 + (eta - 1) * w["project.alpha"]), K)
    eta = split_heads(eta, K)
    g = low_rank(w, "project.gate", x_g, torch.sigmoid)
    eye = torch.eye(K, dtype=x.dtype)

    def step(S: Tensor, t: int) -> Tensor:
        transition = eye * decay[:, t, :, None] - outer(kappa[:, t] * eta[:, t], kappa[:, t])
        return transition @ S + outer(k[:, t], v[:, t])

    o = layer_norm(w, scan(step, lambda S, t: read(S, r[:, t]), zero_state(x)), 64e-5)
    o = o + (r * k * w["outputs.bonus.u"]).sum(-1, keepdim=True) * v
    return out(w, o * g.view(o.shape))


CASES: dict[str, Case] = {
    "deltanet": (DeltaNet(**HEADS), deltanet),
    "deltanet, two householders": (
        DeltaNet(**HEADS, negative_eigenvalues="both", householders=2, feature="elu+1", qk_norm="l1"),
        deltanet_two_householders,
    ),
    "gated_deltanet, doubled erase": (
        GatedDeltaNet(**HEADS, negative_eigenvalues="erase"),
        gated_deltanet_doubled_erase,
    ),
    "gated_deltanet, sigmoid gate, biases": (
        GatedDeltaNet(**HEADS, gate_activation="sigmoid", beta_bias=True, conv_bias=True),
        gated_deltanet(torch.sigmoid),
    ),
    "kda, bias of the gate": (KDA(**HEADS, gate_bias=True), gated_deltanet(torch.sigmoid)),
    "kda, full-rank gates": (KDA(**HEADS, gate_rank="full", gate_bias=True), gated_deltanet(torch.sigmoid)),
    "gated_deltanet2": (GatedDeltaNet2(**HEADS), gated_deltanet2),
    "gated_deltanet2, gates of value heads": (GatedDeltaNet2(**HEADS, gates_per="value"), gated_deltanet2),
    "comba": (Comba(**HEADS), comba(norm_after=False)),
    "comba, norm after the feedback": (Comba(**HEADS, norm_after=True), comba(norm_after=True)),
    "deltaproduct": (DeltaProduct(**HEADS, householders=3), deltaproduct(decay=False)),
    "deltaproduct, no gate": (DeltaProduct(**HEADS, householders=3, gate=False), deltaproduct(False, gated=False)),
    "gated_deltaproduct": (GatedDeltaProduct(**HEADS, householders=3), deltaproduct(decay=True)),
    "gated_deltaproduct, no gate": (
        GatedDeltaProduct(**HEADS, householders=3, gate=False),
        deltaproduct(True, gated=False),
    ),
    "efla": (EFLA(**HEADS), efla),
    "efla with channel decay": (KDA(**HEADS, reparam="efla"), kda_efla),
    "gated_efla": (GatedEFLA(**HEADS), integrated(exact=True)),
    "longhorn": (Longhorn(**HEADS), longhorn),
    "gated_longhorn": (GatedLonghorn(**HEADS), integrated(exact=False, query_norm=False)),
    "gated_longhorn, query norm": (GatedLonghorn(**HEADS, query_norm=True), integrated(exact=False)),
    "gated_deltanet, longhorn": (GatedDeltaNet(**HEADS, reparam="longhorn"), integrated(exact=False)),
    "preconditioned_deltanet": (PreconditionedDeltaNet(**HEADS), preconditioned(F.silu)),
    "preconditioned_deltanet, doubled beta, no gate": (
        PreconditionedDeltaNet(**HEADS, negative_eigenvalues="both", gate=False),
        preconditioned(None, doubled=True),
    ),
    "preconditioned_kda": (PreconditionedKDA(**HEADS), preconditioned(torch.sigmoid)),
    "preconditioned_kda, other heads, bounded decay": (
        PreconditionedKDA(**HEADS, preconditioner_per="key", beta_per="value", decay_bound=-5.0),
        preconditioned(torch.sigmoid, decay=bounded_decay),
    ),
    "momentum_deltanet": (MomentumDeltaNet(**HEADS), momentum_deltanet()),
    "momentum_deltanet, doubled beta, no correction, no gate": (
        MomentumDeltaNet(**HEADS, double_beta=True, correction=False, gate=False),
        momentum_deltanet(doubled=True),
    ),
    "rwkv7": (RWKV7(**HEADS, ranks=(3, 0, 3, 2, 4)), rwkv7),
}


@pytest.mark.parametrize("name", CASES)
def test_mixer_equals_its_equation(name: str, backend: str | Backend) -> None:
    # A later RWKV-7 layer has parameters for the first layer's values, which one mixer alone does not use.
    assert_equals_equation(CASES[name], 1e-9, backend, FIRST_PLACE if name == "rwkv7" else LATER_LAYER)


def test_rwkv7_interpolates_towards_the_values_of_the_first_layer() -> None:
    torch.manual_seed(0)
    config = RWKV7(**HEADS, ranks=(3, 0, 3, 2, 4))
    first, later = (config.build(D, Place(layer, 2), "reference").double() for layer in (0, 1))
    with torch.no_grad():
        later.project.value.down.weight.normal_()
    x = torch.randn(2, T, D, dtype=torch.float64)
    context = Context(values={})
    context = context.after(first(x, None, context).side)
    values: list[Tensor] = []
    later.update.register_forward_pre_hook(lambda _, args: values.append(args[0].v))
    later(x, None, context)
    w_first, w = dict(first.named_parameters()), dict(later.named_parameters())

    def mixed(weights: Weights) -> Tensor:
        return x + (token_shift(x) - x) * weights["project.mix"][3]

    v_first, v = (linear(weights, "project.to_v", mixed(weights)) for weights in (w_first, w))
    weight = torch.sigmoid(low_rank(w, "project.value", mixed(w)))
    torch.testing.assert_close(values[0].flatten(2), (1 - weight) * v + weight * v_first, rtol=1e-10, atol=1e-12)
