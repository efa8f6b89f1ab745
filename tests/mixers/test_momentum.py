"""The chunks of the delta rule with momentum against its recurrence, token by token in float64.

B batch, T time, H heads, K key width, V value width
"""

import pytest
import torch
from torch import Tensor

from deltazoo.backends.ops.momentum_chunks import CHUNK
from deltazoo.mixers.core.conformance import relative_error
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.parts.memory.momentum import MomentumInputs, momentum_delta_rule

H, K, V = 2, 5, 3
# offsets of log alpha and log mu
DECAYS = {"weak": (-0.01, -0.01), "ordinary": (-1.0, -0.5), "strong": (-60.0, -60.0), "alpha 0": (-1e4, -0.1)}


def draw(T: int, offsets: tuple[float, float], B: int = 2, seed: int = 0) -> tuple[MomentumInputs, list[Tensor]]:
    torch.manual_seed(seed)
    q, k, v = (torch.randn(B, T, H, width, dtype=torch.float64) for width in (K, K, V))
    k = k / k.norm(dim=-1, keepdim=True)
    log_alpha, log_mu = (torch.rand(B, T, H, dtype=torch.float64) * offset for offset in offsets)
    beta, eta = torch.rand(B, T, H, dtype=torch.float64), 2 * torch.rand(B, T, H, dtype=torch.float64)
    state = [torch.randn(B, H, K, V, dtype=torch.float64) for _ in range(2)]
    return MomentumInputs(q, k, log_alpha, log_mu, beta, eta, v), state


def recurrence(inputs: MomentumInputs, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    S, N = state
    outputs = []
    for t in range(inputs.q.shape[1]):
        q, k, log_alpha, log_mu, beta, eta, v = (x[:, t] for x in inputs)
        alpha, mu, beta, eta = (y[..., None, None] for y in (log_alpha.exp(), log_mu.exp(), beta, eta))
        error = v - torch.einsum("bhk,bhkv->bhv", k, alpha * S)
        N = mu * N + eta * torch.einsum("bhk,bhv->bhkv", k, error)
        S = alpha * S + beta * N
        outputs.append(torch.einsum("bhk,bhkv->bhv", q, S))
    return torch.stack(outputs, 1), [S, N]


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("T", [1, 2 * CHUNK + 3])
def test_output_state_and_gradients_equal_the_recurrence(T: int, decays: str) -> None:
    inputs, state = draw(T, DECAYS[decays])
    leaves = [*inputs, *state]
    for leaf in leaves:
        leaf.requires_grad_()
    (o, new), (expected_o, expected) = momentum_delta_rule(inputs, state, Context()), recurrence(inputs, state)
    gradients = []
    for results in ([o, *new], [expected_o, *expected]):
        torch.manual_seed(1)
        loss = sum((y * torch.randn_like(y)).sum() for y in results)
        gradients.append(torch.autograd.grad(loss, leaves))
    for value, reference in zip([o, *new, *gradients[0]], [expected_o, *expected, *gradients[1]], strict=True):
        assert value.isfinite().all()
        # The gradients of strong decays are differences of sums of order 1, so 1e-13 is the rounding of those.
        tolerance = max(1e-9 * float(reference.detach().abs().max()), 1e-13)
        torch.testing.assert_close(value, reference, rtol=1e-9, atol=tolerance)


def test_packed_sequences_with_an_empty_one_equal_single_ones() -> None:
    bounds = [0, 70, 70, 71, 150]
    inputs, state = draw(150, DECAYS["ordinary"], B=1)
    states = [torch.cat([s * (n + 1) for n in range(4)]) for s in state]
    context = Context(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    o, new = momentum_delta_rule(inputs, states, context)
    for n in range(4):
        piece = MomentumInputs(*(x[:, bounds[n] : bounds[n + 1]] for x in inputs))
        start = [s[n : n + 1] for s in states]
        o_n, expected = recurrence(piece, start) if piece.q.shape[1] else (piece.v, start)
        torch.testing.assert_close(o[:, bounds[n] : bounds[n + 1]], o_n, rtol=1e-10, atol=1e-12)
        for value, reference in zip(new, expected, strict=True):
            torch.testing.assert_close(value[n : n + 1], reference, rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_long_sequence_in_float32_stays_close_to_float64() -> None:
    """With the gates of the layer: independent ones let the states grow without bound."""
    inputs, state = draw(2000, DECAYS["ordinary"], B=1)
    square = inputs.eta.square()
    log_alpha, beta = -torch.log1p(square), inputs.beta * square / (1 + square)
    inputs = inputs._replace(log_alpha=log_alpha, beta=beta)
    o, new = momentum_delta_rule(MomentumInputs(*(x.float() for x in inputs)), [s.float() for s in state], Context())
    expected_o, expected = recurrence(inputs, state)
    assert relative_error(o, expected_o) < 1e-4
    assert max(relative_error(a, b) for a, b in zip(new, expected, strict=True)) < 1e-4
