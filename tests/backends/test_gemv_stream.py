"""The Hopper kernels of the products of few rows against float64, emulated on a CPU (gluon_on_cpu.py)."""

import pytest
import torch
import torch.nn.functional as F
from gluon_on_cpu import GEMV, LAUNCHED, Timing, kernels, launcher
from torch import Tensor

from deltazoo.backends.ops.rms_norm import rms_norm
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.gemv import op

pytest.importorskip("triton", reason="the kernels need the package triton")
pytestmark = pytest.mark.kernels
DEVICE = DeviceSpec("a small Hopper GPU", "cuda", (9, 0), 3, 232448)


@pytest.fixture(autouse=True, params=[False, True], ids=["copies when issued", "copies when awaited"])
def emulated(request, monkeypatch):
    from deltazoo.backends.triton.gemv.kernels import stream, stream_rows
    from deltazoo.backends.triton.runtime import launcher as runtime

    one_row, several_rows = kernels("stream", "stream_rows", package=GEMV).values()
    monkeypatch.setattr(stream, "stream_kernel", one_row.stream_kernel)
    monkeypatch.setattr(stream_rows, "stream_rows_kernel", several_rows.stream_rows_kernel)
    monkeypatch.setattr(runtime, "launcher", launcher(runtime.launcher))
    monkeypatch.setattr(op, "device_spec", lambda _: DEVICE)
    monkeypatch.setattr(op, "STREAMS_ONE_ROW", True)
    monkeypatch.setattr(Timing, "late", request.param)
    LAUNCHED.clear()


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(actual: Tensor, expected: Tensor, kernel: str = "stream_kernel") -> None:
    error = (actual.double() - expected).norm() / expected.norm()
    assert error <= (1e-3 if actual.dtype == torch.float16 else 5e-3), float(error)
    assert [kernel] == LAUNCHED


@pytest.mark.parametrize("outputs", [(40,), (70, 1, 2, 30), (7, 90), (1, 1, 3)], ids=str)
@pytest.mark.parametrize(("M", "D"), [(1, 72), (2, 1040)])
def test_products_of_several_maps(M, D, outputs):
    x, weights = draw(M, D), [draw(n, D, seed=n) for n in outputs]
    y = op.gemv(x, None, 0.0, weights, None, "", False, None, None, [])
    assert_near(y, x.double() @ torch.cat(weights).double().T)


def test_a_gated_mlp_after_a_norm():
    x, weight, norm = draw(1, 520, dtype=torch.float16), draw(86, 520, dtype=torch.float16, seed=1), draw(520, seed=2)
    exact = rms_norm(x.double(), norm.double(), 0.1) @ weight.double().T
    y = op.gemv(x, norm, 0.1, [weight], None, "silu", True, None, None, [])
    assert_near(y, F.silu(exact[:, :43]) * exact[:, 43:])


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu2"])
def test_an_activation_and_a_residual_of_rows_of_a_wider_tensor(activation):
    x, weight, residual = draw(2, 96)[:, 8:72], draw(61, 64, seed=1), draw(2, 61, seed=2)
    exact = x.double() @ weight.double().T
    act = {"silu": F.silu, "gelu": lambda h: F.gelu(h, approximate="tanh"), "relu2": lambda h: F.relu(h).square()}
    y = op.gemv(x, None, 0.0, [weight], residual, activation, False, None, None, [])
    assert_near(y, residual.double() + act[activation](exact))


def test_a_token_shift_with_shares_by_map():
    D, rows = 520, (2, 0, 1)
    x, before, mix, norm = draw(1, D), draw(1, D, seed=1), draw(3, D, seed=2), draw(D, seed=3)
    weights = [draw(n, D, seed=n) for n in (33, 3, 20)]
    n = rms_norm(x.double(), norm.double(), 0.1)
    y = op.gemv(x, norm, 0.1, weights, None, "", False, before, mix, [*rows])
    parts = [(n + (before.double() - n) * mix[r].double()) @ w.double().T for w, r in zip(weights, rows, strict=True)]
    assert_near(y, torch.cat(parts, 1))


def test_infinite_weights_of_other_outputs_change_nothing():
    x, weight = draw(1, 72), draw(50, 72, seed=1)
    y = op.gemv(x, None, 0.0, [weight], None, "", False, None, None, [])
    weight[20] = torch.inf
    LAUNCHED.clear()
    z = op.gemv(x, None, 0.0, [weight], None, "", False, None, None, [])
    assert not z[:, 20].isfinite().any()
    assert torch.equal(torch.cat([y[:, :20], y[:, 21:]], 1), torch.cat([z[:, :20], z[:, 21:]], 1))


@pytest.mark.parametrize("outputs", [(40,), (170, 1, 2, 330)], ids=str)
@pytest.mark.parametrize(("M", "D"), [(3, 72), (33, 392)])
def test_products_of_several_rows(M, D, outputs):
    wide, weights = draw(M, D + 8), [draw(n, D, seed=n) for n in outputs]
    x, residual = wide[:, 8:], draw(M, sum(outputs), seed=1)
    y = op.gemv(x, None, 0.0, weights, residual, "", False, None, None, [])
    exact = residual.double() + x.double() @ torch.cat(weights).double().T
    assert_near(y, exact, "stream_rows_kernel")


def test_maps_of_several_rows_that_read_different_inputs():
    x, weights = draw(2, 3, 72), [draw(n, 72, seed=n) for n in (140, 2, 30)]
    y = op.gemv(x, None, 0.0, weights, None, "", False, None, None, [1, 0, 1])
    exact = [x[i].double() @ w.double().T for i, w in zip((1, 0, 1), weights, strict=True)]
    assert_near(y, torch.cat(exact, 1), "stream_rows_kernel")


@pytest.mark.parametrize("outputs", [43, 250])
def test_a_gated_mlp_of_several_rows(outputs):
    x, weight = draw(5, 136, dtype=torch.float16), draw(2 * outputs, 136, dtype=torch.float16, seed=1)
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    y = op.gemv(x, None, 0.1, [weight], None, "gelu", True, None, None, [])
    assert_near(y, F.gelu(gate, approximate="tanh") * up, "stream_rows_kernel")


def test_other_inputs_take_the_portable_kernel():
    assert op.launch_of(draw(1, 72), gated=False) == op.StreamLaunch()
    assert op.launch_of(draw(3, 72), gated=False) == op.StreamRowsLaunch()
    assert isinstance(op.launch_of(draw(1, 70), gated=False), op.GemvLaunch)  # rows of 140 bytes
    assert isinstance(op.launch_of(draw(1, 72).float(), gated=False), op.GemvLaunch)
    assert isinstance(op.launch_of(draw(2, 16384), gated=False), op.GemvLaunch)  # too wide for the ring
