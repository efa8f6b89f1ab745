"""deltazoo.fla against a token-by-token recurrence in float64, and against flash-linear-attention's naive functions."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import deltazoo
import deltazoo.fla as fla
from deltazoo.backends.io.errors import DeltazooError, UnsupportedError

B, T, H, HV, K, V, W = 2, 19, 2, 4, 8, 6, 4
BOUNDS = torch.tensor([0, 5, 5, 12, 19])


@pytest.fixture(autouse=True)
def token_by_token() -> Iterator[None]:
    """The names, layouts and defaults are tested, so the reference computes the updates: others compile each spec."""
    with deltazoo.use_backend("reference"):
        yield


def draw(*sizes: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def operands(batch: int = B, heads: int = HV, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Leaves by name: raw values, from which a case computes decays and strengths."""
    sizes = {"q": K, "k": K, "v": V, "w": K, "a": K, "b": K, "erase": K, "write": V}
    key_heads = ("q", "k")
    found = {
        name: draw(batch, T, H if name in key_heads else heads, size, seed=i, dtype=dtype)
        for i, (name, size) in enumerate(sizes.items())
    }
    found |= {name: draw(batch, T, heads, seed=20 + i, dtype=dtype) for i, name in enumerate(("g", "beta"))}
    return found


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def recurrence(
    x: tuple[Tensor, ...], decay: Tensor, state: Tensor, erase: tuple[Tensor, Tensor] | None = None,
    previous: bool = False, scale: float | None = None, before: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """S <- exp(decay) S + column (row^T R) + k v^T token by token, where R is the decayed or the previous state.

    Args: x: q, k and v with as many heads; erase: column and row.
    """
    (q, k, v), out, S = x, [], state
    for t in range(q.shape[1]):
        old, S = S, decay[:, t].exp().unsqueeze(-1) * S
        if erase is not None:
            column, row = (factor[:, t].unsqueeze(-1) for factor in erase)
            S = S + column * (row * (old if previous else S)).sum(-2, keepdim=True)
        S = S + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append((q[:, t].unsqueeze(-1) * (old if before else S)).sum(-2))
    return torch.stack(out, 1) * (q.shape[-1] ** -0.5 if scale is None else scale), S


def grouped(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[2], 2)


def expected(name: str, x: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The result of the function `name` on these operands, in the way that `call` passes them."""
    heads, v = x["v"].shape[2], x["v"]
    q, k = (grouped(x[n], heads) for n in ("q", "k"))
    by_head, channels = F.logsigmoid(x["g"]).unsqueeze(-1).expand_as(k), F.logsigmoid(x["w"])
    beta = x["beta"].sigmoid().unsqueeze(-1)
    if "rwkv6" in name:
        o, S = recurrence((q, k, v), channels, state, before=True)
        return o + K**-0.5 * (q * x["a"][:1, :1] * k).sum(-1, keepdim=True) * v, S
    if "gla" in name:
        return recurrence((q, k, v), by_head if "simple" in name else channels, state)
    if "rwkv7" in name or "dplr" in name:
        scale = 1.0 if name == "chunk_rwkv7" else None
        return recurrence((q, k, v), channels, state, (x["b"], 0.1 * x["a"]), True, scale)
    q, k = unit(q), unit(k)
    if "gdn2" in name:
        erase, write = x["erase"].sigmoid(), x["write"].sigmoid()
        return recurrence((q, k, write * v), channels, state, (-k, erase * k))
    if "comba" in name:
        row = beta * unit(grouped(x["a"][:, :, :H], heads))
        return recurrence((q, k, beta * v), by_head, state, (-k, row), previous=True)
    decay = channels if "kda" in name else by_head if "gated" in name else torch.zeros_like(k)
    return recurrence((q, k, beta * v), decay, state, (-k, beta * k))


def call(name: str, x: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor | None]:
    """Call our function of this name."""
    function, q, k, v = getattr(fla, name), x["q"], x["k"], x["v"]
    g, beta, channels = F.logsigmoid(x["g"]), x["beta"].sigmoid(), F.logsigmoid(x["w"])
    if "rwkv6" in name:
        return function(q, k, v, channels, x["a"][0, 0], **options)
    if "gla" in name:
        return function(q, k, v, g if "simple" in name else channels, **options)
    if "rwkv7" in name:
        return function(q, channels, k, v, 0.1 * x["a"], x["b"], **options)
    if "dplr" in name:
        return function(q, k, v, 0.1 * x["a"], x["b"], channels, **options)
    options["use_qk_l2norm_in_kernel"] = True
    if "gdn2" in name:
        return function(q, k, v, channels, x["erase"].sigmoid(), x["write"].sigmoid(), **options)
    if "kda" in name:
        return function(q, k, v, channels, beta, **options)
    if "comba" in name:
        return function(q, k, v=v, p=x["a"][:, :, :H], g=g, beta=beta, **options)
    if "gated" in name:
        return function(q, k, v, g, beta=beta, **options)
    return function(q, k, v, beta=beta, **options)


NAMES = (
    "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda", "chunk_gdn2",
    "fused_recurrent_gdn2", "chunk_delta_rule", "fused_recurrent_delta_rule", "chunk_comba", "fused_recurrent_comba",
    "chunk_gla", "fused_recurrent_gla", "chunk_simple_gla", "fused_recurrent_simple_gla", "chunk_dplr_delta_rule",
    "fused_recurrent_dplr_delta_rule", "chunk_rwkv7", "fused_recurrent_rwkv7", "chunk_rwkv6",
)  # fmt: skip
UNGROUPED = ("rwkv", "dplr", "gla", "chunk_delta_rule", "recurrent_delta_rule")


def heads_of(name: str) -> int:
    """FLA takes more value heads than key heads for some functions."""
    return H if any(part in name for part in UNGROUPED) else HV


def assert_close(actual: Tensor, wanted: Tensor, tolerance: float = 1e-9) -> None:
    error = (actual - wanted).norm() / wanted.norm().clamp(min=1e-30)
    assert actual.shape == wanted.shape
    assert float(error.detach()) < tolerance


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_function_equals_its_recurrence_with_every_gradient(name: str, packed: bool) -> None:
    heads = heads_of(name)
    x = operands(1 if packed else B, heads)
    sequences = len(BOUNDS) - 1 if packed else B
    state = draw(sequences, heads, K, V, seed=99)
    o, final = call(name, x, initial_state=state, output_final_state=True, **({"cu_seqlens": BOUNDS} if packed else {}))
    assert final is not None
    if packed:
        pieces = []
        for n, (start, stop) in enumerate(zip(BOUNDS[:-1].tolist(), BOUNDS[1:].tolist(), strict=True)):
            piece = {key: value[:, start:stop] for key, value in x.items()}
            piece["a"] = x["a"] if "rwkv6" in name else piece["a"]
            pieces.append(expected(name, piece, state[n : n + 1]) if stop > start else (None, state[n : n + 1]))
        wanted = torch.cat([o for o, _ in pieces if o is not None], 1), torch.cat([S for _, S in pieces])
    else:
        wanted = expected(name, x, state)
    leaves = [*x.values(), state]
    weights = draw(*o.shape, seed=7).detach(), draw(*final.shape, seed=8).detach()
    gradients = [
        torch.autograd.grad((a * weights[0]).sum() + (b * weights[1]).sum(), leaves, allow_unused=True)
        for a, b in ((o, final), wanted)
    ]
    assert_close(o, wanted[0])
    assert_close(final, wanted[1])
    used = [(a, b) for a, b in zip(*gradients, strict=True) if a is not None or b is not None]
    assert len(used) >= 4
    for actual, exact in used:
        assert actual is not None and exact is not None
        assert_close(actual, exact, 1e-8)


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_kda", "chunk_gdn2", "chunk_gla"])
def test_states_with_v_first_are_transposed_and_one_token_leaves_the_given_state_as_it_is(name: str) -> None:
    x = {key: value.detach()[:, :1] for key, value in operands(heads=heads_of(name)).items()}
    state = draw(B, heads_of(name), K, V, seed=99).detach()
    kept = state.clone()
    with torch.no_grad():
        o, final = call(name, x, initial_state=state, output_final_state=True)
        o_first, final_first = call(
            name, x, initial_state=state.transpose(-1, -2), output_final_state=True, state_v_first=True
        )
    wanted = expected(name, x, state)
    assert final is not None and final_first is not None
    assert torch.equal(state, kept)
    assert_close(o, wanted[0])
    assert_close(final, wanted[1])
    assert_close(o_first, wanted[0])
    assert_close(final_first, wanted[1].transpose(-1, -2))


def test_gates_in_the_kernel_equal_gates_outside() -> None:
    x = {key: value.detach() for key, value in operands().items()}
    rate, bias, wide = draw(HV, seed=1).detach(), draw(HV, seed=2).detach(), draw(HV * K, seed=3).detach()
    gate = -rate.exp() * F.softplus(x["g"] + bias)
    inside = fla.chunk_gated_delta_rule(
        x["q"], x["k"], x["v"], x["g"], x["beta"], scale=0.7, use_gate_in_kernel=True, A_log=rate, dt_bias=bias,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    outside = fla.chunk_gated_delta_rule(
        0.7 * K**0.5 * unit(x["q"]), unit(x["k"]), x["v"], gate, 2 * x["beta"].sigmoid()
    )
    assert_close(inside[0], outside[0])
    assert inside[1] is None
    channels = -5 * (rate.exp()[:, None] * (x["w"] + wide.view(HV, K))).sigmoid()
    bounded = fla.chunk_kda(
        x["q"], x["k"], x["v"], x["w"], x["beta"].sigmoid(), use_gate_in_kernel=True, A_log=rate, dt_bias=wide,
        lower_bound=-5.0, safe_gate=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    wanted = fla.chunk_kda(unit(x["q"]), unit(x["k"]), x["v"], channels, x["beta"].sigmoid())
    assert_close(bounded[0], wanted[0])


def convolution(x: Tensor, weight: Tensor, bias: Tensor, past: Tensor) -> Tensor:
    """SiLU of the convolution of [1, T, C] after the inputs `past` [1, C, W]."""
    padded = torch.cat([past[..., 1:], x.transpose(1, 2)], -1)
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=x.shape[2])).transpose(1, 2)


def test_the_convolution_continues_packed_sequences_from_their_states() -> None:
    C = 5
    x, weight, bias, past = draw(1, T, C, seed=1), draw(C, W, seed=2), draw(C, seed=3), draw(4, C, W, seed=4)
    y, final = fla.causal_conv1d(x, weight, bias, None, past, True, "silu", cu_seqlens=BOUNDS)
    pieces, finals = [], []
    for n, (start, stop) in enumerate(zip(BOUNDS[:-1].tolist(), BOUNDS[1:].tolist(), strict=True)):
        pieces.append(convolution(x[:, start:stop], weight, bias, past[n : n + 1]) if stop > start else x[:, :0])
        finals.append(torch.cat([past[n : n + 1], x[:, start:stop].transpose(1, 2)], -1)[..., -W:])
    assert final is not None
    assert_close(y, torch.cat(pieces, 1))
    assert_close(final, torch.cat(finals))


def test_the_convolution_module_decodes_like_one_call() -> None:
    torch.manual_seed(0)
    module = fla.ShortConvolution(6, W, bias=True, dtype=torch.float64)
    x = draw(B, T, 6, seed=5).detach()
    whole, last = module(x, output_final_state=True)
    with torch.no_grad():
        y, cache = module(x[:, :2], output_final_state=True)
        parts = [y]
        for t in range(2, T):
            y, cache = module(x[:, t : t + 1], cache=cache, output_final_state=True)
            parts.append(y)
    assert_close(torch.cat(parts, 1), whole)
    assert_close(cache, last)


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
def test_the_gated_norm_equals_its_equation(activation: str) -> None:
    norm = fla.FusedRMSNormGated(V, eps=1e-5, activation=activation, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(draw(V, seed=1))
    x, gate = draw(B, T, H, V, seed=2), draw(B, T, H, V, seed=3)
    phi = gate.sigmoid() if activation == "sigmoid" else F.silu(gate)
    assert_close(norm(x, gate), norm.weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * phi)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("chunk_gated_delta_rule", {"cp_context": object()}, "cp_context"),
        ("fused_recurrent_gated_delta_rule", {"gv": torch.ones(1)}, "gv"),
        ("chunk_kda", {"use_graph": True}, "use_graph"),
        ("fused_recurrent_gla", {"reverse": True}, "reverse"),
        ("chunk_gla", {"scale": None, "head_first": True}, "head_first"),
        ("chunk_simple_gla", {"head_first": True}, "head_first"),
    ],
)
def test_what_is_not_served_is_refused_by_name(name: str, options: dict[str, Any], named: str) -> None:
    x = operands(heads=heads_of(name))
    with pytest.raises((DeltazooError, TypeError), match=named):
        call(name, x, **options)


def test_normalised_linear_attention_and_unknown_names_are_refused() -> None:
    x = operands(heads=H)
    with pytest.raises(UnsupportedError, match="normalize"):
        fla.chunk_linear_attn(x["q"], x["k"], x["v"])
    with pytest.raises(AttributeError, match="chunk_mesa_net"):
        fla.chunk_mesa_net  # noqa: B018


def test_a_call_is_one_graph() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return fla.chunk_gated_delta_rule(q, k, v, g, beta, scale=0.3, use_qk_l2norm_in_kernel=True)[0]

    x = {key: value.detach().float() for key, value in operands().items()}
    arguments = (x["q"], x["k"], x["v"], F.logsigmoid(x["g"]), x["beta"].sigmoid())
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_close(compiled(*arguments), run(*arguments), 1e-5)


# Against the package itself.

ORACLES = {
    "chunk_gated_delta_rule": "gated_delta_rule.naive:naive_recurrent_gated_delta_rule",
    "chunk_kda": "kda.naive:naive_recurrent_kda",
    "chunk_gla": "gla.naive:naive_recurrent_gla",
    "chunk_simple_gla": "simple_gla.naive:naive_recurrent_simple_gla",
    "chunk_delta_rule": "delta_rule.naive:delta_rule_recurrence",
    "chunk_dplr_delta_rule": "generalized_delta_rule.dplr.naive:dplr_recurrence",
    "chunk_iplr_delta_rule": "generalized_delta_rule.iplr.naive:iplr_recurrence",
    "chunk_comba": "comba.naive:naive_chunk_comba",
    "chunk_gdn2": "gdn2.naive:naive_recurrent_gdn2",
    "chunk_gated_delta_product": "gated_delta_product.naive:naive_recurrent_gated_delta_product",
}


def theirs(name: str) -> Callable[..., Any]:
    module, function = ORACLES[name].split(":")
    return getattr(pytest.importorskip(f"fla.ops.{module}", reason="flash-linear-attention is not installed"), function)


def oracle_arguments(name: str) -> dict[str, Tensor]:
    x = {key: value.detach().float() for key, value in operands(heads=H).items()}
    q, k = unit(x["q"]), unit(x["k"])
    found = {"q": q, "k": k, "v": x["v"]}
    decay, beta, channels = F.logsigmoid(x["g"]), x["beta"].sigmoid(), F.logsigmoid(x["w"])
    if "product" in name:
        steps = {n: torch.cat([found[n], found[n].flip(1)], 1) for n in ("k", "v")}
        return {"q": q, **steps, "g": decay, "beta": torch.cat([beta, beta.flip(1)], 1)}
    if "comba" in name:
        return found | {"p": unit(x["a"]), "g": decay, "beta": beta}
    if "plr" in name:
        return found | {"a": 0.1 * x["a"], "b": x["b"]} | ({"gk": channels} if "dplr" in name else {})
    if "gdn2" in name:
        return found | {"g": channels, "b": x["erase"].sigmoid(), "w": x["write"].sigmoid()}
    if "kda" in name or "chunk_gla" in name:
        return found | {"g": channels} | ({"beta": beta} if "kda" in name else {})
    return found | ({"g": decay} if "chunk_delta" not in name else {}) | ({"beta": beta} if "delta" in name else {})


@pytest.mark.parametrize("name", list(ORACLES))
def test_the_function_equals_the_naive_function_of_the_package(name: str) -> None:
    function = theirs(name)
    leaves = {key: value.requires_grad_() for key, value in oracle_arguments(name).items()}
    state = draw(B, H, K, V, seed=99, dtype=torch.float32)
    options = {"num_householder": 2} if "product" in name else {}
    o, final = getattr(fla, name)(**leaves, initial_state=state, output_final_state=True, **options)
    arguments = dict(leaves)
    if "delta_rule" in name and ("plr" in name or name == "chunk_delta_rule"):  # these have the heads before the time
        arguments = {key: value.transpose(1, 2) for key, value in leaves.items()}
        renamed = {"a": "alpha", "b": "beta"} if "plr" in name else {}
        arguments = {renamed.get(key, key): value for key, value in arguments.items()}
    if name == "chunk_gla":
        arguments["gk"] = arguments.pop("g")
    if "product" in name:
        options["scale"] = K**-0.5
    o_theirs, final_theirs = function(**arguments, initial_state=state, output_final_state=True, **options)
    o_theirs = o_theirs.transpose(1, 2) if arguments["q"].shape[1] == H else o_theirs
    weight = draw(*o.shape, seed=7, dtype=torch.float32).detach()
    everything = [*leaves.values(), state]
    ours = torch.autograd.grad((o * weight).sum() + final.square().sum(), everything)
    other = torch.autograd.grad((o_theirs * weight).sum() + final_theirs.square().sum(), everything)
    assert_close(o, o_theirs, 1e-5)
    assert_close(final, final_theirs, 1e-5)
    for actual, wanted in zip(ours, other, strict=True):
        assert_close(actual, wanted, 1e-4)


@pytest.mark.parametrize("name", sorted(n for n in dir(fla) if n.startswith(("chunk_", "fused_", "causal_"))))
def test_the_signature_is_that_of_the_package(name: str) -> None:
    ops = pytest.importorskip("fla.ops", reason="flash-linear-attention is not installed")
    source = ops if hasattr(ops, name) else None
    if source is None:
        modules = {"causal": "fla.modules.causal_conv1d", "gdn2": "fla.ops.gdn2", "rwkv7": "fla.ops.rwkv7"}
        modules |= {"product": "fla.ops.gated_delta_product", "retention": "fla.ops.retention"}
        source = pytest.importorskip(next(module for part, module in modules.items() if part in name))
    signature = inspect.signature(inspect.unwrap(getattr(source, name)))
    ours = inspect.signature(getattr(fla, name))
    assert list(ours.parameters) == list(signature.parameters)
    assert {n: p.default for n, p in ours.parameters.items() if p.default is not p.empty and p.default is not None} == {
        n: p.default for n, p in signature.parameters.items() if p.default is not p.empty and p.default is not None
    }
