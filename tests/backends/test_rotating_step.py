"""A token of complex diagonal states by one kernel against complex128: in Triton's interpreter, or on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_cases import DEVICE, needs_triton

from deltazoo.backends.triton.element.rotating_op import RotatingCall, rotating_step_

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
D = 12


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def case(kind: str, B: int, C: int, dtype: torch.dtype, full: bool = True) -> RotatingCall:
    """Return a call; full: with the operands that may be missing."""
    products = draw(B, 5 * C + 3, seed=0).to(dtype)
    hgrn, parameters = kind == "hgrn", draw(3, C, seed=1)
    values = {"lru": parameters - 1, "s5": parameters * 0.5 + torch.tensor([[-1.0], [40.0], [-4.0]]).to(DEVICE)}
    magnitude, angle, scale = values.get(kind, parameters).to(dtype)
    seen = torch.arange(B, device=DEVICE) * 100_003
    return RotatingCall(
        kind, values=products[:, : 2 * C], decays=products[:, 2 * C : 3 * C] if hgrn else None,
        gates=products[:, 3 * C : 5 * C] if hgrn else None, magnitude=magnitude if full or not hgrn else None,
        angle=angle, scale=None if hgrn else scale,
        norm_weight=draw(2 * C, seed=2).to(dtype) if hgrn else None, x=None if hgrn else draw(B, D, seed=3).to(dtype),
        feedthrough=None if hgrn else draw(D, seed=4).to(dtype), position=seen + 7 if full else None, seen=seen,
        states=draw(B, C, 1, 2, seed=5), eps=1e-5,
    )  # fmt: skip


def expected(call: RotatingCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return o, direct and the new states, from the equations in complex128."""
    wide = RotatingCall(*(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in call))
    values = torch.view_as_complex(torch.unflatten(wide.values, 1, (-1, 2)).contiguous())
    if call.kind == "lru":
        assert wide.magnitude is not None and wide.scale is not None
        a = torch.polar((-wide.magnitude.exp()).exp(), wide.angle.exp())
        written = wide.scale.exp() * values
    elif call.kind == "s5":
        assert wide.magnitude is not None and wide.scale is not None
        eigenvalue = torch.complex(-wide.magnitude.exp(), wide.angle)
        a = (eigenvalue * wide.scale.exp()).exp()
        written = (a - 1) / eigenvalue * values
    else:
        assert wide.decays is not None and wide.gates is not None and wide.norm_weight is not None
        floor = torch.zeros(()) if wide.magnitude is None else wide.magnitude.sigmoid()
        forget = floor + (1 - floor) * wide.decays.sigmoid()
        a = torch.polar(forget, wide.angle.expand_as(forget))
        written = (1 - forget) * torch.complex(F.silu(values.real), F.silu(values.imag))
    position = call.seen if call.position is None else call.position
    angle = position[:, None] * a.angle()
    frame = torch.polar(torch.ones_like(angle), angle)
    S = a.abs() * torch.view_as_complex(wide.states[:, :, 0]) + frame.conj() * written
    o, direct = frame * S, wide.states.new_zeros(len(S), 0)
    if call.kind != "hgrn":
        assert wide.x is not None and wide.feedthrough is not None
        o, direct = o.conj(), wide.feedthrough * wide.x
    y = torch.view_as_real(o.resolve_conj()).flatten(1)
    if wide.gates is not None and wide.norm_weight is not None:
        y = y * wide.gates.sigmoid()
        y = F.layer_norm(y, y.shape[1:], wide.norm_weight, None, call.eps)
    return y, direct, torch.view_as_real(S)[:, :, None]


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("kind", [pytest.param("lru", marks=pytest.mark.kernel_smoke), "s5", "hgrn"])
def test_a_token_equals_its_equations(kind, full, dtype):
    call = case(kind, 3, 20, dtype, full)
    seen, reference = call.seen.clone(), expected(call)
    o, direct = rotating_step_(call)
    for ours, wide in zip((o, direct, call.states), reference, strict=True):
        assert (ours.double() - wide).norm() <= TOLERANCES[dtype] * wide.norm()
    torch.testing.assert_close(call.seen, seen + 1)


@needs_triton
def test_rows_may_be_unequally_far_apart():
    call = case("hgrn", 3, 20, torch.float32)
    call = call._replace(decays=call.decays.contiguous())
    reference = expected(call)[0]
    torch.testing.assert_close(rotating_step_(call)[0].double(), reference, rtol=1e-4, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("kind", ["lru", "hgrn"])
def test_the_operator_passes_opcheck(kind):
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    call = case(kind, 2, 8, torch.float32)
    torch.library.opcheck(torch.ops.deltazoo.triton_rotating_step_.default, tuple(call), test_utils=tests)
