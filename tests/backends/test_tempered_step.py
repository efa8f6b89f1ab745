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
    products = draw(B, K + R + V + 1, seed=0).to(dtype)  # the rows of each operand are apart
    q, low, gate, _ = products.split([K, R, V, 1], 1)
    return TemperedCall(
        q, low, gate, k=draw(B, K, seed=1), log_decay=-draw(B, K, seed=2).exp(),
        streams=draw(B, 2, V, seed=3).to(dtype), weight=draw(V, R, seed=4).to(dtype), bias=draw(V, seed=5).to(dtype),
        skip=draw(V, seed=6).to(dtype), states=draw(B, 1, K, V, seed=7), activation="silu", scale=0.5,
    )  # fmt: skip


def expected(call: TemperedCall) -> tuple[Tensor, Tensor]:
    """Return o and the new state in float64."""
    q, low, gate, k, log_decay, streams, weight, bias, skip, states = (
        x.double() for x in call if isinstance(x, Tensor)
    )
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
def test_the_operator_passes_opcheck():
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    call = case(2, 5, 12, 3, torch.float32)
    torch.library.opcheck(torch.ops.deltazoo.triton_tempered_step_.default, tuple(call), test_utils=tests)
