"""A token of RG-LRU by one kernel against float64: in Triton's interpreter, or on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo.backends.triton.element.rg_lru_op import RGLRUCall, rg_lru_step_

# the interpreter multiplies no matrices in bfloat16
TOLERANCES = {torch.float32: 1e-5, **({torch.float16: 2e-3} if INTERPRETED else {torch.bfloat16: 1e-2})}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def case(B: int, blocks: int, W: int, dtype: torch.dtype) -> RGLRUCall:
    C = blocks * W
    products = draw(B, 2 * C + 1, seed=0).to(dtype)  # the rows of u and gate are apart
    L = torch.linspace(-16, 2, C, device=DEVICE)  # decays from 1 - 1e-6 to 1e-7
    return RGLRUCall(
        products[:, :C], products[:, C : 2 * C], weight=(draw(2, blocks, W, W, seed=1) * W**-0.5).to(dtype),
        bias=draw(2, C, seed=2).to(dtype), L=L.to(dtype), states=draw(B, C, 1, 1, seed=3),
    )  # fmt: skip


def expected(call: RGLRUCall) -> tuple[Tensor, Tensor]:
    """Return o and the new state from the equations in float64."""
    u, gate, weight, bias, L, h = (x.double() for x in call)
    blocks = torch.unflatten(u, 1, weight.shape[1:3])
    r, i = (torch.einsum("bnc,gncd->gbnd", blocks, weight).flatten(2) + bias[:, None]).sigmoid()
    log_a = -8 * F.softplus(L) * r
    h = log_a.exp() * h[..., 0, 0] + (-torch.expm1(2 * log_a)).sqrt() * i * u
    return h * F.gelu(gate, approximate="tanh"), h


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("B", "blocks", "W"), [pytest.param(2, 3, 8, marks=pytest.mark.kernel_smoke), (19, 1, 40), (1, 2, 150)]
)
def test_a_token_equals_its_equations(B, blocks, W, dtype):
    call = case(B, blocks, W, dtype)
    reference = expected(call)
    o = rg_lru_step_(call)
    for ours, wide in zip((o, call.states[..., 0, 0]), reference, strict=True):
        assert (ours.double() - wide).norm() <= TOLERANCES[dtype] * wide.norm()


@needs_triton
@pytest.mark.parametrize("L", [-14.0, -6.0, -1.0, 6.0])
def test_the_factor_of_the_input_is_exact_for_decays_near_one(L):
    call = case(1, 1, 16, torch.float32)
    call.L.fill_(L)
    call.states.zero_()
    reference = expected(call)[1]
    rg_lru_step_(call)
    torch.testing.assert_close(call.states[..., 0, 0].double(), reference, rtol=2e-6, atol=0)


@needs_triton
def test_the_operator_passes_opcheck():
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    call = case(2, 2, 8, torch.float32)
    torch.library.opcheck(torch.ops.deltazoo.triton_rg_lru_step_.default, tuple(call), test_utils=tests)
