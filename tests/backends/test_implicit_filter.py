"""The filter of Hyena by one kernel against float64: in Triton's interpreter, or on a GPU."""

import math

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo.backends.triton.conv import implicit_filter_op
from deltazoo.backends.triton.conv.implicit_filter_op import ImplicitFilterCall, implicit_filter_

# the interpreter multiplies no matrices in bfloat16
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)


def case(S: int, D: int, F: int, bands: int, dtype: torch.dtype, seen: tuple[int, ...]) -> ImplicitFilterCall:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(DEVICE, dtype)

    layers = [tensor for inputs in (2 * bands + 1, F, F) for tensor in (draw(F, inputs), draw(F))]
    counts, history = torch.tensor(seen, device=DEVICE), torch.empty(len(seen), S, D, device=DEVICE)
    return ImplicitFilterCall(
        *layers, draw(D, F), 4 * draw(F), counts, history,
        length=29, lowest=1e-4, highest=max(bands - 1, 1e-4), slowest=0.5, fastest=7.0,
    )  # fmt: skip


def expected(call: ImplicitFilterCall) -> Tensor:
    """Return the filter from its equations in float64."""
    first, b1, second, b2, third, b3, last, frequency = (x.double() for x in call[:8])
    S, D = call.history.shape[1:]
    t = torch.arange(S, device=DEVICE, dtype=torch.float64)[:, None]
    bands = torch.linspace(call.lowest, call.highest, first.shape[1] // 2, dtype=torch.float64, device=DEVICE)
    angle = 2 * math.pi * bands * t / call.length
    position = t / (call.length - 1)
    z = torch.cat([position, angle.cos(), -angle.sin()], 1)
    for weight, bias in ((first, b1), (second, b2), (third, b3)):
        z = (frequency * (z @ weight.T + bias)).sin()
    rate = torch.linspace(call.slowest, call.fastest, D, dtype=torch.float64, device=DEVICE)
    return z @ last.T * (-position * rate).exp()


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("S", "D", "F", "bands", "seen"),
    [
        pytest.param(40, 20, 8, 1, (33, 5), marks=pytest.mark.kernel_smoke),
        (70, 300, 64, 3, (0, 0)),
        (35, 16, 100, 2, (34,) * 130),
        (20, 1, 16, 1, (90, 3)),  # a row without a request
    ],
)
def test_the_filter_equals_its_network_as_far_as_rows_have_tokens(S, D, F, bands, seen, dtype):
    call = case(S, D, F, bands, dtype, seen)
    reference = expected(call)
    filter = implicit_filter_(call)
    assert call.seen.tolist() == [n + 1 for n in seen]
    read = min(S, max(seen) + 1)
    torch.testing.assert_close(filter[:read].double(), reference[:read], rtol=1e-5, atol=2e-6)


@needs_triton
def test_distances_that_no_row_reads_are_not_computed(monkeypatch):
    monkeypatch.setattr(implicit_filter_op, "_fake", lambda *_: torch.full((64, 16), torch.inf, device=DEVICE))
    filter = implicit_filter_(case(64, 16, 16, 1, torch.float32, (17, 4)))
    assert filter[:18].isfinite().all() and filter[32:].isinf().all()


@needs_triton
def test_the_operator_passes_opcheck():
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    call = case(20, 16, 16, 2, torch.float32, (3, 9))
    torch.library.opcheck(torch.ops.deltazoo.triton_implicit_filter_.default, tuple(call), test_utils=tests)
