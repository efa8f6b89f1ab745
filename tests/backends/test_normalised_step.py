"""A token of linear attention, (Re)Based, gated RFA or mLSTM by a kernel against float64: interpreted, or on a GPU."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_cases import DEVICE, needs_triton

from deltazoo.backends.triton.decode.normalised_op import PAIRS, NormalisedCall, normalised_step_
from deltazoo.mixers.parts.feature_maps import feature_width, phi

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 5e-3}


class Sizes(NamedTuple):
    """B rows, H key heads, HV value heads, K channels, V columns, R random directions."""

    B: int
    H: int
    HV: int
    K: int
    V: int
    R: int = 0


CASES = {
    "elu+1": Sizes(3, 2, 4, 6, 5),
    "taylor": Sizes(3, 2, 4, 5, 6),
    "taylor, three tiles of rows": Sizes(1, 1, 1, 8, 70),
    "quadratic": Sizes(2, 2, 4, 6, 5),
    "quadratic, more channels than half a warp": Sizes(1, 1, 1, 24, 3),
    "quadratic, two tiles of rows and of columns": Sizes(1, 1, 1, 6, 130),
    "fourier": Sizes(2, 2, 4, 6, 5, 3),
    "fourier, two products": Sizes(1, 1, 1, 70, 40, 130),
    "exponential": Sizes(3, 1, 2, 12, 20),
    "exponential, three tiles": Sizes(1, 1, 1, 512, 70),
}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def case(name: str, dtype: torch.dtype) -> NormalisedCall:
    B, H, HV, K, V, R = CASES[name]
    kind = name.split(",")[0]
    gates = HV if kind == "fourier" else 2 * HV
    products = 2 * draw(B, 2 * H * K + 2 * HV * V + gates + 1, seed=0).to(dtype)  # the rows of each operand are apart
    qkv, raw, gate = products[:, :-1].split([2 * H * K + HV * V, gates, HV * V], 1)
    rows = feature_width(kind, K) if kind in PAIRS else 2 * R or K
    states = draw(B, HV, rows, V + 1, seed=1)
    if kind in PAIRS:
        states[..., V] = phi(kind, draw(B, HV, 5, K, seed=2)).sum(2)  # of five keys, so that no divisor is near 0
        weight, bias = (None, None) if kind == "taylor" else (1 + 0.5 * draw(2, K, seed=3)).to(dtype)
        return NormalisedCall(
            H, "", "sum", qkv, states, 0.5, 1e-6, feature=kind, key_weight=weight, key_bias=bias, key_eps=1e-2
        )
    if kind == "elu+1":
        return NormalisedCall(H, "", "sum", qkv, states.abs(), 0.5, 1e-6, feature="elu+1")
    if kind == "fourier":
        directions, sigma = draw(H, K, R, seed=2), 1 + 0.5 * draw(H, K, seed=3)
        return NormalisedCall(
            H, "sigmoid", "floor", qkv, states, 1.0, 0.0, 0.5, raw,
            directions=(5 * directions).to(dtype), sigma=sigma.to(dtype),
        )  # fmt: skip
    norm_weight = draw(HV * V, seed=4) if HV > 1 else draw(V, seed=4)
    return NormalisedCall(
        H, "exponential", "one", qkv, states, K**-0.5, 1e-3, 0.0, 8 * raw, draw(2 * HV, seed=5).to(dtype),
        draw(B, HV, seed=6), None, None, "layer", norm_weight.to(dtype), 1e-3, "sigmoid", gate,
    )  # fmt: skip


def expected(call: NormalisedCall) -> tuple[Tensor, ...]:
    """Return o, the new state and the new maximum in float64."""
    given = {name: x.double() if isinstance(x, Tensor) else x for name, x in call._asdict().items()}
    call = NormalisedCall(**given)
    B, HV, _, columns = call.states.shape
    H, V = call.heads, columns - 1
    K = (call.qkv.shape[1] - HV * V) // (2 * H)
    q, k, v = call.qkv.split([H * K, H * K, HV * V], 1)
    q, k, v = q.view(B, H, K), k.view(B, H, K), F.pad(v.view(B, HV, V), (0, 1), value=1.0)
    if call.directions is not None:
        R = call.directions.shape[2]
        q, k = (x * (x.square().sum(2, keepdim=True) + 1e-6).rsqrt() * call.sigma for x in (q, k))
        q, k = (torch.einsum("bhk,hkr->bhr", x, call.directions) for x in (q, k))
        q, k = (torch.cat([x.sin(), x.cos()], 2) * R**-0.5 for x in (q, k))
    if call.feature == "elu+1":
        q, k = F.elu(q) + 1, F.elu(k) + 1
    if call.key_weight is not None:
        q, k = (F.layer_norm(x, (K,), call.key_weight, call.key_bias, call.key_eps) for x in (q, k))
    if call.feature in PAIRS:
        q, k = phi(call.feature, q), phi(call.feature, k)
    q, k = (x.repeat_interleave(HV // H, 1) for x in (q, k))
    decay, write, m = torch.ones(B, HV), torch.ones(B, HV), torch.zeros(B, HV)
    if call.gates == "sigmoid":
        decay, write = call.raw.sigmoid(), 1 - call.raw.sigmoid()
    if call.gates == "exponential":
        i, f = (15 * ((call.raw + call.bias) / 15).tanh()).split(HV, 1)
        m = torch.maximum(call.largest + F.logsigmoid(f), i)
        decay, write = (call.largest + F.logsigmoid(f) - m).exp(), (i - m).exp()
    decay, write = (x[..., None].to(q) for x in (decay, write))
    states = decay[..., None] * call.states + k[..., None] * (write * v)[:, :, None]
    o, n = (call.scale * (states * q[..., None]).sum(2)).split([V, 1], 2)
    if call.divisor == "floor":
        n = n.abs().clamp(min=call.floor)
    if call.divisor == "one":
        n = torch.maximum(n.abs(), (-m)[..., None].exp())
    o = o / (n + call.eps)
    if call.norm_weight is not None:
        o = F.layer_norm(o, (V,), eps=call.norm_eps) * call.norm_weight.view(-1, V)
    if call.gate is not None:
        o = o * call.gate.view(B, HV, V).sigmoid()
    return o.flatten(1), states, m


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "name", [pytest.param("fourier", marks=pytest.mark.kernel_smoke), *sorted({*CASES} - {"fourier"})]
)
def test_a_token_equals_its_equations(name, dtype):
    call = case(name, dtype)
    *results, m = expected(call)
    o = normalised_step_(call)
    for ours, wide in zip((o, call.states), results, strict=True):
        assert (ours.double() - wide).norm() <= TOLERANCES[dtype] * wide.norm()
    if call.largest is not None:
        torch.testing.assert_close(call.largest.double(), m, rtol=1e-6, atol=1e-6)


@needs_triton
@pytest.mark.parametrize("which", [0, 1])
def test_nan_of_a_gate_reaches_the_output_and_the_state(which):
    call = case("exponential", torch.float32)
    call.raw[1, 2 * which] = torch.nan  # the input gate or the forget gate of the first head
    o = normalised_step_(call)
    is_nan = call.states.isnan().all(3).all(2)
    assert is_nan.nonzero().tolist() == [[1, 0]]
    assert o.view(3, 2, -1).isnan().all(2).equal(is_nan)


@needs_triton
def test_nan_of_a_key_reaches_its_row_of_the_state_and_the_output():
    call = case("elu+1", torch.float32)
    call.qkv[1, 2 * 6 + 2] = torch.nan  # the third key channel of the first head, which two value heads share
    o = normalised_step_(call)
    is_nan = torch.zeros(3, 4, 6, dtype=torch.bool, device=DEVICE)
    is_nan[1, :2, 2] = True
    assert call.states.isnan().all(3).equal(is_nan) and call.states.isnan().any(3).equal(is_nan)
    assert o.view(3, 4, -1).isnan().all(2).equal(is_nan.any(2))


@needs_triton
@pytest.mark.parametrize("name", ["elu+1", "quadratic", "fourier", "exponential"])
def test_the_operator_passes_opcheck(name):
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    call = case(name, torch.float32)
    torch.library.opcheck(torch.ops.deltazoo.triton_normalised_step_.default, tuple(call), test_utils=tests)
