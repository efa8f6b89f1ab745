"""The running maximum stabiliser against a loop over tokens, and exponential gates with large exponents."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deltazoo.mixers import MLSTM, RWKV4, Context
from deltazoo.mixers.parts.gates.exponential_gating import INITIAL_MAX, running_max

T, HV = 11, 3


def looped_max(log_decay: Tensor, log_input: Tensor, first: Tensor) -> Tensor:
    """m_t = max(m_(t-1) + log_decay_t, log_input_t) for one sequence [T, HV]."""
    outputs, m = [], first
    for t in range(log_decay.shape[0]):
        m = torch.maximum(m + log_decay[t], log_input[t])
        outputs.append(m)
    return torch.stack(outputs) if outputs else log_decay


def random_gates(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return -torch.rand(rows, T, HV, dtype=torch.float64) * 3, 20 * torch.randn(rows, T, HV, dtype=torch.float64)


def test_running_max_of_rows_equals_a_loop() -> None:
    log_decay, log_input = random_gates(2)
    first = torch.tensor([[1.0, -50.0, 30.0], [0.0, 2.0, INITIAL_MAX]], dtype=torch.float64)
    m, previous_m, state = running_max(log_decay, log_input, first.clone(), Context())
    for n in range(2):
        expected = looped_max(log_decay[n], log_input[n], first[n])
        torch.testing.assert_close(m[n], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(previous_m[n], torch.cat([first[n : n + 1], expected[:-1]]), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state[n], expected[-1], rtol=1e-12, atol=1e-12)


class Scans(TorchDispatchMode):
    """Counts scans over the tokens."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten.cumsum.default, torch.ops.aten.cummax.default)
        return function(*args, **(kwargs or {}))


def test_steps_of_one_token_equal_the_whole_sequence_without_scans() -> None:
    log_decay, log_input = random_gates(2)
    first = torch.full((2, HV), INITIAL_MAX, dtype=torch.float64)
    expected, _, _ = running_max(log_decay, log_input, first.clone(), Context())
    state = first
    with Scans() as scans:
        for t in range(T):
            m, previous_m, new = running_max(log_decay[:, t : t + 1], log_input[:, t : t + 1], state.clone(), Context())
            torch.testing.assert_close(m[:, 0], expected[:, t], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(previous_m[:, 0], state, rtol=0, atol=0)
            state = new
    assert not scans.count


def test_running_max_stays_within_each_packed_sequence() -> None:
    """Gates of the first sequence are 1000 above the others', and one sequence is empty."""
    log_decay, log_input = random_gates(1)
    bounds = [0, 4, 4, T]
    log_input[:, :4] += 1000
    first = torch.tensor([[0.0] * HV, [7.0] * HV, [-3.0] * HV], dtype=torch.float64)
    context = Context(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    m, previous_m, state = running_max(log_decay, log_input, first.clone(), context)
    for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
        expected = looped_max(log_decay[0, start:stop], log_input[0, start:stop], first[n])
        torch.testing.assert_close(m[0, start:stop], expected, rtol=1e-12, atol=1e-11)
        torch.testing.assert_close(state[n], expected[-1] if stop > start else first[n], rtol=1e-12, atol=1e-11)
        if stop > start:
            torch.testing.assert_close(previous_m[0, start], first[n], rtol=0, atol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("config", [MLSTM(heads=2, key_width=4), RWKV4(channels=8)], ids=lambda config: config.name)
def test_non_finite_input_stays_in_its_packed_sequence(config: MLSTM | RWKV4, value: float) -> None:
    torch.manual_seed(0)
    mixer = config.build(16, backend="reference")
    x = torch.randn(1, T, 16)
    context = Context(cu_seqlens=torch.tensor([0, 4, 8, T], dtype=torch.int32))
    expected = mixer(x, mixer.init_state(3), context)[0]
    x[0, 5] = value
    actual = mixer(x, mixer.init_state(3), context)[0]
    torch.testing.assert_close(actual[:, 8:], expected[:, 8:])
    torch.testing.assert_close(actual[:, :4], expected[:, :4])
    assert not actual[:, 5:8].isfinite().any()


def test_running_max_accepts_rows_after_the_last_packed_sequence() -> None:
    log_decay, log_input = random_gates(1)
    first = torch.zeros(2, HV, dtype=torch.float64)
    context = Context(cu_seqlens=torch.tensor([0, 4, T - 2], dtype=torch.int32))
    m, _, state = running_max(log_decay, log_input, first.clone(), context)
    expected = looped_max(log_decay[0, 4 : T - 2], log_input[0, 4 : T - 2], first[1])
    torch.testing.assert_close(m[0, 4 : T - 2], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state[1], expected[-1], rtol=1e-12, atol=1e-12)


def test_padding_does_not_change_the_running_max() -> None:
    log_decay, log_input = random_gates(1)
    mask = torch.arange(T)[None] < 6
    zero = torch.zeros(1, HV, dtype=torch.float64)
    state = running_max(log_decay, log_input, zero.clone(), Context(mask=mask))[2]
    torch.testing.assert_close(state[0], looped_max(log_decay[0, :6], log_input[0, :6], zero[0])[-1])


@pytest.mark.parametrize("config", [MLSTM(heads=2, key_width=4), RWKV4(channels=8)], ids=lambda config: config.name)
def test_large_exponents_are_accurate_in_float32(config: MLSTM | RWKV4) -> None:
    """Outputs and gradients in float32 against float64, with exponents in the hundreds (mLSTM: at its cap of 15)."""
    torch.manual_seed(0)
    mixer = config.build(16, backend="reference")
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if "gates.proj" in name or "to_k" in name:
                parameter.normal_(std=20.0)
    exact = config.build(16, backend="reference").double()
    exact.load_state_dict({name: value.double() for name, value in mixer.state_dict().items()})
    x = torch.randn(2, 40, 16)
    weight = torch.randn(2, 40, 16)
    actual, expected = mixer(x)[0], exact(x.double())[0]
    assert actual.isfinite().all()
    assert ((actual - expected).norm() / expected.norm()).item() < 1e-4
    (actual * weight).sum().backward()
    (expected * weight).sum().backward()
    for (name, left), right in zip(mixer.named_parameters(), exact.parameters(), strict=True):
        assert (left.grad - right.grad).norm().item() < 2e-3 * right.grad.norm().item() + 1e-6, name
