"""The Hopper kernel of the products of few rows against float64, emulated on a CPU (gluon_on_cpu.py)."""

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
PRODUCT, FINISH, NORMALIZE = "few_rows_sm90_kernel", "finish_rows_kernel", "normalize_rows_kernel"


@pytest.fixture(autouse=True, params=[False, True], ids=["copies when issued", "copies when awaited"])
def emulated(request, monkeypatch):
    from deltazoo.backends.triton.gemv.kernels import few_rows, few_rows_sm90
    from deltazoo.backends.triton.runtime import launcher as runtime

    around, product = kernels("few_rows", "few_rows_sm90", package=GEMV).values()
    monkeypatch.setattr(few_rows, FINISH, around.finish_rows_kernel)
    monkeypatch.setattr(few_rows, NORMALIZE, around.normalize_rows_kernel)
    monkeypatch.setattr(few_rows_sm90, PRODUCT, product.few_rows_sm90_kernel)
    monkeypatch.setattr(runtime, "launcher", launcher(runtime.launcher))
    monkeypatch.setattr(op, "device_spec", lambda _: DeviceSpec("a small Hopper GPU", "cuda", (9, 0), 9, 232448))
    monkeypatch.setattr(Timing, "late", request.param)
    LAUNCHED.clear()


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(actual: Tensor, expected: Tensor, *launched: str) -> None:
    error = (actual.double() - expected).norm() / expected.norm()
    assert error <= (2e-3 if actual.dtype == torch.float16 else 6e-3), float(error)
    assert [*launched] == LAUNCHED


@pytest.mark.parametrize("outputs", [(40,), (70, 1, 2, 130)], ids=str)
@pytest.mark.parametrize(("M", "D"), [(3, 72), (33, 904)])
def test_a_residual_and_biases_are_added_to_products_of_several_maps(M, D, outputs, monkeypatch):
    monkeypatch.setattr(op, "_LEAST_SPAN", D)  # not split
    wide, weights = draw(M, D + 8), [draw(n, D, seed=n) for n in outputs]
    x, residual = wide[:, 8:], draw(M, sum(outputs), seed=1)
    biased = [*range(0, len(outputs), 2)]
    biases = [draw(n, seed=n + 1) if i in biased else draw(n).zero_() for i, n in enumerate(outputs)]
    added = [biases[i] for i in biased]
    y = op.gemv(x, None, 0.0, weights, residual, "", False, None, None, [], added, biased)
    exact = x.double() @ torch.cat(weights).double().T + torch.cat(biases).double()
    assert_near(y, residual.double() + exact, PRODUCT)


@pytest.mark.parametrize("gated", [False, True])
def test_sums_of_splits_are_added(gated):
    x, weight = draw(5, 1160, dtype=torch.float16), draw(86, 1160, dtype=torch.float16, seed=1) / 32
    residual = draw(5, 43 if gated else 86, dtype=torch.float16, seed=2)
    exact = x.double() @ weight.double().T
    gate, up = exact.chunk(2, 1) if gated else (exact, 1.0)
    y = op.gemv(x, None, 0.0, [weight], residual, "silu", gated, None, None, [], [], [])
    assert_near(y, residual.double() + F.silu(gate) * up, PRODUCT, FINISH)


@pytest.mark.parametrize("outputs", [43, 250])
def test_a_gated_mlp_after_a_norm(outputs):
    x, weight = draw(5, 136, dtype=torch.float16), draw(2 * outputs, 136, dtype=torch.float16, seed=1)
    norm = draw(136, seed=2).float()
    gate, up = (rms_norm(x.double(), norm.double(), 0.1) @ weight.double().T).chunk(2, -1)
    y = op.gemv(x, norm, 0.1, [weight], None, "gelu", True, None, None, [], [], [])
    assert_near(y, F.gelu(gate, approximate="tanh") * up, NORMALIZE, PRODUCT)


def test_a_token_shift_with_shares_by_map():
    D, rows = 136, (2, 0, 1)
    x, before, mix, norm = draw(4, D), draw(4, D, seed=1), draw(3, D, seed=2), draw(D, seed=3)
    weights = [draw(n, D, seed=n) for n in (33, 3, 20)]
    n = rms_norm(x.double(), norm.double(), 0.1)
    y = op.gemv(x, norm, 0.1, weights, None, "", False, before, mix, [*rows], [], [])
    parts = [(n + (before.double() - n) * mix[r].double()) @ w.double().T for w, r in zip(weights, rows, strict=True)]
    assert_near(y, torch.cat(parts, 1), NORMALIZE, PRODUCT)


def test_maps_read_different_columns():
    wide, weights = draw(3, 208), [draw(n, 64, seed=n) for n in (70, 30)]
    y = op.gemv(wide, None, 0.0, weights, None, "", False, None, None, [16, 144], [], [])
    parts = [wide[:, first : first + 64].double() @ w.double().T for first, w in zip((16, 144), weights, strict=True)]
    assert_near(y, torch.cat(parts, 1), PRODUCT)


@pytest.mark.parametrize("splits", [False, True])
def test_the_first_map_is_convolved_and_its_product_appended(splits, monkeypatch):
    M, D, C, W = 19, 1160, 86, 4
    monkeypatch.setattr(op, "_LEAST_SPAN", 512 if splits else D)
    x, weights = draw(M, D), [draw(n, D, seed=n) / D**0.5 for n in (C, 9)]
    history, taps, bias = draw(M, W - 1, C, seed=1), draw(C, W, seed=2), draw(C, seed=3)
    before = history.clone()
    added = draw(C, seed=4)
    y = op.gemv_convolved_(x, None, 0.0, weights, [added], [0], history, taps, bias, True)
    tokens, others = (x.double() @ weight.double().T for weight in weights)
    tokens += added.double()
    assert torch.equal(history[:, :-1], before[:, 1:])
    inputs = torch.cat([before, history[:, -1:]], 1).double()
    convolved = F.silu((inputs * taps.T.double()).sum(1) + bias.double())
    expected = torch.cat([convolved, others, tokens], 1)
    launched = (PRODUCT, FINISH) if splits else (PRODUCT,)
    assert_near(torch.cat([y, history[:, -1]], 1), expected, *launched)


def test_infinite_weights_of_other_outputs_change_nothing():
    x, weight = draw(3, 72), draw(50, 72, seed=1)
    y = op.gemv(x, None, 0.0, [weight], None, "", False, None, None, [], [], [])
    weight[20] = torch.inf
    z = op.gemv(x, None, 0.0, [weight], None, "", False, None, None, [], [], [])
    assert not z[:, 20].isfinite().any()
    assert torch.equal(torch.cat([y[:, :20], y[:, 21:]], 1), torch.cat([z[:, :20], z[:, 21:]], 1))
