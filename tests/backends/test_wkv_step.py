"""A token of RWKV-4 by one kernel against float64: in Triton's interpreter, or on a GPU."""

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, needs_triton

from deltazoo.backends.triton.element.wkv_op import WKVCall, wkv_step_
from deltazoo.mixers.parts.gates.exponential_gating import INITIAL_MAX

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def case(B: int, C: int, D: int, dtype: torch.dtype) -> WKVCall:
    products = (3 * draw(B, 3 * C + 1, seed=0)).to(dtype)  # the rows of k, v and r are apart
    k, v, r = products[:, : 3 * C].split(C, 1)
    states = draw(B, C, 1, 2, seed=1)
    states[..., 1].abs_()
    states[0] = 0
    largest = 3 * draw(B, C, seed=2)
    largest[0] = INITIAL_MAX  # of an empty state
    return WKVCall(
        k, v, r, w=draw(C, seed=3).to(dtype), u=draw(C, seed=4).to(dtype), x=draw(B, D, seed=5).to(dtype),
        largest=largest, previous=draw(B, 1, D, seed=6).to(dtype), states=states,
    )  # fmt: skip


def expected(call: WKVCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return o, s and z, which are not divided by e^m, from the equations in float64."""
    k, v, r, w, u, _, m, _, states = (x.double() for x in call)
    s, z = (states[:, :, 0] * m.exp()[..., None]).unbind(-1)
    bonus = (u + k).exp()
    o = r.sigmoid() * (s + bonus * v) / (z + bonus)
    decay = (-w.exp()).exp()
    return o, decay * s + k.exp() * v, decay * z + k.exp()


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("B", "C", "D"), [pytest.param(2, 40, 24, marks=pytest.mark.kernel_smoke), (3, 600, 600), (2, 516, 2000)]
)
def test_a_token_equals_its_equations(B, C, D, dtype):
    call = case(B, C, D, dtype)
    reference = expected(call)
    o = wkv_step_(call)
    s, z = (call.states[:, :, 0].double() * call.largest.double().exp()[..., None]).unbind(-1)
    for ours, wide in zip((o.double(), s, z), reference, strict=True):
        assert (ours - wide).norm() <= TOLERANCES[dtype] * wide.norm()
    torch.testing.assert_close(call.previous[:, 0], call.x)


@needs_triton
def test_strong_keys_do_not_overflow():
    call = case(2, 8, 8, torch.float32)
    call.k.fill_(1e4)
    o = wkv_step_(call)
    torch.testing.assert_close(o, call.r.sigmoid() * call.v)
    torch.testing.assert_close(call.states[..., 0, 1], torch.ones_like(o))


@needs_triton
def test_the_operator_passes_opcheck():
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    call = case(2, 20, 8, torch.float32)
    torch.library.opcheck(torch.ops.deltazoo.triton_wkv_step_.default, tuple(call), test_utils=tests)
