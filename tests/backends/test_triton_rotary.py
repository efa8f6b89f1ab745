"""The kernels of accumulated rotations against float64, token by token: in Triton's interpreter, or on a GPU."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.ops.accumulated_rotary import RotaryOperands, rotate
from deltazoo.backends.triton.rotary import op as kernels
from deltazoo.mixers import Mamba3
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.parts.ssm import mamba3

# B, T, H, HV, K, R, bounds of packed sequences, whether there is a state
CASES = {
    "dense": (2, 33, 1, 2, 12, 4, (), True),
    "groups of heads, all channels": (1, 10, 2, 6, 8, 4, (), False),
    "a pack with empty sequences": (1, 42, 1, 2, 10, 3, (0, 0, 3, 36, 36, 40), True),
    "one token": (2, 1, 1, 2, 8, 2, (), True),
}
if not INTERPRETED:
    CASES["the default widths"] = (2, 300, 1, 8, 128, 32, (), True)
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
# In the interpreter one case in 16 bits, because only loads and stores differ.
PRODUCT = itertools.product(CASES, TOLERANCE)
PRODUCT = [(name, x) for name, x in PRODUCT if not INTERPRETED or x == torch.float32] + [("one token", torch.float16)]


def draw(name: str, dtype: torch.dtype, scale: float) -> tuple[list[Tensor | None], Tensor | None]:
    """Draw the operands up to the state, as the kernels receive them, and the bounds."""
    B, T, H, HV, K, R, bounds, has_state = CASES[name]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    N = len(bounds) - 1 if bounds else B
    operands = [normal(B, T, H, K), normal(B, T, H, K), normal(HV, K), normal(HV, K)]
    operands += [math.pi * torch.tanh(normal(B, T, R)), scale * F.softplus(normal(B, T, HV))]
    state = normal(N, HV, R).to(DEVICE, torch.float32).requires_grad_() if has_state else None
    dtypes = [dtype] * 4 + [torch.float32] * 2
    low = [x.to(DEVICE, to).requires_grad_() for x, to in zip(operands, dtypes, strict=True)]
    return [*low, state], torch.tensor(bounds, dtype=torch.int32, device=DEVICE) if bounds else None


def token_by_token(operands: list[Tensor | None], bounds: Tensor | None) -> tuple[Tensor, ...]:
    """Return q', k', u, 0 outside of sequences, and the last angles, not reduced modulo 2 pi."""
    q, k, q_bias, k_bias, rate, dt, state = operands
    (B, T, H, K), HV, R = q.shape, dt.shape[2], rate.shape[2]
    limits = None if bounds is None else bounds.tolist()
    rows = [(n, range(T)) for n in range(B)]
    if limits is not None:
        rows = [(0, range(start, end)) for start, end in itertools.pairwise(limits)]
    zero = q.new_zeros(HV, K)
    results = {(b, t): (zero, zero, zero[:, 0]) for b in range(B) for t in range(T)}
    finals = []
    for n, (row, tokens) in enumerate(rows):
        angle = q.new_zeros(HV, R) if state is None else state[n]
        for t in tokens:
            angle = angle + rate[row, t] * dt[row, t, :, None]
            biased = [y[row, t].repeat_interleave(HV // H, 0) + bias for y, bias in ((q, q_bias), (k, k_bias))]
            turned = [
                torch.cat([z.real, z.imag, y[:, 2 * R :]], 1)
                for y in biased
                for z in [torch.complex(y[:, :R], y[:, R : 2 * R]) * torch.polar(torch.ones_like(angle), angle)]
            ]
            results[row, t] = (*turned, (biased[0] * biased[1]).sum(1))
        finals.append(angle)
    stacked = [
        torch.stack([results[b, t][i] for b in range(B) for t in range(T)]).unflatten(0, (B, T)) for i in range(3)
    ]
    return (*stacked, torch.stack(finals))


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double().cpu() - expected).norm() / expected.norm())


def exact_operands(operands: list[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else x.detach().double().cpu().requires_grad_() for x in operands]


@needs_triton
@pytest.mark.parametrize(("name", "dtype"), [pytest.param(*PRODUCT[0], marks=pytest.mark.kernel_smoke), *PRODUCT[1:]])
def test_rotation_and_its_gradients(name, dtype):
    operands, bounds = draw(name, dtype, 1.0)
    exact = exact_operands(operands)
    expected = token_by_token(exact, None if bounds is None else bounds.cpu())
    with watch() as log:
        results = rotate(RotaryOperands(*operands, bounds))
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in expected]
        inputs = [x for x in operands if x is not None]
        gradients = torch.autograd.grad(list(results), inputs, [w.to(y) for w, y in zip(weights, results, strict=True)])
    assert {"rotate_kernel", "rotate_backward_kernel", "angle_gradients_kernel"} < set(log.kernels)
    for actual, reference in zip(results[:3], expected[:3], strict=True):
        assert error(actual, reference.detach()) < TOLERANCE[dtype]
        assert actual.double().cpu()[reference == 0].eq(0).all()
    assert results.state.min() >= 0 and results.state.max() <= 2 * math.pi
    distance = torch.polar(torch.ones_like(expected[3]), results.state.double().cpu() - expected[3]) - 1
    assert distance.abs().max() < 1e-5
    loss = sum((y * w).sum() for y, w in zip(expected, weights, strict=True))
    references = torch.autograd.grad(loss, [x for x in exact if x is not None])
    for actual, reference in zip(gradients, references, strict=True):
        assert error(actual, reference) < TOLERANCE[dtype]


@needs_triton
def test_heads_in_several_programs_add_their_gradients(monkeypatch):
    operands, _ = draw("one token", torch.float32, 1.0)
    inputs = [x for x in operands if x is not None]
    gradients = []
    for programs in (1, 2**20):  # all heads in one program, one head in each
        monkeypatch.setattr(kernels, "_MIN_PROGRAMS", programs)
        results = rotate(RotaryOperands(*operands))
        gradients.append(torch.autograd.grad(sum(y.sin().sum() for y in results), inputs))
    for few, many in zip(*gradients, strict=True):
        torch.testing.assert_close(few, many, rtol=1e-4, atol=1e-4)


@needs_triton
def test_gradients_of_two_key_heads_are_contiguous():
    operands, _ = draw("groups of heads, all channels", torch.float32, 1.0)
    results = rotate(RotaryOperands(*operands))
    assert all(x.is_contiguous() for x in torch.autograd.grad(results.q.sum(), operands[:2]))


@needs_triton
def test_angles_of_a_long_sequence_are_exact():
    generator = torch.Generator().manual_seed(0)
    T = 100
    rate, dt = 3.0 * torch.ones(1, T, 1), torch.rand(1, T, 1, generator=generator) + 0.5
    q = torch.tensor([1.0, 0.0]).expand(1, T, 1, 2)
    zero = torch.zeros(1, 2)
    x = RotaryOperands(*(y.to(DEVICE) for y in (q, q, zero, zero, rate, dt)))
    angle = (rate * dt).double().cumsum(1)[..., None]
    expected = torch.cat([angle.cos(), angle.sin()], -1)
    assert float((rotate(x).q.double().cpu() - expected).abs().max()) < 2e-6  # float32 has steps of 3e-5 at 300


@needs_triton
def test_a_layer_with_the_kernels_equals_float64(monkeypatch):
    monkeypatch.setattr(mamba3, "refusals", lambda q: ["float64"] if q.dtype == torch.float64 else [])
    torch.manual_seed(0)
    config = Mamba3(value_heads=2, key_width=8, value_width=4)
    exact, mixer = config.build(8, backend="reference").double(), config.build(8, backend="reference").to(DEVICE)
    mixer.load_state_dict({name: x.float() for name, x in exact.state_dict().items()})
    x, bounds = torch.randn(1, 40, 8, dtype=torch.float64), torch.tensor([0, 5, 5, 40], dtype=torch.int32)
    results = []
    for module in (exact, mixer):
        inputs = x.to(next(module.parameters())).requires_grad_()
        context = Context(cu_seqlens=bounds.to(inputs.device))
        y, state, _ = module(inputs, module.init_state(3), context)
        loss = y.cos().sum() + sum(part.sin().sum() for part in state.values())
        results.append([y, *state.values(), *torch.autograd.grad(loss, [inputs, *module.parameters()])])
    for actual, expected in zip(results[1], results[0], strict=True):
        assert error(actual, expected.detach()) < 1e-5
