"""A token of Mamba and of diagonal Longhorn by one kernel against float64: in Triton's interpreter, or on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_cases import DEVICE, needs_triton

from deltazoo.backends.ops.selective_step import SelectiveCall, selective_step_
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.element import selective_op

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def case(B: int, C: int, N: int, R: int, longhorn: bool, dtype: torch.dtype) -> SelectiveCall:
    wide = draw(B, 2 * C + 3, seed=1).to(dtype)  # the rows of the gate are apart
    A_log = None if longhorn else torch.arange(1.0, N + 1, device=DEVICE).log().expand(C, N).to(dtype)
    bias = draw(C, seed=4) - 6 * (not longhorn)  # step sizes of Mamba are small
    return SelectiveCall(
        v=draw(B, C, seed=0).to(dtype), streams=draw(B, R + 2 * N, seed=2).to(dtype), gate=wide[:, C : 2 * C],
        to_step=(draw(C, R, seed=3) * R**-0.5).to(dtype), bias=bias.to(dtype), A_log=A_log,
        skip=draw(C, seed=5).to(dtype), states=draw(B, C, N, seed=6),
    )  # fmt: skip


def expected(call: SelectiveCall) -> tuple[Tensor, Tensor]:
    """Return o and the new state in float64."""
    v, streams, gate, to_step, bias, A_log, skip, S = (None if x is None else x.double() for x in call)
    r, k, q = streams.split([to_step.shape[1], S.shape[2], S.shape[2]], 1)
    z = r @ to_step.T + bias
    if A_log is None:
        write = z.sigmoid() / (1 + z.sigmoid() * k.square().sum(1, keepdim=True))
        decay = 1 - write[..., None] * k.square()[:, None]
    else:
        write = F.softplus(z)
        decay = (-write[..., None] * A_log.exp()).exp()
    S = decay * S + (write * v)[..., None] * k[:, None]
    return ((S * q[:, None]).sum(2) + skip * v) * F.silu(gate), S


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("longhorn", [False, True])
@pytest.mark.parametrize(
    ("B", "C", "N", "R"),
    [pytest.param(1, 40, 16, 3, marks=pytest.mark.kernel_smoke), (19, 24, 5, 130), (40, 40, 16, 3)],
)
def test_a_token_equals_its_equations(B, C, N, R, longhorn, dtype, monkeypatch):
    """The programs of the last case have several tiles of rows."""
    monkeypatch.setattr(selective_op, "device_spec", lambda _: DeviceSpec("a small GPU", "cuda", (9, 0), 1, 232448))
    call = case(B, C, N, R, longhorn, dtype)
    results = expected(call)
    for ours, reference in zip((selective_step_(call), call.states), results, strict=True):
        assert (ours.double() - reference).norm() <= TOLERANCES[dtype] * reference.norm()


@needs_triton
def test_the_operator_passes_opcheck():
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    call = case(2, 20, 4, 3, False, torch.float32)
    torch.library.opcheck(torch.ops.deltazoo.triton_selective_step_.default, tuple(call), test_utils=tests)
