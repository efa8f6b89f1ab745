"""The Hopper kernel of the products of one or two rows against float64, emulated on a CPU (gluon_on_cpu.py)."""

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
    from deltazoo.backends.triton.gemv.kernels import stream
    from deltazoo.backends.triton.runtime import launcher as runtime

    (module,) = kernels("stream", package=GEMV).values()
    monkeypatch.setattr(stream, "stream_kernel", module.stream_kernel)
    monkeypatch.setattr(runtime, "launcher", launcher(runtime.launcher))
    monkeypatch.setattr(op, "device_spec", lambda _: DEVICE)
    monkeypatch.setattr(Timing, "late", request.param)
    LAUNCHED.clear()


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    error = (actual.double() - expected).norm() / expected.norm()
    assert error <= (1e-3 if actual.dtype == torch.float16 else 5e-3), float(error)
    assert LAUNCHED == ["stream_kernel"]


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


def test_other_inputs_take_the_portable_kernel():
    around = op.Around()
    assert op.launch_of(draw(1, 72), [draw(3, 72)], around) == op.StreamLaunch()
    assert isinstance(op.launch_of(draw(1, 70), [draw(3, 70)], around), op.GemvLaunch)  # rows of 140 bytes
    assert isinstance(op.launch_of(draw(1, 72).float(), [draw(3, 72).float()], around), op.GemvLaunch)
    assert isinstance(op.launch_of(draw(2, 16384), [draw(3, 16384)], around), op.GemvLaunch)  # too wide for the ring
