"""The running maximum against a loop, in rows, packs and padding; large exponential gates stay finite and right."""

import itertools

import pytest
import torch
from torch import Tensor

from deltazoo.mixers import MLSTM, RWKV4, Context
from deltazoo.mixers.parts.exponential_gating import INITIAL_MAX, running_max

T, HV = 11, 3


def by_loop(forget: Tensor, write: Tensor, first: Tensor) -> Tensor:
    """m_t = max(m_(t-1) + forget_t, write_t) for one sequence [T, HV]."""
    outputs, m = [], first
    for t in range(forget.shape[0]):
        m = torch.maximum(m + forget[t], write[t])
        outputs.append(m)
    return torch.stack(outputs) if outputs else forget


def draw(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return -torch.rand(rows, T, HV, dtype=torch.float64) * 3, 20 * torch.randn(rows, T, HV, dtype=torch.float64)


def test_rows_equal_a_loop() -> None:
    forget, write = draw(2)
    first = torch.tensor([[1.0, -50.0, 30.0], [0.0, 2.0, INITIAL_MAX]], dtype=torch.float64)
    m, before, after = running_max(forget, write, first.clone(), Context())
    for n in range(2):
        want = by_loop(forget[n], write[n], first[n])
        torch.testing.assert_close(m[n], want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(before[n], torch.cat([first[n : n + 1], want[:-1]]), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(after[n], want[-1], rtol=1e-12, atol=1e-12)


def test_sequences_of_a_pack_do_not_see_one_another() -> None:
    """The first one's maximum is 1000 above the others'."""
    forget, write = draw(1)
    bounds = [0, 4, 4, T]
    write[:, :4] += 1000
    first = torch.tensor([[0.0] * HV, [7.0] * HV, [-3.0] * HV], dtype=torch.float64)
    context = Context(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    m, before, after = running_max(forget, write, first.clone(), context)
    for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
        want = by_loop(forget[0, start:stop], write[0, start:stop], first[n])
        torch.testing.assert_close(m[0, start:stop], want, rtol=1e-12, atol=1e-11)
        torch.testing.assert_close(after[n], want[-1] if stop > start else first[n], rtol=1e-12, atol=1e-11)
        if stop > start:
            torch.testing.assert_close(before[0, start], first[n], rtol=0, atol=0)


def test_padding_leaves_the_maximum() -> None:
    forget, write = draw(1)
    mask = torch.arange(T)[None] < 6
    _, _, after = running_max(forget, write, torch.zeros(1, HV, dtype=torch.float64), Context(mask=mask))
    want = by_loop(forget[0, :6], write[0, :6], torch.zeros(HV, dtype=torch.float64))
    torch.testing.assert_close(after[0], want[-1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("config", [MLSTM(heads=2, key_width=4), RWKV4(channels=8)], ids=lambda config: config.name)
def test_large_exponents_are_right_in_float32_with_their_gradients(config: MLSTM | RWKV4) -> None:
    """Exponents in the hundreds (RWKV-4; mLSTM's stop at its cap): float32 against float64, nothing cut by rounding."""
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
    ours, want = mixer(x)[0], exact(x.double())[0]
    assert ours.isfinite().all()
    assert float((ours - want).norm() / want.norm()) < 1e-4
    (ours * weight).sum().backward()
    (want * weight).sum().backward()
    for (name, left), right in zip(mixer.named_parameters(), exact.parameters(), strict=True):
        assert float((left.grad - right.grad).norm()) < 2e-3 * float(right.grad.norm()) + 1e-6, name
