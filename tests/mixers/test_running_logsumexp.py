"""The running log-sum-exp of ABC's slots against torch.logcumsumexp of each sequence."""

import itertools

import pytest
import torch
from equations import assert_same_with_gradients
from torch import Tensor

from deltazoo.backends.ops.time_softmax import INITIAL, initial_logsumexp
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.parts.attention.running_logsumexp import running_logsumexp


def expected(score: Tensor, first: Tensor) -> Tensor:
    """Return z for one sequence. Args: score: [T, C]; first: [C]."""
    return torch.logaddexp(first, torch.logcumsumexp(score, 0))


def scores(T: int) -> Tensor:
    """Scores between the bounds of `SoftmaxSlots`, and at them."""
    torch.manual_seed(0)
    return (40 * torch.randn(1, T, 3, dtype=torch.float64)).clamp(-32, 32).requires_grad_()


@pytest.mark.parametrize("carried", [False, True])
def test_packed_sequences_have_the_sums_of_each_sequence(carried: bool) -> None:
    """A sequence of small scores follows one of large scores; one sequence is empty."""
    bounds = [0, 6, 6, 11, 12, 20]
    score = scores(20)
    with torch.no_grad():
        score[:, :6] = 32
        score[:, 6:11] = -32
    context = Context(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    state = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    first = state if carried else initial_logsumexp(5, 3, score)
    z, previous_z, last = running_logsumexp(score, first if carried else None, context)
    pieces = [expected(score[0, a:b], first[n]) for n, (a, b) in enumerate(itertools.pairwise(bounds))]
    assert_same_with_gradients(z[0], torch.cat(pieces), [score, state] if carried else [score], 1e-11)
    shifted = [torch.cat([first[n : n + 1], piece])[:-1] for n, piece in enumerate(pieces)]
    torch.testing.assert_close(previous_z[0], torch.cat(shifted), rtol=1e-11, atol=0)
    if carried:
        finals = [piece[-1] if len(piece) else first[n] for n, piece in enumerate(pieces)]
        torch.testing.assert_close(last, torch.stack(finals), rtol=1e-11, atol=0)
    else:
        assert last is None


def test_nan_stays_in_its_sequence() -> None:
    score = scores(9)
    with torch.no_grad():
        score[:, 2] = torch.nan
    context = Context(cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32))
    z, _, _ = running_logsumexp(score, None, context)
    torch.testing.assert_close(z[0, 4:], score[0, 4:].logcumsumexp(0), rtol=1e-11, atol=0)
    torch.testing.assert_close(z[0, :2], score[0, :2].logcumsumexp(0), rtol=1e-11, atol=0)


def test_gradients_of_rows_in_float32_keep_their_digits() -> None:
    score = scores(2048)
    z, previous_z, _ = running_logsumexp(score.float(), None, Context())
    exact = torch.cat([torch.full_like(score[:, :1], INITIAL), score], 1).logcumsumexp(1)
    d_z, d_previous = torch.randn(2, 1, 2048, 3, dtype=torch.float64)
    (actual,) = torch.autograd.grad([z, previous_z], score, [d_z.float(), d_previous.float()])
    (expected,) = torch.autograd.grad([exact[:, 1:], exact[:, :-1]], score, [d_z, d_previous])
    assert (actual - expected).norm() < 2e-6 * expected.norm()  # 1e-5 with the gradient of torch.logcumsumexp


def test_sum_before_the_first_token_is_negligible() -> None:
    lowest = torch.full((1, 1, 1), -32.0, dtype=torch.float64)
    assert float(running_logsumexp(lowest, None, Context())[0]) == -32
    assert INITIAL < -32 - 40


def test_sums_of_a_thousand_sequences_are_exact() -> None:
    """The offsets that separate the sequences grow with their number."""
    score = scores(3000)
    context = Context(cu_seqlens=torch.arange(0, 3001, 3, dtype=torch.int32))
    z, _, _ = running_logsumexp(score, None, context)
    torch.testing.assert_close(z[0], score[0].view(1000, 3, 3).logcumsumexp(1).view(3000, 3), rtol=1e-10, atol=1e-10)
