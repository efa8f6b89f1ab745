"""A token of Rodimus's update by one kernel against float64: in Triton's interpreter, or on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_cases import DEVICE, needs_triton

from deltazoo.backends.triton.decode.tempered_op import TemperedCall, tempered_step_

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 5e-3}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def case(B: int, K: int, V: int, R: int, dtype: torch.dtype) -> TemperedCall:
    products = draw(B, 4 * K + R + V + 1, seed=0).to(dtype)  # the rows of each operand are apart
    q, k, g, tau, low, gate, _ = products.split([K, K, K, K, R, V, 1], 1)
    return TemperedCall(
        q, k, g, tau, low, gate, g_bias=draw(K, seed=1) - 3, tau_bias=draw(K, seed=2).to(dtype),
        streams=draw(B, 2, V, seed=3).to(dtype), weight=draw(V, R, seed=4).to(dtype), bias=draw(V, seed=5).to(dtype),
        skip=draw(V, seed=6).to(dtype), states=draw(B, 1, K, V, seed=7), activation="silu", scale=0.5,
    )  # fmt: skip


def expected(call: TemperedCall) -> tuple[Tensor, Tensor]:
    """Return o and the new state in float64."""
    q, k, g, tau, low, gate, g_bias, tau_bias, streams, weight, bias, skip, states = (
        x.double() for x in call if isinstance(x, Tensor)
    )
    g, tau = F.softplus(g + g_bias), (tau + tau_bias).sigmoid()
    k, log_decay = F.normalize(k, dim=-1) * g**tau, -g * tau
    c, u = streams.unbind(1)
    v = (low @ weight.T + bias).sigmoid() * u
    states = log_decay.exp()[:, None, :, None] * states + k[:, None, :, None] * v[:, None, None]
    o = call.scale * (q[:, :, None] * states[:, 0]).sum(1) + skip * c
    return o * F.silu(gate), states


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("B", "K", "V", "R"), [pytest.param(2, 5, 12, 3, marks=pytest.mark.kernel_smoke), (1, 64, 300, 32), (2, 200, 70, 1)]
)
def test_a_token_equals_its_equations(B, K, V, R, dtype):
    call = case(B, K, V, R, dtype)
    reference = expected(call)
    for ours, wide in zip((tempered_step_(call), call.states), reference, strict=True):
        assert (ours.double() - wide).norm() <= TOLERANCES[dtype] * wide.norm()


@needs_triton
def test_gates_and_keys_at_their_limits_are_finite():
    call = case(2, 5, 12, 3, torch.float32)
    call.k[0].zero_()
    call.g[1] = torch.tensor([-200.0, -200.0, -40.0, 40.0, 200.0], device=DEVICE)  # softplus underflows to 0
    call.tau[1] = torch.tensor([-200.0, 0.0, 0.0, -200.0, 200.0], device=DEVICE)  # and the sigmoid
    wide = expected(call)
    for ours, reference in zip((tempered_step_(call), call.states), wide, strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=1e-5, atol=1e-6)


@needs_triton
def test_products_of_several_tensors_are_joined():
    call = case(2, 5, 12, 3, torch.float32)
    apart = call._replace(k=call.k.clone(), tau=call.tau.clone(), states=call.states.clone())
    torch.testing.assert_close(tempered_step_(apart), tempered_step_(call))
    torch.testing.assert_close(apart.states, call.states)


@needs_triton
def test_the_operator_passes_opcheck():
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    call = case(2, 5, 12, 3, torch.float32)
    torch.library.opcheck(torch.ops.deltazoo.triton_tempered_step_.default, tuple(call), test_utils=tests)
