"""The kernels of least squares against direct solutions in float64: in Triton's interpreter, or on a GPU."""

import itertools

import pytest
import torch
from least_squares_cases import CASES, Case, draw, exact_solution, relative_error
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.ops import least_squares as operators
from deltazoo.backends.triton.least_squares import op as kernels
from deltazoo.mixers import Mesa

# of outputs that are rounded once, and of states
TOLERANCE = {torch.float32: 3e-5, torch.float16: 6e-4, torch.bfloat16: 3e-3}
DTYPES = list(TOLERANCE)[: 2 if INTERPRETED else 3]
# In the interpreter few cases in float32, which takes smaller chunks and more steps.
PRODUCT = [
    (name, x) for name, x in itertools.product(CASES, DTYPES)
    if not INTERPRETED or x == torch.float16 or name in ("no initial state", "one token")
]  # fmt: skip


@needs_triton
@pytest.mark.parametrize(("name", "dtype"), [pytest.param(*PRODUCT[0], marks=pytest.mark.kernel_smoke), *PRODUCT[1:]])
def test_solution_equals_the_direct_one(name, dtype):
    systems, b = draw(CASES[name], dtype, DEVICE)
    with watch() as log:
        x = kernels.solve(b, *systems, 40)
    assert log.kernels == {"covariance_kernel": 1, "solve_kernel": 1}
    expected = exact_solution(systems, b)[0]
    assert x.dtype == dtype
    assert relative_error(x, expected) < TOLERANCE[dtype]
    assert x.double().cpu()[expected == 0].eq(0).all()


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: products of 128 columns take minutes in the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("log_decay", [None, 0.0])
def test_solution_of_wide_keys_in_a_long_sequence(dtype, log_decay):
    systems, b = draw(Case(2, 1000, 3, 128, log_decay=log_decay), dtype, DEVICE)
    assert relative_error(kernels.solve(b, *systems, 100), exact_solution(systems, b)[0]) < TOLERANCE[dtype]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [pytest.param(16, marks=pytest.mark.kernel_smoke), 20])
def test_a_step_adds_its_token_and_solves(dtype, K):
    systems, b = draw(Case(3, 1, 2, K), dtype, DEVICE)
    expected, final = exact_solution(systems, b)
    x = kernels.step_(b, *systems[:5], 40)
    assert relative_error(x, expected) < TOLERANCE[dtype]
    assert relative_error(systems.state, final) < 1e-6


@needs_triton
def test_the_squares_of_small_right_hand_sides_do_not_vanish():
    systems, b = draw(Case(1, 20, 1, 16, scale=1e-30), torch.float32, DEVICE)
    assert relative_error(kernels.solve(b, *systems, 40), exact_solution(systems, b)[0]) < TOLERANCE[torch.float32]


@needs_triton
def test_few_steps_equal_those_of_plain_torch(monkeypatch):
    systems, b = draw(Case(1, 40, 1, 16, log_decay=0.0), torch.float32, DEVICE)
    monkeypatch.setattr(kernels, "device_refusals", lambda *_: ("it is refused here.",))
    for steps in (0, 1, 3):
        expected = operators.solve(systems, b, steps)
        torch.testing.assert_close(kernels.solve(b, *systems, steps), expected, rtol=1e-4, atol=1e-5)


@needs_triton
def test_gradients_of_a_layer_with_the_kernels_equal_those_in_float64(monkeypatch):
    monkeypatch.setattr(operators, "kernel_refusals", lambda k: ["it needs float32."] * (k.dtype == torch.float64))
    monkeypatch.setattr(kernels, "device_refusals", lambda *_: ())
    torch.manual_seed(0)
    config = Mesa(heads=1, key_width=4, value_width=8, steps=6)
    exact, mixer = config.build(12, backend="reference").double(), config.build(12, backend="reference").to(DEVICE)
    mixer.load_state_dict({name: x.float() for name, x in exact.state_dict().items()})
    x = torch.randn(1, 20, 12, dtype=torch.float64)
    results = []
    for module in (exact, mixer):
        inputs = x.to(next(module.parameters())).requires_grad_()
        with watch() as log:
            y = module(inputs)[0]
            results.append([y, *torch.autograd.grad(y.cos().sum(), [inputs, *module.parameters()])])
    assert log.kernels["solve_kernel"] == 2
    for actual, expected in zip(results[1], results[0], strict=True):
        assert relative_error(actual.detach(), expected.detach()) < 1e-4
